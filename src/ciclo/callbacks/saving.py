"""`checkpoint`: saves the state and the loop, so that a run can be resumed."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Any

from ciclo import device_values
from ciclo.callbacks.base import LoopCallback, check_mode, may_come, missing, number
from ciclo.checkpoints import tree
from ciclo.checkpoints.folder import Folder, Writer
from ciclo.checkpoints.manifest import HOW_TO_TRUST
from ciclo.elapsed import check_elapsed
from ciclo.errors import CheckpointError, check, warn
from ciclo.logs import Logs
from ciclo.processes import Process

if TYPE_CHECKING:
    import os

    from ciclo.elapsed import Elapsed
    from ciclo.logs import LogsLike
    from ciclo.loop import LoopState

__all__ = ["checkpoint"]


class checkpoint(LoopCallback):  # noqa: N801  a name like the functions beside it
    """Saves the state to a folder, with everything that `resume=` needs.

    prefix: the name of a checkpoint before its step number; "step-" by default
    keep: number of latest checkpoints to keep; None for all
    monitor: a logged value; as many of the best checkpoints are kept too
    mode: whether the smallest ("min") or the largest ("max") is the best
    keep_every_n_steps: also keep the first checkpoint of each n steps
    overwrite: whether a new run may replace the checkpoints of an earlier one
    asynchronous: whether writing happens in the background
    async_manager: ignored; see `asynchronous`
    trusted: whether to load pickles, also with `resume=`; a pickle can run any code

    >>> save = ciclo.checkpoint("runs/a", keep=2, monitor="loss_valid")
    >>> ciclo.loop(state, data, {ciclo.every(1): step, ciclo.every(1000): save}, resume="runs/a")
    >>> state = save.restore(state)
    """

    moments = ("on_epoch_end",)

    def __init__(
        self,
        directory: str | os.PathLike[str],
        prefix: str | None = None,
        keep: int | None = 1,
        overwrite: bool = False,
        keep_every_n_steps: int | None = None,
        *,
        monitor: str | None = None,
        mode: str = "min",
        asynchronous: bool = True,
        trusted: bool = False,
        async_manager: Any = None,
    ) -> None:
        check_mode("checkpoint", monitor, mode)
        if mode == "max" and monitor is None:
            raise ValueError('mode="max" needs a name: monitor="accuracy"')
        for name, given in (("keep", keep), ("keep_every_n_steps", keep_every_n_steps)):
            if given is not None:
                check(name, given, lambda one: type(one) is int and one > 0, "1 or more, or None")
        self.folder = Folder(directory) if prefix is None else Folder(directory, prefix)
        self.keep = keep
        self.monitor = monitor
        self.mode = mode
        self.keep_every_n_steps = keep_every_n_steps
        self.overwrite = overwrite
        self.asynchronous = asynchronous
        self.trusted = trusted
        self._writer = Writer.of(self.folder.path)
        self._ours: set[int] = set()  # steps that this run saved or resumed from
        self._is_checked = False
        self._is_deferred = False
        self._is_warned = False

    # -- in a loop -----------------------------------------------------------------------------

    def on_loop_start(self, loop_state: LoopState[Any]) -> None:
        self._is_checked, self._is_deferred = False, False
        done = loop_state.done().steps
        self._ours = {step for step in self.folder.steps() if step <= done}
        self._check(done)

    def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
        if not self._is_deferred:
            self._is_deferred = True
            loop_state.defer(self._save_loop)

    def on_loop_done(self, loop_state: LoopState[Any]) -> None:
        """Saves the final state, before `early_stopping` may restore the best one."""
        self._save_loop(loop_state)

    def on_loop_end(self, loop_state: LoopState[Any]) -> None:
        self.wait()
        if self.monitor is not None and self._ours and not self._best():
            warn(
                f"checkpoint monitors {self.monitor!r}, which was not logged in any saved step, or"
                " only as NaN"
            )

    def _save_loop(self, loop_state: LoopState[Any]) -> None:
        self._is_deferred = False
        done = loop_state.done()
        if done.steps in self._ours:
            return
        # Not the accumulated logs: an earlier value belongs to another state.
        logs = loop_state.logs
        known: Logs | None = loop_state.accumulated_logs
        if loop_state._timeline is None or may_come(loop_state):
            known = None
        self._save(done.steps, loop_state.state, logs, known, loop_state.state_dict())

    # -- by hand -------------------------------------------------------------------------------

    def __call__(self, elapsed: Elapsed, state: Any, logs: LogsLike | None = None) -> None:
        """Saves the state after the step of `elapsed`, in a hand-written loop."""
        check_elapsed(elapsed, "the first argument of a checkpoint")
        step = elapsed.done().steps
        if step not in self._ours:
            given = Logs(logs)
            self._save(step, state, given, given, None)

    def wait(self) -> None:
        """Waits until everything is on disk; raises errors of the background thread."""
        self._writer.wait()

    @property
    def steps(self) -> list[int]:
        """The saved steps."""
        self.wait()
        return self.folder.steps()

    @property
    def latest_step(self) -> int | None:
        """The latest saved step."""
        self.wait()
        return self.folder.latest()

    @property
    def best_step(self) -> int | None:
        """The saved step with the best value of `monitor`."""
        self.wait()
        return next(iter(self._best()), None)

    def restore(
        self, like: Any = tree.NOTHING, step: int | str = "latest", *, trusted: bool = False
    ) -> Any:
        """A saved state with the types of `like`; modules and optimizers are restored in place.

        step: a number, "latest" or "best"
        trusted: whether to load pickles; a pickle can run any code
        """
        self.wait()
        if isinstance(step, str):
            check("step", step, ("latest", "best").__contains__, 'a number, "latest" or "best"')
            found = self.latest_step if step == "latest" else self.best_step
        else:
            found = step if step in self.folder.steps() else None
        if found is None:
            there = ", ".join(map(str, self.folder.steps())) or "no step"
            raise CheckpointError(f"{self.folder.path} has no {step} checkpoint; it has {there}")
        manifest = self.folder.manifest(found)
        return tree.load(manifest, "state", like, is_trusted=trusted or self.trusted)

    # -- both ----------------------------------------------------------------------------------

    def _save(
        self, step: int, state: Any, logs: Logs, known: Logs | None, loop: dict[str, Any] | None
    ) -> None:
        self._writer.wait()
        self._check(step)
        process = Process()
        if not self._is_checked:
            self._is_checked = True
            if process.rank == 0:
                self.folder.clear()
            process.wait_for_all()
        draft = self.folder.begin(step, process)
        value = self._value(logs, known, bool(loop and loop["epochs"]))
        frozen = tree.freeze(state, "state")
        pickled = frozen.pickled
        work = tree.begin_state(frozen, draft, process, self.asynchronous)
        if loop is not None:
            name = f"loop-{process.rank}" if process.rank else "loop"
            frozen = tree.freeze(loop, "loop")
            pickled = pickled + frozen.pickled
            work += tree.begin(frozen, draft, name, self.asynchronous)
        if pickled and not self.trusted and not self._is_warned:
            self._is_warned = True
            warn(f"{pickled[0]} is saved as a pickle, which can run code; {HOW_TO_TRUST}")
        replaced = set(self.folder.steps()) - self._ours if self.overwrite else set()
        self._ours.add(step)
        about = {"monitor": self.monitor, "value": value, "is_resumable": loop is not None}

        def write() -> None:
            for one in work:
                one()
            self.folder.commit(draft, step, about, process)
            if process.rank == 0:
                self._prune(replaced - {step})

        self._writer.start(write)
        if not self.asynchronous:
            self._writer.wait()

    def _check(self, step: int) -> None:
        """A new run must not mix its checkpoints with those of an earlier run."""
        found = [s for s in self.folder.steps() if s >= step and s not in self._ours]
        others = list(self.folder.whole(found))
        if others and not self.overwrite:
            raise CheckpointError(
                f"{self.folder.path} has the checkpoint of step {others[-1]} of an earlier run;"
                f' use resume="{self.folder.path}" to continue it, overwrite=True to start again,'
                " or another folder"
            )

    def _value(self, logs: Logs, known: Logs | None, has_epochs: bool) -> float | None:
        """The monitored value; None if this step did not log it, or for NaN, which is never best.

        known: everything logged so far, to detect a wrong name; None if it is too early for that
        """
        if self.monitor is None:
            return None
        if known is not None and known.find(self.monitor) is None:
            raise missing("checkpoint", self.monitor, known, has_epochs=has_epochs)
        if logs.find(self.monitor) is None:
            return None
        value = number(device_values.fetch([logs.value(self.monitor)])[0])
        if value is None:
            raise CheckpointError(f"checkpoint monitors {self.monitor!r}, which is not a number")
        return None if isnan(value) else value

    def _best(self) -> list[int]:
        """The steps that have a value, best first; the latest first for equal values."""
        sign = 1 if self.mode == "min" else -1
        found = [
            (sign * manifest.value, -step)
            for step, manifest in self.folder.whole(self.folder.steps()).items()
            if manifest.value is not None and manifest.monitor == self.monitor
        ]
        return [-step for _, step in sorted(found)]

    def _prune(self, replaced: set[int]) -> None:
        steps = [step for step in self.folder.steps() if step not in replaced]
        kept = set(steps if self.keep is None else steps[-self.keep :])
        if self.monitor is not None:
            kept |= set(self._best()[: self.keep])
        if self.keep_every_n_steps is not None:
            first: dict[int, int] = {}
            for step in steps:
                first.setdefault(step // self.keep_every_n_steps, step)
            kept |= {step for number, step in first.items() if number > 0}
        for step in replaced | (set(steps) - kept):
            self.folder.remove(step)
