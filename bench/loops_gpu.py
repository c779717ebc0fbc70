"""What logging a device value each step costs on a GPU. Run on its own; prints one JSON line.

The same step, without logging, with the value waited for at each step (`float(loss)`), and in a
loop of ciclo that logs it. "syncs" are the waits for the device that torch itself reports.
"""

import json
import sys
import time
import warnings

import ciclo

STEPS = 1000
ROUNDS = 5


def torch_steps(size):
    import torch

    x = torch.randn(size, size, device="cuda") / size**0.5

    def step(state):
        state = torch.tanh(state @ x)
        return state, state.sum()

    def wait():
        torch.cuda.synchronize()

    return torch.randn(size, size, device="cuda"), step, wait


def jax_steps(size):
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (size, size)) / size**0.5

    @jax.jit
    def step(state):
        state = jnp.tanh(state @ x)
        return state, state.sum()

    state = jax.random.normal(jax.random.key(1), (size, size))

    def wait():
        jax.block_until_ready(step(state))

    return state, step, wait


def timed(run, wait):
    best = []
    for _ in range(ROUNDS):
        wait()
        began = time.perf_counter()
        run()
        wait()
        best.append((time.perf_counter() - began) / STEPS * 1e6)
    return round(min(best), 1)


def measure(state, step, wait):
    def silent():
        current = state
        for _ in range(STEPS):
            current, _ = step(current)

    def waiting():
        current, losses = state, []
        for _ in range(STEPS):
            current, loss = step(current)
            losses.append(float(loss))
        return losses

    def looped():
        def train_step(state):
            state, loss = step(state)
            return {"metrics": {"loss": loss}}, state

        return ciclo.loop(state, range(STEPS), {ciclo.every(1): train_step}).history.collect("loss")

    silent()
    assert waiting() == looped(), "the history is not what was computed"
    return {
        "silent_us": timed(silent, wait),
        "waiting_us": timed(waiting, wait),
        "ciclo_us": timed(looped, wait),
    }, looped


def syncs(looped):
    import torch

    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        looped()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


found = {"steps": STEPS}
for size in (128, 1024, 4096):
    figures, looped = measure(*torch_steps(size))
    found[f"torch_{size}"] = {**figures, "syncs": syncs(looped)}
if "torch" not in sys.argv:
    for size in (128, 1024, 4096):
        found[f"jax_{size}"], _ = measure(*jax_steps(size))
print(json.dumps(found))
