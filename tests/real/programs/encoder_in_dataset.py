# shape: features of a frozen encoder, computed by the dataset while it loads
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

counts = Counts()


class Features(Dataset):
    def __init__(self, of):
        self.of = of
        self.encoder = nn.Linear(8, 8).eval()

    def __len__(self):
        return len(self.of)

    @torch.no_grad()
    def __getitem__(self, index):
        x, y = self.of[index]
        counts["forward"] += 1
        return self.encoder(x), y


torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(Features(points(12)), batch_size=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = optim.SGD(model.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    counts["epoch"] += 1
    for inputs, labels in loader:
        counts["step"] += 1
        counts["forward"] += 1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
result(counts, losses=losses, weights=digest(*model.parameters()))
