# shape: "Learning PyTorch with examples": all the data at once, weights changed by hand
import torch
from common import Counts, digest, result
from torch import nn

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.linspace(-3.0, 3.0, 100)
y = torch.sin(x)
powers = x.unsqueeze(-1).pow(torch.tensor([1, 2, 3]))
model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0, 1))
loss_fn = nn.MSELoss(reduction="sum")
losses = []
for _t in range(5):
    counts["step"] += 1
    loss = loss_fn(model(powers), y)
    losses.append(loss.item())
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-6 * parameter.grad
result(counts, losses=losses, weights=digest(*model.parameters()))
