# shape: retrieval and domain adaptation: pairs of batches are evaluated within the epoch, zipped or
# with next(); after it, each batch of queries is compared with each batch of a gallery
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
training = DataLoader(points(32), batch_size=8, shuffle=True)
queries = DataLoader(points(16, seed=1), batch_size=8)
gallery = DataLoader(points(24, seed=2), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = []


@torch.no_grad()
def compare_pairs():
    counts["evaluation"] += 1
    model.eval()
    counts["data_load"] += 1  # of the gallery, for which there is no query
    for (g, _), (q, _) in zip(gallery, queries):  # noqa: B905
        counts["batch"] += 1
        counts["data_load"] += 2
        values.append((model(torch.cat([g, q])).sum()).item())
    model.train()


@torch.no_grad()
def compare_cycled():
    counts["evaluation"] += 1
    model.eval()
    gallery_iter, query_iter = iter(gallery), iter(queries)
    for _ in range(len(gallery)):
        counts["batch"] += 1
        counts["data_load"] += 2
        g, _ = next(gallery_iter)
        try:
            q, _ = next(query_iter)
        except StopIteration:
            query_iter = iter(queries)
            q, _ = next(query_iter)
        values.append((model(torch.cat([g, q])).sum()).item())
    model.train()


@torch.no_grad()
def compare_all():
    counts["evaluation"] += 1
    model.eval()
    for q, _ in queries:
        counts["batch"] += 1
        counts["data_load"] += 1
        features = model(q)
        for g, _ in gallery:
            counts["data_load"] += 1
            values.append((features @ model(g).T).max().item())
    model.train()


for _epoch in range(2):
    counts["epoch"] += 1
    for number, (x, y) in enumerate(training):
        counts["step"] += 1
        counts["data_load"] += 1
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if number == 1:
            compare_pairs()
        if number == 2:
            compare_cycled()
    compare_all()
result(counts, values=values, weights=digest(*model.parameters()))
