# shape: scripts that call model.train() in each step and leave the model in eval mode after a test
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(16), batch_size=4, shuffle=True)
test_loader = DataLoader(points(8, seed=1), batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = []


def test():
    counts["evaluation"] += 1
    model.eval()
    with torch.no_grad():
        for x, y in test_loader:
            counts["batch"] += 1
            values.append(F.cross_entropy(model(x), y).item())


test()
for _epoch in range(2):
    counts["epoch"] += 1
    for i, (x, y) in enumerate(loader):
        model.train()
        counts["step"] += 1
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2:
            test()
result(counts, values=values, weights=digest(*model.parameters()))
