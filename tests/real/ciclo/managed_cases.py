"""Managed states on eight devices that the CPU plays: each case prints a line of JSON.

`managed_cases.py FOLDER CASE DEVICES`
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

FOLDER, CASES, DEVICES = sys.argv[1], sys.argv[2], int(sys.argv[3])
# Little is computed here and much compiled: the compiler need not try hard.
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
)

import equinox  # noqa: E402
import haiku  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen, nnx  # noqa: E402

import ciclo  # noqa: E402
from ciclo import managed  # noqa: E402
from ciclo.managed import ManagedState  # noqa: E402

STEPS = 20
RNG = np.random.default_rng(0)
BATCHES = [
    (RNG.normal(size=(32, 64)).astype("float32"), RNG.integers(0, 10, 32)) for _ in range(STEPS)
]
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def say(case: str, **found: Any) -> None:
    print(json.dumps({"case": case, **found}), flush=True)


def params() -> Any:
    first, second = jax.random.split(jax.random.key(0))
    return {
        "hidden": jax.random.normal(first, (64, 64)) / 8,
        "bias": jnp.zeros(64),
        "out": jax.random.normal(second, (64, 10)) / 8,
    }


def logits(state: Any, x: Any, is_training: bool) -> Any:
    hidden = jnp.tanh(x @ state.params["hidden"] + state.params["bias"])
    if is_training:
        hidden *= jax.random.bernoulli(state.rng(), 0.8, hidden.shape) / 0.8
    return hidden @ state.params["out"]


@managed.train_step
def train_step(state: Any, batch: Any) -> Any:
    logs = ciclo.logs()
    logs.add_loss("loss", managed.mean(cross_entropy(logits(state, batch[0], True), batch[1])))
    return logs, state


@managed.step
def predict_step(state: Any, batch: Any) -> Any:
    return {"outputs": {"logits": logits(state, batch[0], False)}}


def plain(strategy: Any, **options: Any) -> Any:
    return ManagedState.create(
        params=params(), tx=optax.sgd(0.5), rngs=0, strategy=strategy, **options
    )


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(64)(x))
        x = linen.Dropout(0.2, deterministic=not train)(linen.relu(x))
        return linen.Dense(10)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class Equinox(equinox.Module):
    hidden: Any
    norm: Any
    dropout: Any
    out: Any

    def __init__(self, key: Any) -> None:
        first, second = jax.random.split(key)
        self.hidden = equinox.nn.Linear(64, 64, key=first)
        self.norm = equinox.nn.BatchNorm(64, "batch", mode="batch")
        self.dropout = equinox.nn.Dropout(0.2)
        self.out = equinox.nn.Linear(64, 10, key=second)

    def __call__(self, x: Any, state: Any, *, key: Any = None) -> Any:
        x, state = self.norm(self.hidden(x), state)
        return self.out(self.dropout(jax.nn.relu(x), key=key)), state


def haiku_model(x: Any, is_training: bool) -> Any:
    x = haiku.BatchNorm(True, True, 0.9)(haiku.Linear(64)(x), is_training)
    x = jax.nn.relu(x)
    if is_training:
        x = haiku.dropout(haiku.next_rng_key(), 0.2, x)
    return haiku.Linear(10)(x)


def framework_state(kind: str, strategy: Any) -> Any:
    options: dict[str, Any] = {"losses": cross_entropy, "strategy": strategy}
    tx = optax.sgd(0.1)
    if kind == "flax":
        return ciclo.create_flax_state(Linen(), jnp.zeros((1, 64)), tx, **options)
    if kind == "nnx":
        return ciclo.create_nnx_state(lambda: Nnx(nnx.Rngs(0)), tx, **options)
    if kind == "haiku":
        return ciclo.create_haiku_state(haiku_model, jnp.zeros((1, 64)), tx, **options)
    made: Any = equinox.nn.make_with_state(Equinox)(jax.random.key(0))
    return ciclo.create_equinox_state(made[0], tx, model_state=made[1], **options)


def numbers(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [np.asarray(x) for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def difference(one: list[Any], other: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def trained(state: Any, batches: Any = BATCHES, step: Any = train_step, **options: Any) -> Any:
    return ciclo.loop(state, batches, {ciclo.every(1): step}, **options).state


# -- cases ---------------------------------------------------------------------------------------


def strategies_agree() -> None:
    reference = numbers(trained(plain("eager")).params)
    for name in ("jit", "jit_donate", "data_parallel", "data_parallel_donate", "fsdp"):
        found = trained(plain(name))
        say(
            "agree",
            kind="plain",
            strategy=name,
            difference=difference(reference, numbers(found.params)),
            moved=difference(numbers(params()), numbers(found.params)),
        )


def frameworks_agree() -> None:
    """With dropout and batch norm, whose statistics are compared too."""
    for kind in ("nnx", "flax", "equinox", "haiku"):
        reference: list[Any] = []
        for name in ("eager", "jit", "data_parallel", "fsdp") if kind == "nnx" else ("jit", "fsdp"):
            state = framework_state(kind, name)
            begun = numbers(state.params)
            state = trained(state, step=type(state).train_step)
            found = numbers((state.params, state.batch_stats))
            reference = reference or found
            moved = difference(begun, numbers(state.params))
            away = difference(reference, found)
            say("frameworks", kind=kind, strategy=name, difference=away, moved=moved)


def places() -> None:
    for name in ("data_parallel", "fsdp"):
        state = trained(plain(name), BATCHES[:2])
        shards = state.params["hidden"].addressable_shards
        placed, _ = state.strategy.place_batch(BATCHES[0])[:2]
        say(
            "places",
            strategy=name,
            devices=len({shard.device for shard in shards}),
            part=list(shards[0].data.shape),
            batch_devices=len({shard.device for shard in placed[0].addressable_shards}),
            batch_part=list(placed[0].addressable_shards[0].data.shape),
            collectives=train_step.collectives(state, BATCHES[0]),
        )
    say("places", strategy="jit", collectives=train_step.collectives(plain("jit"), BATCHES[0]))
    born = ManagedState.create(params=params, tx=optax.adam(0.1), strategy="fsdp")
    say(
        "born",
        parts=[list(leaf.addressable_shards[0].data.shape) for leaf in jax.tree.leaves(born)],
        difference=difference(numbers(params()), numbers(born.params)),
    )
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    rules = [("hidden", jax.P(None, "model")), ("out", jax.P("model", None))]
    wide = ciclo.Strategy(name="wide", mesh=mesh, rules=rules)
    state = trained(plain(wide))
    say(
        "own",
        parts={
            name: list(leaf.addressable_shards[0].data.shape) for name, leaf in state.params.items()
        },
        batch_part=list(wide.place_batch(BATCHES[0]).batch[0].addressable_shards[0].data.shape),
        difference=difference(numbers(trained(plain("jit")).params), numbers(state.params)),
        collectives=train_step.collectives(state, BATCHES[0]),
    )


def uneven_batches() -> None:
    odd = tuple(part[:10] for part in BATCHES[0])

    def refused(step: Any, state: Any) -> str:
        try:
            step(state, odd)
        except ciclo.CicloError as error:
            return str(error)
        return "nothing"

    @managed.train_step
    def careless(state: Any, batch: Any) -> Any:
        loss = cross_entropy(logits(state, batch[0], False), batch[1]).mean()
        return {"losses": {"loss": loss}}, state

    @managed.train_step
    def smooth(state: Any, batch: Any) -> Any:
        loss = cross_entropy(logits(state, batch[0], False), batch[1])
        logs = ciclo.logs()
        logs.add_loss("loss", managed.mean(loss))
        logs.add_metric("rows", 10 if managed.mask() is None else managed.mask().sum())
        return logs, state

    padding = ciclo.get_strategy("data_parallel", uneven="pad")
    say("refused", text=refused(train_step, plain("data_parallel")))
    say("careless", text=refused(careless, plain(padding)))
    norm = framework_state("flax", padding)
    say("statistics", text=refused(type(norm).train_step, norm))
    for window in (None, 2):
        one = trained(plain("jit", accumulate=window), [odd, BATCHES[1]], smooth)
        many = trained(plain(padding, accumulate=window), [odd, BATCHES[1]], smooth)
        say(
            "padded",
            window=window,
            difference=difference(numbers(one.params), numbers(many.params)),
            moved=difference(numbers(params()), numbers(many.params)),
        )
    here = predict_step(plain("jit"), odd).logits
    there = predict_step(plain(padding), odd).logits
    say("outputs", rows=len(there), difference=difference([np.asarray(here)], [np.asarray(there)]))


def donation() -> None:
    given = jax.device_put(params(), ciclo.get_strategy("data_parallel").shardings(params()))
    for name in ("data_parallel_donate", "fsdp"):
        state = ManagedState.create(params=given, tx=optax.sgd(0.5), rngs=0, strategy=name)
        returned = trained(state, BATCHES[:3])
        _, between = train_step(returned, BATCHES[0])
        _, last = train_step(between, BATCHES[0])
        say(
            "donation",
            strategy=name,
            given=any(leaf.is_deleted() for leaf in jax.tree.leaves(given)),
            state=any(leaf.is_deleted() for leaf in jax.tree.leaves(state)),
            returned=any(leaf.is_deleted() for leaf in jax.tree.leaves(returned)),
            between=between.params["hidden"].is_deleted(),
            last=last.params["hidden"].is_deleted(),
        )


def checkpoints(folder: str) -> None:
    """Saved on eight devices in the middle of the run; gone on with here, and on fewer later."""
    for name in ("data_parallel", "fsdp"):
        save = ciclo.checkpoint(f"{folder}/{name}")
        tasks = [(ciclo.every(1), train_step), (ciclo.every(10, at="end"), save)]
        ciclo.loop(adam(name), BATCHES[:10], tasks, batch_size_fn=lambda batch: 32)
    reference = numbers(trained(adam("jit")).params)
    np.savez(f"{folder}/reference.npz", *reference)


def scale() -> None:
    """A state of a million parameters and a step over it, compiled for all devices there are."""

    def large() -> Any:
        return {"in": jnp.ones((512, 1024)) / 512, "out": jnp.ones((1024, 512)) / 1024}

    @managed.train_step
    def step(state: Any, x: Any) -> Any:
        off = jnp.tanh(x @ state.params["in"]) @ state.params["out"] - x
        return {"losses": {"loss": managed.mean(off**2)}}, state

    rows = np.ones((2 * DEVICES, 512), "float32")
    for name in ("data_parallel", "fsdp"):
        state = ManagedState.create(params=large, tx=optax.adam(0.01), strategy=name)
        leaves = jax.tree.leaves(state)
        say(
            "scale",
            strategy=name,
            devices=DEVICES,
            kib_a_device=sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) // 1024,
            collectives=step.collectives(state, rows),
        )


def adam(strategy: Any) -> Any:
    return ManagedState.create(
        params=params(), tx=optax.adam(0.01), rngs=0, strategy=strategy, accumulate=2
    )


def resumed(folder: str) -> None:
    reference = list(np.load(f"{folder}/reference.npz").values())
    for saved, name in (("fsdp", "fsdp"), ("fsdp", "jit"), ("data_parallel", "fsdp")):
        save = ciclo.checkpoint(f"{folder}/{saved}-{name}-{DEVICES}", overwrite=True)
        shutil.copytree(f"{folder}/{saved}", save.folder.path)
        tasks = [(ciclo.every(1), train_step), (ciclo.every(10, at="end"), save)]
        result = ciclo.loop(adam(name), BATCHES, tasks, resume=save)
        say(
            "resumed",
            saved=saved,
            strategy=name,
            devices=len(result.state.params["hidden"].devices()),
            steps=result.history.collect("steps"),
            difference=difference(reference, numbers(result.state.params)),
        )


if __name__ == "__main__":
    if CASES == "frameworks":
        frameworks_agree()
    elif CASES == "scale":
        scale()
    elif CASES == "plain":
        strategies_agree()
        places()
        uneven_batches()
        donation()
        checkpoints(FOLDER)
    else:
        resumed(FOLDER)
