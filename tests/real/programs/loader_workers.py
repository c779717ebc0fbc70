# shape: image classification with num_workers=2: workers started and stopped for each pass
import torch
from common import Counts, digest, result
from torch import nn
from torch.utils.data import DataLoader, Dataset

counts = Counts()


class Images(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        made = torch.Generator().manual_seed(i)
        return torch.randn(1, 4, 4, generator=made), i % 3


def train(loader, model, criterion, optimizer):
    model.train()
    counts["epoch"] += 1
    for images, target in loader:
        counts["step"] += 1
        counts["data_load"] += 1
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def validate(loader, model, criterion):
    model.eval()
    counts["evaluation"] += 1
    total = 0.0
    for images, target in loader:
        counts["batch"] += 1
        counts["data_load"] += 1
        total += criterion(model(images), target).item()
    return total


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keywords = {"batch_size": 8, "num_workers": 2, "multiprocessing_context": "fork"}
    train_loader = DataLoader(Images(32), shuffle=True, **keywords)
    val_loader = DataLoader(Images(16), **keywords)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for _ in range(2):
        values.append(train(train_loader, model, criterion, optimizer))
        values.append(validate(val_loader, model, criterion))
    result(counts, values=values, weights=digest(*model.parameters()))
