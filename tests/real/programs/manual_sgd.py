# shape: "What is torch.nn really": weights are changed by hand, there is no optimizer
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(20), batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
losses = []
for epoch in range(2):
    counts["epoch"] += 1
    for inputs, labels in loader:
        counts["step"] += 1
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad * 0.1
            model.zero_grad()
result(counts, losses=losses, weights=digest(*model.parameters()))
