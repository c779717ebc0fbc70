# shape: timm's PrefetchLoader: a generator that fetches the next batch before it yields this one
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class PrefetchLoader:
    def __init__(self, loader, mean=0.1, std=1.5):
        self.loader = loader
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    def __iter__(self):
        batch = None
        for next_input, next_target in self.loader:
            counts["data_load"] += 1
            next_input = next_input.float().sub_(self.mean).div_(self.std)
            if batch is not None:
                yield batch
            batch = next_input, next_target
        yield batch

    def __len__(self):
        return len(self.loader)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn):
    counts["epoch"] += 1
    model.train()
    for batch_idx, (x, target) in enumerate(loader):
        counts["step"] += 1
        loss = loss_fn(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if batch_idx + 1 == len(loader):
            counts["checkpoint"] += 1
            torch.save(model.state_dict(), "recovery.pt")
    return loss.item()


def validate(model, loader, loss_fn):
    counts["evaluation"] += 1
    model.eval()
    losses = []
    with torch.no_grad():
        for x, target in loader:
            counts["batch"] += 1
            losses.append(loss_fn(model(x), target).item())
    return sum(losses) / len(losses)


torch.manual_seed(42)
torch.set_num_threads(1)
loader_train = PrefetchLoader(DataLoader(points(40), batch_size=8, shuffle=True))
loader_eval = PrefetchLoader(DataLoader(points(24, seed=1), batch_size=8))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss()
values = []
for epoch in range(2):
    values.append(train_one_epoch(epoch, model, loader_train, optimizer, loss_fn))
    values.append(validate(model, loader_eval, loss_fn))
    counts["checkpoint"] += 1
    torch.save(model.state_dict(), "last.pt")
result(counts, values=values, weights=digest(*model.parameters()))
