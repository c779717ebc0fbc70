"""Two samples a step: the time goes into calling operations. Mended: 64."""

from common import IS_FIXED, Loop, mlp, samples, train
from torch.utils.data import DataLoader

if __name__ == "__main__":
    size, steps = (64, 300) if IS_FIXED else (2, 1500)
    model = mlp(64, depth=8)
    loader = DataLoader(samples(size * steps, 64), size)
    train(loader, model, Loop(model, samples=size))
