# shape: modded-nanogpt and DiLoCo: an optimizer in each step, another one right after it now and
# then; random batches, no loader
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
inputs, labels = points(64)[:]
body, head = nn.Linear(8, 8), nn.Linear(8, 4)
model = nn.Sequential(body, head)
often = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
seldom = torch.optim.Adam(head.parameters(), lr=0.01)
values = []
for step in range(9):
    counts["step"] += 1
    chosen = torch.randint(0, 64, (8,))
    loss = F.cross_entropy(model(inputs[chosen]), labels[chosen])
    loss.backward()
    often.step()
    if step % 3 == 2:
        seldom.step()
    model.zero_grad()
    values.append(loss.item())
result(counts, values=values, weights=digest(*model.parameters()))
