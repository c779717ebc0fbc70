"""Classifies handwritten digits with a module of PyTorch.

python examples/digits_torch.py
"""

import numpy as np
import torch
from sklearn.datasets import load_digits

import ciclo
import cirron as ci


def accuracy(outputs, targets):
    return (outputs.argmax(-1) == targets).float().mean()


ci.profile()
torch.manual_seed(0)
torch.set_num_threads(1)  # for a module this small, more of them wait for each other
digits = load_digits()
images = (digits.data / 16).astype("float32")
order = np.random.default_rng(0).permutation(1792).reshape(-1, 32)
batches = [(images[rows], digits.target[rows]) for rows in order]
module = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
state = ciclo.create_torch_state(
    module,
    torch.optim.SGD(module.parameters(), lr=0.5),
    losses=torch.nn.CrossEntropyLoss(),
    metrics=accuracy,
    strategy="eager",  # or "compile"
)
_, history, _ = ciclo.fit(state, batches[:44], batches[44:], epochs=15)
ci.trace()
print(f"accuracy {history.last('accuracy_valid'):.3f}")
