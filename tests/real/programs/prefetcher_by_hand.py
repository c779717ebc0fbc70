# shape: NVIDIA apex's data_prefetcher: next() of its own, one batch ahead, None at the end
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class Prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.preload()

    def preload(self):
        try:
            self.following = next(self.loader)
            counts["data_load"] += 1
        except StopIteration:
            self.following = None, None

    def next(self):
        batch = self.following
        self.preload()
        return batch


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(16), batch_size=4)
test_loader = DataLoader(points(8, seed=1), batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = []
counts["epoch"] += 1
prefetcher = Prefetcher(loader)
x, y = prefetcher.next()
while x is not None:
    counts["step"] += 1
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    values.append(loss.item())
    x, y = prefetcher.next()
model.eval()
counts["evaluation"] += 1
prefetcher = Prefetcher(test_loader)
x, y = prefetcher.next()
while x is not None:
    counts["batch"] += 1
    with torch.no_grad():
        values.append(F.cross_entropy(model(x), y).item())
    x, y = prefetcher.next()
result(counts, values=values, weights=digest(*model.parameters()))
