# shape: pytorch/examples distributed/FSDP2: fully_shard each layer and the model, random batches
# run: torchrun --standalone --nproc-per-node 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Counts, digest, result
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

counts = Counts()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.output = nn.Linear(16, 32)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2,))
model = Transformer()
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(42 + rank)
losses = []
for _ in range(6):
    x = torch.randint(0, 32, (4, 8))
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    counts["step"] += 1
    losses.append(loss.item())
whole = [one.full_tensor() for one in model.state_dict().values()]
every = [None, None]
dist.all_gather_object(every, counts)
dist.destroy_process_group()
if rank == 0:
    result(sum(every, Counts()), losses=losses, weights=digest(*whole))
