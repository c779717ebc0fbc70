# shape: accelerate with two models and optimizers, gradients accumulated over two batches
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, critic = nn.Linear(8, 4), nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
model, critic, optimizer, critic_optimizer, loader = accelerator.prepare(
    model, critic, optimizer, critic_optimizer, DataLoader(points(28), batch_size=4, shuffle=True)
)
losses = []
for _epoch in range(2):
    counts["epoch"] += 1
    for x, y in loader:
        with accelerator.accumulate(model, critic):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.backward(critic(x).square().mean())
            critic_optimizer.step()
            critic_optimizer.zero_grad()
        if accelerator.sync_gradients:
            counts["step"] += 1
        losses.append(loss.item())
result(counts, losses=losses, weights=digest(*model.parameters(), *critic.parameters()))
