# shape: MixMatch: iterators kept for labelled and unlabelled data, each begun again when it is
# exhausted; labels are guessed in train mode; both are used up when the test begins; and unlabelled
# data that is fetched without gradients, for a teacher
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
labelled = DataLoader(points(12), batch_size=4, shuffle=True)
unlabelled = DataLoader(points(16, seed=1), batch_size=4, shuffle=True)
test_loader = DataLoader(points(8, seed=2), batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
values = []
for _round in range(2):
    labelled_iter, unlabelled_iter = iter(labelled), iter(unlabelled)
    counts["epoch"] += 1
    model.train()
    for _ in range(6):
        counts["step"] += 1
        try:
            x, y = next(labelled_iter)
        except StopIteration:
            labelled_iter = iter(labelled)
            counts["epoch"] += 1
            x, y = next(labelled_iter)
        try:
            u, _ = next(unlabelled_iter)
        except StopIteration:
            unlabelled_iter = iter(unlabelled)
            u, _ = next(unlabelled_iter)
        with torch.no_grad():
            guessed = F.softmax(model(u), 1)
        targets = torch.cat([F.one_hot(y, 4).float(), guessed])
        loss = F.cross_entropy(model(torch.cat([x, u])), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    model.eval()
    counts["evaluation"] += 1
    with torch.no_grad():
        for x, y in test_loader:
            counts["batch"] += 1
            values.append(F.cross_entropy(model(x), y).item())
teacher = nn.Linear(8, 4).eval()
labelled_iter, unlabelled_iter = iter(labelled), iter(unlabelled)
counts["epoch"] += 1
model.train()
for _ in range(3):
    counts["step"] += 1
    x, y = next(labelled_iter)
    with torch.no_grad():
        u, _ = next(unlabelled_iter)
        guessed = F.softmax(teacher(u), 1)
    loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(u), guessed)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    values.append(loss.item())
result(counts, values=values, weights=digest(*model.parameters()))
