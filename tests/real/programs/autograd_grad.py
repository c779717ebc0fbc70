# shape: gradients by `torch.autograd.grad` and weights changed by hand, as in meta-learning; a
# gradient of the inputs in the evaluation
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(20), batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
losses, steepness = [], []
for epoch in range(2):
    counts["epoch"] += 1
    model.train()
    for inputs, labels in loader:
        counts["step"] += 1
        loss = F.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, model.parameters())
        losses.append(loss.item())
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= gradient * 0.1
    counts["evaluation"] += 1
    model.eval()
    for inputs, labels in loader:
        counts["batch"] += 1
        inputs = inputs.requires_grad_()
        loss = F.cross_entropy(model(inputs), labels)
        steepness.append(torch.autograd.grad(loss, inputs)[0].norm().item())
result(counts, losses=losses, steepness=steepness, weights=digest(*model.parameters()))
