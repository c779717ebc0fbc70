# shape: data from tfds or a generator of one's own: no DataLoader, evaluation an epoch
import numpy as np
import torch
import torch.nn.functional as F
from common import Counts, digest, result
from torch import nn

counts = Counts()


def batches(seed, count, size=8):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        x = rng.normal(size=(size, 8)).astype("float32")
        yield torch.from_numpy(x), torch.from_numpy(np.abs(x[:, :4]).argmax(1))


def train_epoch(model, optimizer, epoch):
    model.train()
    for x, y in batches(epoch, 5):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counts["step"] += 1
    return loss.item()


@torch.no_grad()
def evaluate(model):
    counts["evaluation"] += 1
    model.eval()
    return sum((model(x).argmax(1) == y).sum().item() for x, y in batches(99, 3))


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
values = []
for epoch in range(3):
    values += [train_epoch(model, optimizer, epoch), evaluate(model)]
result(counts, values=values, weights=digest(*model.parameters()))
