# shape: training by a number of iterations over itertools.cycle(loader), which keeps the batches
from itertools import cycle

import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(32), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
n_iters, values = 10, []
for iteration, (x, y) in enumerate(cycle(loader), 1):
    counts["step"] += 1
    if iteration <= len(loader):
        counts["data_load"] += 1
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    values.append(loss.item())
    if iteration == n_iters:
        break
result(counts, values=values, weights=digest(*model.parameters()))
