# shape: semi-supervised training: labelled and unlabelled batches, zipped
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
labeled_loader = DataLoader(points(24), batch_size=8, shuffle=True)
unlabeled_loader = DataLoader(points(64, seed=1), batch_size=16, shuffle=True)
test_loader = DataLoader(points(16, seed=2), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
values = []
for _epoch in range(2):
    model.train()
    counts["epoch"] += 1
    for (x_l, y_l), (x_u, _) in zip(labeled_loader, unlabeled_loader, strict=False):
        counts["step"] += 1
        counts["data_load"] += 2
        with torch.no_grad():
            pseudo_label = model(x_u + 0.05 * torch.randn_like(x_u)).argmax(1)
        logits_l, logits_u = model(torch.cat([x_l, x_u])).split([len(x_l), len(x_u)])
        loss = F.cross_entropy(logits_l, y_l) + 0.5 * F.cross_entropy(logits_u, pseudo_label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    model.eval()
    counts["evaluation"] += 1
    with torch.no_grad():
        for x, y in test_loader:
            counts["batch"] += 1
            counts["data_load"] += 1
            values.append(F.cross_entropy(model(x), y).item())
result(counts, values=values, weights=digest(*model.parameters()))
