"""Each batch is decoded slowly, in the training process, on its core. Mended: in workers."""

from common import BATCH, Loop, burn, mlp, pace, samples, train, workers
from torch.utils.data import DataLoader


class Decodes:
    def __init__(self, seconds: float) -> None:
        self.samples, self.seconds = samples(100 * BATCH), seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, at: list[int]) -> object:
        burn(self.seconds)
        return self.samples.__getitems__(at)


if __name__ == "__main__":
    model = mlp()
    train(DataLoader(Decodes(pace(model)), BATCH, **workers()), model, Loop(model))
