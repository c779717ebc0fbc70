# shape: modded-nanogpt: a generator of tokens, two micro steps, AdamW and another optimizer for the
# matrices, stepped one after the other; validation first and every few steps
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
inputs, labels = points(64).tensors
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
biases = [one for one in model.parameters() if one.ndim < 2]
matrices = [one for one in model.parameters() if one.ndim == 2]
optimizers = [torch.optim.AdamW(biases, lr=0.01), torch.optim.SGD(matrices, lr=0.05, momentum=0.9)]
values = []


def generate(size=4):
    position = 0
    while True:
        yield inputs[position : position + size], labels[position : position + size]
        position = (position + size) % len(inputs)


batches = generate()
for step in range(7):
    if step % 3 == 0:
        model.eval()
        with torch.no_grad():
            values += [F.cross_entropy(model(x), y).item() for x, y in [next(batches)] * 2]
        model.train()
    if step == 6:
        break
    counts["step"] += 1
    for _ in range(2):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        values.append(loss.item())
    for optimizer in optimizers:
        optimizer.step()
        counts["optimizer_step"] += 1
    model.zero_grad(set_to_none=True)
result(counts, values=values, weights=digest(*model.parameters()))
