"""Loops of real JAX: jitted steps, donated states, arrays in logs."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ciclo
from ciclo.device_values import STACKED


class State(NamedTuple):
    w: jax.Array
    step: jax.Array


def new_state() -> State:
    return State(jnp.zeros(3), jnp.zeros((), jnp.int32))


def step(state: State, batch: Any) -> tuple[Any, State]:
    loss = jnp.mean((state.w - batch) ** 2)
    state = State(state.w + 0.5 * (batch - state.w), state.step + 1)
    return {"metrics": {"loss": loss, "step": state.step}}, state


BATCHES = [np.full(3, value, "float32") for value in (1.0, 1.0, 1.0, 1.0)]
LOSSES = [1.0, 0.25, 0.0625, 0.015625]


def test_a_jitted_step() -> None:
    """A named tuple is a state; scalars come out of the history as plain numbers."""
    result = ciclo.loop(new_state(), BATCHES, {ciclo.every(1): jax.jit(step)})

    assert LOSSES == result.history.collect("loss")
    assert [1, 2, 3, 4] == result.history.collect("step")
    assert 0.9375 == float(result.state.w[0])


def test_a_donated_state() -> None:
    """Parts of a state that the next step donates are in the history all the same."""
    donating = partial(jax.jit, donate_argnums=0)(step)
    result = ciclo.loop(new_state(), BATCHES * 50, {ciclo.every(1): donating})

    assert list(range(1, 201)) == result.history.collect("step")
    assert LOSSES == result.history.collect("loss")[:4]


def test_early_stopping_with_a_donated_state() -> None:
    """The best state is a copy with memory of its own."""
    donating = partial(jax.jit, donate_argnums=0)(
        lambda state, batch: ({"metrics": {"loss": batch}}, State(state.w + 1, state.step + 1))
    )
    stop = ciclo.early_stopping("loss", patience=2, restore_best_weights=True)
    losses = [jnp.float32(value) for value in (3.0, 1.0, 2.0, 2.0, 2.0)]
    result = ciclo.loop(new_state(), losses, [(ciclo.every(1), donating), (ciclo.every(1), stop)])

    assert (4, 2, 2.0) == (
        result.elapsed.steps,
        int(result.state.step),
        float(result.state.w[0]),
    )
    assert isinstance(result.state, State)


def test_elapsed_and_logs_go_through_jit() -> None:
    """A jitted function takes `elapsed` without being compiled again, and returns logs."""
    compiled = 0

    @jax.jit
    def train_step(state: jax.Array, batch: Any, elapsed: ciclo.Elapsed) -> Any:
        nonlocal compiled
        compiled += 1
        logs = ciclo.logs()
        logs.add_loss("loss", state + elapsed.steps)
        return logs, state + 1

    result = ciclo.loop(jnp.float32(0), range(5), {ciclo.every(1): train_step})

    assert [0.0, 2.0, 4.0, 6.0, 8.0] == result.history.collect("losses.loss")
    assert 1 == compiled


def test_counting_inside_a_jitted_function() -> None:
    """Differences, later counts and schedules of steps are traced like other numbers."""
    start = ciclo.Elapsed(steps=1)

    @jax.jit
    def train_step(state: jax.Array, batch: Any, elapsed: ciclo.Elapsed) -> Any:
        gone = {"gone": (elapsed - start).steps, "done": elapsed.done().steps}
        later = {"later": elapsed.update(4).samples, "is_due": ciclo.every(2)(elapsed)}
        return {"metrics": {**gone, **later}}, state + 1

    result = ciclo.loop(jnp.float32(0), [np.ones(2)] * 3, {ciclo.every(1): train_step})

    assert ([-1, 0, 1], [1, 2, 3]) == result.history.collect("gone", "done")
    assert ([4, 6, 8], [1, 0, 1]) == result.history.collect("later", "is_due")


def test_arrays_are_not_kept_alive() -> None:
    """Of a thousand logged arrays only a queue's worth is alive."""
    made: list[weakref.ref[Any]] = []

    def log(batch: int) -> Any:
        array = jnp.float32(batch) + 1
        made.append(weakref.ref(array))
        return {"metrics": {"x": array}}

    result = ciclo.loop(0, range(1000), {ciclo.every(1): log})
    gc.collect()

    assert sum(ref() is not None for ref in made) <= 2 * STACKED + 2
    assert [float(n + 1) for n in range(1000)] == result.history.collect("x")


def test_scalars_of_any_type_are_plain_numbers() -> None:
    """Whatever types a name is logged with, the history has the numbers, in their order."""
    types = ("float32", "bfloat16", "int32", "bool", "float16")
    values = [jnp.asarray(number % 2, types[number // 100]) for number in range(500)]
    result = ciclo.loop(0, values, {ciclo.every(1): lambda batch: {"metrics": {"x": batch}}})

    found = result.history.collect("x")
    assert [number % 2 for number in range(500)] == found
    assert [float, float, int, bool, float] == [type(one) for one in found[1::100]]


def test_outputs_are_arrays_of_the_host() -> None:
    """What a predict step puts out is collected as NumPy arrays."""
    result = ciclo.predict_loop(
        2.0,
        [jnp.ones(2), jnp.zeros(2)],
        {ciclo.on_predict_step: jax.jit(lambda state, batch: {"outputs": {"y": state * batch}})},
    )
    first, second = result.history.collect("y")

    assert isinstance(first, np.ndarray)
    assert ([2.0, 2.0], [0.0, 0.0]) == (list(first), list(second))


def test_the_size_of_batches() -> None:
    """Arrays of JAX count as NumPy's do."""
    batches = [{"x": jnp.zeros((4, 2)), "input_ids": jnp.zeros((4, 8), jnp.int32)}] * 3
    _, _, elapsed = ciclo.loop(0, batches, {})

    assert (12, 96) == (elapsed.samples, elapsed.tokens)


def test_nan_guard_looks_later() -> None:
    """A NaN on a device is found some steps later, and its own step is named."""
    guard = ciclo.nan_guard(lag=3)
    values = [jnp.float32(1)] * 2 + [jnp.float32("nan")] + [jnp.float32(1)] * 9
    tasks = [
        (ciclo.every(1), lambda batch: {"metrics": {"loss": batch}}),
        (ciclo.every(1), guard),
    ]

    with pytest.raises(ciclo.NotFiniteError, match="loss is nan at step 2") as caught:
        ciclo.loop(0, values, tasks)

    assert "step 7" in caught.value.__notes__[0]


def test_ema_of_a_pytree() -> None:
    """Floating leaves are averaged, others are the newest, the type stays."""
    average = ciclo.ema(0.5)
    tasks = [(ciclo.every(1), jax.jit(step)), (ciclo.every(1), average)]
    ciclo.loop(new_state(), BATCHES[:2], tasks)

    assert isinstance(average.value, State)
    assert pytest.approx((0.5 + 2 * 0.75) / 3) == float(average.value.w[0])
    assert 2 == int(average.value.step)


def test_the_bar_does_not_wait(capsys: pytest.CaptureFixture[str]) -> None:
    """Values on a device are shown, the last of them at the end."""
    ciclo.loop(new_state(), BATCHES, {ciclo.every(1): jax.jit(step), **ciclo.keras_bar(total=4)})

    assert "- loss: 0.0156 - step: 4.0000" in capsys.readouterr().out


def test_the_best_module_of_nnx_comes_back_in_place() -> None:
    """An NNX module is the same object, with the values of its best step."""
    nnx = pytest.importorskip("flax.nnx")
    module = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    losses = iter([2.0, 1.0, 5.0])
    seen = []

    def train_step(module: Any, batch: Any) -> Any:
        module.kernel[...] = module.kernel[...] + 1
        seen.append(np.asarray(module.kernel[...]))
        return {"metrics": {"loss": next(losses)}}

    result = ciclo.loop(
        module,
        range(3),
        [
            (ciclo.every(1), train_step),
            (ciclo.every(1), ciclo.early_stopping("loss", 9, restore_best_weights=True)),
        ],
    )

    assert result.state is module
    assert np.array_equal(seen[1], np.asarray(module.kernel[...]))


def test_the_best_module_of_equinox() -> None:
    """An Equinox module, functions inside it included, is a state that comes back."""
    eqx = pytest.importorskip("equinox")
    losses = iter([1.0, 2.0])

    def train_step(module: Any) -> Any:
        larger = jax.tree.map(lambda leaf: leaf + 1 if eqx.is_array(leaf) else leaf, module)
        return {"metrics": {"loss": next(losses)}}, larger

    module = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    result = ciclo.loop(
        module,
        range(2),
        [
            (ciclo.every(1), train_step),
            (ciclo.every(1), ciclo.early_stopping("loss", 9, restore_best_weights=True)),
        ],
    )

    assert isinstance(result.state, type(module))
    assert np.allclose(module.layers[0].weight + 1, result.state.layers[0].weight)
