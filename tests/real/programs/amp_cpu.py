# shape: mixed precision on a CPU: autocast to bfloat16, a scaler that is there and off
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(32), batch_size=8, shuffle=True)
val_loader = DataLoader(points(16, seed=1), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
use_amp, values = False, []
scaler = torch.amp.GradScaler("cpu", enabled=use_amp)
for _epoch in range(2):
    model.train()
    counts["epoch"] += 1
    for x, target in loader:
        counts["step"] += 1
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
            loss = F.cross_entropy(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        counts["optimizer_step"] += 1
        values.append(loss.item())
    model.eval()
    counts["evaluation"] += 1
    with torch.no_grad(), torch.amp.autocast("cpu", dtype=torch.bfloat16):
        for x, target in val_loader:
            counts["batch"] += 1
            values.append(F.cross_entropy(model(x), target).item())
result(counts, values=values, weights=digest(*model.parameters()))
