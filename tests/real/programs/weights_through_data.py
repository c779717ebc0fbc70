# shape: LSTM language models over slices of one tensor, weights changed through `.data`
import torch
from common import Counts, digest, result
from torch import nn

counts = Counts()
n_tokens, bptt = 12, 10


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(n_tokens, 8)
        self.rnn = nn.GRU(8, 8)
        self.decoder = nn.Linear(8, n_tokens)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).view(-1, n_tokens), hidden


def get_batch(source, i):
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].reshape(-1)


def evaluate(source):
    model.eval()
    counts["evaluation"] += 1
    total, hidden = 0.0, torch.zeros(1, source.size(1), 8)
    with torch.no_grad():
        for i in range(0, len(source) - 1, bptt):
            tokens, targets = get_batch(source, i)
            output, hidden = model(tokens, hidden)
            total += criterion(output, targets).item()
    return total


def train():
    model.train()
    hidden, losses = torch.zeros(1, train_data.size(1), 8), []
    for i in range(0, len(train_data) - 1, bptt):
        counts["step"] += 1
        tokens, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = hidden.detach()
        output, hidden = model(tokens, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
torch.set_num_threads(1)
train_data = torch.randint(0, n_tokens, (51, 4))
val_data = torch.randint(0, n_tokens, (21, 4))
model = RNNModel()
criterion = nn.CrossEntropyLoss()
lr, values = 2.0, []
for _ in range(2):
    values += train()
    values.append(evaluate(val_data))
    lr /= 4.0
result(counts, values=values, weights=digest(*model.parameters()))
