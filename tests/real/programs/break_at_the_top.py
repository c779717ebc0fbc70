# shape: `if step >= max_steps: break` before anything else; loaders of different lengths
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, held_out = points(40), points(24, seed=1)
max_steps, eval_iters, losses = 3, 2, []


def train(x, y):
    counts["step"] += 1
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


@torch.no_grad()
def evaluate():
    counts["evaluation"] += 1
    model.eval()
    for i, (x, _) in enumerate(DataLoader(held_out, batch_size=8)):
        if i >= eval_iters:
            break
        counts["batch"] += 1
        model(x)
    model.train()


for _ in range(2):
    counts["epoch"] += 1
    for i, (x, y) in enumerate(DataLoader(data, batch_size=8)):
        if i >= max_steps:
            break
        train(x, y)
        if i == 1:
            evaluate()
    evaluate()
counts["epoch"] += 1
for (x, y), _ in zip(DataLoader(data, batch_size=8), DataLoader(held_out, batch_size=8)):  # noqa: B905
    train(x, y)
result(counts, losses=losses, weights=digest(*model.parameters()))
