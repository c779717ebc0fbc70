# shape: pytorch/examples mnist_hogwild: a model in shared memory, mp.Process, test at the end
import torch
import torch.multiprocessing as mp
from common import Counts, digest, result
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Factors(nn.Module):
    """Sparse gradients: each process has rows of its own, so that no update is lost."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(32, 4, sparse=True)

    def forward(self, ids):
        return self.users(ids).sum(1)


def ratings(first, last):
    ids = torch.arange(first, last)
    return TensorDataset(ids, (ids % 5).float())


def train(rank, epochs, model, queue):
    counts = Counts()
    torch.manual_seed(1 + rank)
    torch.set_num_threads(1)
    loader = DataLoader(ratings(16 * rank, 16 * rank + 16), batch_size=4, shuffle=True)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        counts["epoch"] += 1
        model.train()
        for ids, y in loader:
            counts["step"] += 1
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(ids), y)
            loss.backward()
            optimizer.step()
    queue.put(counts)


def test(model, counts):
    counts["evaluation"] += 1
    model.eval()
    total = 0.0
    with torch.no_grad():
        for ids, y in DataLoader(ratings(0, 32), batch_size=16):
            counts["batch"] += 1
            total += nn.functional.mse_loss(model(ids), y, reduction="sum").item()
    return total


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mp.set_start_method("spawn", force=True)
    model = Factors()
    model.share_memory()
    queue = mp.SimpleQueue()
    processes = [mp.Process(target=train, args=(rank, 2, model, queue)) for rank in range(2)]
    for one in processes:
        one.start()
    counts = queue.get() + queue.get()
    for one in processes:
        one.join()
    total = test(model, counts)
    result(counts, total=total, weights=digest(*model.parameters()))
