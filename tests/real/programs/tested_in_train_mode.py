# shape: torch's CIFAR10 tutorial: workers, a look at a batch, no model.eval() before the tests
import os
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
trainloader = DataLoader(points(24), batch_size=8, shuffle=True, num_workers=1)
testloader = DataLoader(points(16, seed=1), batch_size=8, num_workers=1)
dataiter = iter(trainloader)
images, labels = next(dataiter)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
values = [images.sum().item()]
for _epoch in range(2):
    counts["epoch"] += 1
    for _i, (inputs, labels) in enumerate(trainloader, 0):
        counts["step"] += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
with TemporaryDirectory() as folder:
    path = os.path.join(folder, "cifar_net.pth")
    torch.save(net.state_dict(), path)
    net.load_state_dict(torch.load(path, weights_only=True))
for _test in ("in all", "by class"):
    counts["evaluation"] += 1
    with torch.no_grad():
        for inputs, labels in testloader:
            counts["batch"] += 1
            values.append((net(inputs).argmax(1) == labels).sum().item())
result(counts, values=values, weights=digest(*net.parameters()))
