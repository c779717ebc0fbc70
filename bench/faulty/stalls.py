"""Every 20th batch waits for the next shard. Mended: workers read far enough ahead."""

import time

from common import BATCH, Loop, mlp, pace, samples, train, workers
from torch.utils.data import DataLoader


class Shards:
    def __init__(self, seconds: float) -> None:
        self.samples, self.seconds = samples(160 * BATCH), seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, at: list[int]) -> object:
        if at[0] // BATCH % 20 == 19:
            time.sleep(self.seconds)
        return self.samples.__getitems__(at)


if __name__ == "__main__":
    model = mlp()
    train(DataLoader(Shards(14 * pace(model)), BATCH, **workers()), model, Loop(model))
