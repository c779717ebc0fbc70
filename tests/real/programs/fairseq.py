# shape: fairseq's GroupedIterator: a generator groups the batches of a step, the last group is
# smaller; samples are generated after each epoch, without a loader; and a generator whose last
# batch is too small to train with
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


def grouped(iterable, size):
    chunk = []
    for item in iterable:
        counts["data_load"] += 1
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def train(update_freq, batches):
    loader = DataLoader(points(4 * batches), batch_size=4, shuffle=True)
    for _epoch in range(2):
        counts["epoch"] += 1
        model.train()
        for samples in grouped(loader, update_freq):
            counts["step"] += 1
            optimizer.zero_grad()
            for x, y in samples:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                counts["backward"] += 1
                values.append(loss.item())
            optimizer.step()
        sample()


def train_on_whole_batches():
    counts["epoch"] += 1
    model.train()
    for samples in grouped(DataLoader(points(14), batch_size=4), 1):
        counts["step"] += 1  # also of the batch that it fetches and does not use
        x, y = samples[0]
        if len(x) < 4:
            continue
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        counts["backward"] += 1
        optimizer.step()
    sample()


def sample():
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            values.append(model(torch.randn(2, 8)).sum().item())


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
values = []
train(3, 7)
train(2, 4)
train(4, 4)
train_on_whole_batches()
result(counts, values=values, weights=digest(*model.parameters()))
