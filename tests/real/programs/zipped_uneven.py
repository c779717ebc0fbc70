# shape: two domains zipped, the longer loader first: its last batch is fetched and never used
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
source = DataLoader(points(40), batch_size=8, shuffle=True)
target = DataLoader(points(24, seed=1), batch_size=8, shuffle=True)
features = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
label_head, domain_head = nn.Linear(16, 4), nn.Linear(16, 2)
parameters = [p for m in (features, label_head, domain_head) for p in m.parameters()]
optimizer = torch.optim.Adam(parameters, lr=0.01)
values = []
for _epoch in range(2):
    counts["epoch"] += 1
    for (xs, ys), (xt, _) in zip(source, target):  # noqa: B905
        counts["data_load"] += 2
        fs, ft = features(xs), features(xt)
        domains = torch.tensor([0] * len(fs) + [1] * len(ft))
        loss = F.cross_entropy(label_head(fs), ys)
        loss = loss + F.cross_entropy(domain_head(torch.cat([fs, ft])), domains)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    counts["data_load"] += 1
result(counts, values=values, weights=digest(*parameters))
