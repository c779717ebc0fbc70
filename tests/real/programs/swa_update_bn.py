# shape: stochastic weight averaging: averages from some epoch on, then update_bn over the loader
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(32), batch_size=8, shuffle=True)
test_loader = DataLoader(points(16, seed=1), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
swa_model = AveragedModel(model)
scheduler = CosineAnnealingLR(optimizer, T_max=3)
swa_scheduler = SWALR(optimizer, swa_lr=0.05)
swa_start, values = 1, []
for epoch in range(3):
    counts["epoch"] += 1
    for inputs, targets in loader:
        counts["step"] += 1
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    if epoch >= swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()

counts["evaluation"] += 1
counts["batch"] += len(loader)
update_bn(loader, swa_model)
swa_model.eval()
correct = 0
with torch.no_grad():
    counts["evaluation"] += 1
    for inputs, targets in test_loader:
        counts["batch"] += 1
        correct += (swa_model(inputs).argmax(1) == targets).sum().item()
result(counts, values=[*values, correct], weights=digest(*swa_model.state_dict().values()))
