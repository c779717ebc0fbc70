# shape: trainers by a number of steps: `data = infinite(loader)`, next(data), evaluations
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


def infinite(loader):
    while True:
        counts["epoch"] += 1
        yield from loader


class Trainer:
    def __init__(self, model, loader, val_loader, train_num_steps=10, save_every=4):
        self.model = model
        self.dl = infinite(loader)
        self.val_loader = val_loader
        self.opt = torch.optim.Adam(model.parameters(), lr=0.01)
        self.train_num_steps, self.save_every = train_num_steps, save_every
        self.step, self.values = 0, []

    def evaluate(self):
        self.model.eval()
        counts["evaluation"] += 1
        with torch.no_grad():
            for x, y in self.val_loader:
                counts["batch"] += 1
                self.values.append(F.cross_entropy(self.model(x), y).item())
        self.model.train()

    def train(self):
        while self.step < self.train_num_steps:
            x, y = next(self.dl)
            counts["step"] += 1
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()
            self.values.append(loss.item())
            self.step += 1
            if self.step % self.save_every == 0:
                self.evaluate()


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
loader = DataLoader(points(32), batch_size=8, shuffle=True)
trainer = Trainer(model, loader, DataLoader(points(16, seed=1), batch_size=8))
trainer.train()
result(counts, values=trainer.values, weights=digest(*model.parameters()))
