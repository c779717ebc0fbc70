# shape: torch.func: gradients of a head alone, of a model with one weight, and without a loader
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.func import functional_call, grad, grad_and_value
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(24), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
linear = nn.Linear(8, 4, bias=False)
parameters = {name: one.detach() for name, one in model.named_parameters()}
head = {name: parameters.pop(name) for name in ("2.weight", "2.bias")}
weight = {name: one.detach() for name, one in linear.named_parameters()}
losses = []


def loss_of_head(head, x, y):
    return F.cross_entropy(functional_call(model, {**parameters, **head}, (x,)), y)


def loss_of_linear(weight, x, y):
    loss = F.cross_entropy(functional_call(linear, weight, (x,)), y)
    return loss, loss.detach()


def loss_of_all(parameters, x, y):
    return F.cross_entropy(functional_call(model, parameters, (x,)), y)


def descend(parameters, gradients):
    return {name: one - 0.1 * gradients[name] for name, one in parameters.items()}


counts["epoch"] += 1
for x, y in loader:
    counts["step"] += 1
    head = descend(head, grad(loss_of_head)(head, x, y))
counts["epoch"] += 1
for x, y in loader:
    counts["step"] += 1
    gradients, loss = grad(loss_of_linear, has_aux=True)(weight, x, y)
    weight = descend(weight, gradients)
    losses.append(loss.item())
parameters |= head
x, y = points(24).tensors
counts["epoch"] += 1
for _ in range(5):
    counts["step"] += 1
    gradients, loss = grad_and_value(loss_of_all)(parameters, x, y)
    parameters = descend(parameters, gradients)
    losses.append(loss.item())
result(counts, losses=losses, weights=digest(*parameters.values(), *weight.values()))
