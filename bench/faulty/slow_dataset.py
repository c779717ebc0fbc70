"""Each batch is read slowly, in the training process. Mended: in workers."""

from common import BATCH, Loop, Waits, mlp, pace, train, workers
from torch.utils.data import DataLoader

if __name__ == "__main__":
    model = mlp()
    train(DataLoader(Waits(100, 2.5 * pace(model)), BATCH, **workers()), model, Loop(model))
