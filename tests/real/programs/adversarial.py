# shape: adversarial training: FGSM with the model in eval mode, in each step and in the test
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


def attack(x, y):
    model.eval()
    x = x.clone().requires_grad_(True)
    F.cross_entropy(model(x), y).backward()
    return (x + 0.1 * x.grad.sign()).detach()


def robust_accuracy(loader):
    counts["evaluation"] += 1
    right = 0
    for x, y in loader:
        counts["batch"] += 1
        attacked = attack(x, y)
        with torch.no_grad():
            right += (model(attacked).argmax(1) == y).sum().item()
    return right


torch.manual_seed(0)
torch.set_num_threads(1)
train_loader = DataLoader(points(32), batch_size=8, shuffle=True)
test_loader = DataLoader(points(16, seed=1), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accuracies = []
for _epoch in range(2):
    counts["epoch"] += 1
    for x, y in train_loader:
        counts["step"] += 1
        attacked = attack(x, y)
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(attacked), y).backward()
        optimizer.step()
    accuracies.append(robust_accuracy(test_loader))
result(counts, accuracies=accuracies, weights=digest(*model.parameters()))
