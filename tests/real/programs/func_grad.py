# shape: torch.func: gradients of a function of the parameters, which are changed by hand
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(24), batch_size=8)
test_loader = DataLoader(points(16, seed=1), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
parameters = {name: one.detach() for name, one in model.named_parameters()}
values = []


def loss_of(parameters, x, y):
    return F.cross_entropy(functional_call(model, parameters, (x,)), y)


for _epoch in range(2):
    counts["epoch"] += 1
    model.train()
    for x, y in loader:
        counts["step"] += 1
        gradients, loss = grad_and_value(loss_of)(parameters, x, y)
        parameters = {name: one - 0.1 * gradients[name] for name, one in parameters.items()}
        values.append(loss.item())
    counts["evaluation"] += 1
    model.eval()
    with torch.no_grad():
        for x, y in test_loader:
            counts["batch"] += 1
            values.append(loss_of(parameters, x, y).item())
result(counts, values=values, weights=digest(*parameters.values()))
