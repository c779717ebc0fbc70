# shape: accelerate's find_executable_batch_size: a training that runs out of memory begins again
# with half the batch; the errors are kept
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        if len(x) > 8:
            raise RuntimeError("out of memory")
        return self.layers(x)


def train(batch_size):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(2):
        counts["epoch"] += 1
        for x, y in DataLoader(points(32), batch_size):
            counts["step"] += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
    return model


torch.manual_seed(0)
torch.set_num_threads(1)
values, errors, model, batch_size = [], [], None, 32
while model is None:
    try:
        model = train(batch_size)
    except RuntimeError as error:
        errors.append(error)
        batch_size //= 2
result(counts, values=values, weights=digest(*model.parameters()))
