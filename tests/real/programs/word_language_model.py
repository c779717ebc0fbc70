# shape: pytorch/examples word_language_model: get_batch(source, i) over one long tensor
import math

import torch
import torch.nn.functional as F
from common import Counts, digest, result
from torch import nn

counts = Counts()
ntoken, bptt = 12, 6


class TransformerModel(nn.Module):
    def __init__(self, ninp=16, nhead=2, nhid=24, nlayers=2, dropout=0.2):
        super().__init__()
        self.ninp = ninp
        self.input_emb = nn.Embedding(ntoken, ninp)
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(ninp, nhead, nhid, dropout)
        self.encoder = nn.TransformerEncoder(layer, nlayers)
        self.decoder = nn.Linear(ninp, ntoken)

    def forward(self, src):
        mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
        src = self.drop(self.input_emb(src) * math.sqrt(self.ninp))
        return F.log_softmax(self.decoder(self.encoder(src, mask=mask)), dim=-1)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, bptt):
            data, targets = get_batch(data_source, i)
            counts["forward"] += 1
            output = model(data).view(-1, ntoken)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train():
    model.train()
    for _batch, i in enumerate(range(0, train_data.size(0) - 1, bptt)):
        counts["step"] += 1
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        counts["forward"] += 1
        loss = criterion(model(data).view(-1, ntoken), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


torch.manual_seed(1111)
torch.set_num_threads(1)
corpus = torch.randint(0, ntoken, (300,))
train_data, val_data, test_data = (batchify(one, 4) for one in corpus.split([100, 80, 120]))
model = TransformerModel()
criterion = nn.NLLLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
values, best = [], None
for _epoch in range(1, 3):
    train()
    values.append(evaluate(val_data))
    if best is None or values[-1] < best:
        counts["checkpoint"] += 1
        torch.save(model.state_dict(), "model.pt")
        best = values[-1]
model.load_state_dict(torch.load("model.pt"))
values.append(evaluate(test_data))
result(counts, values=values, weights=digest(*model.parameters()))
