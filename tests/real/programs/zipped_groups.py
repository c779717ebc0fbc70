# shape: accumulation over zip(*[iter(loader)] * n): n batches a step
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(36), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _epoch in range(2):
    counts["epoch"] += 1
    for group in zip(*[iter(loader)] * 3):  # noqa: B905
        counts["step"] += 1
        counts["data_load"] += 3
        optimizer.zero_grad()
        for x, y in group:
            loss = F.cross_entropy(model(x), y) / len(group)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
result(counts, losses=losses, weights=digest(*model.parameters()))
