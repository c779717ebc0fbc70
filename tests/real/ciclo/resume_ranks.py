"""One of several processes that train together, with `resume=`: `resume_ranks.py KIND RANK`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import ciclo

KIND, RANK = sys.argv[1], int(sys.argv[2])
STEPS = 24
# The run that goes on, and after it one that nobody has cut.
RUNS = [("run", "run"), ("whole", None)][: 1 if os.environ.get("SLOW") else 2]


def say(*words: Any) -> None:
    print(*words, flush=True)


def wait_if_first(step: int) -> None:
    """Gives the test the time to send a signal, in the first run alone."""
    if os.environ.get("SLOW") and step >= 2:
        time.sleep(0.05)


def torch_run() -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['MEET']}", rank=RANK, world_size=2
    )
    for place, resume in RUNS:
        torch_train(place, resume)
    dist.destroy_process_group()


def torch_train(place: str, resume: str | None) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    same: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    spread: Any = torch.nn.Linear(4, 4)
    fully_shard(spread, mesh=init_device_mesh("cpu", (2,)))
    models = (same, spread)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    torch.manual_seed(RANK)

    def step(state: Any, batch: int, elapsed: Any) -> Any:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(torch.rand(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
        say("step", batch)
        wait_if_first(batch)
        return {"losses": {"loss": loss.item()}}

    tasks = [(ciclo.every(1), step), (ciclo.every(4), ciclo.checkpoint(place))]
    steps = 1000 if os.environ.get("SLOW") else STEPS
    result = ciclo.loop((models, optimizers), range(1000), tasks, steps, resume=resume)
    weights = [
        getattr(one, "full_tensor", lambda one=one: one)().tolist()
        for model in models
        for one in model.parameters()
    ]
    say("finished", weights, result.history.collect("loss"), torch.rand(1).item())


def jax_run() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(os.environ["MEET"], num_processes=2, process_id=RANK)
    for place, resume in RUNS:
        jax_train(place, resume)
    jax.distributed.shutdown()


def jax_train(place: str, resume: str | None) -> None:
    import jax
    import jax.numpy as jnp

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.P("data"))
    same = jax.sharding.NamedSharding(mesh, jax.P())
    state = {
        "w": jax.make_array_from_callback((4,), spread, lambda index: jnp.ones(2)),
        "n": jax.make_array_from_callback((), same, lambda index: jnp.zeros(())),
    }

    @jax.jit
    def advance(state: Any, batch: int) -> Any:
        total = state["w"].sum()
        return {"w": state["w"] * 1.01 + batch / total, "n": state["n"] + 1}, total

    def step(state: Any, batch: int) -> Any:
        state, total = jax.block_until_ready(advance(state, batch))
        say("step", batch)
        wait_if_first(batch)
        return {"losses": {"total": float(total)}}, state

    tasks = [(ciclo.every(1), step), (ciclo.every(4), ciclo.checkpoint(place))]
    steps = 1000 if os.environ.get("SLOW") else STEPS
    result = ciclo.loop(state, range(1000), tasks, steps, resume=resume)
    mine = result.state["w"].addressable_data(0).tolist()
    say("finished", mine, result.history.collect("total"), float(result.state["n"]))


if __name__ == "__main__":
    jax_run() if KIND == "jax" else torch_run()
