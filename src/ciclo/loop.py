"""The loop: tasks on schedules over a dataset, with any state.

`loop` sets up, iterates, and always ends. Between two iterations everything that it knows is in
`LoopState`: that is where a checkpoint is taken (`LoopState.defer`), and what a loop that goes on
begins with (`LoopState.load_state_dict`, before the first batch).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ciclo import _seam, _trees, values
from ciclo.binding import Bound, Task, bind, bind_tasks, listed, name_of, owners, read
from ciclo.elapsed import Elapsed, Period, Timeline, as_period
from ciclo.errors import CallbackError
from ciclo.history import History
from ciclo.interrupts import Interrupts, Preempted
from ciclo.logs import Logs
from ciclo.schedules import anchors_of, restore_anchors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import SupportsIndex, TypeAlias

    from ciclo.elapsed import BatchSize
    from ciclo.logs import LogsLike
    from ciclo.loops import Epochs
    from ciclo.resume import Feed
    from ciclo.schedules import Schedule

    Tasks: TypeAlias = Any  # {schedule: callback or [callbacks]}, or pairs of them

State = TypeVar("State")


class LoopState(Generic[State]):
    """All that a loop knows; what a callback that asks for it is given.

    Set `stop_iteration` to end the loop after this iteration.
    """

    __slots__ = (
        "_accumulated",
        "_deferred",
        "_epochs",
        "_feed",
        "_last",
        "_tasks",
        "_timeline",
        "batch",
        "elapsed",
        "epoch",
        "history",
        "is_interrupted",
        "logs",
        "metadata",
        "state",
        "stop",
        "stop_iteration",
    )

    def __init__(
        self,
        state: State,
        *,
        history: History | None = None,
        elapsed: Elapsed | None = None,
        stop: Period | None = None,
        metadata: Any = None,
    ) -> None:
        self.state = state
        self.batch: Any = None
        self.history = History() if history is None else history.copy()
        self.elapsed = Elapsed() if elapsed is None else elapsed
        self.logs = Logs()
        self.metadata = metadata
        self.stop = stop  # where the loop was told to end
        self.stop_iteration = False
        self.is_interrupted = False
        self.epoch: int | None = None  # of a loop that knows epochs
        self._accumulated = Logs()
        self._deferred: list[Callable[[LoopState[State]], None]] = []
        self._tasks: list[Task] = []
        self._timeline: Timeline[Any] | None = None
        self._epochs: Epochs | None = None  # of a loop that knows epochs
        self._feed: Feed | None = None  # what knows where the data is, if somebody saves that
        self._last: Elapsed | None = None  # the last iteration of the run that goes on

    @property
    def itself(self) -> LoopState[State]:
        return self

    @property
    def accumulated_logs(self) -> Logs:
        """The newest value of everything that was logged so far, in this iteration too."""
        if self.logs:
            self._accumulated.merge(self.logs)
        return self._accumulated

    def done(self) -> Elapsed:
        """The counts once this iteration is done."""
        if self._timeline is None:
            return self.elapsed
        return self._timeline.done(self.elapsed)

    def defer(self, function: Callable[[LoopState[State]], None]) -> None:
        """Has a function called between this iteration and the next, when this state is whole."""
        self._deferred.append(function)

    def take_deferred(self) -> list[Bound]:
        """What was deferred, to be called now."""
        deferred, self._deferred = self._deferred, []
        return [Bound(name_of(function), function, function) for function in deferred]

    def take(self, name: str, result: Any) -> LogsLike | None:
        """Takes over the logs and the state that a callback returned; says which logs."""
        logs, state = read(name, result, self.state)
        if logs is not None:
            self.logs.merge(logs)
        if state is self:
            raise CallbackError(
                f"{name} returned the loop_state, which is not the state; change that in place with"
                " loop_state.state = ..., or return the new one"
            )
        if state is not None:
            self.state = state
        return logs

    def commit(self) -> None:
        """Puts the logs of this iteration into the history."""
        if self.logs:
            self.history.commit(self.elapsed, self.logs)
            self._accumulated.merge(self.logs)

    def state_dict(self) -> dict[str, Any]:
        """Everything but `state` itself; to be taken between two iterations."""
        last = self.elapsed if self._timeline is not None else self._last
        return {
            "elapsed": self.done().state_dict(),
            "last": last and [last.state_dict(), last.batch_samples, last.batch_tokens],
            "tasks": self.described_tasks(),
            "anchors": anchors_of(self._schedules(), self.elapsed),
            "history": self.history.state_dict(),
            "is_stopped": self.stop_iteration,
            "epoch": self.epoch,
            "epochs": None if self._epochs is None else self._epochs.state_dict(),
            "data": None if self._feed is None else self._feed.state_dict(),
            "callbacks": [owner.state_dict() for owner in self._stateful()],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes up where another loop with the same tasks was; before the first iteration."""
        self.elapsed = Elapsed.from_state_dict(saved["elapsed"])
        restore_anchors(self._schedules(), self.elapsed, saved["anchors"])
        if saved["last"] is not None:
            self._last = Elapsed.from_state_dict(saved["last"][0])
            _, self._last.batch_samples, self._last.batch_tokens = saved["last"]
            self._last._anchors = self.elapsed._anchors
        self.history.load_state_dict(saved["history"])
        for path in self.history.names():
            collection, _, name = path.partition(".")
            self._accumulated.add(collection, name, self.history.last(path))
        self.stop_iteration = saved["is_stopped"]
        self.epoch = saved["epoch"]
        if self._epochs is not None:
            self._epochs.load_state_dict(saved["epochs"])
        if self._feed is not None:
            self._feed.load_state_dict(saved["data"])
        for owner, state in zip(self._stateful(), saved["callbacks"], strict=True):
            owner.load_state_dict(state)

    def described_tasks(self) -> list[str]:
        """The tasks that a run must have to go on where another was."""
        return [_describe(task) for task in self._counted()]

    def _schedules(self) -> list[tuple[str, Schedule]]:
        return [(_describe(task), task.schedule) for task in self._tasks]

    def _counted(self) -> list[Task]:
        """Functions, and objects with a state; bars and loggers may come and go."""
        return [
            task
            for task in self._tasks
            if not hasattr(type(task.bound.owner), "__loop_callback__")
            or hasattr(type(task.bound.owner), "load_state_dict")
        ]

    def _stateful(self) -> list[Any]:
        bound = owners(task.bound for task in self._tasks)
        return [one.owner for one in bound if hasattr(type(one.owner), "load_state_dict")]


def _describe(task: Task) -> str:
    """A task in words that are the same in another process."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{task.schedule!r}: {task.bound.name}")


class Result(tuple[State, History, Elapsed], Generic[State]):
    """What a loop returns: `state, history, elapsed = ciclo.loop(...)`, and how it ended."""

    is_interrupted: bool

    @property
    def state(self) -> State:
        return self[0]

    @property
    def history(self) -> History:
        return self[1]

    @property
    def elapsed(self) -> Elapsed:
        """The counts of the iterations that are done, from which another loop may go on."""
        return self[2]


def loop(
    state: State,
    dataset: Iterable[Any],
    tasks: Tasks,
    stop: Period | SupportsIndex | None = None,
    *,
    on_start: Any = None,
    on_end: Any = None,
    history: History | None = None,
    elapsed: Elapsed | None = None,
    metadata: Any = None,
    batch_size_fn: BatchSize | None = None,
    catch_keyboard_interrupt: bool = True,
    resume: Any = None,
) -> Result[State]:
    """Runs tasks on their schedules for each batch of a dataset.

    resume: a folder of checkpoints: goes on from the newest there, or begins if there is none

    >>> state, history, elapsed = ciclo.loop(
    ...     0, range(10), {ciclo.every(1): lambda state, batch: state + batch}
    ... )
    >>> state
    45
    """
    period = None if stop is None else as_period(stop)
    run = LoopState(state, history=history, elapsed=elapsed, stop=period, metadata=metadata)
    return iterate(
        run,
        dataset,
        tasks,
        on_start=on_start,
        on_end=on_end,
        batch_size_fn=batch_size_fn,
        catch_keyboard_interrupt=catch_keyboard_interrupt,
        resume=resume,
        watch=_seam.watch(),
    )


def iterate(
    run: LoopState[State],
    dataset: Iterable[Any],
    tasks: Tasks,
    *,
    on_start: Any,
    on_end: Any,
    batch_size_fn: BatchSize | None,
    catch_keyboard_interrupt: bool,
    resume: Any,
    watch: _seam.Watch | None,
    at_last: Callable[[], list[Any]] | None = None,
) -> Result[State]:
    """What every loop here does, ready-made ones too.

    at_last: asked after the last iteration for callbacks to run then, unless it was cut short
    """
    _trees.register()
    run._tasks = bind_tasks(tasks, watch)
    callbacks = owners(task.bound for task in run._tasks)
    is_saved = resume is not None or any(hasattr(one.owner, "on_loop_done") for one in callbacks)
    is_resumed = False
    if is_saved:
        from ciclo.resume import set_up

        is_resumed = set_up(run, callbacks, resume)
        if run._epochs is None and run._feed is not None:
            dataset = run._feed.read(dataset)
    starts = [*_hooks(callbacks, "on_loop_start"), *(bind(one, watch) for one in listed(on_start))]
    dones = _hooks(callbacks, "on_loop_done")
    ends = [*_hooks(callbacks, "on_loop_end"), *(bind(one, watch) for one in listed(on_end))]

    timeline = Timeline(dataset, run.elapsed, run.stop, batch_size_fn, watch)
    schedule = [(task.due, task.bound.call, task.bound) for task in run._tasks]
    done = run.elapsed
    active: Bound | None = None  # the callback that runs, for a note in its error
    is_amid = False  # whether an iteration has begun and is not done
    failure: BaseException | None = None
    with Interrupts(catch_keyboard_interrupt, is_saved) as interrupts:
        try:
            state = run.state
            for active in starts:
                run.take(active.name, active.call(run))
            active = None
            if is_resumed:  # what a start does was done when the run began
                run.state, run.logs = state, Logs()
            run.commit()
            for elapsed, batch in () if run.stop_iteration else timeline:
                run.elapsed = elapsed
                run.batch = batch
                run.logs = Logs()
                run._timeline = timeline
                state = run.state
                is_amid = True
                for due, call, active in schedule:
                    if due is None or due(elapsed):
                        result = call(run)
                        if result is not None:
                            run.take(active.name, result)
                if run.logs:
                    run.commit()
                    if watch is not None:
                        watch.mark(run.logs)
                is_amid = False
                if run._deferred:
                    for active in run.take_deferred():
                        active.call(run)
                active = None
                if run.stop_iteration:
                    break
                if interrupts.stops(elapsed.steps):
                    run.is_interrupted = True
                    break
            if run._timeline is None and run._last is not None:
                run.elapsed, run._timeline = run._last, timeline
                if run._feed is not None:
                    run._feed.settle()
            done = run.done()
            if at_last is not None and not run.is_interrupted:
                for active in [bind(one, watch) for one in at_last()]:
                    logs = run.take(active.name, active.call(run))
                    if watch is not None and logs:
                        watch.mark(logs)
                run.commit()
                for active in run.take_deferred():
                    active.call(run)
            for active in dones:
                active.call(run)
            active = None
        except KeyboardInterrupt as error:
            if is_amid:  # as if this iteration had not begun
                done, run.state = run.elapsed, state
            else:
                done = run.done()
            run.logs = Logs()
            run.is_interrupted = True
            if not catch_keyboard_interrupt or interrupts.is_urgent:
                failure = error
        except BaseException as error:  # noqa: BLE001  raised again below, once the loop has ended
            _add_note(error, run, active)
            run.logs = Logs()
            failure = error
        finally:
            if watch is not None:
                watch.end(failure)
        failure = _end(run, ends, failure)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # else its traceback and this frame keep each other alive
    returned: Any = getattr(type(run.state), "__loop_return__", None)
    if returned is not None:  # the state knows that it is the caller's from now on
        run.state = returned(run.state)
    finished: Result[State] = Result((run.state, run.history, done))
    finished.is_interrupted = run.is_interrupted
    if interrupts.preemption is not None:
        raise Preempted(interrupts.preemption, finished)
    if run.is_interrupted:
        _warn_of_interrupt(done)
    return finished


def _hooks(callbacks: list[Bound], name: str) -> list[Bound]:
    """The methods of this name that callbacks have."""
    return [
        Bound(f"{name} of {one.name}", getattr(one.owner, name), one.owner)
        for one in callbacks
        if hasattr(type(one.owner), name)
    ]


def _end(
    run: LoopState[Any], ends: list[Bound], failure: BaseException | None
) -> BaseException | None:
    """Runs all that is to run at the end, whatever happens; the first error of the loop counts."""
    for one in ends:
        try:
            run.take(one.name, one.call(run))
        except BaseException as error:  # noqa: BLE001  the others must run too; raised at the end
            _add_note(error, run, one)
            if failure is None:
                failure = error
            else:
                failure.add_note(f"then {one.name} failed: {type(error).__name__}: {error}")
    run.commit()
    return failure


def _add_note(error: BaseException, run: LoopState[Any], active: Bound | None) -> None:
    if active is None:
        step = run.elapsed.steps if run._timeline is None else run.elapsed.steps + 1
        error.add_note(f"ciclo: while fetching the batch of step {step}")
        return
    batch = "" if run.batch is None else f", batch {values.describe(run.batch)}"
    error.add_note(f"ciclo: in callback {active.name}, step {run.elapsed.steps}{batch}")


def _warn_of_interrupt(done: Elapsed) -> None:
    import logging

    logging.getLogger("ciclo").warning(
        "ciclo: interrupted after %d steps; what the loop returns is the state so far", done.steps
    )
