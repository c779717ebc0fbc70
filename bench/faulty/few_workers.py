"""One worker cannot keep up with the model. Mended: more."""

from common import BATCH, IS_FIXED, Loop, Waits, mlp, pace, train, workers
from torch.utils.data import DataLoader

if __name__ == "__main__":
    model = mlp()
    settings = workers() if IS_FIXED else {"num_workers": 1}
    train(DataLoader(Waits(100, 2 * pace(model)), BATCH, **settings), model, Loop(model))
