# shape: fairseq's grouped iterator: each step takes a list of batches at once
import itertools

import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn, optim
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(24), batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    counts["epoch"] += 1
    items = iter(loader)
    while chunk := list(itertools.islice(items, 2)):
        counts["step"] += 1
        optimizer.zero_grad()
        for inputs, labels in chunk:
            loss = F.cross_entropy(model(inputs), labels) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
result(counts, losses=losses, weights=digest(*model.parameters()))
