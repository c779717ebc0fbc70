"""Gradients are kept for a histogram, all of them. Mended: their norms."""

from common import BATCH, IS_FIXED, Loop, mlp, samples, train
from torch.utils.data import DataLoader

kept: list[object] = []

if __name__ == "__main__":
    model = mlp()

    def keep(step: int, outputs: object, labels: object) -> None:
        gradient = model[0].weight.grad
        kept.append(gradient.norm().item() if IS_FIXED else gradient.clone())

    train(DataLoader(samples(30 * BATCH), BATCH), model, Loop(model), keep, epochs=10)
