# shape: llama2.c: generators over endless loaders, the next batch is fetched after the forward;
# estimate_loss() after the first fetch and every few steps, on new generators; weights saved
import os
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from common import Counts, digest, result
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

counts = Counts()
eval_interval, eval_iters, max_iters, gradient_accumulation_steps = 3, 2, 5, 2


class Tokens(IterableDataset):
    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        made = torch.Generator().manual_seed(self.seed)
        while True:
            chunk = torch.randint(0, 16, (9,), generator=made)
            yield chunk[:-1], chunk[1:]


def iter_batches(seed):
    for x, y in DataLoader(Tokens(seed), batch_size=4):
        yield x.clone(), y.clone()


@torch.no_grad()
def estimate_loss():
    model.eval()
    for seed in (1, 2):
        counts["evaluation"] += 1
        batch_iter = iter_batches(seed=seed)
        for _ in range(eval_iters):
            counts["batch"] += 1
            x, y = next(batch_iter)
            values.append(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item())
    model.train()


def train(reads_ahead):
    counts["epoch"] += 1
    train_batch_iter = iter_batches(seed=1)
    X, Y = next(train_batch_iter)  # noqa: N806
    iter_num = 0
    while True:
        if reads_ahead and iter_num % eval_interval == 0:
            estimate_loss()
            torch.save(model.state_dict(), path)
            counts["checkpoint"] += 1
        for micro_step in range(gradient_accumulation_steps):
            loss = F.cross_entropy(model(X).flatten(0, 1), Y.flatten()) / 2
            if reads_ahead or micro_step == 0:
                X, Y = next(train_batch_iter)  # noqa: N806
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts["step"] += 1
        values.append(loss.item())
        iter_num += 1
        if iter_num == max_iters:
            break
        if not reads_ahead:
            X, Y = next(train_batch_iter)  # noqa: N806


torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
values = []
with TemporaryDirectory() as folder:
    path = os.path.join(folder, "ckpt.pt")
    train(reads_ahead=True)
train(reads_ahead=False)
result(counts, values=values, weights=digest(*model.parameters()))
