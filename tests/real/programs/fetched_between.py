# shape: loops that fetch the next batch while a GPU would compute: between forward and backward, or
# between backward and the optimizer step; and the sum of the losses of two items
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


def train(place, epochs):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(epochs):
        counts["epoch"] += 1
        iterator = iter(DataLoader(points(32), batch_size=8))
        batch = next(iterator, None)
        while batch is not None:
            counts["step"] += 1
            x, y = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if place == "before the backward":
                batch = next(iterator, None)
            loss.backward()
            if place == "before the step":
                batch = next(iterator, None)
            optimizer.step()
            if place == "after the step":
                batch = next(iterator, None)
            values.append(loss.item())
    return model


def train_on_sums(steps):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iterator = iter(DataLoader(points(32), batch_size=8))
    counts["epoch"] += 1
    for _step in range(steps):
        counts["step"] += 1
        loss = 0.0
        for _ in range(2):
            x, y = next(iterator)
            loss = loss + F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return model


torch.manual_seed(0)
torch.set_num_threads(1)
values = []
models = [train(place, 2) for place in ("before the backward", "before the step", "after the step")]
models.append(train_on_sums(2))
result(
    counts,
    values=values,
    weights=digest(*(one for model in models for one in model.parameters())),
)
