# shape: losses that contain the model, as in sentence-transformers and CenterNet. A later loss with
# parameters gets the output of a model.
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
torch.set_num_threads(1)
counts = Counts()


class ModelWithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, labels):
        return nn.functional.cross_entropy(self.model(inputs), labels)


class CenterLoss(nn.Module):
    """Keeps a learned center for each class."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Embedding(4, 4)

    def forward(self, outputs, labels):
        return (outputs - self.centers(labels)).square().mean()


def train(call, parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for epoch in range(2):
        counts["epoch"] += 1
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            loss = call(inputs, labels)
            loss.backward()
            optimizer.step()
            counts["step"] += 1
            counts["forward"] += 1
            losses.append(loss.item())
        counts["evaluation"] += 1
        with torch.no_grad():
            for inputs, labels in test_loader:
                losses.append(call(inputs, labels).item())
                counts["batch"] += 1
                counts["forward"] += 1


losses = []
train_loader = DataLoader(points(64), batch_size=16, shuffle=True)
test_loader = DataLoader(points(32, seed=1), batch_size=16)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

with_loss = ModelWithLoss(model)
train(with_loss, with_loss.parameters())

center = CenterLoss()
train(
    lambda inputs, labels: center(model(inputs), labels),
    [*model.parameters(), *center.parameters()],
)
result(counts, losses=losses, weights=digest(*model.parameters(), *center.parameters()))
