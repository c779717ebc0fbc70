"""Ready-made loops: `train_loop`, `test_loop`, `predict_loop`, `fit`.

They order callbacks by their moments, and run the same loop as `ciclo.loop`. An iteration runs the
start of an epoch, the train step, tasks on schedules, and callbacks of each step. After the last
batch of an epoch comes the evaluation, then the end of the epoch, so that `checkpoint` and
`early_stopping` see the evaluation of the same state.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ciclo import _seam, moments
from ciclo import loop as run_loop  # `loops.loop` is a module, as in 0.1.9
from ciclo.binding import listed, pairs_of
from ciclo.callbacks.inner import inner_loop
from ciclo.elapsed import Period, as_period, whole
from ciclo.epochs import ONCE, Epochs, as_duration, length_of, made
from ciclo.errors import CicloError, PeriodError, check, refuse_unknown, warn
from ciclo.loop import (
    INSTEAD,
    NO_BATCH,
    OPTIONS,
    LoopState,
    Result,
    State,
    begin,
    iterate,
    refuse_options,
)
from ciclo.plan import Plan
from ciclo.schedules import always

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import SupportsIndex, Unpack

    from ciclo.loop import LoopOptions, Tasks

__all__ = ["fit", "predict_loop", "test_loop", "train_loop"]

INNER = ("aggregation", "weighted", "output_state")  # the rest are options of `loop`


def train_loop(
    state: State,
    dataset: Iterable[Any],
    tasks: Tasks = None,
    stop: Period | SupportsIndex | None = None,
    *,
    epoch_duration: Period | SupportsIndex | None = None,
    test_dataset: Any = None,
    test_duration: Period | SupportsIndex | None = None,
    test_name: str = "test",
    aggregation: Any = "last",
    inner_loop_kwargs: Mapping[str, Any] | None = None,
    callbacks: Iterable[Any] = (),
    **options: Unpack[LoopOptions],
) -> Result[State]:
    """Trains on one stream of batches, evaluating after each epoch of `epoch_duration`.

    tasks: callbacks by moment (`ciclo.on_train_step`, ...) or schedule; methods of the state with
        these names, or `train_step`, `test_step` and `reset_step`, run before them
    epoch_duration: a number of steps, or a period of steps, samples or time
    test_dataset: the data to evaluate on, or a function that returns it
    test_duration: where an evaluation ends; by default at the end of the test data
    aggregation: of the evaluation, as in `inner_loop`; "mean" is weighted by samples
    inner_loop_kwargs: more options of `inner_loop`, or of the evaluation loop
    callbacks: objects with their own moments, such as `ciclo.keras_bar()`, or with methods named
        like moments

    Other options are those of `loop`. Without `epoch_duration` the whole loop is one epoch.
    """
    duration = as_duration(epoch_duration)
    run = begin(train_loop, state, stop, options)
    epochs = Epochs(run)
    return _train(
        run,
        epochs,
        epochs.cut(dataset, duration, options.get("batch_size_fn")),
        Plan(state, tasks, callbacks),
        Evaluation(test_dataset, test_name, aggregation, test_duration, inner_loop_kwargs),
        options,
    )


def fit(
    state: State,
    train: Any,
    validation: Any = None,
    epochs: int | None = None,
    steps: int | None = None,
    callbacks: Iterable[Any] = (),
    *,
    train_step: Any = None,
    test_step: Any = None,
    reset_step: Any = None,
    tasks: Tasks = None,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    aggregation: Any = "mean",
    **options: Unpack[LoopOptions],
) -> Result[State]:
    """Trains for a number of epochs or steps, and evaluates after each epoch.

    train, validation: data that can be read once per epoch, or a function that returns it
    train_step, test_step, reset_step: callbacks; without them, the methods of the state
    validation_steps: number of batches to evaluate on; all by default

    Other options are those of `loop`.

    >>> state, history, elapsed = ciclo.fit(
    ...     state, train, validation, epochs=10, callbacks=[ciclo.keras_bar()]
    ... )
    """
    refuse_options(fit, options, INSTEAD | {"test_dataset": "; it is called validation here"})
    if epochs is None and steps is None:
        raise PeriodError("fit() needs an end: epochs=10 or steps=1000")
    whole("epochs", epochs)
    if whole("steps_per_epoch", steps_per_epoch) == 0:
        raise PeriodError("steps_per_epoch=0 is not valid; use 1 or more")
    own = {
        moments.on_train_step: train_step,
        moments.on_test_step: test_step,
        moments.on_reset_step: reset_step,
    }
    pairs = [(moment, step) for moment, step in own.items() if step is not None]
    length = steps_per_epoch if steps_per_epoch is not None else length_of(train)
    if length is None and hasattr(train, "__next__") and epochs is not None and epochs > 1:
        raise CicloError(ONCE)
    if length == 0:
        warn(NO_BATCH)
    run = begin(fit, state, steps, options)
    if epochs is not None and length is not None:
        end = epochs * length + run.elapsed.steps
        given = {} if run.stop is None else dict(run.stop._given())
        given["steps"] = min(end, given.get("steps", end))
        run._stop = Period.create(**given)
    cut = Epochs(run)
    return _train(
        run,
        cut,
        cut.repeat(train, epochs, steps_per_epoch),
        Plan(state, [*pairs, *pairs_of(tasks or {})], callbacks, [moment for moment, _ in pairs]),
        Evaluation(validation, "valid", aggregation, validation_steps, None),
        options,
    )


class Evaluation:
    """The evaluation after an epoch."""

    def __init__(
        self,
        dataset: Any,
        name: str,
        aggregation: Any,
        duration: Period | SupportsIndex | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        self.dataset = dataset
        self.name = name
        self.stop = None if duration is None else as_period(duration)
        options = {} if options is None else options
        check("inner_loop_kwargs", options, lambda one: {**one} == one, "a dict of options")
        given = {"aggregation": aggregation, "weighted": True, **options}
        self._inner = {key: given.pop(key) for key in INNER if key in given}
        self._options = given
        refuse_unknown("inner_loop", given, [*INNER, *OPTIONS])
        if hasattr(dataset, "__next__"):  # not iter(): that would start a loader's workers
            raise CicloError(
                f"the dataset for {name!r} can be read only once; give a list, a loader, or a"
                " function that returns one: lambda: batches()"
            )

    def callbacks(self, plan: Plan, metadata: Any) -> list[Any]:
        """The callback that evaluates, if there is a dataset."""
        if self.dataset is None:
            plan.refuse(moments.on_test_begin, moments.on_test_batch_begin, moments.on_test_step)
            plan.refuse(moments.on_test_batch_end, moments.on_test_end)
            if plan.tasks[moments.on_test_step]:
                warn(
                    "a test step was given, but no data to test on: use test_dataset=, or, in"
                    " fit, validation="
                )
            return []
        steps = [
            *plan.all_at(moments.on_test_batch_begin),
            *plan.steps(moments.on_test_step),
            *plan.callbacks[moments.on_test_step],
            *plan.all_at(moments.on_test_batch_end),
        ]
        options = {"metadata": metadata, **self._options}
        starts = [*plan.all_at(moments.on_reset_step), *plan.all_at(moments.on_test_begin)]
        starts += listed(options.pop("on_start", None))
        ends = [*plan.all_at(moments.on_test_end), *listed(options.pop("on_end", None))]

        def evaluate(state: Any) -> Result[Any]:
            tasks = [(always(), steps)]
            batches, stop = made(self.dataset), self.stop
            return run_loop(state, batches, tasks, stop, on_start=starts, on_end=ends, **options)

        inner = inner_loop(self.name, evaluate, **self._inner)
        inner.span_name = "evaluation"  # as that of other frameworks, which readers know
        return [inner]


def _train(
    run: LoopState[State],
    epochs: Epochs,
    batches: Iterator[Any],
    plan: Plan,
    evaluation: Evaluation,
    options: LoopOptions,
) -> Result[State]:
    plan.refuse(moments.on_predict_step)
    ending: list[Any] = []
    if callable(getattr(run.state, "flush_step", None)):
        ending.append(_flush)
    ending += [*evaluation.callbacks(plan, run.metadata), *plan.all_at(moments.on_epoch_end)]
    beginning = [*plan.all_at(moments.on_epoch_start), *plan.all_at(moments.on_reset_step)]
    tasks = [
        (lambda elapsed: epochs.is_first, beginning),
        (always(), plan.all_at(moments.on_train_batch_begin)),
        (always(), plan.steps(moments.on_train_step)),
        *_check_once(run),
        *plan.scheduled,
        (always(), plan.callbacks[moments.on_train_step]),
        (always(), plan.all_at(moments.on_train_batch_end)),
        (lambda elapsed: epochs.is_over(), ending),
    ]
    before, at_start = run.done().steps, _array_ids(run.state)
    result = iterate(
        run,
        batches,
        tasks,
        {
            **options,
            "on_start": [*listed(options.get("on_start")), *plan.all_at(moments.on_train_start)],
            "on_end": [*plan.all_at(moments.on_train_end), *listed(options.get("on_end"))],
        },
        _seam.watch(is_epoch_end=lambda: epochs.is_last, epoch=lambda: run.epoch or 0),
        at_last=lambda: ending if epochs.end() else [],
    )
    if at_start and result.elapsed.steps > before and _array_ids(result.state) == at_start:
        warn(
            "no step returned a new state, so nothing was trained; end the train step with\n"
            "    return logs, state"
        )
    return result


def _array_ids(state: Any) -> list[int]:
    """The ids of the JAX arrays in a state; these are immutable."""
    jax: Any = sys.modules.get("jax")
    leaves = [] if jax is None else jax.tree.leaves(state)
    return [id(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]


def _flush(state: Any) -> Any:
    return state.flush_step()


_flush.__name__ = "flush_step"  # the name of the task in a checkpoint


def _check_once(run: LoopState[Any]) -> list[tuple[Any, Any]]:
    """Checks after the first step that a managed state was trained."""
    if not hasattr(run.state, "__loop_trained__"):
        return []
    is_due = [True]

    def check(loop_state: LoopState[Any]) -> None:
        is_due.clear()
        loop_state.state.__loop_trained__(loop_state.logs)

    return [(lambda elapsed: is_due, check)]


def test_loop(
    state: State,
    dataset: Iterable[Any],
    tasks: Tasks = None,  # noqa: PT028  a loop, not a test
    stop: Period | SupportsIndex | None = None,  # noqa: PT028
    *,
    callbacks: Iterable[Any] = (),  # noqa: PT028
    **options: Unpack[LoopOptions],
) -> Result[State]:
    """Runs `on_reset_step` once and `on_test_step` for each batch; options are those of `loop`."""
    return _pass(moments.on_test_step, state, dataset, tasks, stop, callbacks, options)


def predict_loop(
    state: State,
    dataset: Iterable[Any],
    tasks: Tasks = None,
    stop: Period | SupportsIndex | None = None,
    *,
    callbacks: Iterable[Any] = (),
    **options: Unpack[LoopOptions],
) -> Result[State]:
    """Runs `on_predict_step` for each batch; options are those of `loop`.

    Outputs that the step logs are in the history: `history.collect("outputs.logits")`.
    """
    return _pass(moments.on_predict_step, state, dataset, tasks, stop, callbacks, options)


def _pass(
    moment: str,
    state: State,
    dataset: Iterable[Any],
    tasks: Tasks,
    stop: Period | SupportsIndex | None,
    callbacks: Iterable[Any],
    options: LoopOptions,
) -> Result[State]:
    """One pass over a dataset, without epochs; callbacks of train steps run in each step."""
    plan = Plan(state, tasks, callbacks)
    plan.refuse(moments.on_predict_step if moment == moments.on_test_step else moments.on_test_step)
    is_test = moment == moments.on_test_step
    starts = [
        *listed(options.get("on_start")),
        *plan.callbacks[moments.on_train_start],
        *plan.callbacks[moments.on_epoch_start],
        *(plan.all_at(moments.on_test_begin) if is_test else ()),
        *plan.all_at(moments.on_reset_step),
    ]
    ends = [
        *(plan.all_at(moments.on_test_end) if is_test else ()),
        *plan.callbacks[moments.on_epoch_end],
        *plan.callbacks[moments.on_train_end],
        *listed(options.get("on_end")),
    ]
    steps = [
        (always(), plan.all_at(moments.on_test_batch_begin) if is_test else []),
        (always(), [*plan.steps(moment), *plan.callbacks[moment]]),
        *plan.scheduled,
        (always(), plan.callbacks[moments.on_train_step]),
        (always(), plan.all_at(moments.on_test_batch_end) if is_test else []),
    ]
    run = begin(test_loop if is_test else predict_loop, state, stop, options)
    options = {**options, "on_start": starts, "on_end": ends}
    return iterate(run, dataset, steps, options, _seam.watch())
