# shape: validation without model.eval() and without no_grad, inside an epoch and after it
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(32), batch_size=8)
test_loader = DataLoader(points(40, seed=1), batch_size=1)  # more than is held back
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = []


def validate():
    counts["evaluation"] += 1
    for x, y in test_loader:
        counts["batch"] += 1
        values.append(F.cross_entropy(model(x), y).item())


for _epoch in range(2):
    counts["epoch"] += 1
    for number, (x, y) in enumerate(loader):
        counts["step"] += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if number == 1:
            validate()
    validate()
result(counts, values=values, weights=digest(*model.parameters()))
