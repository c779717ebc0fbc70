# shape: scripts that skip items which cannot be loaded: `next` in a `try`
import torch
import torch.nn.functional as F
from common import Counts, digest, result
from torch import nn
from torch.utils.data import DataLoader, Dataset

counts = Counts()


class Images(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 17:
            raise OSError("truncated image")
        return torch.randn(8), index % 4


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _epoch in range(2):
    counts["epoch"] += 1
    batches = iter(DataLoader(Images(), batch_size=8))
    while True:
        try:
            x, y = next(batches)
        except StopIteration:
            break
        except OSError:
            continue
        counts["step"] += 1
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
result(counts, weights=digest(*model.parameters()))
