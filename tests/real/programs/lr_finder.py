# shape: a learning rate finder: some batches with a growing rate, the state put back, then training
import copy

import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


def find_lr(model, loader, optimizer, criterion, start=1e-4, end=1.0, num_iter=5):
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    lr, factor = start, (end / start) ** (1 / num_iter)
    history = []
    model.train()
    counts["epoch"] += 1
    for i, (inputs, targets) in enumerate(loader):
        counts["step"] += 1
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        history.append((loss.item(), lr))
        lr *= factor
        if i + 1 == num_iter:
            break
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    return min(history)[1] / 10, history


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(64), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
lr, history = find_lr(model, loader, optimizer, criterion)
for group in optimizer.param_groups:
    group["lr"] = lr
values = [lr, *(loss for loss, _ in history)]
for _epoch in range(2):
    counts["epoch"] += 1
    for inputs, targets in loader:
        counts["step"] += 1
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
result(counts, values=values, weights=digest(*model.parameters()))
