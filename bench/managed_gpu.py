"""What a managed step costs beside a loop written by hand, profiler on. Prints one JSON line.

The same model, data and optimizer: a `jax.jit` loop and `ManagedState` in `ciclo.loop`, then a
`torch.compile` loop and `create_torch_state(strategy="compile")`. Rounds of both in turn, so that a
slow moment hits both. Made for a GPU; on a CPU it is a trial with a small model.

python bench/managed_gpu.py [jax] [torch] [--save bench/results/managed.json]
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

SAVE = Path(sys.argv[sys.argv.index("--save") + 1]).resolve() if "--save" in sys.argv else None
os.chdir(tempfile.mkdtemp())

import ciclo  # noqa: E402
import cirron as ci  # noqa: E402  the folder is changed first: profiling writes where it starts

WANTED = [name for name in ("jax", "torch") if name in sys.argv] or ["jax", "torch"]
STEPS = int(os.environ.get("STEPS", "300"))
ROUNDS = int(os.environ.get("ROUNDS", "9"))
LAYERS = 4
now = time.perf_counter_ns


def compared(by_hand, managed):
    """Both return the losses of all steps, fetched, so that all work is done when they end."""
    expected = by_hand()
    ci.profile(output="none")
    found = managed()
    ci.shutdown()
    assert all(abs(a - b) <= 1e-3 * abs(a) for a, b in zip(expected, found, strict=True))
    took = {by_hand: [], managed: []}
    for _ in range(ROUNDS):
        began = now()
        by_hand()
        took[by_hand].append((now() - began) / STEPS)
        ci.profile(output="none")
        began = now()
        managed()
        took[managed].append((now() - began) / STEPS)
        ci.shutdown()
    ratios = [b / a for a, b in zip(took[by_hand], took[managed], strict=True)]
    return {
        "by_hand_us": round(statistics.median(took[by_hand]) / 1e3, 1),
        "managed_us": round(statistics.median(took[managed]) / 1e3, 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_of_best": round(min(took[managed]) / min(took[by_hand]), 4),
    }


def jax_case():
    import jax
    import jax.numpy as jnp
    import optax

    from ciclo import managed

    is_gpu = jax.default_backend() != "cpu"
    width, rows = (4096, 2048) if is_gpu else (256, 128)
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    x = jax.random.normal(jax.random.key(1), (rows, width))
    tx = optax.adam(1e-4)

    def loss_of(params, x):
        out = x
        for weights in params:
            out = jnp.tanh(out @ weights)
        return jnp.mean((out - x) ** 2)

    @jax.jit
    def copied(tree):
        return jax.tree.map(jnp.copy, tree)

    def step(params, opt_state, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jax.jit(step, donate_argnums=(0, 1))

    def by_hand():
        current, opt_state = copied(params), tx.init(params)
        losses = []
        for _ in range(STEPS):
            current, opt_state, loss = step(current, opt_state, x)
            losses.append(loss)
        return [loss.item() for loss in jax.device_get(losses)]

    @managed.train_step
    def train_step(state, x):
        return {"losses": {"loss": loss_of(state.params, x)}}, state

    def through_ciclo():
        state = ciclo.ManagedState.create(params=params, tx=tx, strategy="jit_donate")
        result = ciclo.loop(state, [x] * STEPS, {ciclo.every(1): train_step})
        return result.history.collect("loss")

    return {"device": jax.devices()[0].device_kind, **compared(by_hand, through_ciclo)}


def torch_case():
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, rows = (4096, 2048) if device == "cuda" else (256, 128)
    x = torch.randn(rows, width, device=device)

    def new():
        torch.manual_seed(0)
        layers = [
            one for _ in range(LAYERS) for one in (torch.nn.Linear(width, width), torch.nn.Tanh())
        ]
        module = torch.nn.Sequential(*layers).to(device)
        return module, torch.optim.Adam(module.parameters(), lr=1e-4, fused=device == "cuda")

    def loss_of(outputs, targets):
        return torch.nn.functional.mse_loss(outputs, targets)

    # Compiled once each; a round goes on with the weights as they are, from the same ones.
    module, optimizer = new()
    compiled = torch.compile(module)
    state = ciclo.create_torch_state(*new(), losses=loss_of, strategy="compile")

    def by_hand():
        losses = []
        for _ in range(STEPS):
            loss = loss_of(compiled(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    def through_ciclo():
        tasks = {ciclo.every(1): lambda state, batch: state.train_step(batch)}
        return ciclo.loop(state, [(x, x)] * STEPS, tasks).history.collect("loss")

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"device": name, **compared(by_hand, through_ciclo)}


found = {"steps": STEPS, "rounds": ROUNDS}
for name in WANTED:
    found[name] = {"jax": jax_case, "torch": torch_case}[name]()
print(json.dumps(found))
if SAVE is not None:
    SAVE.write_text(json.dumps(found, indent=1) + "\n")
