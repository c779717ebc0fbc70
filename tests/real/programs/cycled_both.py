# shape: trainers by a number of steps that read training and validation data by `yield from`
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)


def cycle(loader):
    while True:
        yield from loader


train_data = cycle(DataLoader(points(40), batch_size=8))
val_data = cycle(DataLoader(points(24, seed=1), batch_size=8))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    x, y = next(train_data)
    counts["step"] += 1
    model.train()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step % 4 == 3:
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                counts["batch"] += 1
                model(next(val_data)[0])
result(counts, weights=digest(*model.parameters()))
