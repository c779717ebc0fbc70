"""The learning rate is far too high: the loss becomes NaN. Mended: it is not."""

import torch
from common import BATCH, IS_FIXED, Loop, mlp, samples
from torch.utils.data import DataLoader

if __name__ == "__main__":
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if IS_FIXED else 1e6)
    loop = Loop(model)
    for inputs, labels in DataLoader(samples(100 * BATCH), BATCH):
        with loop.step():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    loop.end()
