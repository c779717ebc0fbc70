# shape: DPO: a policy and a frozen reference on pairs, gradients of two batches a step
import copy

import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(32), batch_size=4)
val_loader = DataLoader(points(8, seed=1), batch_size=4)
policy = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)


def loss_of(chosen, rejected):
    margin = policy(chosen) - policy(rejected)
    with torch.no_grad():
        margin_before = reference(chosen) - reference(rejected)
    return -F.logsigmoid(0.1 * (margin - margin_before)).mean()


counts["epoch"] += 1
for number, (x, _) in enumerate(loader):
    (loss_of(x, -x) / 2).backward()
    counts["backward"] += 1
    if number % 2:
        counts["step"] += 1
        optimizer.step()
        optimizer.zero_grad()
    if number == 3:
        counts["evaluation"] += 1
        policy.eval()
        with torch.no_grad():
            for v, _ in val_loader:
                counts["batch"] += 1
                loss_of(v, -v)
        policy.train()
result(counts, weights=digest(*policy.parameters()))
