# shape: a stream of single items (batch_size=None), from which the program makes its batches; the
# first epoch goes on where a checkpoint was made
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(24), batch_size=None)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    counts["epoch"] += 1
    batch = []
    for number, item in enumerate(loader):
        counts["data_load"] += 1
        if epoch == 0 and number < 8:
            continue
        batch.append(item)
        if len(batch) < 8:
            continue
        counts["step"] += 1
        x, y = (torch.stack(part) for part in zip(*batch, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        batch = []
result(counts, weights=digest(*model.parameters()))
