# shape: character RNN classifiers: a cell called for each character, its hidden state handed on
import torch
from common import Counts, digest, result
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

counts = Counts()
n_letters, n_hidden, n_categories, length = 6, 12, 3, 5


class RNN(nn.Module):
    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size + hidden_size, hidden_size)
        self.h2o = nn.Linear(hidden_size, output_size)
        self.softmax = nn.LogSoftmax(dim=1)

    def forward(self, x, hidden):
        hidden = torch.tanh(self.i2h(torch.cat((x, hidden), 1)))
        return self.softmax(self.h2o(hidden)), hidden

    def init_hidden(self, batch_size):
        return torch.zeros(batch_size, self.hidden_size)


def train(lines, category):
    hidden = rnn.init_hidden(lines.size(0))
    optimizer.zero_grad()
    for i in range(lines.size(1)):
        output, hidden = rnn(lines[:, i], hidden)
        counts["forward"] += 1
    loss = criterion(output, category)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(rnn.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(loader):
    rnn.eval()
    counts["evaluation"] += 1
    right = 0
    for lines, category in loader:
        counts["batch"] += 1
        hidden = rnn.init_hidden(lines.size(0))
        for i in range(lines.size(1)):
            output, hidden = rnn(lines[:, i], hidden)
            counts["forward"] += 1
        right += (output.argmax(1) == category).sum().item()
    rnn.train()
    return right / len(loader.dataset)


torch.manual_seed(0)
torch.set_num_threads(1)
letters = torch.randint(0, n_letters, (24, length))
data = TensorDataset(torch.eye(n_letters)[letters], letters.sum(1) % n_categories)
loader = DataLoader(data, batch_size=8, shuffle=True)
rnn = RNN(n_letters, n_hidden, n_categories)
criterion = nn.NLLLoss()
optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)
values = []
for _ in range(2):
    counts["epoch"] += 1
    for lines, category in loader:
        counts["step"] += 1
        values.append(train(lines, category))
    values.append(accuracy(loader))
result(counts, values=values, weights=digest(*rnn.parameters()))
