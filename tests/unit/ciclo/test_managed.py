"""Managed states and steps on one device: gradients, windows, precision, metrics, wrong use."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ciclo
from ciclo import managed
from ciclo.managed import ManagedState

X = np.arange(12, dtype="float32").reshape(6, 2) / 10
Y = X @ np.array([1.0, -2.0], "float32")
BATCHES = [{"x": X[:2], "y": Y[:2]}, {"x": X[2:4], "y": Y[2:4]}, {"x": X[4:], "y": Y[4:]}]
COMPILED = ["jit", "jit_donate"]


def error(params: Any, batch: Any) -> Any:
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


@managed.train_step
def train_step(state: ManagedState, batch: Any) -> Any:
    logs = ciclo.logs()
    logs.add_loss("loss", managed.mean(error(state.params, batch)))
    return logs, state


@managed.step
def test_step(state: ManagedState, batch: Any) -> Any:
    return {"metrics": {"error": managed.mean(error(state.params, batch))}}


test_step.__test__ = False  # type: ignore[attr-defined]  # a step, not a test


def new_state(tx: Any = None, **options: Any) -> ManagedState:
    return ManagedState.create(
        params={"w": jnp.array([0.5, 0.25])}, tx=tx or optax.sgd(0.1), **options
    )


def by_hand(batches: list[Any], w: Any = (0.5, 0.25), rate: float = 0.1) -> Any:
    w = np.array(w, "float32")
    for batch in batches:
        gradient = 2 * (batch["x"] @ w - batch["y"]) @ batch["x"] / len(batch["y"])
        w = w - rate * gradient
    return w


def joined(batches: list[Any]) -> Any:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in ("x", "y")}


@pytest.mark.parametrize("strategy", ["eager", "jit", "jit_donate", "jit-donate"])
def test_losses_give_gradients(strategy: str) -> None:
    """A train step follows the gradient of its loss, whatever the strategy."""
    result = ciclo.loop(new_state(strategy=strategy), BATCHES, {ciclo.every(1): train_step})

    np.testing.assert_allclose(by_hand(BATCHES), result.state.params["w"], rtol=1e-5)
    assert 3 == int(result.state.step)
    assert 3 == len(result.history.collect("losses.loss"))


def test_losses_are_summed() -> None:
    """Two losses give the gradient of their sum, and both are logged."""

    @managed.train_step
    def twice(state: ManagedState, batch: Any) -> Any:
        half = managed.mean(error(state.params, batch)) / 2
        return {"losses": {"a": half, "b": half}}, state

    logs, state = twice(new_state(), BATCHES[0])

    np.testing.assert_allclose(by_hand(BATCHES[:1]), state.params["w"], rtol=1e-5)
    assert logs.a == logs.b


def test_a_train_step_may_return_logs_alone() -> None:
    """The state goes on from the one that was given."""
    alone = managed.train_step(
        lambda state, batch: {"losses": {"loss": managed.mean(error(state.params, batch))}}
    )
    _, state = alone(new_state(), BATCHES[0])

    np.testing.assert_allclose(by_hand(BATCHES[:1]), state.params["w"], rtol=1e-5)


def test_a_step_returns_what_its_function_does() -> None:
    """Logs alone, a state alone, or both, as written."""
    state = new_state()
    alone = managed.step(lambda state: state.replace(step=state.step + 5))
    both = managed.step(lambda state, batch: ({"metrics": {"n": state.step}}, state))

    assert isinstance(test_step(state, BATCHES[0]), ciclo.Logs)
    assert 5 == int(alone(state).step)
    logs, same = both(state, BATCHES[0])
    assert (0, 0) == (int(logs.n), int(same.step))


def test_steps_as_methods() -> None:
    """A class of one's own has steps as methods and fields of its own, in a ready-made loop too."""

    class Scaled(ManagedState):
        scale: Any
        power: int = managed.static(2)

        @managed.train_step
        def train_step(self, batch: Any) -> Any:
            off = batch["x"] @ self.params["w"] * self.scale - batch["y"]
            return {"losses": {"loss": managed.mean(off**self.power)}}, self

    state = Scaled.create(params={"w": jnp.array([0.5, 0.25])}, tx=optax.sgd(0.1), scale=1.0)
    result = ciclo.train_loop(state, BATCHES)

    np.testing.assert_allclose(by_hand(BATCHES), result.state.params["w"], rtol=1e-5)
    assert isinstance(result.state, Scaled)
    assert (1.0, 2) == (float(result.state.scale), result.state.power)


def test_elapsed_is_an_argument() -> None:
    """A managed step may ask for `elapsed`, and is not compiled again for it."""
    traced = []

    @managed.step
    def count(state: ManagedState, batch: Any, elapsed: ciclo.Elapsed) -> Any:
        traced.append(1)
        return {"metrics": {"at": elapsed.steps}}

    result = ciclo.loop(new_state(), BATCHES, {ciclo.every(1): count})

    assert [0, 1, 2] == result.history.collect("at")
    assert 1 == len(traced)


@pytest.mark.parametrize("strategy", COMPILED)
def test_a_step_is_compiled_once(strategy: str) -> None:
    """Steps with batches of one shape are traced once, the first with a copied state too."""
    traced = []

    @managed.train_step
    def traced_step(state: ManagedState, batch: Any) -> Any:
        traced.append(1)
        return {"losses": {"loss": managed.mean(error(state.params, batch))}}, state

    ciclo.loop(new_state(strategy=strategy), BATCHES, {ciclo.every(1): traced_step})

    assert 1 == len(traced)


# -- donation ------------------------------------------------------------------------------------


def test_donation_leaves_the_callers_arrays() -> None:
    """What the caller made stays, also when two fields of the state are one array."""
    w = jnp.array([0.5, 0.25])
    state = ManagedState.create(
        params={"w": w}, batch_stats={"w": w}, tx=optax.sgd(0.1), strategy="jit_donate"
    )
    result = ciclo.loop(state, BATCHES, {ciclo.every(1): train_step})
    again = ciclo.loop(state, BATCHES, {ciclo.every(1): train_step})

    assert [0.5, 0.25] == w.tolist() == state.params["w"].tolist()
    assert result.state.params["w"].tolist() == again.state.params["w"].tolist()


def test_donation_leaves_what_a_loop_returned() -> None:
    """A second loop that goes on from the first leaves the first one's result whole."""
    first = ciclo.loop(new_state(strategy="jit_donate"), BATCHES, {ciclo.every(1): train_step})
    second = ciclo.loop(first.state, BATCHES, {ciclo.every(1): train_step})

    np.testing.assert_allclose(by_hand(BATCHES), first.state.params["w"], rtol=1e-5)
    np.testing.assert_allclose(by_hand(BATCHES * 2), second.state.params["w"], rtol=1e-5)


def test_donation_reuses_memory() -> None:
    """A state that a train step made is used up by the next; evaluating one does not use it up."""
    _, first = train_step(new_state(strategy="jit_donate"), BATCHES[0])
    test_step(first, BATCHES[0])
    assert not first.params["w"].is_deleted()
    train_step(first, BATCHES[1])

    assert first.params["w"].is_deleted()
    with pytest.raises(ciclo.CicloError, match="an earlier train step has consumed") as caught:
        train_step(first, BATCHES[1])
    assert 'strategy="jit"' in str(caught.value)


def test_evaluation_inside_a_donating_loop() -> None:
    """`fit` resets, trains and evaluates with a donated state."""

    class Trained(ManagedState):
        train_step = train_step
        test_step = test_step

    state = Trained.create(
        params={"w": jnp.array([0.5, 0.25])}, tx=optax.sgd(0.1), strategy="jit_donate"
    )
    result = ciclo.fit(state, BATCHES, BATCHES, epochs=3)

    assert 3 == len(result.history.collect("error_valid"))
    np.testing.assert_allclose(by_hand(BATCHES * 3), result.state.params["w"], rtol=1e-5)


# -- windows of gradients ------------------------------------------------------------------------


def test_a_window_is_one_large_batch() -> None:
    """Batches of different sizes count by their rows, as if they were one."""
    uneven = [{k: v[:4] for k, v in joined(BATCHES).items()}, BATCHES[2]]
    result = ciclo.loop(new_state(accumulate=2), uneven, {ciclo.every(1): train_step})

    np.testing.assert_allclose(by_hand([joined(BATCHES)]), result.state.params["w"], rtol=1e-5)
    assert result.state.window is not None
    assert (2, 0) == (int(result.state.step), int(result.state.window.steps))


@pytest.mark.parametrize("strategy", ["eager", "jit_donate"])
def test_a_short_last_window(strategy: str) -> None:
    """The batches that are left at the end of an epoch make an update of their own, by rows."""

    class Trained(ManagedState):
        train_step = train_step
        test_step = test_step

    params = {"w": jnp.array([0.5, 0.25])}
    state = Trained.create(params=params, tx=optax.sgd(0.1), accumulate=2, strategy=strategy)
    result = ciclo.fit(state, BATCHES, BATCHES, epochs=2)
    expected = [joined(BATCHES[:2]), BATCHES[2]] * 2

    np.testing.assert_allclose(by_hand(expected), result.state.params["w"], rtol=1e-5)
    # The evaluation at the end of the epoch has seen that update.
    everything = joined(BATCHES)
    off = everything["x"] @ by_hand(expected) - everything["y"]
    np.testing.assert_allclose((off**2).mean(), result.history.last("error_valid"), rtol=1e-4)


def test_nothing_to_flush() -> None:
    """Without a window, or with an empty one, the state stays."""
    for state in (new_state(), new_state(accumulate=2)):
        assert [0.5, 0.25] == state.flush_step().params["w"].tolist()


# -- optax ---------------------------------------------------------------------------------------


def test_clipping() -> None:
    """No update is longer than the gradient may be, times the rate."""
    _, state = train_step(new_state(clip_norm=0.01), BATCHES[2])
    moved = np.linalg.norm(state.params["w"] - np.array([0.5, 0.25]))

    np.testing.assert_allclose(0.001, moved, rtol=1e-3)


def test_the_average_of_parameters() -> None:
    """It weighs the newest most, and is not drawn to zero at the beginning."""
    state = new_state(ema_decay=0.5)
    seen = []
    for batch in BATCHES:
        _, state = train_step(state, batch)
        seen.append(np.asarray(state.params["w"]))
    expected = np.average(seen, axis=0, weights=[0.25, 0.5, 1.0])

    np.testing.assert_allclose(expected, state.ema_params["w"], rtol=1e-5)
    assert [0.5, 0.25] == new_state(ema_decay=0.5).ema_params["w"].tolist()
    with pytest.raises(ciclo.CicloError, match=r"has no average; use create\(\.\.\., ema_decay="):
        _ = new_state().ema_params


# -- precision -----------------------------------------------------------------------------------


def test_mixed_precision() -> None:
    """Steps compute in bfloat16; parameters, targets, statistics and logs stay float32."""
    seen = []

    @managed.train_step
    def cast_step(state: ManagedState, batch: Any) -> Any:
        loss = error(state.params, batch)
        seen.append([one.dtype.name for one in (state.params["w"], batch["x"], batch["y"])])
        stats = {"mean": batch["x"].mean(0)}
        return {"losses": {"loss": loss.mean()}}, state.replace(batch_stats=stats)

    state = new_state(policy="bfloat16", batch_stats={"mean": jnp.zeros(2)}, accumulate=2)
    for batch in BATCHES[:2]:
        logs, state = cast_step(state, batch)

    assert ["bfloat16", "bfloat16", "float32"] == seen[0]
    kinds = {leaf.dtype for leaf in jax.tree.leaves((state.params, state.batch_stats, logs))}
    assert {jnp.dtype("float32")} == kinds
    np.testing.assert_allclose(by_hand([joined(BATCHES[:2])]), state.params["w"], rtol=2e-2)


def test_params_that_a_step_changes_keep_their_type() -> None:
    """Also a step that does not train, and returns others, in the type that it computes in."""
    double = managed.step(
        lambda state, batch: state.replace(params=jax.tree.map(lambda x: x * 2, state.params))
    )
    state = double(new_state(policy="bfloat16"), BATCHES[0])

    assert jnp.float32 == state.params["w"].dtype


# -- random keys ---------------------------------------------------------------------------------


def test_keys_change_with_each_step() -> None:
    """A key is another in the next step, and the same when the run is repeated."""

    @managed.train_step
    def noisy(state: ManagedState, batch: Any) -> Any:
        loss = managed.mean(error(state.params, batch))
        logs = ciclo.logs()
        logs.add_loss("loss", loss)
        logs.add_metric("noise", jax.random.uniform(state.rng()))
        logs.add_metric("same", jax.random.uniform(state.step_rngs["dropout"]))
        return logs, state

    runs = [ciclo.loop(new_state(rngs=7), BATCHES, {ciclo.every(1): noisy}) for _ in range(2)]
    first, second = (run.history.collect("noise") for run in runs)

    assert first == second == runs[0].history.collect("same")
    assert 3 == len(set(first))
    with pytest.raises(ciclo.CicloError, match=r"no random key 'noise' \(it has 'dropout'\)"):
        new_state(rngs=7).rng("noise")


# -- metrics -------------------------------------------------------------------------------------


class Mean:
    """A metric as jax_metrics has them: nothing changes in place."""

    def __init__(self, total: Any = 0.0, count: Any = 0.0) -> None:
        self.total, self.count = jnp.asarray(total), jnp.asarray(count)

    def update(self, *, values: Any, **_: Any) -> Mean:
        return Mean(self.total + jnp.sum(values), self.count + values.size)

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def reset(self) -> Mean:
        return Mean()

    def compute(self) -> Any:
        return self.total / self.count


def _unflattened(_: Any, parts: Any) -> Mean:
    mean = Mean.__new__(Mean)
    mean.total, mean.count = parts
    return mean


jax.tree_util.register_pytree_node(Mean, lambda m: ((m.total, m.count), None), _unflattened)


@pytest.mark.parametrize("strategy", ["eager", "jit_donate"])
def test_logged_metrics_are_merged(strategy: str) -> None:
    """A metric of this batch is merged into the state's, and what it amounts to is logged."""

    @managed.train_step
    def measured(state: ManagedState, batch: Any) -> Any:
        logs = ciclo.logs()
        logs.add_loss("loss", managed.mean(error(state.params, batch)))
        logs.add_stateful_metric("mean_x", Mean().update(values=batch["x"]))
        return logs, state

    state = new_state(metrics={"mean_x": Mean()}, strategy=strategy)
    result = ciclo.loop(state, BATCHES, {ciclo.every(1): measured})
    expected = [X[:n].mean() for n in (2, 4, 6)]

    np.testing.assert_allclose(expected, result.history.collect("mean_x"), rtol=1e-6)
    reset = result.state.reset_step()
    np.testing.assert_allclose(X[4:].mean(), measured(reset, BATCHES[2])[0].mean_x, rtol=1e-6)


def test_metrics_that_are_updated() -> None:
    """`update_metrics` adds a batch to all of them; the state before is not changed."""
    state = new_state(metrics={"mean": Mean})
    new = state.update_metrics(values=jnp.array([1.0, 3.0]))

    assert 2.0 == float(new.compute_metrics()["mean"])
    assert 0.0 == float(state.metrics["mean"].count)


def test_a_metric_that_is_not_kept() -> None:
    """A logged metric must be one of the state's, and the state must be returned."""
    stray = managed.step(lambda state: ({"stateful_metrics": {"m": Mean()}}, state))
    lost = managed.step(lambda state: {"stateful_metrics": {"m": Mean()}})

    with pytest.raises(ciclo.CicloError, match=r"declare it: create\(\.\.\., metrics="):
        stray(new_state())
    with pytest.raises(ciclo.CallbackError, match="part of the state; return logs, state"):
        lost(new_state(metrics={"m": Mean()}))


# -- strategies ----------------------------------------------------------------------------------


def test_names_of_strategies() -> None:
    """Hyphens are underscores, a name gives the same strategy again, and one may be registered."""
    mine = ciclo.Strategy(name="mine")
    ciclo.register_strategy("my-own", lambda: mine)

    assert ciclo.get_strategy("data-parallel") is ciclo.get_strategy("data_parallel")
    assert mine is ciclo.get_strategy("my_own") is new_state(strategy="my-own").strategy
    assert mine is ciclo.get_strategy(mine)


def test_with_strategy() -> None:
    """A state goes from one strategy to another and trains on."""
    state = new_state(strategy="data_parallel")
    for name in ("eager", "fsdp", "jit"):
        state = state.with_strategy(name)
        assert name == state.strategy.name
        _, state = train_step(state, BATCHES[0])

    np.testing.assert_allclose(by_hand(BATCHES[:1] * 3), state.params["w"], rtol=1e-5)


# -- wrong use -----------------------------------------------------------------------------------


def wrong(function: Any, state: Any = None, batch: Any = BATCHES[0]) -> str:
    with pytest.raises(ciclo.CicloError) as caught:
        function(new_state() if state is None else state, batch)
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["eager", "jit"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda params, batch: managed.mean(error({"w": jnp.ones(2)}, batch)),
        lambda params, batch: jnp.argmax(params["w"]).astype("float32"),
        lambda params, batch: managed.mean(error(jax.lax.stop_gradient(params), batch)),
    ],
)
def test_a_loss_that_does_not_depend_on_the_parameters(loss: Any, strategy: str) -> None:
    """Its gradients are all zero and nothing would be trained: the error says what to write."""

    @managed.train_step
    def detached(state: ManagedState, batch: Any) -> Any:
        return {"losses": {"loss": loss(state.params, batch)}}, state

    text = wrong(detached, state=new_state(strategy=strategy))

    assert "detached: the losses ['loss'] do not depend on state.params" in text
    assert 'state.apply_fn({"params": state.params}, batch["x"])' in text


def test_a_part_of_the_parameters_may_be_left_alone() -> None:
    """A loss that depends on some of the parameters trains these."""
    params = {"w": jnp.array([0.5, 0.25]), "frozen": jnp.ones(2)}
    state = ManagedState.create(params=params, tx=optax.sgd(0.1))
    _, state = train_step(state, BATCHES[0])

    assert [1.0, 1.0] == state.params["frozen"].tolist()
    np.testing.assert_allclose(by_hand(BATCHES[:1]), state.params["w"], rtol=1e-5)


def test_parameters_that_cannot_be_trained() -> None:
    """A whole number among the parameters has no gradient; the error says where to keep it."""
    state = ManagedState.create(
        params={"w": jnp.array([0.5, 0.25]), "count": jnp.int32(0)}, tx=optax.sgd(0.1)
    )

    assert "params['count'] is int32[], which cannot be trained; move it to" in wrong(
        train_step, state=state
    )


def test_no_loss() -> None:
    """The error says what was logged, and how to log a loss."""

    @managed.train_step
    def lossless(state: ManagedState, batch: Any) -> Any:
        return {"metrics": {"error": 1.0}}, state

    text = wrong(lossless)

    assert "lossless is a train step and logged no loss (it logged ['metrics.error'])" in text
    assert 'logs.add_loss("loss", loss); return logs, state' in text


def test_a_loss_that_is_no_number() -> None:
    """The error says its shape, and how to average it."""

    @managed.train_step
    def rows(state: ManagedState, batch: Any) -> Any:
        return {"losses": {"loss": error(state.params, batch)}}, state

    text = wrong(rows)

    assert "rows: the loss 'loss' is float32[2]; a loss must be a scalar" in text
    assert "logs.add_loss('loss', managed.mean(loss))" in text


def test_a_loss_without_a_gradient() -> None:
    """A count is no loss."""
    counted = managed.train_step(lambda state, batch: {"losses": {"n": jnp.int32(3)}})

    assert "the loss 'n' is int32[], which has no gradient" in wrong(counted)


def test_a_state_that_is_not_managed() -> None:
    """The error says what was given, and what to make."""
    text = wrong(train_step, {"w": 1.0})

    assert "train_step is a managed step, but {w: 1.0} is not a managed state" in text
    assert "ManagedState.create(params=..., tx=...)" in text


def test_a_strategy_that_does_not_exist() -> None:
    """The error lists those that do."""
    with pytest.raises(ciclo.CicloError) as caught:
        new_state(strategy="pmap")

    assert "strategy='pmap' does not exist; use one of 'eager', 'jit'" in str(caught.value)
    assert "register_strategy" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devices": 0}, "needs 0 devices, but JAX has .*; use 1 to"),
        (
            {"devices": []},
            r"devices=\[\] is not valid; use a number, or devices of jax.devices",
        ),
        ({"devices": "gpu"}, "devices='gpu' is not valid; use a number"),
        ({"donate": True}, "strategy 'fsdp' has no option 'donate'; it has devices, uneven"),
    ],
)
def test_wrong_options_of_a_strategy(options: Any, text: str) -> None:
    """Each says what is allowed."""
    with pytest.raises(ciclo.CicloError, match=text):
        ciclo.get_strategy("fsdp", **options)


def test_a_step_that_does_not_train() -> None:
    """A loop that is to train says so after the first step, where it would go on in silence."""

    def logs_only(state: Any, batch: Any) -> Any:
        return {"losses": {"loss": error(state.params, batch).mean()}}, state

    for step in (logs_only, managed.step(logs_only)):
        with pytest.raises(ciclo.CallbackError, match=r"decorate it with @managed.train_step"):
            ciclo.fit(new_state(), BATCHES, epochs=1, train_step=step)


def test_a_method_of_the_first_state() -> None:
    """As a callback it goes on with the state of the loop, not with the first one again."""

    class Own(ManagedState):
        @managed.train_step
        def train_step(self, batch: Any) -> Any:
            return {"losses": {"loss": error(self.params, batch).mean()}}, self

    made = Own.create(params={"w": jnp.zeros(2)}, tx=optax.sgd(0.1))
    bound = ciclo.loop(made, BATCHES, {ciclo.every(1): made.train_step})
    unbound = ciclo.loop(made, BATCHES, {ciclo.every(1): Own.train_step})

    assert len(BATCHES) == int(bound.state.step)
    assert unbound.history.collect("loss") == bound.history.collect("loss")


def test_tensors_of_torch() -> None:
    """A loader of torch gives these; the error says what a step of JAX takes."""
    torch = pytest.importorskip("torch")
    text = wrong(train_step, new_state(), {"x": torch.zeros(3, 2), "y": torch.zeros(3)})

    assert "train_step got torch tensors, {x: float32[3,2], y: float32[3]}" in text
    assert "use a collate_fn in the loader, or tensor.numpy()" in text


def test_a_metric_of_a_batch_that_cannot_be_merged() -> None:
    """It would replace what the state has counted: the error says what to do instead."""
    nnx = pytest.importorskip("flax.nnx")

    @managed.step
    def measured(state: Any, batch: Any) -> Any:
        metric = nnx.metrics.Average()
        metric.update(values=batch["x"])
        return {"stateful_metrics": {"mean": metric}}, state

    state = new_state(metrics={"mean": nnx.metrics.Average()})
    with pytest.raises(ciclo.CicloError, match=r"'mean' \(Average\) has no merge\(\).*update_metr"):
        measured(state, BATCHES[0])


def test_too_few_devices() -> None:
    """The error says how many there are, and how to try more on a CPU."""
    with pytest.raises(ciclo.CicloError) as caught:
        ciclo.get_strategy("fsdp", devices=1000)

    assert "fsdp needs 1000 devices, but JAX has" in str(caught.value)
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=1000" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"policy": "float16"}, "policy='float16' is not valid; use 'bfloat16'"),
        ({"accumulate": 0}, "accumulate=0 is not valid; use 1 or more"),
        ({"tx": 3}, "tx=3 is not an optimizer; use one of optax"),
        ({"metrics": {"a": 3}}, r"metrics\['a'\] is 3, which has no compute\(\)"),
        ({"accumulate": 2.5}, "accumulate=2.5 is not valid; use 1 or more"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0 is not valid; use a number above 0"),
        ({"ema_decay": 1.5}, "ema_decay=1.5 is not valid; use a decay such as 0.999"),
        ({"optimizer": 3}, "ManagedState.create has no option 'optimizer'; the optimizer is tx="),
        ({"strategy": 3}, "a strategy is a ciclo.Strategy or a name, as 'eager', .*; got 3"),
    ],
)
def test_wrong_options(options: Any, text: str) -> None:
    """Each says what is allowed."""
    with pytest.raises(ciclo.CicloError, match=text):
        new_state(**options)


def test_clipping_without_an_optimizer() -> None:
    """There is nothing to clip for."""
    with pytest.raises(ciclo.CicloError, match="clip_norm= needs an optimizer: tx="):
        ManagedState.create(params={"w": jnp.zeros(2)}, clip_norm=1.0)


def test_wrong_strategies() -> None:
    """What cannot be registered or made says why."""
    mesh = ciclo.get_strategy("data_parallel").mesh

    with pytest.raises(ciclo.CicloError, match="or a function that returns"):
        ciclo.register_strategy("wrong", 3)  # type: ignore[arg-type]
    with pytest.raises(ciclo.CicloError, match="uneven='drop' is not valid; use"):
        ciclo.get_strategy("data_parallel", uneven="drop")
    with pytest.raises(
        ciclo.CicloError,
        match=r"batch_axes=\('rows',\) is not valid; use axes of the mesh, which are",
    ):
        ciclo.Strategy(name="wrong", mesh=mesh, batch_axes=("rows",))


def test_a_state_without_an_optimizer() -> None:
    """It predicts, and cannot be trained."""
    state = ManagedState.create(params={"w": jnp.ones(2)})

    assert "error" in test_step(state, BATCHES[0]).metrics
    assert "the state has no optimizer" in wrong(train_step, state)


def test_what_a_step_may_ask_for() -> None:
    """The loop's state is no argument of what is compiled."""
    with pytest.raises(ciclo.CallbackError, match="cannot take loop_state"):
        managed.step(lambda state, loop_state: None)


def test_a_result_that_is_no_state() -> None:
    """A step that returns something else says so."""
    assert "returned 3 as the state; return logs, state" in wrong(managed.step(lambda s, b: 3))


def test_rows_that_differ() -> None:
    """A batch is split by rows, so all of its arrays have as many."""
    state = new_state(strategy="data_parallel")
    with pytest.raises(ciclo.CicloError, match=r"different numbers of rows, \[2, 6\]"):
        train_step(state, {"x": X, "y": Y[:2]})


# -- absent packages -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "create", "package"),
    [
        ("flax.linen", ciclo.create_flax_state, "flax"),
        ("flax.nnx", ciclo.create_nnx_state, "flax"),
        ("equinox", ciclo.create_equinox_state, "equinox"),
        ("haiku", ciclo.create_haiku_state, "dm-haiku"),
    ],
)
def test_an_absent_framework(
    module: str, create: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what needs it, and what to install."""
    monkeypatch.setitem(sys.modules, module, None)

    text = rf"{create.__name__}\(\) needs {package}, which is not installed: pip install {package}"
    with pytest.raises(ciclo.MissingDependencyError, match=text):
        create(None, None)


def test_jax_is_absent() -> None:
    """Without JAX, `import ciclo` works and `ciclo.managed` says what to install."""
    program = """
import sys
sys.modules["jax"] = None
import ciclo
try:
    ciclo.managed
except ciclo.MissingDependencyError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert "ciclo.managed needs jax, which is not installed: pip install jax" in ended.stdout


@pytest.mark.parametrize(("outputs", "targets"), [((4, 1), (4,)), ((4,), (4, 1))])
def test_a_loss_of_each_output_and_all_targets_is_said(
    outputs: Any, targets: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Outputs [n,1] and targets [n] become [n,n]: its mean is told of, itself is refused."""
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):  # type: ignore[misc, name-defined]
        @linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return linen.Dense(1)(x).reshape(len(x), *outputs[1:])

    def fitted(loss: Any) -> None:
        state = ciclo.create_flax_state(Model(), np.ones((1, 2)), optax.sgd(0.1), losses=loss)
        ciclo.fit(state, [(np.ones((4, 2), "float32"), np.ones(targets, "float32"))], epochs=1)

    fitted(lambda preds, target: ((preds.reshape(-1) - target.reshape(-1)) ** 2).mean())
    assert "" == caplog.text
    fitted(lambda preds, target: ((preds - target) ** 2).mean())
    assert "the loss 'loss' compares each output with all targets" in caplog.text
    with pytest.raises(ciclo.CicloError, match="compares each output with all targets"):
        fitted(lambda preds, target: (preds - target) ** 2)
