"""Hangs inside of backward, as in a collective that a rank does not join."""

import time

from common import BATCH, IS_FIXED, Loop, mlp, samples, train
from torch.utils.data import DataLoader

calls = 0


def hang(*_: object) -> None:
    global calls
    calls += 1
    if calls == 60 and not IS_FIXED:
        time.sleep(600)


if __name__ == "__main__":
    model = mlp()
    model[0].register_full_backward_hook(hang)
    train(DataLoader(samples(100 * BATCH), BATCH), model, Loop(model))
