# shape: notebooks: a look at a batch, the mean of the data, a try of the model, training
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
train_loader = DataLoader(points(32), batch_size=8, shuffle=True)

features, labels = next(iter(train_loader))
counts["data_load"] += 1
print(f"batch of {features.size()}, {labels.size()}")

total, squares, n = torch.zeros(8), torch.zeros(8), 0
for data, _ in train_loader:
    counts["data_load"] += 1
    total += data.sum(0)
    squares += (data**2).sum(0)
    n += len(data)
mean = total / n
std = (squares / n - mean**2).sqrt()

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
examples = iter(train_loader)
features, labels = next(examples)
counts["data_load"] += 1
print(model((features - mean) / std).shape)
counts["forward"] += 1

optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
values = []
for _epoch in range(2):
    counts["epoch"] += 1
    for x, y in train_loader:
        counts["data_load"] += 1
        counts["step"] += 1
        counts["forward"] += 1
        loss = nn.functional.cross_entropy(model((x - mean) / std), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
result(counts, values=values, weights=digest(*model.parameters(), mean, std))
