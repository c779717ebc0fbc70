# shape: pytorch/examples time_sequence_prediction: LBFGS on all the data at once, predictions
import torch
from common import Counts, digest, result
from torch import nn, optim

counts = Counts()


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 8)
        self.linear = nn.Linear(8, 1)

    def forward(self, x, future=0):
        counts["forward"] += 1
        outputs = []
        h_t = c_t = torch.zeros(x.size(0), 8, dtype=torch.double)
        for input_t in x.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            output = self.linear(h_t)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            output = self.linear(h_t)
            outputs += [output]
        return torch.cat(outputs, dim=1)


torch.manual_seed(0)
torch.set_num_threads(1)
data = torch.sin(torch.arange(20).double()[None] / 4 + torch.randn(6, 1).double())
train_input, target = data[3:, :-1], data[3:, 1:]
test_input, test_target = data[:3, :-1], data[:3, 1:]
seq = Sequence()
seq.double()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.5, max_iter=3)
values = []
for i in range(4):

    def closure():
        optimizer.zero_grad()
        out = seq(train_input)
        loss = criterion(out, target)
        values.append(loss.item())
        loss.backward()
        counts["backward"] += 1
        return loss

    optimizer.step(closure)
    counts["optimizer_step"] += 1
    counts["step"] += 1
    with torch.no_grad():
        pred = seq(test_input, future=5)
        values.append(criterion(pred[:, :-5], test_target).item())
result(counts, values=values, weights=digest(*seq.parameters(), pred))
