"""The loop: runs tasks on schedules over a dataset, with any state.

`loop` sets up, iterates, and always runs its end. Between two iterations, `LoopState` is complete:
checkpoints are taken there (`LoopState.defer`), and a resumed loop starts from one
(`LoopState.load_state_dict`, before the first batch).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypedDict, TypeVar

from ciclo import _seam, _trees, device_values
from ciclo.binding import (
    LOGGED,
    Bound,
    Task,
    bind,
    bind_tasks,
    check_new_state,
    listed,
    name_of,
    owners,
    read,
)
from ciclo.elapsed import Elapsed, Period, Timeline, as_period, check_elapsed
from ciclo.errors import CallbackError, refuse_unknown, shown, warn
from ciclo.history import History
from ciclo.interrupts import Interrupts, Preempted
from ciclo.logs import DICTS, Logs
from ciclo.schedules import anchors_of, restore_anchors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import SupportsIndex, TypeAlias, Unpack

    from ciclo.elapsed import BatchSize
    from ciclo.epochs import Epochs
    from ciclo.resume import Feed
    from ciclo.schedules import Schedule

    Tasks: TypeAlias = Any  # {schedule: callback or [callbacks]}, or a list of pairs

State = TypeVar("State")
NO_BATCH = (
    "the dataset is empty, so nothing ran; an iterator can be read only once: give a list, a"
    " loader, or a new iterator"
)
STEPS = "; a loop ends after stop=1000 steps, or stop=ciclo.at(samples=50_000)"
EPOCHS = "; for epochs, write ciclo.fit(state, dataset, epochs=3, train_step=train_step)"
EPOCHS_ONLY = "; it is an option of ciclo.train_loop. Tasks take callbacks: {ciclo.every(1): bar}"
INSTEAD = {  # options of other libraries' loops
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), EPOCHS),
    **dict.fromkeys(("steps", "num_steps", "max_steps", "total_steps"), STEPS),
    **dict.fromkeys(("callbacks", "epoch_duration", "test_dataset"), EPOCHS_ONLY),
    "strategy": "; it is an option of the function that creates the state",
    "batch_size": "; the dataset yields batches, so set their size there",
}


class LoopState(Generic[State]):
    """The complete state of a loop, which callbacks can take as an argument.

    Set `stop_iteration` to end the loop after this callback.
    """

    __slots__ = (
        "_committed",
        "_deferred",
        "_epochs",
        "_feed",
        "_first_row",
        "_is_cut",
        "_last",
        "_logged",
        "_stop",
        "_tasks",
        "_timeline",
        "batch",
        "elapsed",
        "epoch",
        "history",
        "is_interrupted",
        "metadata",
        "state",
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
        if not isinstance(history, (History, type(None))):
            raise TypeError(
                f"history={shown(history)} is not a history; give ciclo.history(), or the history"
                " of another loop"
            )
        if elapsed is not None:
            check_elapsed(elapsed, "elapsed=")
        self.state = state
        self.batch: Any = None
        self.history = History() if history is None else history  # the caller's object, which grows
        self.elapsed = Elapsed() if elapsed is None else elapsed
        self.metadata = metadata
        self._stop = stop
        self.stop_iteration = False
        self.is_interrupted = False
        self.epoch: int | None = None  # in a loop with epochs
        # The logs of this iteration: a plain dict of dicts, until `logs` is used.
        self._logged: dict[str, dict[str, Any]] | None = None
        self._committed: dict[str, dict[str, Any]] = {}  # the part of it that is in the history
        self._first_row = len(self.history)
        self._is_cut = False  # whether Ctrl-C interrupted an iteration, which then does not count
        self._deferred: list[Callable[[LoopState[State]], None]] = []
        self._tasks: list[Task] = []
        self._timeline: Timeline[Any] | None = None
        self._epochs: Epochs | None = None  # in a loop with epochs
        self._feed: Feed | None = None  # tracks the position in the data, in a loop that saves
        self._last: Elapsed | None = None  # the last iteration of the run that is resumed

    @property
    def loop_state(self) -> LoopState[State]:
        return self  # so that callbacks get it by attribute like the rest

    @property
    def stop(self) -> Period | None:
        """The `stop` of the loop."""
        return self._stop

    @stop.setter
    def stop(self, given: Any) -> None:
        raise AttributeError("to end a loop, write loop_state.stop_iteration = True")

    @property
    def logs(self) -> Logs:
        """The logs of this iteration so far."""
        logged = self._logged
        if not isinstance(logged, Logs):
            logged = self._logged = Logs._of(logged or {})
        return logged

    @logs.setter
    def logs(self, logs: Logs) -> None:
        self._logged = logs

    @property
    def accumulated_logs(self) -> Logs:
        """The latest value of every name, including this iteration."""
        newest = Logs._of(self.history.newest(self._first_row))
        if self._logged:
            newest.merge(self._logged)
        return newest

    def done(self) -> Elapsed:
        """The counts after this iteration."""
        if self._timeline is None:
            return self.elapsed
        return self._timeline.done(self.elapsed)

    def defer(self, function: Callable[[LoopState[State]], None]) -> None:
        """Calls a function after this iteration, when the LoopState is complete."""
        if not callable(function):
            raise CallbackError(f"defer({shown(function)}) needs a function of the loop_state")
        self._deferred.append(function)

    def take_deferred(self) -> list[Bound]:
        """The deferred functions; empties the list."""
        deferred, self._deferred = self._deferred, []
        return [Bound(name_of(getattr(one, "__self__", one)), one, one) for one in deferred]

    def take(self, name: str, result: Any) -> None:
        """Applies the logs and the state that a callback returned.

        Values are copied immediately, because the callback may reuse its dicts.
        """
        # The fast path of `read` and `merge` for most results; a third of the time.
        before = self.state
        if type(result) is tuple and len(result) == 2:
            logs, state = result
            is_clear = type(before) is not tuple
        else:
            logs, state, is_clear = result, None, not isinstance(before, dict)
        logged = self._logged
        kind = type(logs)
        if is_clear and (kind is dict or kind is Logs) and type(logged) is not Logs:
            if logged is None:
                logged = self._logged = {}
            for collection in logs:
                named = logs[collection]
                if type(collection) is not str or type(named) not in DICTS:
                    break
                if collection in logged:
                    logged[collection] |= named
                else:
                    logged[collection] = {**named}
            else:
                if state is None:
                    return
                kind = type(state)
                if kind is type(before) and (kind is not dict or LOGGED.isdisjoint(state)):
                    self.state = state
                else:
                    self._set_state(name, state)
                return
        logs, state = read(name, result, self.state)
        if logs is not None:
            self.logs.merge(logs)
        if state is not None:
            self._set_state(name, state)

    def _set_state(self, name: str, state: Any) -> None:
        if state is self:
            raise CallbackError(
                f"{name} returned the loop_state, not the state; set loop_state.state = ..., or"
                " return the new state"
            )
        if isinstance(state, Result):
            raise CallbackError(
                f"{name} returned the result of a loop, not a state; log it with"
                f' ciclo.inner_loop("test", {name}), or return result.state'
            )
        check_new_state(name, state, self.state)
        self.state = state

    def commit(self, watch: _seam.Watch | None = None) -> None:
        """Commits new logs of this iteration to the history."""
        logged = self._logged or {}
        new: dict[str, dict[str, Any]] = {}
        for collection, named in logged.items():
            before = self._committed.get(collection, {})
            new[collection] = {
                name: value
                for name, value in named.items()
                if name not in before or before[name] is not value
            }
        self.history.record(self.elapsed, new)
        if watch is not None:
            watch.mark(new, self.history.kept)
        self.note_committed()

    def note_committed(self) -> None:
        """Records that the logs so far are in the history."""
        logged = self._logged or {}
        self._committed = {collection: dict(named) for collection, named in logged.items()}

    def forget_logs(self) -> None:
        """Drops the logs of an interrupted iteration."""
        self._logged, self._committed = None, {}
        self.history.mend()

    def state_dict(self) -> dict[str, Any]:
        """Everything except `state`; valid between two iterations."""
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
        """Restores the `state_dict` of a loop with the same tasks, before the first iteration."""
        self.elapsed = Elapsed.from_state_dict(saved["elapsed"])
        restore_anchors(self._schedules(), self.elapsed, saved["anchors"])
        if saved["last"] is not None:
            self._last = Elapsed.from_state_dict(saved["last"][0])
            _, self._last.batch_samples, self._last.batch_tokens = saved["last"]
            self._last._anchors = self.elapsed._anchors
        self.history.load_state_dict(saved["history"])
        self._first_row = 0
        self.stop_iteration = saved["is_stopped"]
        self.epoch = saved["epoch"]
        if self._epochs is not None:
            self._epochs.load_state_dict(saved["epochs"])
        if self._feed is not None:
            self._feed.load_state_dict(saved["data"])
        for owner, state in zip(self._stateful(), saved["callbacks"], strict=True):
            owner.load_state_dict(state)

    def described_tasks(self) -> list[str]:
        """The tasks that a resumed run must have."""
        return [_describe(task) for task in self._counted()]

    def _schedules(self) -> list[tuple[str, Schedule]]:
        return [(_describe(task), task.schedule) for task in self._tasks]

    def _counted(self) -> list[Task]:
        """Functions, and objects with state; bars and loggers may differ in a resumed run."""
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
    """A description of a task that is the same in another process."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{task.schedule!r}: {task.bound.name}")


class Result(tuple[State, History, Elapsed], Generic[State]):
    """The result of a loop: `state, history, elapsed = ciclo.loop(...)`, and `is_interrupted`."""

    is_interrupted: bool

    @property
    def state(self) -> State:
        return self[0]

    @property
    def history(self) -> History:
        return self[1]

    @property
    def elapsed(self) -> Elapsed:
        """The counts of completed iterations, from which another loop can continue."""
        return self[2]


def loop(
    state: State,
    dataset: Iterable[Any],
    tasks: Tasks,
    stop: Period | SupportsIndex | None = None,
    **options: Unpack[LoopOptions],
) -> Result[State]:
    """Runs tasks on their schedules for each batch of a dataset.

    on_start, on_end: callbacks that run once, with the first batch and at the end
    history, elapsed: those of an earlier loop, to continue it
    metadata: any value, available as `loop_state.metadata`
    batch_size_fn: a function of the array shapes of a batch: samples, or (samples, tokens)
    catch_keyboard_interrupt: whether Ctrl-C ends the loop after the step; True by default
    resume: a folder of checkpoints; continues from the latest, or starts if there is none

    >>> state, history, elapsed = ciclo.loop(
    ...     0, range(10), {ciclo.every(1): lambda state, batch: state + batch}
    ... )
    >>> state
    45
    """
    return iterate(begin(loop, state, stop, options), dataset, tasks, options, _seam.watch())


class LoopOptions(TypedDict, total=False):
    """The options of every loop; see `loop`."""

    on_start: Any
    on_end: Any
    history: History | None
    elapsed: Elapsed | None
    metadata: Any
    batch_size_fn: BatchSize | None
    catch_keyboard_interrupt: bool
    resume: Any


OPTIONS = LoopOptions.__annotations__.keys()


def refuse_options(
    function: Callable[..., Any], options: LoopOptions, instead: Mapping[str, str] = INSTEAD
) -> None:
    """Raises a TypeError for an option that a public loop does not have."""
    if options.keys() - OPTIONS:
        import inspect

        known = [*list(inspect.signature(function).parameters)[:-1], *OPTIONS]
        refuse_unknown(function.__name__, options, known, instead)


def begin(
    function: Callable[..., Any],
    state: State,
    stop: Period | SupportsIndex | None,
    options: LoopOptions,
) -> LoopState[State]:
    """Creates the LoopState, and refuses unknown options.

    function: the public function, for the error
    """
    refuse_options(function, options)
    given: Any = {name: options.get(name) for name in ("history", "elapsed", "metadata")}
    return LoopState(state, stop=None if stop is None else as_period(stop), **given)


def iterate(
    run: LoopState[State],
    dataset: Iterable[Any],
    tasks: Tasks,
    options: LoopOptions,
    watch: _seam.Watch | None,
    at_last: Callable[[], list[Any]] | None = None,
) -> Result[State]:
    """Runs a loop; every public loop ends here.

    at_last: returns callbacks to run after the last iteration, unless it was interrupted
    """
    parts = _set_up(run, dataset, tasks, options, watch)
    done = run.elapsed
    failure: BaseException | None = None
    catches = options.get("catch_keyboard_interrupt", True)
    with Interrupts(catches, parts.is_saved) as interrupts:
        try:
            _start(run, _hooks(parts.callbacks, "on_loop_start"), parts.is_resumed)
            _run(run, parts, interrupts, watch)
            done = run.done()
            _finish(run, parts.callbacks, at_last, watch)
        except KeyboardInterrupt as error:
            done = run.elapsed if run._is_cut else run.done()
            run.forget_logs()
            run.is_interrupted = True
            if not catches or interrupts.is_urgent:
                failure = error
            else:
                interrupts.stop_outer()
        except BaseException as error:  # noqa: BLE001  raised again below, once the loop has ended
            run.forget_logs()
            failure = error
        finally:
            if watch is not None:
                watch.end(failure)
        failure = _end(run, parts.ends, failure)
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # else its traceback and this frame form a cycle
    return _result(run, done, interrupts)


class _Parts(NamedTuple):
    """The parts of a loop that is set up."""

    timeline: Timeline[Any]
    callbacks: list[Bound]  # each object once
    starts: list[Bound]  # run with the first batch
    ends: list[Bound]
    is_saved: bool
    is_resumed: bool


def _set_up(
    run: LoopState[Any],
    dataset: Iterable[Any],
    tasks: Tasks,
    options: LoopOptions,
    watch: _seam.Watch | None,
) -> _Parts:
    _trees.register()
    run._tasks = bind_tasks(tasks, watch)
    callbacks = owners(task.bound for task in run._tasks)
    can_save = any(hasattr(one.owner, "on_loop_done") for one in callbacks)
    is_saved = can_save or options.get("resume") is not None
    is_resumed = False
    if is_saved:
        from ciclo.resume import set_up

        is_resumed = set_up(run, callbacks, options.get("resume"))
        if run._epochs is None and run._feed is not None:
            dataset = run._feed.read(dataset)
    starts = [bind(one, watch) for one in listed(options.get("on_start"))]
    ends = [bind(one, watch) for one in listed(options.get("on_end"))]
    ends = [*_hooks(callbacks, "on_loop_end"), *ends]
    timeline = Timeline(dataset, run.elapsed, run.stop, options.get("batch_size_fn"), watch)
    return _Parts(timeline, callbacks, starts, ends, is_saved, is_resumed)


def _start(run: LoopState[Any], starts: list[Bound], is_resumed: bool) -> None:
    state = run.state
    for one in starts:
        run.take(one.name, _call(run, one))
    if is_resumed and starts:  # a resumed run has already done its start
        run.state = state
        run.forget_logs()
    run.commit()


def _run(
    run: LoopState[Any], parts: _Parts, interrupts: Interrupts, watch: _seam.Watch | None
) -> None:
    """The iterations, inlined: a function call takes a tenth of an iteration."""
    timeline, starts, is_resumed = parts.timeline, parts.starts, parts.is_resumed
    schedule = [(task.due, task.bound.call, task.bound.name) for task in run._tasks]
    history = run.history
    active: str | None = None  # the running callback, for the note of an error
    is_amid = False  # whether an iteration is in progress
    state = run.state
    try:
        for elapsed, batch in () if run.stop_iteration else timeline:
            run.elapsed = elapsed
            run.batch = batch
            run._logged = None
            if starts:
                for one in _starting(run, starts, is_resumed):
                    active = one.name
                    run.take(active, one.call(run))
                active = None
                if run.stop_iteration:
                    run.commit(watch)
                    break
            run._timeline = timeline
            state = run.state
            is_amid = True
            for due, call, active in schedule:
                if due is None or due(elapsed):
                    result = call(run)
                    if result is not None:
                        run.take(active, result)
                    if run.stop_iteration:
                        break
            logged = run._logged
            if logged:
                history.record(elapsed, logged)  # type: ignore[unreachable]  # `take` fills it
                if watch is not None:
                    watch.mark(logged, history.kept)
            is_amid = False
            if run._deferred:
                for one in run.take_deferred():
                    active = one.name
                    one.call(run)
            active = None
            if run.stop_iteration:
                break
            if interrupts.may_stop and interrupts.stops(elapsed.steps):
                run.is_interrupted = True
                break
        else:
            _warn_of_early_end(run, is_resumed)
    except KeyboardInterrupt:
        if is_amid:  # undo this iteration
            run.state = state
            run._is_cut = True
        raise
    except BaseException as error:
        _add_note(error, run, active)
        raise
    run.note_committed()
    _start(run, starts, is_resumed)  # if there was no batch
    if run._timeline is None and run._last is not None:  # a resumed run that was already complete
        run.elapsed, run._timeline = run._last, timeline
        if run._feed is not None:
            run._feed.settle()


def _finish(
    run: LoopState[Any],
    callbacks: list[Bound],
    at_last: Callable[[], list[Any]] | None,
    watch: _seam.Watch | None,
) -> None:
    """Runs callbacks that belong to the last iteration."""
    if at_last is not None and not run.is_interrupted:
        for one in at_last():
            bound = bind(one, watch)
            run.take(bound.name, _call(run, bound))
            run.commit(watch)
        for bound in run.take_deferred():
            _call(run, bound)
    for bound in _hooks(callbacks, "on_loop_done"):
        _call(run, bound)


def _call(run: LoopState[Any], one: Bound) -> Any:
    """Calls a callback outside the iterations."""
    try:
        return one.call(run)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _add_note(error, run, one.name)
        raise


def _result(run: LoopState[State], done: Elapsed, interrupts: Interrupts) -> Result[State]:
    returned: Any = getattr(type(run.state), "__loop_return__", None)
    if returned is not None:  # from now on the state belongs to the caller
        run.state = returned(run.state)
    finished: Result[State] = Result((run.state, run.history, done))
    finished.is_interrupted = run.is_interrupted
    if interrupts.preemption is not None:
        raise Preempted(interrupts.preemption, finished)
    if run.is_interrupted:
        warn(f"interrupted after {done.steps} steps; the loop returns the state so far")
    return finished


def _starting(run: LoopState[Any], starts: list[Bound], is_resumed: bool) -> Iterator[Bound]:
    """Yields the starting callbacks and empties the list."""
    state = run.state
    while starts:
        yield starts.pop(0)
    if is_resumed:
        run.state = state
        run.forget_logs()


def _hooks(callbacks: list[Bound], name: str) -> list[Bound]:
    """The methods with this name of all callbacks."""
    return [
        Bound(f"{name} of {one.name}", getattr(one.owner, name), one.owner)
        for one in callbacks
        if hasattr(type(one.owner), name)
    ]


def _end(
    run: LoopState[Any], ends: list[Bound], failure: BaseException | None
) -> BaseException | None:
    """Runs all callbacks at the end, even after errors; returns the first error."""
    for one in ends:
        try:
            run.take(one.name, one.call(run))
        except BaseException as error:  # noqa: BLE001  the others must run too; raised at the end
            _add_note(error, run, one.name)
            if failure is None:
                failure = error
            else:
                failure.add_note(f"then {one.name} failed: {type(error).__name__}: {error}")
    run.commit()
    return failure


def _add_note(error: BaseException, run: LoopState[Any], active: str | None) -> None:
    if active is None:
        step = run.elapsed.steps if run._timeline is None else run.elapsed.steps + 1
        error.add_note(f"ciclo: while fetching the batch of step {step}")
        return
    batch = "" if run.batch is None else f", batch {device_values.describe(run.batch)}"
    error.add_note(f"ciclo: in callback {active}, step {run.elapsed.steps}{batch}")


def _warn_of_early_end(run: LoopState[Any], is_resumed: bool) -> None:
    """Warns if the dataset was empty or ended before `stop`."""
    done, stop = run.done(), run.stop
    if stop is not None and stop.is_reached_by(done):
        return
    if run._timeline is None:
        if not is_resumed and not run.stop_iteration:
            warn(NO_BATCH)
        return
    counted = {} if stop is None else dict(stop._given())
    for name in ("steps", "samples", "tokens"):
        if name in counted:
            warn(
                f"the dataset ended after {getattr(done, name)} {name}, before stop={stop!r}; for"
                " more, use itertools.cycle(dataset), or ciclo.fit, which reads it again"
            )
            return
