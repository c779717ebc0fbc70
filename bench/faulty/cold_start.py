"""Workers open their files anew in each epoch. Mended: they are kept."""

import time

from common import BATCH, IS_FIXED, Loop, mlp, pace, samples, train
from torch.utils.data import DataLoader


class Opens:
    """Takes as long as 60 steps to open what a worker reads from."""

    def __init__(self, seconds: float) -> None:
        self.samples, self.seconds = samples(20 * BATCH), seconds
        self.is_open = False

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, at: list[int]) -> object:
        if not self.is_open:
            time.sleep(self.seconds)
            self.is_open = True
        return self.samples.__getitems__(at)


if __name__ == "__main__":
    model = mlp()
    data = Opens(60 * pace(model))
    loader = DataLoader(data, BATCH, num_workers=2, persistent_workers=IS_FIXED)
    train(loader, model, Loop(model), epochs=8)
