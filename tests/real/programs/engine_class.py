# shape: PyTorch-Ignite: an engine is a generator that stops at its last item; handlers evaluate
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class Engine:
    """Calls `process` for each item, and handlers after each one and each epoch."""

    def __init__(self, process):
        self.process = process
        self.after_item, self.after_epoch = [], []
        self.iteration = 0

    def run(self, loader, epochs=1):
        for _ in range(epochs):
            self.items = iter(loader)
            for _interrupted in self._run_epoch(len(loader)):
                pass
            for handler in self.after_epoch:
                handler()

    def _run_epoch(self, length):
        done = 0
        while True:
            self.batch = next(self.items)
            self.process(self.batch)
            self.iteration += 1
            for handler in self.after_item:
                handler(self)
            done += 1
            if done == length:
                break
        if self.iteration < 0:
            yield  # an interrupted engine


def train_step(batch):
    counts["step"] += 1
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    values.append(loss.item())


def evaluate_batch(batch):
    counts["batch"] += 1
    model.eval()
    with torch.no_grad():
        values.append(F.cross_entropy(model(batch[0]), batch[1]).item())


def validate():
    counts["evaluation"] += 1
    Engine(evaluate_batch).run(validation)


def validate_sometimes(engine):
    if engine.iteration % 3 == 0:
        validate()


torch.manual_seed(0)
torch.set_num_threads(1)
values = []
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(points(24), batch_size=8, shuffle=True)
validation = DataLoader(points(16, seed=1), batch_size=8)
trainer = Engine(train_step)
trainer.after_epoch.append(validate)
trainer.run(loader, epochs=2)
trainer.after_item.append(validate_sometimes)
trainer.run(loader, epochs=1)
result(counts, values=values, weights=digest(*model.parameters()))
