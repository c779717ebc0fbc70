"""Three steps with slow data: too little to say anything."""

from common import BATCH, Loop, Waits, mlp, train
from torch.utils.data import DataLoader

if __name__ == "__main__":
    model = mlp()
    train(DataLoader(Waits(3, 0.02), BATCH), model, Loop(model))
