# shape: ultralytics' InfiniteDataLoader and timm's MultiEpochsDataLoader: one iterator for all
# epochs, round a sampler that repeats; tests between the epochs
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class RepeatSampler:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


torch.manual_seed(0)
torch.set_num_threads(1)
loader = InfiniteDataLoader(points(16), batch_size=4, shuffle=True)
test_loader = InfiniteDataLoader(points(8, seed=1), batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = []
for _epoch in range(3):
    counts["epoch"] += 1
    model.train()
    for x, y in loader:
        counts["step"] += 1
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    model.eval()
    counts["evaluation"] += 1
    with torch.no_grad():
        for x, y in test_loader:
            counts["batch"] += 1
            values.append(F.cross_entropy(model(x), y).item())
result(counts, values=values, weights=digest(*model.parameters()))
