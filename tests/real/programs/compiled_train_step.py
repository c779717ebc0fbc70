# shape: a training step compiled as a whole, up to its backward; the model is tested as it is
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(16), batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = []


@torch.compile(backend="eager")
def train_step(x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


for _epoch in range(2):
    counts["epoch"] += 1
    model.train()
    for x, y in loader:
        counts["step"] += 1
        optimizer.zero_grad()
        values.append(train_step(x, y).item())
        optimizer.step()
    counts["evaluation"] += 1
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            counts["batch"] += 1
            values.append(F.cross_entropy(model(x), y).item())
result(counts, values=values, weights=digest(*model.parameters()))
