# shape: per-sample gradients of torch.func, as for differential privacy: vmap(grad(loss)), clipped
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(24), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
norms = []


def loss_of(parameters, x, y):
    return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])


for _epoch in range(2):
    counts["epoch"] += 1
    for x, y in loader:
        counts["step"] += 1
        parameters = {name: one.detach() for name, one in model.named_parameters()}
        gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
        squares = sum(one.flatten(1).square().sum(1) for one in gradients.values())
        scale = (1 / squares.sqrt()).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("n,n...->...", scale, gradients[name]) / len(x)
        optimizer.step()
        norms.append(squares.sqrt().mean().item())
result(counts, norms=norms, weights=digest(*model.parameters()))
