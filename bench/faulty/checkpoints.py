"""Saves the weights every 5 steps, and waits for it. Mended: every 50."""

import torch
from common import BATCH, IS_FIXED, Loop, mlp, samples, train
from torch.utils.data import DataLoader

if __name__ == "__main__":
    model = mlp()
    every = 50 if IS_FIXED else 5
    ballast = torch.randn(2_000_000)  # the optimizer's state of a larger model

    def save(step: int, outputs: object, labels: object) -> None:
        if step % every == every - 1:
            torch.save({"model": model.state_dict(), "ballast": ballast}, "weights.pt")

    train(DataLoader(samples(160 * BATCH), BATCH), model, Loop(model), save)
