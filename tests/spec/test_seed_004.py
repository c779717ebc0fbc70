"""The code of seed 004, run as written, with small stand-ins for what it leaves open.

Where the seed has a slip of the pen (`add_metric("loss": loss)`, a missing quote, a body that is
not indented), what it means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ciclo

if TYPE_CHECKING:
    from collections.abc import Iterator


class TrainState(NamedTuple):
    w: jax.Array
    step: jax.Array


def new_state() -> TrainState:
    return TrainState(jnp.zeros((4, 3)), jnp.zeros((), jnp.int32))


def batches(count: int) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    for _ in range(count):
        x = random.normal(size=(8, 4)).astype("float32")
        yield {"x": x, "y": np.argmax(x[:, :3], -1)}


@jax.jit
def train_step(state: TrainState, batch: Any) -> tuple[ciclo.Logs, TrainState]:
    def loss_fn(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = batch["x"] @ w
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_p, batch["y"][:, None], -1)), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.w)
    state = TrainState(state.w - 0.5 * grads, state.step + 1)
    logs = ciclo.logs()
    logs.add_metric("loss", loss)
    logs.add_metric("accuracy", jnp.mean(jnp.argmax(logits, -1) == batch["y"]))
    return logs, state


def assert_saved(state: TrainState, step: int) -> None:
    """The newest checkpoint is of this step and has this state, of the same type."""
    checkpoint = ciclo.checkpoint("logdir/my-model")
    restored = checkpoint.restore(new_state())

    assert step == checkpoint.latest_step
    assert isinstance(restored, TrainState)
    assert jnp.array_equal(state.w, restored.w)


def test_reaching_the_end_period_ends_the_loop() -> None:
    """`elapsed >= end_period` ends the loop."""
    dataset = batches(100)
    end_period = ciclo.at(steps=20)  # {steps, samples, time}

    for elapsed, batch in ciclo.elapse(dataset):  # track steps/samples/time  # noqa: B007
        # elapsed = Elapsed(steps=..., samples=..., time=...)
        if elapsed >= end_period:
            break

    assert (20, 160) == (elapsed.steps, elapsed.samples)
    assert elapsed.time >= 0


def test_a_schedule_says_when_to_evaluate() -> None:
    """`eval_period(elapsed)` says when to evaluate."""
    dataset = batches(25)
    eval_period = ciclo.every(steps=10)  # {steps, samples, time}
    evaluated = []

    for elapsed, batch in ciclo.elapse(dataset):  # noqa: B007
        if eval_period(elapsed):
            # evaluate model here
            evaluated.append(elapsed.steps)

    assert [0, 10, 20] == evaluated


def test_callbacks_can_be_called_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Callbacks are called by hand with elapsed and state, or elapsed and logs."""
    dataset, state, total_steps = batches(30), new_state(), 30
    call_checkpoint = ciclo.every(steps=10)
    checkpoint = ciclo.checkpoint("logdir/my-model")
    keras_bar = ciclo.keras_bar(total=total_steps)

    for elapsed, batch in ciclo.elapse(dataset):
        logs, state = train_step(state, batch)  # jax function

        if call_checkpoint(elapsed):
            checkpoint(elapsed, state)  # state checkpointing

        keras_bar(elapsed, logs)  # keras progress bar

    assert 21 == checkpoint.latest_step  # after the step that counts as 20
    assert 21 == checkpoint.restore(state).step
    assert "30/30 ━━━━━━━━━━━━━━━━━━━━" in capsys.readouterr().out


def test_logs_filled_in_jit_are_committed_and_collected() -> None:
    """Logs are filled inside `jax.jit`, merged by assignment, committed and collected."""
    dataset, state = batches(30), new_state()
    history = ciclo.history()

    for elapsed, batch in ciclo.elapse(dataset):
        logs = ciclo.logs()
        # merge log updates
        logs.updates, state = train_step(state, batch)
        # commit logs
        history.commit(elapsed, logs)
    # collect log values e.g. for plotting
    steps, loss, accuracy = history.collect("steps", "loss", "accuracy")

    assert list(range(30)) == steps
    assert loss[-1] < loss[0]
    assert all(isinstance(value, float) for value in loss + accuracy)


def test_the_complete_example_runs() -> None:
    """The whole of it together."""
    dataset, state = batches(1000), new_state()
    total_steps = 100
    call_checkpoint = ciclo.every(steps=10)
    checkpoint = ciclo.checkpoint("logdir/my-model")
    keras_bar = ciclo.keras_bar(total=total_steps)
    end_period = ciclo.at(steps=total_steps)
    history = ciclo.history()

    for elapsed, batch in ciclo.elapse(dataset):
        logs = ciclo.logs()
        logs.updates, state = train_step(state, batch)

        if call_checkpoint(elapsed):
            checkpoint(elapsed, state)

        keras_bar(elapsed, logs)
        history.commit(elapsed, logs)
        if elapsed >= end_period:
            break

    steps, loss, accuracy = history.collect("steps", "loss", "accuracy")

    assert list(range(101)) == steps
    assert 101 == len(loss) == len(accuracy) == int(state.step)
    assert 101 == checkpoint.restore(state).step


def test_two_equal_schedules_are_two_keys() -> None:
    """Lists of callbacks by schedule; two `every(1)` are two keys."""
    dataset, state = batches(1000), new_state()
    total_steps = 100

    state, history, elapsed = ciclo.loop(
        state,
        dataset,
        {
            ciclo.every(1): [train_step],
            ciclo.every(steps=10): [ciclo.checkpoint("logdir/my-model")],
            ciclo.every(1): [ciclo.keras_bar(total=total_steps)],
        },
        stop=ciclo.at(steps=total_steps),
    )

    assert (100, 100, 800) == (int(state.step), elapsed.steps, elapsed.samples)
    assert 100 == len(history.collect("loss"))
    assert_saved(state, 100)


def test_a_single_callback_or_an_unpacked_object_is_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One callback instead of a list, and an object unpacked."""
    dataset, state = batches(1000), new_state()
    total_steps = 100

    state, history, elapsed = ciclo.loop(
        state,
        dataset,
        {
            ciclo.every(1): train_step,
            ciclo.every(steps=10): ciclo.checkpoint("logdir/my-model"),
            **ciclo.keras_bar(total=total_steps),
        },
        stop=ciclo.at(steps=total_steps),
    )

    assert (100, 100, 100) == (int(state.step), elapsed.steps, len(history))
    assert_saved(state, 100)
    assert "100/100 ━━━━━━━━━━━━━━━━━━━━" in capsys.readouterr().out


@pytest.mark.parametrize(
    "callback",
    [
        lambda: None,
        lambda state: None,
        lambda state, batch: state,
        lambda state, batch, elapsed: {"metrics": {"x": 1}},
        lambda state, batch, elapsed, loop_state: ({"metrics": {"x": 1}}, state),
        lambda state: (None, None),
    ],
    ids=range(6),
)
def test_loop_function_callbacks(callback: Any) -> None:
    """Between 0 and 4 arguments; `(logs | None, state | None) | logs | state | None`."""
    state, _, elapsed = ciclo.loop(7, range(3), {ciclo.every(1): callback})

    assert (7, 3) == (state, elapsed.steps)


def test_loop_callbacks_and_loop_state() -> None:
    """`__loop_callback__` gets a LoopState with all that the seed lists."""
    seen = []

    class Callback:
        def __loop_callback__(self, loop_state: ciclo.LoopState[int]) -> tuple[Any, int]:
            seen.append(
                (
                    loop_state.state,
                    loop_state.batch,
                    type(loop_state.history),
                    type(loop_state.elapsed),
                    type(loop_state.logs),
                    type(loop_state.accumulated_logs),
                    loop_state.metadata,
                    loop_state.stop_iteration,
                )
            )
            loop_state.stop_iteration = True
            return {"metrics": {"x": 1.0}}, loop_state.state + 1

    state, history, _ = ciclo.loop(1, "ab", {ciclo.every(1): Callback()}, metadata="m")

    kinds = (ciclo.History, ciclo.Elapsed, ciclo.Logs, ciclo.Logs)
    assert [(1, "a", *kinds, "m", False)] == seen
    assert (2, [1.0]) == (state, history.collect("x"))
