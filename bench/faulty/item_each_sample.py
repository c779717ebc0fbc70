"""The accuracy is counted sample by sample with .item(). Mended: in one operation."""

from common import BATCH, IS_FIXED, Loop, mlp, samples, train
from torch.utils.data import DataLoader

correct = 0


def count(step: int, outputs: object, labels: object) -> None:
    global correct
    if IS_FIXED:
        correct += (outputs.argmax(1) == labels).sum().item()
        return
    for output, label in zip(outputs, labels, strict=True):
        best = max(range(len(output)), key=lambda at: output[at].item())
        correct += best == label.item()


if __name__ == "__main__":
    model = mlp(256)
    train(DataLoader(samples(200 * BATCH, 256), BATCH), model, Loop(model), count)
