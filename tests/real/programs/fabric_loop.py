# shape: Lightning Fabric: a loop of one's own, setup, setup_dataloaders, fabric.backward
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.set_num_threads(1)
fabric = Fabric(accelerator="cpu", devices=1)
seed_everything(0)
fabric.launch()

train_loader = DataLoader(points(40), batch_size=8, shuffle=True)
test_loader = DataLoader(points(16, seed=1), batch_size=8)
train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
model, optimizer = fabric.setup(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

losses = []
for epoch in range(2):
    counts["epoch"] += 1
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        counts["step"] += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        counts["optimizer_step"] += 1
    scheduler.step()

    counts["evaluation"] += 1
    model.eval()
    test_loss = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            counts["batch"] += 1
            test_loss += F.cross_entropy(model(data), target, reduction="sum").item()
    losses += [loss.item(), test_loss]
    counts["checkpoint"] += 1
    fabric.save("checkpoint.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})

result(counts, losses=losses, weights=digest(*model.parameters()))
