# shape: A3C and IMPALA: threads that train by hand and end; an iterator that outlives its thread
import threading

import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class Worker:
    def __init__(self, batches):
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = batches

    def train(self):
        for _ in range(3):
            counts["step"] += 1
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            values.append(loss.item())


def drawn_by_hand():
    inputs, labels = points(64)[:]
    while True:
        chosen = torch.randint(0, 64, (8,))
        yield inputs[chosen], labels[chosen]


torch.manual_seed(0)
torch.set_num_threads(1)
values = []
workers = [Worker(drawn_by_hand()), Worker(iter(DataLoader(points(64), batch_size=8)))]
for worker in workers:
    counts["epoch"] += 1
    thread = threading.Thread(target=worker.train)
    thread.start()
    thread.join()
weights = [one for worker in workers for one in worker.model.parameters()]
result(counts, values=values, weights=digest(*weights))
