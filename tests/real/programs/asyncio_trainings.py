# shape: hyperparameter search with asyncio: two trainings in one thread, which take turns
import asyncio

import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.set_num_threads(1)


async def train(rate):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _epoch in range(2):
        model.train()
        counts["epoch"] += 1
        for x, y in DataLoader(points(24), batch_size=8):
            counts["step"] += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            await asyncio.sleep(0)
            loss.backward()
            optimizer.step()
            await asyncio.sleep(0)
        model.eval()
        counts["evaluation"] += 1
        for x, _ in DataLoader(points(16, seed=1), batch_size=8):
            counts["batch"] += 1
            with torch.no_grad():
                model(x)
            await asyncio.sleep(0)
    return digest(*model.parameters())


async def main():
    return await asyncio.gather(train(0.1), train(0.01))


result(counts, weights=asyncio.run(main()))
