# shape: torch's transfer learning tutorial: one loop for both phases, `set_grad_enabled`
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loaders = {
    "train": DataLoader(points(32), batch_size=8, shuffle=True),
    "val": DataLoader(points(16, seed=1), batch_size=8),
}
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
losses = []
for _epoch in range(2):
    for phase in ("train", "val"):
        counts["epoch" if phase == "train" else "evaluation"] += 1
        model.train(phase == "train")
        running = 0.0
        for inputs, labels in loaders[phase]:
            counts["step" if phase == "train" else "batch"] += 1
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                loss = F.cross_entropy(model(inputs), labels)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            running += loss.item()
        if phase == "train":
            scheduler.step()
        losses.append(running)
result(counts, losses=losses, weights=digest(*model.parameters()))
