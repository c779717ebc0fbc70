# shape: karpathy/nanoGPT train.py: get_batch of random places, micro steps, estimate_loss()
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from common import Counts, digest, result
from torch import nn

counts = Counts()
vocab_size, block_size, batch_size, n_embd, n_head = 16, 8, 4, 16, 2
eval_interval, eval_iters, max_iters, gradient_accumulation_steps = 3, 2, 6, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 32), nn.GELU(), nn.Linear(32, n_embd))

    def forward(self, x):
        B, T, C = x.size()  # noqa: N806
        qkv = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (one.view(B, T, n_head, C // n_head).transpose(1, 2) for one in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList([Block() for _ in range(2)])
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)  # noqa: N806
            with ctx:
                _logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


torch.manual_seed(1337)
torch.set_num_threads(1)
train_data, val_data = torch.randint(0, vocab_size, (400,)).split([300, 100])
ctx = nullcontext()
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)
X, Y = get_batch("train")  # fetch the very first batch
iter_num, values = 0, []
while True:
    if iter_num % eval_interval == 0:
        values.append(estimate_loss())
    for _micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")  # prefetch the next batch while the model is busy
        scaler.scale(loss).backward()
        counts["backward"] += 1
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    counts["step"] += 1
    values.append(loss.item())
    iter_num += 1
    if iter_num > max_iters:
        break
result(counts, values=values, weights=digest(*model.parameters()))
