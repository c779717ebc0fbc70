# shape: pytorch/examples vae: forward gives three values, test() and a sample an epoch
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn, optim
from torch.utils.data import DataLoader

counts = Counts()


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc21 = nn.Linear(16, 3)
        self.fc22 = nn.Linear(16, 3)
        self.fc3 = nn.Linear(3, 16)
        self.fc4 = nn.Linear(16, 8)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(epoch):
    model.train()
    counts["epoch"] += 1
    train_loss = 0
    for _batch_idx, (data, _) in enumerate(train_loader):
        counts["step"] += 1
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(torch.sigmoid(data))
        loss = loss_function(recon_batch, torch.sigmoid(data), mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    return train_loss / len(train_loader.dataset)


def test(epoch):
    model.eval()
    counts["evaluation"] += 1
    test_loss = 0
    with torch.no_grad():
        for data, _ in test_loader:
            counts["batch"] += 1
            recon_batch, mu, logvar = model(torch.sigmoid(data))
            test_loss += loss_function(recon_batch, torch.sigmoid(data), mu, logvar).item()
    return test_loss / len(test_loader.dataset)


torch.manual_seed(1)
torch.set_num_threads(1)
train_loader = DataLoader(points(40), batch_size=8, shuffle=True)
test_loader = DataLoader(points(16, seed=1), batch_size=8)
model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
values, samples = [], []
for epoch in range(1, 3):
    values += [train(epoch), test(epoch)]
    with torch.no_grad():
        samples.append(model.decode(torch.randn(4, 3)))
result(counts, values=values, weights=digest(*model.parameters(), *samples))
