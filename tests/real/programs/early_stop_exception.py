# shape: early stopping by an exception that is raised in the loop and caught around all epochs
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class EarlyStopping(Exception):  # noqa: N818
    pass


class Patience:
    def __init__(self, most):
        self.most = most

    def __call__(self, loss):
        if counts["step"] == self.most:
            raise EarlyStopping(f"no better than {loss:.3f}")


def fit(model, loader, optimizer, callback, epochs):
    for _epoch in range(epochs):
        counts["epoch"] += 1
        model.train()
        for x, y in loader:
            counts["step"] += 1
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
            callback(values[-1])


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(32), batch_size=8, shuffle=True)
test_loader = DataLoader(points(16, seed=1), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = []
try:
    fit(model, loader, optimizer, Patience(6), epochs=5)
except EarlyStopping as stop:
    print("stopped early:", stop)
model.eval()
counts["evaluation"] += 1
with torch.no_grad():
    for x, y in test_loader:
        counts["batch"] += 1
        values.append(nn.functional.cross_entropy(model(x), y).item())
result(counts, values=values, weights=digest(*model.parameters()))
