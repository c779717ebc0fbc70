# shape: Megatron-LM: endless iterators that are kept for training, validation and test; each micro
# batch is a next()
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)


def cyclic(loader):
    while True:
        yield from loader


def forward_backward(iterator, forward_only):
    for _ in range(2):
        x, y = next(iterator)
        loss = F.cross_entropy(model(x), y) / 2
        values.append(loss.item())
        if not forward_only:
            loss.backward()


def train_step(iterator):
    counts["step"] += 1
    optimizer.zero_grad()
    forward_backward(iterator, forward_only=False)
    optimizer.step()


def evaluate(iterator):
    counts["evaluation"] += 1
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            counts["batch"] += 2
            forward_backward(iterator, forward_only=True)
    model.train()


training = cyclic(DataLoader(points(64), batch_size=4, shuffle=True))
validation = cyclic(DataLoader(points(32, seed=1), batch_size=4))
test = cyclic(DataLoader(points(32, seed=2), batch_size=4))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
values = []
for iteration in range(6):
    train_step(training)
    if iteration % 3 == 2:
        evaluate(validation)
evaluate(test)
result(counts, values=values, weights=digest(*model.parameters()))
