# shape: self-supervised scripts: every few steps, a linear probe is trained on frozen features
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


def train_probe(encoder, loader):
    probe = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    for x, y in loader:
        counts["step"] += 1
        with torch.no_grad():
            features = encoder(x)
        optimizer.zero_grad()
        F.cross_entropy(probe(features), y).backward()
        optimizer.step()
    return probe


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(32), batch_size=8, shuffle=True)
probe_loader = DataLoader(points(16, seed=1), batch_size=8)
encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
probes = []
for _epoch in range(2):
    counts["epoch"] += 1
    for index, (x, y) in enumerate(loader):
        counts["step"] += 1
        optimizer.zero_grad()
        F.cross_entropy(encoder(x), y).backward()
        optimizer.step()
        if index == 1:
            probes.append(train_probe(encoder, probe_loader))
weights = [weight for probe in probes for weight in probe.parameters()]
result(counts, weights=digest(*encoder.parameters(), *weights))
