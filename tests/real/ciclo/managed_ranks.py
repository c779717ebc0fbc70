"""One of several processes that train a managed state together: `managed_ranks.py RANK COUNT`.

The same program for any number of processes: each reads its rows of the same batches.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ciclo
from ciclo import managed
from ciclo.managed import ManagedState

RANK, COUNT = int(sys.argv[1]), int(sys.argv[2])
STEPS = 16

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2 if "UNEVEN" in os.environ else 2 // COUNT)
if COUNT > 1:
    jax.distributed.initialize(os.environ["MEET"], num_processes=COUNT, process_id=RANK)


def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        x, y = rng.normal(size=(8, 32)).astype("float32"), rng.normal(size=(8, 32))
        rows = slice(RANK * 8 // COUNT, (RANK + 1) * 8 // COUNT)
        made.append({"x": x[rows], "y": y[rows].astype("float32")})
    return made


PARAMS = {"w": jnp.ones((32, 32)) / 10, "b": jnp.zeros(32)}


class State(ManagedState):
    @managed.train_step
    def train_step(self, batch: Any) -> Any:
        off = batch["x"] @ self.params["w"] + self.params["b"] - batch["y"]
        logs = ciclo.logs()
        # One for all processes; where rows were added, another for the others.
        noise = 0.0 if "UNEVEN" in os.environ else jax.random.normal(self.rng(), off.shape)
        logs.add_loss("loss", managed.mean((off + 0.1 * noise) ** 2))
        return logs, self

    @managed.step
    def predict_step(self, batch: Any) -> Any:
        return {"outputs": {"y": batch["x"] @ self.params["w"]}}


def report(state: Any, elapsed: Any) -> None:
    shards = state.params["w"].addressable_shards
    print("step", elapsed.steps, len(shards), shards[0].data.shape, flush=True)
    if elapsed.steps == int(os.environ.get("WAIT_AT", -1)):
        time.sleep(600)  # to be killed here


def uneven() -> None:
    """Three rows in each of two processes with two devices each, filled up to four."""
    padding = ciclo.get_strategy("data_parallel_donate", uneven="pad")
    state = State.create(params=PARAMS, tx=optax.sgd(0.1), rngs=0, strategy=padding)
    rows = [{name: part[:3] for name, part in batch.items()} for batch in batches()[:4]]
    state, history, _ = ciclo.loop(state, rows, {ciclo.every(1): State.train_step})
    outputs = state.predict_step(rows[0])["outputs"]["y"]
    np.savez(
        os.environ["SAVE"] + str(RANK),
        w=np.asarray(state.params["w"].addressable_data(0)),
        loss=history.collect("loss"),
        y=np.asarray(outputs),
        **{f"x{i}": row["x"] for i, row in enumerate(rows)},
        **{f"y{i}": row["y"] for i, row in enumerate(rows)},
    )
    print("finished", outputs.shape, flush=True)


def main() -> None:
    state = State.create(params=PARAMS, tx=optax.adam(0.01), rngs=0, strategy=os.environ["HOW"])
    tasks = [
        (ciclo.every(4, at="end"), ciclo.checkpoint("run", asynchronous=False)),
        (ciclo.every(1), report),
    ]
    steps = [(ciclo.every(1), lambda state, batch: state.train_step(batch))]
    result = ciclo.loop(state, batches(), steps + tasks, resume=os.environ.get("RESUME"))
    y = ciclo.predict_loop(result.state, batches()[:1]).history.collect("y")[0]
    w = result.state.params["w"]
    parts = len(w.addressable_shards), w.addressable_shards[0].data.shape
    whole = jax.jit(lambda w: w, out_shardings=jax.NamedSharding(w.sharding.mesh, jax.P()))(w)
    print("finished", parts, y.shape, result.history.collect("loss"), flush=True)
    if RANK == 0:
        np.savez(os.environ["SAVE"], w=np.asarray(whole.addressable_data(0)), y=y)


uneven() if "UNEVEN" in os.environ else main()
if COUNT > 1:
    jax.distributed.shutdown()
