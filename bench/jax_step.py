"""What profiling adds to a jitted JAX step of about 10 ms, as a ratio. Prints one JSON line.

The same loop with and without a session, in turn, so that a slow moment hits both; each step's
loss is marked, and the device never waited for. `tiny` is a step that does next to nothing: what is
added to it is all ours. `boundary` is how long an epoch's end holds the loop for the parameters of
a ResNet-50, in 161 arrays, `watch` what `ci.watch(params)` takes for them.
"""

import json
import os
import statistics
import tempfile
import time

os.chdir(tempfile.mkdtemp())
# On one thread: a step that takes all cores of the host is no stand-in for one on a GPU.
os.environ.setdefault("NPROC", "1")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import cirron as ci  # noqa: E402  the folder is changed first: profiling writes where it starts

STEPS = int(os.environ.get("STEPS", "10"))
ROUNDS = int(os.environ.get("ROUNDS", "60"))
STEP_NS = 10e6
now = time.perf_counter_ns


def make_step(size, repeats):
    @jax.jit
    def step(x):
        x = jax.lax.fori_loop(0, repeats, lambda _, x: jnp.sin(x @ x), x)
        return x, x[0, 0]

    return step, jnp.full((size, size), 0.01)


def calibrated():
    """A step of about 10 ms on this machine."""
    step, x = make_step(192, 1)
    jax.block_until_ready(step(x))
    repeats = 1
    while True:
        step, x = make_step(192, repeats)
        jax.block_until_ready(step(x))
        took = min(timed(plain, step, x, 3) for _ in range(3))
        if took > STEP_NS / 2:
            return make_step(192, max(1, round(repeats * STEP_NS / took)))
        repeats *= 2


def plain(step, x, count):
    for _ in range(count):
        x, _ = step(x)
    jax.block_until_ready(x)


def profiled(step, x, count):
    for _ in ci.batches(range(count)):
        x, loss = step(x)
        ci.mark("loss", loss)
    jax.block_until_ready(x)


def timed(loop, step, x, count):
    began = now()
    loop(step, x, count)
    return (now() - began) / count


def compare(step, x, count):
    found = {plain: [], profiled: []}
    jax.block_until_ready(step(x))
    for _ in range(ROUNDS):
        found[plain].append(timed(plain, step, x, count))
        ci.profile(output="none")
        profiled(step, x, 1)  # threads start with the first value
        found[profiled].append(timed(profiled, step, x, count))
        ci.shutdown()
    bare, ours = statistics.median(found[plain]), statistics.median(found[profiled])
    return {
        "plain_us": round(bare / 1e3, 1),
        "profiled_us": round(ours / 1e3, 1),
        "ratio": round(ours / bare, 4),
        "ratio_of_best": round(min(found[profiled]) / min(found[plain]), 4),
    }


def boundary():
    """A tree as large as a ResNet-50's, at the end of an epoch."""
    sizes = [25_557_032 // 161] * 161
    params = {f"layer_{number}": jnp.ones(size) for number, size in enumerate(sizes)}
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0.9, tree), donate_argnums=0)
    held, watch = [], []
    ci.profile(output="none")
    for _ in ci.epochs(range(6)):
        params = update(params)
        jax.block_until_ready(params)
        began = now()
        ci.watch(params)
        watch.append(now() - began)
        ci.flush()  # the last snapshot is done with: this is about the loop alone
        held.append(ci.health()["snapshot_held_ns"])
    ci.shutdown()
    return {
        "held_ms": round(statistics.median(held[1:]) / 1e6, 2),
        "watch_ms": round(statistics.median(watch) / 1e6, 2),
    }


step, x = calibrated()
print(
    json.dumps(
        {
            "step": compare(step, x, STEPS),
            "tiny": compare(*make_step(2, 1), 2_000),
            "boundary": boundary(),
        }
    )
)
