"""Every 25 steps something unnamed takes long in the step. Mended: it does not."""

from common import BATCH, IS_FIXED, Loop, burn, mlp, pace, samples, train
from torch.utils.data import DataLoader


def after(step: int, outputs: object, labels: object) -> None:
    if step % 25 == 20 and not IS_FIXED:
        burn(12 * unit)


if __name__ == "__main__":
    model = mlp()
    unit = pace(model)
    train(DataLoader(samples(200 * BATCH), BATCH), model, Loop(model), after)
