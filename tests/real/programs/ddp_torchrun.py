# shape: pytorch/examples multigpu_torchrun.py: a Trainer class, evaluation on rank 0 alone
# run: torchrun --standalone --nproc-per-node 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

counts = Counts()


class Trainer:
    def __init__(self, model, train_loader, test_loader, optimizer, rank):
        self.rank = rank
        self.train_loader = train_loader
        self.test_loader = test_loader
        self.optimizer = optimizer
        self.model = DistributedDataParallel(model)

    def run_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        counts["step"] += 1

    def run_epoch(self, epoch):
        counts["epoch"] += 1
        self.model.train()
        self.train_loader.sampler.set_epoch(epoch)
        for x, y in self.train_loader:
            self.run_batch(x, y)

    def evaluate(self):
        counts["evaluation"] += 1
        self.model.eval()
        correct = 0
        with torch.no_grad():
            for x, y in self.test_loader:
                counts["batch"] += 1
                correct += (self.model.module(x).argmax(1) == y).sum().item()
        return correct

    def train(self, epochs):
        correct = []
        for epoch in range(epochs):
            self.run_epoch(epoch)
            if self.rank == 0:
                correct.append(self.evaluate())
            dist.barrier()
        return correct


dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
data = points(64)
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
test_loader = DataLoader(points(16, seed=1), batch_size=8)
trainer = Trainer(model, loader, test_loader, optimizer, dist.get_rank())
correct = trainer.train(epochs=2)
every = [None, None]
dist.all_gather_object(every, counts)
dist.destroy_process_group()
if trainer.rank == 0:
    result(sum(every, Counts()), correct=correct, weights=digest(*model.parameters()))
