# shape: evaluation every n steps inside the training loop, best weights kept
import copy

import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
train_loader = DataLoader(points(40), batch_size=8, shuffle=True)
val_loader = DataLoader(points(24, seed=1), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
eval_every, global_step, best, best_state, values = 4, 0, float("inf"), None, []
for _epoch in range(2):
    counts["epoch"] += 1
    model.train()
    for x, y in train_loader:
        counts["step"] += 1
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        global_step += 1
        values.append(loss.item())
        if global_step % eval_every == 0:
            model.eval()
            counts["evaluation"] += 1
            val_loss = 0.0
            for x, y in val_loader:
                counts["batch"] += 1
                with torch.no_grad():
                    val_loss += criterion(model(x), y).item()
            values.append(val_loss)
            if val_loss < best:
                best, best_state = val_loss, copy.deepcopy(model.state_dict())
            model.train()
model.load_state_dict(best_state)
result(counts, values=values, weights=digest(*model.parameters()))
