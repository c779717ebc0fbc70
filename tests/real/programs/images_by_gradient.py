# shape: DeepDream: an optimizer changes an image, the model is in eval mode
import torch
from common import Counts, digest, result
from torch import nn

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval().requires_grad_(False)
image = torch.randn(1, 8, requires_grad=True)
optimizer = torch.optim.Adam([image], lr=0.1)
values = []
for _ in range(5):
    counts["step"] += 1
    optimizer.zero_grad()
    loss = -model(image)[:, 1].mean()
    loss.backward()
    optimizer.step()
    values.append(loss.item())
result(counts, values=values, weights=digest(image))
