"""Evaluates every 10 steps. Mended: every 100."""

import torch
from common import BATCH, IS_FIXED, Loop, mlp, samples, train
from torch.utils.data import DataLoader

if __name__ == "__main__":
    model = mlp()
    every = 100 if IS_FIXED else 10
    held_out = DataLoader(samples(20 * BATCH), BATCH)

    def evaluate(step: int, outputs: object, labels: object) -> None:
        if step % every == every - 1:
            model.eval()
            with torch.no_grad():
                sum((model(inputs).argmax(1) == labels).sum() for inputs, labels in held_out)
            model.train()

    train(DataLoader(samples(200 * BATCH), BATCH), model, Loop(model), evaluate)
