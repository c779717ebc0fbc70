# shape: modded-nanogpt: Muon in each step, Adam in every second one, validation every third step
import itertools

import torch
import torch.nn.functional as F
from common import Counts, digest, result
from torch import nn

counts = Counts()


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(8, 8, generator=generator)
        yield x, x.argmax(1) % 4


torch.manual_seed(0)
torch.set_num_threads(1)
body, head = nn.Linear(8, 8), nn.Linear(8, 4)
model = nn.Sequential(body, head)
muon = torch.optim.SGD(body.parameters(), 0.1, momentum=0.9, nesterov=True)
adam = torch.optim.Adam(head.parameters(), 0.01)
train, values = batches(), []
for step in range(7):
    if step % 3 == 0:
        model.eval()
        with torch.no_grad():
            for x, y in itertools.islice(batches(), 2):
                values.append(F.cross_entropy(model(x), y).item())
        model.train()
    if step == 6:
        break
    counts["step"] += 1
    x, y = next(train)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    values.append(loss.item())
    for optimizer in [muon, adam] if step % 2 else [muon]:
        optimizer.step()
    model.zero_grad(set_to_none=True)
result(counts, values=values, weights=digest(*model.parameters()))
