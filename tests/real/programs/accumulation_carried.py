# shape: gradient accumulation by a global counter: what is left goes on in the next epoch
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(40), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
values, micro_step, accumulate = [], 0, 3
for _epoch in range(3):
    counts["epoch"] += 1
    for x, y in loader:
        counts["forward"] += 1
        loss = nn.functional.cross_entropy(model(x), y) / accumulate
        loss.backward()
        micro_step += 1
        if micro_step % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            counts["optimizer_step"] += 1
            values.append(loss.item())
result(counts, values=values, weights=digest(*model.parameters()))
