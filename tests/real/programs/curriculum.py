# shape: curriculum learning: an easy loader, then a hard one, in each round
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader, Subset

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
data = points(48)
hardness = data.tensors[0].norm(dim=1).argsort()
easy_loader = DataLoader(Subset(data, hardness[:24].tolist()), batch_size=8, shuffle=True)
hard_loader = DataLoader(Subset(data, hardness[24:].tolist()), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
values = []


def step(x, y):
    counts["step"] += 1
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    values.append(loss.item())


for _round in range(2):
    counts["epoch"] += 1  # a pass over the easy ones
    for x, y in easy_loader:
        step(x, y)
    counts["epoch"] += 1  # and one over the hard ones
    for x, y in hard_loader:
        step(x, y)
result(counts, values=values, weights=digest(*model.parameters()))
