"""Ready-made loops: `train_loop`, `test_loop`, `predict_loop`, `fit`.

They put callbacks at named moments into the right order and hand the result to the one loop there
is. In each iteration: what an epoch begins with, the train step, tasks on schedules, callbacks of
each step; and after the last batch of an epoch the evaluation, then what an epoch ends with, so
that a checkpoint or an early stop sees the evaluation of the same state.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

from ciclo import _seam
from ciclo.binding import listed, name_of, pairs_of
from ciclo.callbacks import adapters
from ciclo.callbacks.base import LoopCallback
from ciclo.callbacks.inner_loop import inner_loop
from ciclo.elapsed import Period, as_period, whole
from ciclo.errors import CallbackError, CicloError, PeriodError
from ciclo.loop import LoopState, Result, State, iterate
from ciclo.schedules import always

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import SupportsIndex

    from ciclo.elapsed import BatchSize, Elapsed
    from ciclo.history import History
    from ciclo.loop import Tasks

on_train_start: Final = "on_train_start"
on_epoch_start: Final = "on_epoch_start"
on_reset_step: Final = "on_reset_step"
on_train_step: Final = "on_train_step"
on_test_step: Final = "on_test_step"
on_predict_step: Final = "on_predict_step"
on_epoch_end: Final = "on_epoch_end"
on_train_end: Final = "on_train_end"

MOMENTS = (
    on_train_start,
    on_epoch_start,
    on_reset_step,
    on_train_step,
    on_test_step,
    on_predict_step,
    on_epoch_end,
    on_train_end,
)


class Plan:
    """Who is called when: the user's tasks and the callbacks that registered, each in order."""

    def __init__(self, tasks: Tasks, callbacks: Iterable[Any]) -> None:
        self.tasks: dict[str, list[Any]] = {moment: [] for moment in MOMENTS}
        self.callbacks: dict[str, list[Any]] = {moment: [] for moment in MOMENTS}
        self.scheduled: list[tuple[Any, Any]] = []
        self._add(tasks, self.tasks)
        for callback in listed(callbacks):
            self._register(callback)

    def _add(self, tasks: Tasks, into: dict[str, list[Any]]) -> None:
        for key, callbacks in pairs_of(tasks or {}):
            if not isinstance(key, str):
                self.scheduled.append((key, callbacks))
            else:
                into[_moment(key)] += listed(callbacks)

    def _register(self, callback: Any) -> None:
        adapted = adapters.adapt(callback)
        callback = callback if adapted is None else adapted
        moments = getattr(callback, "moments", None)
        if isinstance(callback, LoopCallback) or isinstance(moments, tuple):
            for moment in moments or ():
                self.callbacks[_moment(moment)].append(callback)
        elif hasattr(callback, "items"):
            self._add(callback, self.callbacks)
        else:
            name = name_of(callback)
            raise CallbackError(
                f"{name} in callbacks=[...] does not say when it is due: give it as"
                f" {{ciclo.on_epoch_end: {name}}} or {{ciclo.every(100): {name}}}, or derive it"
                " from ciclo.LoopCallback"
            )

    def refuse(self, *moments: str) -> None:
        """Refuses callbacks that wait for moments which do not come."""
        for moment in moments:
            if self.callbacks[moment]:
                name = name_of(self.callbacks[moment][0])
                raise CallbackError(
                    f"{name} in callbacks=[...] would never be called: {moment} is for tasks here;"
                    f" give {{ciclo.{moment}: {name}}} as tasks"
                )

    def steps(self, moment: str, state: Any, is_needed: bool = True) -> list[Any]:
        """The tasks of a step; those of the state itself if there are none."""
        if self.tasks[moment]:
            return self.tasks[moment]
        method = moment.removeprefix("on_")
        if callable(getattr(state, method, None)):
            return [_method(method, takes_batch=moment != on_reset_step)]
        if not is_needed:
            return []
        raise CallbackError(
            f"there is nothing to do in a step: give {{ciclo.{moment}: {method}}} as tasks, or a"
            f" state that has a method {method}(batch)"
        )


def _moment(name: str) -> str:
    if name not in MOMENTS:
        raise CallbackError(f"{name!r} is no moment; use one of {', '.join(MOMENTS)}")
    return name


def _method(name: str, takes_batch: bool) -> Callable[..., Any]:
    """A callback that calls the state's own method."""

    def with_batch(state: Any, batch: Any) -> Any:
        return getattr(state, name)(batch)

    def alone(state: Any) -> Any:
        return getattr(state, name)()

    called = with_batch if takes_batch else alone
    called.__name__ = name
    return called


class Epochs:
    """A dataset in epochs; knows of the batch in hand whether it is the first or last of one."""

    def __init__(self, run: LoopState[Any]) -> None:
        self.run = run
        self.is_first = False
        self.is_last = False
        self.is_open = False  # begun, and not ended by its last batch
        self.count = 0  # batches of this epoch that were handed out
        self._is_resumed = False
        run._epochs = self

    def cut(self, dataset: Iterable[Any], length: int | None) -> Iterator[Any]:
        """One stream, an epoch every so many batches; all of it one epoch if `length` is None."""
        first = self.run.elapsed.steps
        begins = None if self._is_resumed else first  # a run that goes on is amid an epoch
        for step, batch in enumerate(self._read(dataset, False), first):
            if length is None:
                self.run.epoch, self.is_first, self.is_last = 0, step == begins, False
            else:
                self.run.epoch, place = divmod(step, length)
                self.is_first, self.is_last = place == 0 or step == begins, place == length - 1
            self.is_open = not self.is_last
            yield batch

    def repeat(self, source: Any, epochs: int | None, length: int | None) -> Iterator[Any]:
        """A dataset read again for each epoch.

        Where nobody says how long an epoch is, one batch is read ahead to see its end.
        """
        epoch, count = 0, 0
        rest: Iterable[Any] | None = None
        if self._is_resumed:
            epoch, count = self.run.epoch or 0, self.count
            if self.is_last and self.run._feed is not None:
                rest = self.run._feed.finish(_made(source))
                epoch, count = epoch + 1, 0
        while epochs is None or epoch < epochs:
            if length is None and epoch > 0 and hasattr(source, "__next__"):
                raise CicloError(
                    "train can be read only once; give a list, a loader, or a function that makes"
                    " one for each epoch: fit(state, lambda: batches(), ...)"
                )
            self.run.epoch, self.count = epoch, count
            dataset = _made(source)
            if rest is None and hasattr(getattr(dataset, "sampler", None), "set_epoch"):
                dataset.sampler.set_epoch(epoch)  # a DistributedSampler shuffles by it
            batches = iter(self._read(dataset, callable(source)) if rest is None else rest)
            expected = length if length is not None else _length(dataset)
            known = (
                self._numbered(batches) if expected is None else _counted(batches, expected, count)
            )
            for batch, self.is_last in known:
                self.is_first = self.count == 0
                self.is_open = not self.is_last
                self.count += 1
                yield batch
            if self.count == 0:
                return  # an epoch without a batch: there is nothing more to come
            epoch, count, rest = epoch + 1, 0, None

    def _read(self, dataset: Any, can_repeat: bool) -> Iterable[Any]:
        feed = self.run._feed
        return dataset if feed is None else feed.begin(dataset, can_repeat)

    def _numbered(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        feed = self.run._feed
        ahead: list[Any] = [] if feed is None else feed.ahead  # kept there, to be saved
        ahead += itertools.islice(batches, 1 - len(ahead))
        while ahead:
            batch = ahead.pop()
            ahead += itertools.islice(batches, 1)
            yield batch, not ahead

    def end(self) -> bool:
        """Ends the last epoch, when the loop ends in the middle of it; whether there was one."""
        is_open, self.is_open = self.is_open, False
        return is_open

    def state_dict(self) -> dict[str, Any]:
        return {"is_last": self.is_last, "is_open": self.is_open, "count": self.count}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.is_last, self.is_open = saved["is_last"], saved["is_open"]
        self.count = saved["count"]
        self._is_resumed = True


def _check_once(run: LoopState[Any]) -> list[tuple[Any, Any]]:
    """Asks a state that can tell, after its first step, whether that has trained it."""
    if not hasattr(run.state, "__loop_trained__"):
        return []
    is_due = [True]

    def check(loop_state: LoopState[Any]) -> None:
        is_due.clear()
        loop_state.state.__loop_trained__(loop_state.logs)

    return [(lambda elapsed: is_due, check)]


def _made(source: Any) -> Any:
    return source() if callable(source) else source


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _counted(batches: Iterator[Any], length: int, done: int) -> Iterator[tuple[Any, bool]]:
    count = done
    for count, batch in enumerate(itertools.islice(batches, length - done), done + 1):
        yield batch, count == length
    if 0 < count < length:
        raise CicloError(
            f"train said that an epoch has {length} batches, and had {count};"
            f" say fit(..., steps_per_epoch={count})"
        )


def train_loop(
    state: State,
    dataset: Iterable[Any],
    tasks: Tasks = None,
    stop: Period | SupportsIndex | None = None,
    *,
    epoch_duration: int | None = None,
    test_dataset: Any = None,
    test_name: str = "test",
    aggregation: Any = "mean",
    callbacks: Iterable[Any] = (),
    on_start: Any = None,
    on_end: Any = None,
    history: History | None = None,
    elapsed: Elapsed | None = None,
    metadata: Any = None,
    batch_size_fn: BatchSize | None = None,
    catch_keyboard_interrupt: bool = True,
    resume: Any = None,
) -> Result[State]:
    """Trains on one stream of batches, evaluating after each epoch of `epoch_duration` steps.

    tasks: callbacks by moment (`ciclo.on_train_step`, ...) or schedule. Without any, the methods
        `train_step(batch)`, `test_step(batch)` and `reset_step()` of the state.
    test_dataset: what to evaluate on, or a function that makes it; means are weighted by samples
    callbacks: objects that know when they are due, such as `ciclo.keras_bar()`
    resume: a folder of checkpoints to go on from, as in `loop`

    Without `epoch_duration` the whole loop is one epoch.
    """
    if whole("epoch_duration", epoch_duration) == 0:
        raise PeriodError("epoch_duration=0 is not valid; use 1 or more steps")
    period = None if stop is None else as_period(stop)
    run = LoopState(state, history=history, elapsed=elapsed, stop=period, metadata=metadata)
    epochs = Epochs(run)
    return _train(
        run,
        epochs,
        epochs.cut(dataset, epoch_duration),
        Plan(tasks, callbacks),
        (test_dataset, test_name, aggregation),
        on_start=on_start,
        on_end=on_end,
        batch_size_fn=batch_size_fn,
        catch_keyboard_interrupt=catch_keyboard_interrupt,
        resume=resume,
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
    aggregation: Any = "mean",
    history: History | None = None,
    elapsed: Elapsed | None = None,
    metadata: Any = None,
    batch_size_fn: BatchSize | None = None,
    catch_keyboard_interrupt: bool = True,
    resume: Any = None,
) -> Result[State]:
    """Trains for some epochs of a dataset, or some steps, and evaluates after each epoch.

    train, validation: what can be read again for each epoch, or a function that makes it
    train_step, test_step, reset_step: callbacks; without them, the methods of the state
    resume: a folder of checkpoints to go on from, as in `loop`

    >>> state, history, elapsed = ciclo.fit(
    ...     state, train, validation, epochs=10, callbacks=[ciclo.keras_bar()]
    ... )
    """
    if epochs is None and steps is None:
        raise PeriodError("fit() must know where to end: say epochs=10 or steps=1000")
    whole("epochs", epochs)
    if whole("steps_per_epoch", steps_per_epoch) == 0:
        raise PeriodError("steps_per_epoch=0 is not valid; use 1 or more")
    given = {on_train_step: train_step, on_test_step: test_step, on_reset_step: reset_step}
    pairs = [(moment, step) for moment, step in given.items() if step is not None]
    length = steps_per_epoch if steps_per_epoch is not None else _length(train)
    ends = [] if steps is None else [steps]
    if epochs is not None and length is not None:
        ends.append(epochs * length + (0 if elapsed is None else elapsed.steps))
    run = LoopState(
        state,
        history=history,
        elapsed=elapsed,
        stop=as_period(min(ends)) if ends else None,
        metadata=metadata,
    )
    cut = Epochs(run)
    return _train(
        run,
        cut,
        cut.repeat(train, epochs, steps_per_epoch),
        Plan([*pairs, *pairs_of(tasks or {})], callbacks),
        (validation, "valid", aggregation),
        on_start=None,
        on_end=None,
        batch_size_fn=batch_size_fn,
        catch_keyboard_interrupt=catch_keyboard_interrupt,
        resume=resume,
    )


def _train(
    run: LoopState[State],
    epochs: Epochs,
    batches: Iterator[Any],
    plan: Plan,
    evaluation: tuple[Any, str, Any],
    *,
    on_start: Any,
    on_end: Any,
    batch_size_fn: BatchSize | None,
    catch_keyboard_interrupt: bool,
    resume: Any,
) -> Result[State]:
    dataset, name, aggregation = evaluation
    plan.refuse(on_reset_step, on_test_step, on_predict_step)
    reset = plan.steps(on_reset_step, run.state, is_needed=False)
    ending: list[Any] = []
    if callable(getattr(run.state, "flush_step", None)):
        ending.append(_method("flush_step", takes_batch=False))
    if dataset is not None:
        if hasattr(dataset, "__next__"):  # not iter(): that would start a loader's workers
            raise CicloError(
                f"the dataset for {name!r} can be read only once; give a list, a loader, or a"
                " function that makes one: lambda: batches()"
            )
        test = {on_reset_step: reset, on_test_step: plan.steps(on_test_step, run.state)}
        ending.append(
            inner_loop(
                name,
                lambda state: test_loop(
                    state, dataset() if callable(dataset) else dataset, test, metadata=run.metadata
                ),
                aggregation=aggregation,
                weighted=True,
            )
        )
    ending += [*plan.tasks[on_epoch_end], *plan.callbacks[on_epoch_end]]
    beginning = [*plan.tasks[on_epoch_start], *plan.callbacks[on_epoch_start], *reset]
    tasks = [
        (lambda elapsed: epochs.is_first, beginning),
        (always(), plan.steps(on_train_step, run.state)),
        *_check_once(run),
        *plan.scheduled,
        (always(), plan.callbacks[on_train_step]),
        (lambda elapsed: epochs.is_last, ending),
    ]
    return iterate(
        run,
        batches,
        tasks,
        on_start=[*listed(on_start), *plan.tasks[on_train_start], *plan.callbacks[on_train_start]],
        on_end=[*plan.tasks[on_train_end], *plan.callbacks[on_train_end], *listed(on_end)],
        at_last=lambda: ending if epochs.end() else [],
        batch_size_fn=batch_size_fn,
        catch_keyboard_interrupt=catch_keyboard_interrupt,
        resume=resume,
        watch=_seam.watch(is_epoch_end=lambda: epochs.is_last, epoch=lambda: run.epoch or 0),
    )


def test_loop(
    state: State,
    dataset: Iterable[Any],
    tasks: Tasks = None,  # noqa: PT028  a loop, not a test
    stop: Period | SupportsIndex | None = None,  # noqa: PT028
    *,
    callbacks: Iterable[Any] = (),  # noqa: PT028
    **options: Any,
) -> Result[State]:
    """Runs `on_reset_step` once and `on_test_step` for each batch; options are those of `loop`."""
    return _pass(on_test_step, state, dataset, tasks, stop, callbacks, options)


def predict_loop(
    state: State,
    dataset: Iterable[Any],
    tasks: Tasks = None,
    stop: Period | SupportsIndex | None = None,
    *,
    callbacks: Iterable[Any] = (),
    **options: Any,
) -> Result[State]:
    """Runs `on_predict_step` for each batch; options are those of `loop`.

    What the step logs as outputs is in the history: `history.collect("outputs.logits")`.
    """
    return _pass(on_predict_step, state, dataset, tasks, stop, callbacks, options)


def _pass(
    moment: str,
    state: State,
    dataset: Iterable[Any],
    tasks: Tasks,
    stop: Period | SupportsIndex | None,
    callbacks: Iterable[Any],
    options: dict[str, Any],
) -> Result[State]:
    """One pass over a dataset, without epochs: callbacks of a train step go with each step."""
    from ciclo.loop import loop

    plan = Plan(tasks, callbacks)
    plan.refuse(on_reset_step, on_test_step, on_predict_step)
    starts = [
        *listed(options.pop("on_start", None)),
        *plan.callbacks[on_train_start],
        *plan.callbacks[on_epoch_start],
        *plan.steps(on_reset_step, state, False),
    ]
    ends = [
        *plan.callbacks[on_epoch_end],
        *plan.callbacks[on_train_end],
        *listed(options.pop("on_end", None)),
    ]
    steps = [
        (always(), plan.steps(moment, state)),
        *plan.scheduled,
        (always(), plan.callbacks[on_train_step]),
    ]
    return loop(state, dataset, steps, stop, on_start=starts, on_end=ends, **options)
