# shape: fastai: a Learner with callbacks, one of which cancels batches by raising
import contextlib

import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class CancelBatchError(Exception):
    pass


class SkipLast:
    def before_batch(self, learner):
        if learner.is_training and learner.index == 3:
            raise CancelBatchError


class Learner:
    def __init__(self, model, loaders, callbacks):
        self.model, self.loaders, self.callbacks = model, loaders, callbacks
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def __call__(self, event):
        for callback in self.callbacks:
            getattr(callback, event)(self)

    def one_batch(self):
        with contextlib.suppress(CancelBatchError):
            self("before_batch")
            counts["step" if self.is_training else "batch"] += 1
            self.loss = F.cross_entropy(self.model(self.x), self.y)
            if self.is_training:
                self.loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def all_batches(self):
        loader = self.loaders[0 if self.is_training else 1]
        for self.index, (self.x, self.y) in enumerate(loader):
            self.one_batch()

    def fit(self, epochs):
        for _epoch in range(epochs):
            self.is_training = True
            self.model.train()
            self.all_batches()
            self.is_training = False
            self.model.eval()
            with torch.no_grad():
                self.all_batches()


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
loaders = DataLoader(points(32), batch_size=8), DataLoader(points(16, seed=1), batch_size=8)
Learner(model, loaders, [SkipLast()]).fit(2)
result(counts, weights=digest(*model.parameters()))
