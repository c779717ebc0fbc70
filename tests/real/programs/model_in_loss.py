# shape: sentence-transformers, CenterNet, OpenPCDet: a loss, itself a module, calls the model
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        counts["forward"] += 1
        return self.net(x)


class MultipleNegativesRankingLoss(nn.Module):
    def __init__(self, model, scale=20.0):
        super().__init__()
        self.model = model
        self.scale = scale
        self.cross_entropy_loss = nn.CrossEntropyLoss()

    def forward(self, sentence_features):
        anchors, positives = [self.model(one) for one in sentence_features]
        scores = nn.functional.cosine_similarity(anchors[:, None], positives[None], dim=-1)
        return self.cross_entropy_loss(scores * self.scale, torch.arange(len(scores)))


torch.manual_seed(0)
torch.set_num_threads(1)
model = Encoder()
train_loss = MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train_loader = DataLoader(points(32), batch_size=8, shuffle=True)
dev_loader = DataLoader(points(16, seed=1), batch_size=8)
values = []
for _epoch in range(2):
    counts["epoch"] += 1
    train_loss.train()
    for x, _ in train_loader:
        counts["step"] += 1
        loss = train_loss([x, x + 0.1 * torch.randn_like(x)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    counts["evaluation"] += 1
    train_loss.eval()
    with torch.no_grad():
        for x, _ in dev_loader:
            counts["batch"] += 1
            values.append(train_loss([x, x]).item())

result(counts, values=values, weights=digest(*model.parameters()))
