# shape: pytorch/examples dcgan: two models, two optimizers, three backwards a batch, samples
import torch
from common import Counts, digest, points, result
from torch import nn, optim
from torch.utils.data import DataLoader

counts = Counts()
torch.manual_seed(999)
torch.set_num_threads(1)
nz = 4


def weights_init(m):
    if m.__class__.__name__.find("Linear") != -1:
        nn.init.normal_(m.weight, 0.0, 0.2)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(nz, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 8), nn.Tanh()
        )

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid()
        )

    def forward(self, x):
        return self.main(x).view(-1)


dataloader = DataLoader(points(32), batch_size=8, shuffle=True)
net_g = Generator()
net_g.apply(weights_init)
net_d = Discriminator()
net_d.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(8, nz)
optimizer_d = optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
values = []
for _epoch in range(2):
    counts["epoch"] += 1
    for i, (real, _) in enumerate(dataloader):
        counts["step"] += 1
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        net_d.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        err_real = criterion(net_d(real), label)
        err_real.backward()
        fake = net_g(torch.randn(real.size(0), nz))
        err_fake = criterion(net_d(fake.detach()), label.fill_(0.0))
        err_fake.backward()
        optimizer_d.step()
        # (2) Update G: maximize log(D(G(z)))
        net_g.zero_grad()
        err_g = criterion(net_d(fake), label.fill_(1.0))
        err_g.backward()
        optimizer_g.step()
        counts["backward"] += 3
        counts["optimizer_step"] += 2
        values += [(err_real + err_fake).item(), err_g.item()]
        if i % 3 == 0:
            with torch.no_grad():
                fake = net_g(fixed_noise).detach()
result(counts, values=values, weights=digest(*net_g.parameters(), *net_d.parameters(), fake))
