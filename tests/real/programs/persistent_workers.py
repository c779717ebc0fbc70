# shape: persistent_workers=True: workers that live as long as the loader
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loader = DataLoader(
        points(32),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        prefetch_factor=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    values = []
    for _epoch in range(3):
        counts["epoch"] += 1
        for x, y in loader:
            counts["step"] += 1
            counts["data_load"] += 1
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
    return values, digest(*model.parameters())


if __name__ == "__main__":
    values, weights = main()
    result(counts, values=values, weights=weights)
