# shape: mixed precision with a scaler whose first scale is too large: that step is skipped
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(40), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)
values = []
for _epoch in range(2):
    counts["epoch"] += 1
    for x, target in loader:
        counts["step"] += 1
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), target, reduction="sum")
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            counts["optimizer_step"] += 1
        optimizer.zero_grad(set_to_none=True)
        values.append(loss.item())
result(counts, values=values, weights=digest(*model.parameters()))
