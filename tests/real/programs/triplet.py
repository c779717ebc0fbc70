# shape: metric learning: one network on anchor, positive and negative; nearest neighbours after it
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader, Dataset

counts = Counts()


class Triplets(Dataset):
    def __init__(self, data):
        self.x, self.y = data.tensors

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        same, other = (self.y == self.y[i]).nonzero(), (self.y != self.y[i]).nonzero()
        pick = torch.randint(10**6, (2,))
        return (
            self.x[i],
            self.x[same[pick[0] % len(same)]][0],
            self.x[other[pick[1] % len(other)]][0],
        )


class EmbeddingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 2))

    def forward(self, x):
        counts["forward"] += 1
        return self.fc(x)


torch.manual_seed(0)
torch.set_num_threads(1)
data = points(32)
train_loader = DataLoader(Triplets(data), batch_size=8, shuffle=True)
embedding_net = EmbeddingNet()
criterion = nn.TripletMarginLoss(margin=1.0)
optimizer = torch.optim.Adam(embedding_net.parameters(), lr=1e-2)
values = []
for _epoch in range(2):
    counts["epoch"] += 1
    embedding_net.train()
    for anchor, positive, negative in train_loader:
        counts["step"] += 1
        optimizer.zero_grad()
        out = embedding_net(anchor), embedding_net(positive), embedding_net(negative)
        loss = criterion(*out)
        loss.backward()
        optimizer.step()
        values.append(loss.item())

embedding_net.eval()
embeddings, labels = [], []
with torch.no_grad():
    counts["evaluation"] += 1
    for x, y in DataLoader(data, batch_size=16):
        counts["batch"] += 1
        embeddings.append(embedding_net(x))
        labels.append(y)
distances = torch.cdist(torch.cat(embeddings), torch.cat(embeddings)).fill_diagonal_(1e9)
right = (torch.cat(labels)[distances.argmin(1)] == torch.cat(labels)).sum().item()
result(counts, values=[*values, right], weights=digest(*embedding_net.parameters()))
