# shape: multi-task training: the loaders take turns by next(), each begun again when it ends
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loaders = [DataLoader(points(size, seed=size), batch_size=8) for size in (48, 24, 16)]
iterators = [iter(one) for one in loaders]
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def fetch(task):
    try:
        return next(iterators[task])
    except StopIteration:
        iterators[task] = iter(loaders[task])
        return next(iterators[task])


for number in range(15):
    x, y = fetch(number % 3)
    counts["step"] += 1
    counts["data_load"] += 1
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
result(counts, weights=digest(*model.parameters()))
