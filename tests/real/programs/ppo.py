# shape: CleanRL ppo.py: a rollout without gradients, then epochs of minibatches over its tensors
import torch
from common import Counts, digest, result
from torch import nn
from torch.distributions.categorical import Categorical

counts = Counts()
num_envs, num_steps, num_minibatches, update_epochs, num_iterations = 4, 5, 2, 2, 2


def layer_init(layer, std=1.4):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(3, 8)), nn.Tanh(), layer_init(nn.Linear(8, 1), std=1.0)
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(3, 8)), nn.Tanh(), layer_init(nn.Linear(8, 2), std=0.01)
        )

    def get_value(self, x):
        counts["forward"] += 1
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        counts["forward"] += 2
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def env_step(state, action):
    state = 0.9 * state + 0.1 * (2 * action[:, None] - 1) + 0.05 * torch.randn_like(state)
    return state, -state.abs().sum(1)


torch.manual_seed(1)
torch.set_num_threads(1)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
next_obs, values = torch.randn(num_envs, 3), []
for _iteration in range(1, num_iterations + 1):
    rollout = []
    for _step in range(num_steps):
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
        obs, (next_obs, reward) = next_obs, env_step(next_obs, action)
        rollout.append((obs, action, logprob, value.flatten(), reward))
    with torch.no_grad():
        next_value = agent.get_value(next_obs).flatten()
    returns = []
    for *_, reward in reversed(rollout):
        next_value = reward + 0.99 * next_value
        returns.insert(0, next_value)
    b_obs, b_actions, b_logprobs, b_values, _ = map(torch.cat, zip(*rollout, strict=True))
    b_returns = torch.cat(returns)
    for _epoch in range(update_epochs):
        for mb_inds in torch.randperm(len(b_obs)).chunk(num_minibatches):
            counts["step"] += 1
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                b_obs[mb_inds], b_actions[mb_inds]
            )
            ratio = (newlogprob - b_logprobs[mb_inds]).exp()
            adv = b_returns[mb_inds] - b_values[mb_inds]
            pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
            v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb_inds]) ** 2).mean()
            loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            values.append(loss.item())
result(counts, values=values, weights=digest(*agent.parameters(), next_obs))
