# shape: SAM: the weights are moved by hand, the loss is taken again, then the optimizer steps
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["old"] = weight.data.clone()
                weight.add_(weight.grad * group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data = self.state[weight]["old"]
        self.base.step()
        self.zero_grad()


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(32), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
for _epoch in range(2):
    counts["epoch"] += 1
    for x, y in loader:
        counts["step"] += 1
        F.cross_entropy(model(x), y).backward()
        optimizer.first_step()
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step()
result(counts, weights=digest(*model.parameters()))
