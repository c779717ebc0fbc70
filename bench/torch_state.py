"""What `create_torch_state` costs beside the same loop by hand; prints one JSON line.

`python -P bench/torch_state.py`: a compiled module and SGD, by hand and in `ciclo.loop` with
`strategy="compile"`, which logs its loss and is profiled; interleaved. On a GPU where there is one.
`ratio` is the median of the rounds' ratios.
"""

import json
import statistics
import time

import torch
from torch.nn import functional

import ciclo
import cirron as ci

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
STEPS = 200 if IS_GPU else 20
ROUNDS = 15 if IS_GPU else 5


def module(width, depth):
    torch.manual_seed(0)
    layers = [
        layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*layers).to(DEVICE)


def wait():
    if IS_GPU:
        torch.cuda.synchronize()


def by_hand(width, depth, batch):
    trained = module(width, depth)
    compiled = torch.compile(trained)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)

    def run():
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.mse_loss(compiled(batch[0]), batch[1]).backward()
            optimizer.step()

    return run


def by_ciclo(width, depth, batch):
    trained = module(width, depth)
    state = ciclo.create_torch_state(
        trained,
        torch.optim.SGD(trained.parameters(), lr=0.01),
        losses=functional.mse_loss,
        strategy="compile",
    )

    def step(state, batch):
        return state.train_step(batch)

    return lambda: ciclo.loop(state, [batch] * STEPS, {ciclo.every(1): step})


def timed(run):
    wait()
    began = time.perf_counter()
    run()
    wait()
    return (time.perf_counter() - began) / STEPS * 1e6


def measure(width, depth, rows):
    batch = (torch.randn(rows, width, device=DEVICE), torch.randn(rows, width, device=DEVICE))
    hand, ours = by_hand(width, depth, batch), by_ciclo(width, depth, batch)
    ci.shutdown()
    hand()
    ci.profile(output="none")
    ours()
    rounds = []
    for _ in range(ROUNDS):
        ci.shutdown()
        alone = timed(hand)
        ci.profile(output="none")
        rounds.append((alone, timed(ours)))
    return {
        "hand_us": round(statistics.median(alone for alone, _ in rounds), 1),
        "ciclo_us": round(statistics.median(looped for _, looped in rounds), 1),
        "ratio": round(statistics.median(looped / alone for alone, looped in rounds), 4),
    }


name = torch.cuda.get_device_name() if IS_GPU else "cpu"
found = {"device": name, "torch": torch.__version__, "steps": STEPS}
for width, depth, rows in ((256, 4, 256), (4096, 8, 4096)) if IS_GPU else ((256, 4, 256),):
    found[f"{depth}x{width}, {rows} rows"] = measure(width, depth, rows)
print(json.dumps(found))
