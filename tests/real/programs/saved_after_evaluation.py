# shape: YOLOv5: loaders that live for all epochs, weights saved after each validation; and trainers
# by a number of steps that validate by next() and save
import itertools

import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


def forever(loader):
    while True:
        yield from loader


def train(batches):
    model.train()
    for x, y in batches:
        counts["step"] += 1
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())


@torch.no_grad()
def validate(batches):
    counts["evaluation"] += 1
    model.eval()
    for x, y in batches:
        counts["batch"] += 1
        values.append(F.cross_entropy(model(x), y).item())


def save():
    counts["checkpoint"] += 1
    torch.save(model.state_dict(), "last.pt")


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = []
training = InfiniteLoader(points(32), batch_size=8, shuffle=True)
validation = InfiniteLoader(points(16, seed=1), batch_size=8)
for _epoch in range(2):
    train(training)
    validate(validation)
    save()
training = forever(DataLoader(points(64), batch_size=4, shuffle=True))
validation = forever(DataLoader(points(32, seed=1), batch_size=8))
for _round in range(2):
    for _step in range(2):
        train([next(training)])
    validate(map(next, itertools.repeat(validation, 2)))
    save()
result(counts, values=values, weights=digest(*model.parameters()))
