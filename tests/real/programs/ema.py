# shape: scripts with an exponential moving average: AveragedModel updated each step, and evaluated
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

counts = Counts()


def train_one_epoch(model, ema_model, criterion, optimizer, loader):
    model.train()
    counts["epoch"] += 1
    for images, target in loader:
        counts["step"] += 1
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema_model.update_parameters(model)
    return loss.item()


def evaluate(model, criterion, loader):
    model.eval()
    counts["evaluation"] += 1
    total = 0.0
    with torch.inference_mode():
        for images, target in loader:
            counts["batch"] += 1
            total += criterion(model(images), target).item()
    return total / len(loader)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train_loader = DataLoader(points(32), batch_size=8, shuffle=True)
    val_loader = DataLoader(points(16, seed=1), batch_size=8)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    values = []
    for _epoch in range(2):
        values.append(train_one_epoch(model, ema_model, criterion, optimizer, train_loader))
        values.append(evaluate(model, criterion, val_loader))
        values.append(evaluate(ema_model, criterion, val_loader))
    result(counts, values=values, weights=digest(*ema_model.parameters()))


if __name__ == "__main__":
    main()
