# shape: gradient accumulation that does not divide the loader: what is left is applied after it
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
accumulation_steps = 3


def train(model, loader, optimizer, criterion):
    model.train()
    counts["epoch"] += 1
    optimizer.zero_grad()
    total = 0.0
    for i, (inputs, labels) in enumerate(loader):
        counts["data_load"] += 1
        loss = criterion(model(inputs), labels) / accumulation_steps
        loss.backward()
        counts["backward"] += 1
        total += loss.item()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
            counts["optimizer_step"] += 1
    if (i + 1) % accumulation_steps != 0:
        optimizer.step()
        optimizer.zero_grad()
        counts["optimizer_step"] += 1
    return total


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(64), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
values = [train(model, loader, optimizer, criterion) for _ in range(3)]
result(counts, values=values, weights=digest(*model.parameters()))
