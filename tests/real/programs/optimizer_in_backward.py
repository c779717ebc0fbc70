# shape: torchtune: an optimizer for each parameter, stepped by a hook when its gradient is there
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
optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
losses = []


def apply(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()
    counts["optimizer_step"] += 1


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(apply)
for _epoch in range(2):
    counts["epoch"] += 1
    for x, y in loader:
        counts["step"] += 1
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
result(counts, losses=losses, weights=digest(*model.parameters()))
