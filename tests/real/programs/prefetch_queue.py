# shape: prefetchers that hold some batches in a queue: a generator, or a class with a next() that
# gives None at the end; samples after each epoch
from collections import deque

import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class Prefetcher:
    def __init__(self, loader, size):
        self.iterator = iter(loader)
        self.queue = deque()
        for _ in range(size):
            self.preload()

    def preload(self):
        batch = next(self.iterator, None)
        if batch is not None:
            self.queue.append(batch)

    def next(self):
        batch = self.queue.popleft() if self.queue else None
        self.preload()
        return batch


def prefetched(loader, size):
    queue = deque()
    for batch in loader:
        queue.append(batch)
        if len(queue) > size:
            yield queue.popleft()
    while queue:
        yield queue.popleft()


def train_gan(real):
    fake = generator(torch.randn(8, 4))
    optimizer_d.zero_grad()
    loss_d = discriminator(fake.detach()).mean() - discriminator(real).mean()
    loss_d.backward()
    optimizer_d.step()
    optimizer_g.zero_grad()
    loss_g = -discriminator(fake).mean()
    loss_g.backward()
    optimizer_g.step()
    values.append([loss_d.item(), loss_g.item()])


def train_discriminator(real):
    optimizer_d.zero_grad()
    loss = -discriminator(real).mean()
    loss.backward()
    optimizer_d.step()
    values.append(loss.item())


def sample():
    generator.eval()
    with torch.no_grad():
        values.append(generator(torch.randn(2, 4)).sum().item())
    generator.train()


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(40), batch_size=8, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01)
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.01)
values = []
for train, size in ((train_gan, 1), (train_discriminator, 2)):
    counts["epoch"] += 1
    prefetcher = Prefetcher(loader, size)
    batch = prefetcher.next()
    while batch is not None:
        counts["step"] += 1
        train(batch[0])
        batch = prefetcher.next()
    sample()
    counts["epoch"] += 1
    for batch in prefetched(loader, size):
        counts["step"] += 1
        train(batch[0])
    sample()
parameters = (*generator.parameters(), *discriminator.parameters())
result(counts, values=values, weights=digest(*parameters))
