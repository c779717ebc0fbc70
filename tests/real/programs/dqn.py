# shape: the DQN tutorial of PyTorch: replay memory, a target network in eval mode, soft updates
import random
from collections import deque, namedtuple

import torch
from common import Counts, digest, result
from torch import nn, optim

counts = Counts()
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
BATCH_SIZE, GAMMA, TAU = 4, 0.9, 0.05


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(3, 8)
        self.layer2 = nn.Linear(8, 2)

    def forward(self, x):
        counts["forward"] += 1
        return self.layer2(torch.relu(self.layer1(x)))


def select_action(state):
    with torch.no_grad():
        found = policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(2)]]) if random.random() < 0.3 else found


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    counts["step"] += 1
    batch = Transition(*zip(*random.sample(memory, BATCH_SIZE), strict=True))
    chosen = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
    with torch.no_grad():
        next_values = target_net(torch.cat(batch.next_state)).max(1).values
    expected = next_values * GAMMA + torch.cat(batch.reward)
    loss = nn.SmoothL1Loss()(chosen, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    values.append(loss.item())


torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)
policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
target_net.eval()
optimizer = optim.AdamW(policy_net.parameters(), lr=1e-2, amsgrad=True)
memory, values = deque(maxlen=100), []
for _episode in range(3):
    state = torch.randn(1, 3)
    for _t in range(4):
        action = select_action(state)
        next_state = 0.9 * state + 0.2 * (action - 0.5)
        reward = -next_state.abs().sum(1)
        memory.append(Transition(state, action, next_state, reward))
        state = next_state
        optimize_model()
        target_state, policy_state = target_net.state_dict(), policy_net.state_dict()
        for key in policy_state:
            target_state[key] = policy_state[key] * TAU + target_state[key] * (1 - TAU)
        target_net.load_state_dict(target_state)
result(counts, values=values, weights=digest(*policy_net.parameters(), *target_net.parameters()))
