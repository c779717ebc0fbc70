# shape: WGAN-GP: a penalty on gradients of inputs; the generator is trained every third batch
import torch
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    (gradients,) = torch.autograd.grad(
        scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True
    )
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


torch.manual_seed(0)
torch.set_num_threads(1)
generator = nn.Linear(4, 8)
critic = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
loader = DataLoader(points(32), batch_size=8, shuffle=True)
for _epoch in range(2):
    counts["epoch"] += 1
    for index, (real, _) in enumerate(loader):
        counts["step"] += 1
        critic_optimizer.zero_grad()
        fake = generator(torch.randn(real.size(0), 4))
        penalty = gradient_penalty(real.data, fake.data)
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        critic_optimizer.step()
        counts["optimizer_step"] += 1
        generator_optimizer.zero_grad()
        if index % 3 == 0:
            (-critic(generator(torch.randn(real.size(0), 4))).mean()).backward()
            generator_optimizer.step()
            counts["optimizer_step"] += 1
result(counts, weights=digest(*generator.parameters(), *critic.parameters()))
