# shape: batches that fit in memory are loaded once, by list(loader), and trained on from there
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn, optim
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
batches = list(DataLoader(points(20), batch_size=4))
counts["data_load"] += len(batches)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    for inputs, labels in batches:
        counts["step"] += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
inputs, labels = batches[0]  # once more, with gradients but after the last step
losses.append(F.cross_entropy(model(inputs), labels).item())
result(counts, losses=losses, weights=digest(*model.parameters()))
