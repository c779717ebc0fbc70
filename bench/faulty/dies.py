"""Killed inside of backward (`kill -9`, as by the system when memory is out)."""

import os
import signal
import time

from common import BATCH, IS_FIXED, Loop, mlp, samples, train
from torch.utils.data import DataLoader

calls = 0


def kill(*_: object) -> None:
    global calls
    calls += 1
    if calls == 60 and not IS_FIXED:
        time.sleep(2)  # as long as a flush takes
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    model = mlp()
    model[0].register_full_backward_hook(kill)
    train(DataLoader(samples(100 * BATCH), BATCH), model, Loop(model))
