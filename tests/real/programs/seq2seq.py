# shape: torch's translation tutorial: teacher forcing, two optimizers, pairs without a loader
import random

import torch
import torch.nn.functional as F
from common import Counts, digest, result
from torch import nn

counts = Counts()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(10, 4), nn.GRU(4, 4)

    def forward(self, token, hidden):
        return self.gru(self.embedding(token).view(1, 1, -1), hidden)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru, self.out = nn.Embedding(10, 4), nn.GRU(4, 4), nn.Linear(4, 10)

    def forward(self, token, hidden):
        output, hidden = self.gru(F.relu(self.embedding(token).view(1, 1, -1)), hidden)
        return F.log_softmax(self.out(output[0]), dim=1), hidden


def train(source, target):
    counts["step"] += 1
    hidden, loss = torch.zeros(1, 1, 4), 0
    for optimizer in optimizers:
        optimizer.zero_grad()
    for token in source:
        _, hidden = encoder(token, hidden)
    given, is_forced = torch.tensor([0]), random.random() < 0.5
    for token in target:
        output, hidden = decoder(given, hidden)
        loss += F.nll_loss(output, token.view(1))
        given = token if is_forced else output.topk(1)[1].squeeze().detach()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(1)
encoder, decoder = Encoder(), Decoder()
optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (encoder, decoder)]
losses = [train(torch.randint(10, (3,)), torch.randint(10, (2,))) for _ in range(6)]
result(counts, losses=losses, weights=digest(*encoder.parameters(), *decoder.parameters()))
