# shape: a training service: each step is a task of asyncio, and so is each validation
import asyncio

import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


async def step(x, y):
    counts["step"] += 1
    optimizer.zero_grad()
    await asyncio.sleep(0)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


async def validate():
    counts["evaluation"] += 1
    model.eval()
    with torch.no_grad():
        for x, _ in DataLoader(points(16, seed=1), batch_size=8):
            counts["batch"] += 1
            model(x)
    model.train()


async def train():
    counts["epoch"] += 1
    for x, y in DataLoader(points(24), batch_size=8):
        await asyncio.create_task(step(x, y))
    await asyncio.create_task(validate())


for _epoch in range(2):
    asyncio.run(train())
result(counts, weights=digest(*model.parameters()))
