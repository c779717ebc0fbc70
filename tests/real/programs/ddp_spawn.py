# shape: pytorch/examples distributed/ddp: mp.spawn, the rank goes to init_process_group
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import Counts, digest, points, result
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def setup(rank, world_size):
    store = f"file://{os.getcwd()}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    torch.set_num_threads(1)


def validate(rank, model, loader, criterion, counts):
    """Each rank its part, summed."""
    counts["evaluation"] += 1
    model.eval()
    total = torch.zeros(1)
    with torch.no_grad():
        for x, y in loader:
            counts["batch"] += 1
            total += criterion(model(x), y)
    dist.all_reduce(total)
    return total.item()


def main_worker(rank, world_size, epochs):
    setup(rank, world_size)
    counts = Counts()
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data, other = points(64), points(32, seed=1)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    kept = DistributedSampler(other, num_replicas=world_size, rank=rank, shuffle=False)
    val_loader = DataLoader(other, batch_size=8, sampler=kept)
    totals = []
    for epoch in range(epochs):
        counts["epoch"] += 1
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            counts["step"] += 1
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        totals.append(validate(rank, model, val_loader, criterion, counts))
    every = [None] * world_size
    dist.all_gather_object(every, counts)
    if rank == 0:
        result(sum(every, Counts()), totals=totals, weights=digest(*model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main_worker, args=(2, 2), nprocs=2, join=True)
