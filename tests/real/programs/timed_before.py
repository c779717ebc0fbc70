# shape: a script that times a forward and backward before it trains: these are no steps
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
data = points(20)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
for _ in range(3):
    F.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
    model.zero_grad()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    counts["epoch"] += 1
    for inputs, labels in DataLoader(data, batch_size=4):
        counts["step"] += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
result(counts, losses=losses, weights=digest(*model.parameters()))
