"""Managed states on eight devices that the CPU plays: each case prints a line of JSON.

`managed_cases.py FOLDER CASE DEVICES`
"""

from __future__ import annotations

import json
import os
import shutil
import signal
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


def framework_state(kind: str, strategy: Any, tx: Any = None) -> Any:
    options: dict[str, Any] = {"losses": cross_entropy, "strategy": strategy}
    tx = tx or optax.sgd(0.1)
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
    """With dropout and batch norm, whose statistics are compared too; and in every loop."""
    for kind in ("nnx", "flax", "equinox", "haiku"):
        reference: list[Any] = []
        whole: list[Any] = []
        for name in ("eager", "jit", "data_parallel", "fsdp"):
            state = framework_state(kind, name)
            end = trained(state, step=type(state).train_step)
            found = numbers((end.params, end.batch_stats))
            reference = reference or found
            say(
                "frameworks",
                kind=kind,
                strategy=name,
                difference=difference(reference, found),
                moved=difference(numbers(state.params), numbers(end.params)),
            )
            if name != "eager":
                made = every_loop(state)
                whole = whole or made
                away = difference(whole, made)
                say("loops", kind=kind, strategy=name, difference=away, found=len(made))


def every_loop(state: Any) -> list[Any]:
    """What each ready-made loop, and two by hand, log for a state and make of it."""
    data = BATCHES[:3]
    fitted = ciclo.fit(state, data, data, epochs=1)
    run = ciclo.train_loop(state, data, epoch_duration=3, test_dataset=data)
    tested = ciclo.test_loop(run.state, data).history
    predicted = ciclo.predict_loop(run.state, [x for x, _ in data]).history
    by_hand = state
    for _, batch in ciclo.elapse(data):
        logs, by_hand = by_hand.train_step(batch)
    last = ciclo.loop(state, data, {ciclo.every(1): lambda state, batch: state.train_step(batch)})
    logged = [
        *(one.collect("loss") for one in (fitted.history, run.history, last.history, tested)),
        fitted.history.collect("loss_valid"),
        run.history.collect("loss_test"),
        *predicted.collect("preds"),
        float(logs.loss),
    ]
    ends = (fitted.state.params, run.state.params, last.state.params, by_hand.params)
    return [*map(np.asarray, logged), *numbers(ends)]


def places() -> None:
    """Where the arrays of a state and of a batch are inside of a step, and after it."""
    inside: dict[str, Any] = {}

    @managed.train_step
    def looking(state: Any, batch: Any) -> Any:
        for path, leaf in leaves_of((state, batch)):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)

            def look(sharding: Any, path: Any = path, shape: Any = leaf.shape) -> None:
                parts = len(sharding.device_set), list(sharding.shard_shape(shape)), list(shape)
                inside[jax.tree_util.keystr(path)] = parts

            jax.debug.inspect_array_sharding(jax.lax.stop_gradient(leaf), callback=look)
        return type(state).train_step.function(state, batch)

    for name in ("data_parallel", "fsdp"):
        inside.clear()
        state = framework_state("flax", name, optax.adam(0.1))
        arrays = [jax.tree_util.keystr(path) for path, _ in leaves_of((state, BATCHES[0]))]
        _, state = looking(state, BATCHES[0])
        after = {
            jax.tree_util.keystr(path): len({shard.device for shard in leaf.addressable_shards})
            for path, leaf in leaves_of(state)
        }
        say("places", strategy=name, arrays=arrays, inside=inside, after=after)
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
    )


def leaves_of(tree: Any) -> Any:
    return jax.tree_util.tree_leaves_with_path(tree)


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
    """All that a state is made of is the caller's, and lies already where the strategy has it."""

    @managed.train_step
    def keeping(state: Any, batch: Any) -> Any:
        """A step whose new state has the batch, and the keys, in it as they were given."""
        state = state.replace(batch_stats=batch[0]).update_metrics(values=batch[0])
        off = batch[0] @ state.params["hidden"] + jax.random.normal(state.rng(), (32, 64))
        return {"losses": {"loss": managed.mean(off**2)}}, state

    for name in ("jit_donate", "data_parallel_donate", "fsdp"):
        placed = ciclo.get_strategy(name).place(params())
        first = ManagedState.create(
            params=placed,
            tx=optax.adam(0.1),
            rngs=0,
            metrics={"seen": nnx.metrics.Average()},
            batch_stats=jnp.zeros((32, 64)),
            accumulate=2,
            ema_decay=0.9,
            strategy=name,
        )
        fields = ["params", "opt_state", "batch_stats", "rngs", "metrics", "window", "ema_state"]
        given = {field: getattr(first, field) for field in fields}
        batches = [first.strategy.place_batch(batch).batch for batch in BATCHES[:3]]
        batches = [jax.tree.map(jnp.asarray, batch) for batch in batches]
        _, made = keeping(first, batches[0])
        state = made.replace(**given)
        returned = trained(state, batches, keeping)
        _, between = keeping(returned, batches[0])
        _, last = keeping(between, batches[0])
        kept = {"placed": placed, **given, "batch": batches, "first": first}
        kept |= {"state": state, "returned": returned, "last": last}
        say(
            "donation",
            strategy=name,
            kept={part: len(jax.tree.leaves(tree)) for part, tree in kept.items()},
            deleted=[part for part, tree in kept.items() if any(deleted(tree))],
            between=between.params["hidden"].is_deleted(),
        )


def deleted(tree: Any) -> list[bool]:
    return [leaf.is_deleted() for leaf in jax.tree.leaves(tree)]


# -- runs that are killed ------------------------------------------------------------------------


def adam(strategy: Any) -> Any:
    return ManagedState.create(
        params=params(), tx=optax.adam(0.01), rngs=0, strategy=strategy, accumulate=2
    )


def run(strategy: str, folder: str, batches: Any = BATCHES, kill_at: int | None = None) -> Any:
    """A run that saves every 5 steps and goes on from what is saved; also the steps it took."""
    steps: list[int] = []

    def watch(elapsed: Any) -> None:
        steps.append(elapsed.steps)
        if elapsed.steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    save = ciclo.checkpoint(folder, asynchronous=False)
    tasks = [(ciclo.every(1), train_step), (ciclo.every(5, at="end"), save)]
    result = ciclo.loop(adam(strategy), batches, [*tasks, (ciclo.every(1), watch)], resume=save)
    return result, steps


def resumed(folder: str, saved: str, name: str) -> None:
    """Gone on with, from a copy: others go on from the same."""
    copy = f"{folder}/{saved}-{name}-{DEVICES}"
    shutil.copytree(f"{folder}/{saved}", copy)
    result, steps = run(name, copy)
    reference = list(np.load(f"{folder}/reference.npz").values())
    say(
        "resumed",
        saved=saved,
        strategy=name,
        devices=len(result.state.params["hidden"].devices()),
        begun=steps[0],
        steps=result.history.collect("steps"),
        difference=difference(reference, numbers(result.state.params)),
    )


# -- what is compiled ----------------------------------------------------------------------------


def hybrid() -> Any:
    """The mesh of the page on scale: split inside of a group, the same in each group."""
    groups = {1: 1, 8: 2, 64: 8}[DEVICES]
    inside = DEVICES // groups

    def split(path: str, array: Any) -> Any:
        divides = array.ndim == 2 and array.shape[0] % inside == 0
        return jax.P("inside") if divides else jax.P()

    return ciclo.Strategy(
        name="hybrid",
        mesh=jax.make_mesh((groups, inside), ("group", "inside")),
        rules=split,
        batch_axes=("group", "inside"),
        donates=True,
    )


def scale() -> None:
    """A state of a million parameters and a step over it, compiled for all devices there are."""

    def large() -> Any:
        return {"in": jnp.ones((512, 1024)) / 512, "out": jnp.ones((1024, 512)) / 1024}

    @managed.train_step
    def step(state: Any, x: Any) -> Any:
        off = jnp.tanh(x @ state.params["in"]) @ state.params["out"] - x
        return {"losses": {"loss": managed.mean(off**2)}}, state

    rows = np.ones((2 * DEVICES, 512), "float32")
    of_one = ("eager", "jit", "jit_donate") if DEVICES == 1 else ()
    for strategy in (*of_one, "data_parallel", "data_parallel_donate", "fsdp", hybrid()):
        state = ManagedState.create(params=large, tx=optax.adam(0.01), strategy=strategy)
        leaves = jax.tree.leaves(state)
        say(
            "scale",
            strategy=state.strategy.name,
            devices=DEVICES,
            kib_a_device=sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) // 1024,
            collectives=step.collectives(state, rows),
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
        np.savez(f"{FOLDER}/reference.npz", *numbers(trained(adam("jit")).params))
        run("data_parallel", f"{FOLDER}/data_parallel-8", BATCHES[:10])
        run("fsdp", f"{FOLDER}/fsdp-8", kill_at=12)
    elif CASES == "fewer":
        for saved, name in (("fsdp-8", "fsdp"), ("fsdp-8", "jit"), ("data_parallel-8", "fsdp")):
            resumed(FOLDER, saved, name)
        run("fsdp", f"{FOLDER}/fsdp-4", kill_at=12)
    else:
        resumed(FOLDER, "fsdp-4", "fsdp")
