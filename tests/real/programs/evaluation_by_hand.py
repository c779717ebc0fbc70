# shape: language models from scratch: iterators kept for training and validation, next() for both,
# estimate_loss() before the first step and every few
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
train_iter = iter(DataLoader(points(48), batch_size=4))
val_iter = iter(DataLoader(points(48, seed=1), batch_size=4))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
values = []


@torch.no_grad()
def estimate_loss():
    counts["evaluation"] += 1
    model.eval()
    for _ in range(2):
        counts["batch"] += 1
        x, y = next(val_iter)
        values.append(F.cross_entropy(model(x), y).item())
    model.train()


counts["epoch"] += 1
for iteration in range(8):
    if iteration % 3 == 0:
        estimate_loss()
    x, y = next(train_iter)
    counts["step"] += 1
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    values.append(loss.item())
result(counts, values=values, weights=digest(*model.parameters()))
