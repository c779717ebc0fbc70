# shape: streaming data: an IterableDataset without a length, several passes, one for validation
import torch
from common import Counts, digest, result
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

counts = Counts()


class Stream(IterableDataset):
    def __init__(self, start, end):
        super().__init__()
        self.start, self.end = start, end

    def __iter__(self):
        for seed in range(self.start, self.end):
            made = torch.Generator().manual_seed(seed)
            yield torch.randn(6, generator=made), seed % 3


def run_epoch(loader, is_train):
    model.train(is_train)
    counts["epoch" if is_train else "evaluation"] += 1
    total = 0.0
    for x, y in loader:
        counts["step" if is_train else "batch"] += 1
        loss = criterion(model(x), y)
        if is_train:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total += loss.item()
    return total


torch.manual_seed(0)
torch.set_num_threads(1)
train_loader = DataLoader(Stream(0, 29), batch_size=8)
val_loader = DataLoader(Stream(40, 52), batch_size=8)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = []
for _ in range(3):
    values.append(run_epoch(train_loader, True))
    values.append(run_epoch(val_loader, False))
result(counts, values=values, weights=digest(*model.parameters()))
