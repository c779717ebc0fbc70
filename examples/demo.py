"""Trains a small model on handwritten digits with a slow dataset, and says what is wrong with it.

The dataset takes its time to decode an image, and the DataLoader has no workers: training waits
for data. The verdict says so, and what fixing it would save. The same training with the advice
followed shows what it saved.

    make demo               # or: python examples/demo.py
    DEMO_SERVE=0 make demo  # ends after the verdict
"""

import contextlib
import os
import re
import subprocess
import sys
import time
import warnings

import torch
from sklearn.datasets import load_digits

import cirron as ci

EPOCHS, BATCH_SIZE, DECODE_S = 6, 64, 0.0002


class Digits(torch.utils.data.Dataset):
    """Images that take a while to decode, as from a slow disk."""

    def __init__(self):
        digits = load_digits()
        self.images = torch.tensor(digits.data, dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        time.sleep(DECODE_S)
        return self.images[at], self.labels[at]


def train(workers):
    """One training, recorded in this folder."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for a module this small, more of them wait for each other
    ci.profile(snapshots="stats", config={"epochs": EPOCHS, "workers": workers})
    loader = torch.utils.data.DataLoader(
        Digits(), BATCH_SIZE, num_workers=workers, persistent_workers=workers > 0
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )  # fmt: skip
    ci.watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        right = 0
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = model(images)
            loss = torch.nn.functional.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            ci.mark("loss", loss.item())
            right += (outputs.argmax(1) == labels).sum().item()
        ci.mark("accuracy", right / len(loader.dataset), kind="summary")
    ci.shutdown()
    return ci.open()


def step_ms(run):
    """The mean of the steps in ms, without the first epoch, in which workers start."""
    walls = [step["wall_ns"] for step in run.steps if step["epoch"] > 0]
    return sum(walls) / len(walls) / 1e6


def main():
    print("Training on handwritten digits that are slow to read ...\n", flush=True)
    slow = train(workers=0)
    report = slow.report()
    print(report)

    advised = re.search(r"num_workers=(\d+)", report.verdict.advice)
    workers = int(advised[1]) if advised else 2
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores
    print(f"\nTraining again, with {workers} workers ...", flush=True)
    fixed = train(workers)
    before, after = step_ms(slow), step_ms(fixed)
    gain = report.verdict.gain
    said = f"predicted: {100 * gain.share:.0f}%" if gain else "no prediction: the machine is busy"
    print(f"A step takes {after:.3g} ms instead of {before:.3g} ms:", end=" ")
    print(f"{100 * (1 - after / before):.0f}% less ({said}).")
    if os.environ.get("DEMO_SERVE") == "0":
        return
    print("\nBoth runs, in the browser (Ctrl-C ends it):", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        subprocess.run([sys.executable, "-m", "cirron", "serve", "--no-browser", "--port", "0"])


if __name__ == "__main__":
    main()
