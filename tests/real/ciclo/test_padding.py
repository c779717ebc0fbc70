"""Batches that are filled up so that they divide, on eight devices and in two processes."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

for package in ("jax", "optax", "flax"):
    pytest.importorskip(package)

pytestmark = pytest.mark.timeout(300)

EIGHT = """
    import json, os
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax, jax.numpy as jnp, numpy as np, optax
    from flax import nnx
    import ciclo
    from ciclo import managed

    X = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    BATCH = {"x": X, "y": X.sum(1)}

    def errors(state, batch):
        return (batch["x"] @ state.params["w"] - batch["y"]) ** 2

    def new(**options):
        pad = ciclo.get_strategy("data_parallel", uneven="pad")
        options.setdefault("strategy", pad)
        return managed.ManagedState.create(
            params={"w": jnp.zeros(4)}, tx=optax.sgd(0.1), rngs=0, **options
        )

    def careless_loss(state, batch):
        return {
            "losses": {"loss": errors(state, batch).mean()},
            "metrics": {"mine": managed.mean(errors(state, batch))},
        }, state

    def careless_metric(state, batch):
        return {
            "losses": {"loss": managed.mean(errors(state, batch))},
            "metrics": {"mine": errors(state, batch).mean()},
        }, state

    def stateful(state, batch):
        state = state.update_metrics(values=errors(state, batch))
        return {"losses": {"loss": managed.mean(errors(state, batch))}}, state

    def statistics(state, batch):
        stats = {"mean": batch["x"].mean(0), "steps": state.batch_stats["steps"] + 1}
        logs = {"losses": {"loss": managed.mean(errors(state, batch))}}
        return logs, state.replace(batch_stats=stats)

    def counting(state, batch):
        stats = {"mean": state.batch_stats["mean"], "steps": state.batch_stats["steps"] + 1}
        logs = {"losses": {"loss": managed.mean(errors(state, batch))}}
        return logs, state.replace(batch_stats=stats)

    def masked(state, batch):
        rows = managed.mask()
        weight = jnp.ones(len(batch["y"])) if rows is None else rows
        loss = (errors(state, batch) * weight).sum() / weight.sum()
        noise = jax.random.bernoulli(state.rng(), 0.5, loss.shape)
        return {"losses": {"loss": loss}, "metrics": {"noise": 1.0 * noise}}, state

    KEPT = {"mean": jnp.zeros(4), "steps": jnp.zeros((), jnp.int32)}
    for step, options in (
        (careless_loss, {}),
        (careless_metric, {}),
        (stateful, {"metrics": {"mean": nnx.metrics.Average()}}),
        (statistics, {"batch_stats": KEPT}),
        (counting, {"batch_stats": KEPT}),
        (masked, {}),
    ):
        try:
            logs, state = managed.train_step(step)(new(**options), BATCH)
        except ciclo.CicloError as error:
            print(json.dumps({"step": step.__name__, "error": str(error)}))
            continue
        _, whole = managed.train_step(step)(new(**options, strategy="jit"), BATCH)
        off = np.abs(np.asarray(whole.params["w"]) - np.asarray(state.params["w"])).max()
        print(json.dumps({"step": step.__name__, "off": float(off)}))
"""


def test_rows_that_are_added_never_count(scripts: Scripts) -> None:
    """A step in which they would is an error that names what counts them; others are right."""
    ended = scripts.run(EIGHT, timeout_s=200)
    assert 0 == ended.status, ended.err
    lines: list[dict[str, Any]] = [json.loads(line) for line in ended.out.splitlines()]
    found = {one["step"]: one for one in lines}

    for step, counting in (
        ("careless_loss", "losses/loss"),
        ("careless_metric", "metrics/mine"),
        ("stateful", "metrics/mean/total"),
        ("statistics", "batch_stats/mean"),
    ):
        assert f"{step}: this batch was padded" in found[step]["error"]
        assert f"so that it divides, and {counting}" in found[step]["error"]
        assert "counts the padding; use managed.mean(values)" in found[step]["error"]
    assert [] == [step for step in ("counting", "masked") if found[step]["off"] > 1e-6]


TWO = """
    import os, sys
    import jax, jax.numpy as jnp, numpy as np, optax
    import ciclo
    from ciclo import managed, strategies

    RANK, COUNTS = int(os.environ["MINE"]), eval(os.environ["COUNTS"])
    strategies.AGREE_S = 3
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(os.environ["ADDRESS"], 2, RANK, initialization_timeout=60)

    @managed.train_step
    def train_step(state, batch):
        loss = managed.mean((batch @ state.params["w"] - 1) ** 2)
        return {"losses": {"loss": loss}}, state

    X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    strategy = ciclo.get_strategy("data_parallel", uneven=os.environ["HOW"])
    state = managed.ManagedState.create(
        params={"w": jnp.zeros(4)}, tx=optax.sgd(0.1), strategy=strategy
    )
    w = np.zeros(4, "float32")
    try:
        for counts in COUNTS:
            start = sum(counts[:RANK])
            logs, state = train_step(state, X[start : start + counts[RANK]])
            x = X[: sum(counts)]
            w = w - 0.1 * 2 * x.T @ (x @ w - 1) / len(x)
        predict = managed.step(lambda state, batch: {"outputs": {"x": batch}})
        rows = predict(state, X[start : start + counts[RANK]])["outputs"]["x"]
        assert np.array_equal(rows, x), (rows.shape, x.shape)
        there = np.asarray(state.params["w"].addressable_data(0))
        print("the same" if np.allclose(w, there, atol=1e-6) else f"{w} {there}", flush=True)
    except ciclo.CicloError as error:
        print(error, flush=True)
    sys.stdin.read()  # the other one would end with this one
"""


@pytest.mark.parametrize(
    ("how", "counts", "said"),
    [
        ("pad", [(4, 4), (3, 4), (1, 2), (4, 3)], "the same"),
        ("refuse", [(4, 2)], "(process 0: 4, process 1: 2)"),
        ("refuse", [(4, 4), (4, 2)], "(process 1: 2; the others have as many as before"),
    ],
)
def test_processes_that_bring_different_rows(
    scripts: Scripts, how: str, counts: list[tuple[int, int]], said: str
) -> None:
    """Rows that are added make up for it, or it is an error: never another result, or a hang."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    ranks = [
        scripts.start(
            TWO, driven=True, MINE=str(rank), ADDRESS=address, HOW=how, COUNTS=repr(counts)
        )
        for rank in range(2)
    ]
    # Where one is alone with another number, the other is in a step that has no end.
    for rank in ranks[1:] if "others" in said else ranks:
        rank.wait_for(said, timeout_s=100)
