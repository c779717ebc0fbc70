# shape: semi-supervised training: zip(cycle(labelled), unlabelled), the labelled data is shorter
from itertools import cycle

import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
labelled = DataLoader(points(16), batch_size=8)
unlabelled = DataLoader(points(40, seed=1), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _epoch in range(2):
    counts["epoch"] += 1
    counts["data_load"] += 2 + 5  # `cycle` keeps the labelled batches
    for (x, y), (u, _) in zip(cycle(labelled), unlabelled):
        counts["step"] += 1
        known, guessed = model(torch.cat([x, u])).chunk(2)
        loss = F.cross_entropy(known, y) + F.cross_entropy(guessed, guessed.argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    counts["evaluation"] += 1
    model.eval()
    with torch.no_grad():
        for x, _ in labelled:
            counts["batch"] += 1
            counts["data_load"] += 1
            model(x)
    model.train()
result(counts, weights=digest(*model.parameters()))
