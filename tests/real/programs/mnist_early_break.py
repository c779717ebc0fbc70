# shape: pytorch/examples mnist: train(), test() an epoch, --dry-run breaks out of both loops
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

counts = Counts()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        return F.log_softmax(self.fc2(self.dropout(F.relu(self.fc1(x)))), dim=1)


def train(model, loader, optimizer, most):
    model.train()
    counts["epoch"] += 1
    for number, (x, y) in enumerate(loader):
        counts["step"] += 1
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        counts["optimizer_step"] += 1
        if number + 1 == most:
            break
    return loss.item()


def test(model, loader):
    model.eval()
    counts["evaluation"] += 1
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            counts["batch"] += 1
            total += F.nll_loss(model(x), y, reduction="sum").item()
            if total > 0:
                break
    return total


torch.manual_seed(0)
torch.set_num_threads(1)
train_loader = DataLoader(points(64), batch_size=8, shuffle=True)
test_loader = DataLoader(points(32, seed=1), batch_size=8)
model = Net()
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
values = []
for _ in range(3):
    values += [train(model, train_loader, optimizer, 3), test(model, test_loader)]
    scheduler.step()
result(counts, values=values, weights=digest(*model.parameters()))
