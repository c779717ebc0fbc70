"""Ranks of DDP over gloo, one of which is late: `slow` (rank 1 loads longer), `batches` (the same
between the batches of `ci.batches`), `rotating` (by turns, by chance) or `backward` (rank 1 is
late inside of backward, where all wait). Mended: evenly.
"""

import random
import sys
import time

import torch
from common import BATCH, IS_FIXED, Loop, mlp, samples
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import cirron as ci

HOW = sys.argv[1]
DELAY = 0.03

distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
turns = random.Random(1)


class Late:
    """Loads as the others do, and longer when it is this rank's turn."""

    def __init__(self) -> None:
        self.samples = samples(80 * BATCH)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, at: list[int]) -> object:
        whose = turns.randrange(world)
        if HOW == "rotating":
            # Mended, the same work is shared out.
            time.sleep(DELAY / world if IS_FIXED else DELAY * (whose == rank))
        elif HOW in ("slow", "batches") and rank == 1 and not IS_FIXED:
            time.sleep(DELAY)
        return self.samples.__getitems__(at)


if __name__ == "__main__":
    plain = mlp()
    if HOW == "backward" and rank == 1 and not IS_FIXED:
        plain[2].register_full_backward_hook(lambda *_: time.sleep(DELAY))
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loop = Loop(model)
    loader = DataLoader(Late(), BATCH)
    for inputs, labels in ci.batches(iter(loader)) if HOW == "batches" else loader:
        with loop.step():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if rank == 0:
        loop.end()
    distributed.destroy_process_group()
