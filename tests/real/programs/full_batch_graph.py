# shape: pytorch/examples gcn and gat: a whole graph at once, tested after each step and at the end
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn

counts = Counts()


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, adjacency):
        counts["forward"] += 1
        x = F.dropout(F.relu(adjacency @ self.first(x)), 0.3, self.training)
        return F.log_softmax(adjacency @ self.second(x), dim=1)


torch.manual_seed(0)
torch.set_num_threads(1)
x, y = points(20).tensors
adjacency = (torch.rand(20, 20) < 0.2).float() + torch.eye(20)
adjacency /= adjacency.sum(1, keepdim=True)
model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
criterion = nn.NLLLoss()
values = []


def train_iter():
    counts["step"] += 1
    model.train()
    optimizer.zero_grad()
    loss = criterion(model(x, adjacency)[:10], y[:10])
    loss.backward()
    optimizer.step()
    values.append(loss.item())


def test(rows):
    model.eval()
    with torch.no_grad():
        values.append(criterion(model(x, adjacency)[rows], y[rows]).item())


for _epoch in range(5):
    train_iter()
    test(slice(10, 15))
test(slice(15, 20))
result(counts, values=values, weights=digest(*model.parameters()))
