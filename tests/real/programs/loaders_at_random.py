# shape: multi-task training: each step takes a batch of a task that is chosen at random
import random

import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)
loaders = [DataLoader(points(24), batch_size=4), DataLoader(points(16, seed=1), batch_size=4)]
body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.1)
values = []
for _epoch in range(2):
    counts["epoch"] += 1
    iterators = [iter(one) for one in loaders]
    order = [task for task, one in enumerate(loaders) for _ in range(len(one))]
    random.shuffle(order)
    for task in order:
        x, y = next(iterators[task])
        counts["step"] += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(heads[task](body(x)), y)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
result(counts, values=values, weights=digest(*body.parameters(), *heads.parameters()))
