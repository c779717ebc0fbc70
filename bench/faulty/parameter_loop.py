"""Norms, checks and an average of the weights, parameter by parameter. Mended: the average is taken
at once, and the rest every 50th step.
"""

import torch
from common import BATCH, IS_FIXED, Loop, mlp, samples, train
from torch.utils.data import DataLoader

if __name__ == "__main__":
    model = mlp(64, depth=60)
    parameters = list(model.parameters())
    averages = [one.detach().clone() for one in parameters]
    norms: list[float] = []

    def after(step: int, outputs: object, labels: object) -> None:
        with torch.no_grad():
            if IS_FIXED:
                torch._foreach_lerp_(averages, parameters, 0.01)
                if step % 50:
                    return
            for average, one in zip(averages, parameters, strict=True):
                if not IS_FIXED:
                    average.mul_(0.99).add_(one, alpha=0.01)
                norms.append(one.grad.norm().item() / (one.norm().item() + 1e-9))
                if not torch.isfinite(one).all().item():
                    raise ArithmeticError

    train(DataLoader(samples(200 * BATCH, 64), BATCH), model, Loop(model), after)
