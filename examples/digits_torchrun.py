"""Classifies handwritten digits with PyTorch in two processes; each epoch is saved.

torchrun --nproc-per-node=2 examples/digits_torchrun.py    killed, it goes on after its last epoch
"""

import os
import subprocess
import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ciclo
import cirron as ci


def accuracy(outputs, targets):
    return (outputs.argmax(-1) == targets).float().mean()


def loader(rows, shuffle):
    digits = load_digits()
    images = (digits.data[rows] / 16).astype("float32")
    data = TensorDataset(torch.from_numpy(images), torch.from_numpy(digits.target[rows]))
    return DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=shuffle))


def main():
    ci.profile()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    state = ciclo.create_torch_state(
        module,
        torch.optim.SGD(module.parameters(), lr=0.5),
        losses=torch.nn.CrossEntropyLoss(),
        metrics=accuracy,
        strategy="ddp",  # or "fsdp"
    )
    order = np.random.default_rng(0).permutation(1792)
    train, test = loader(order[:1408], shuffle=True), loader(order[1408:], shuffle=False)
    options = {"callbacks": [ciclo.checkpoint("checkpoints")], "resume": "checkpoints"}
    _, history, _ = ciclo.fit(state, train, test, epochs=15, **options)
    if os.environ["RANK"] == "0":
        print(f"accuracy {history.last('accuracy_valid'):.3f}")


if "RANK" in os.environ:
    main()
else:  # started as plain Python: have torchrun start it
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sys.exit(subprocess.call([sys.executable, *torchrun, __file__]))
