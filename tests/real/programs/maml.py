# shape: MAML: inner steps on fast weights by torch.autograd.grad, an outer step for several tasks
import torch
import torch.nn.functional as F
from common import Counts, digest, result
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(6, 6, 1)
loader = DataLoader(TensorDataset(inputs, torch.sin(inputs + torch.rand(6, 1, 1))), batch_size=2)
model = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
meta_optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _epoch in range(2):
    counts["epoch"] += 1
    for xs, ys in loader:
        counts["step"] += 1
        meta_optimizer.zero_grad()
        meta_loss = 0.0
        for x, y in zip(xs, ys, strict=True):
            fast = dict(model.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(functional_call(model, fast, (x[:3],)), y[:3])
                gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                counts["backward"] += 1
                pairs = zip(fast.items(), gradients, strict=True)
                fast = {name: one - 0.1 * gradient for (name, one), gradient in pairs}
            meta_loss = meta_loss + F.mse_loss(functional_call(model, fast, (x[3:],)), y[3:])
        meta_loss.backward()
        counts["backward"] += 1
        meta_optimizer.step()
        losses.append(meta_loss.item())
result(counts, losses=losses, weights=digest(*model.parameters()))
