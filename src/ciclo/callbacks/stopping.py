"""Callbacks that end a loop: `early_stopping` and `nan_guard`."""

from __future__ import annotations

from math import inf, isnan
from typing import TYPE_CHECKING, Any

from ciclo import device_values
from ciclo.callbacks.base import (
    LoopCallback,
    check_mode,
    check_name,
    may_come,
    missing,
    number,
    scalars,
)
from ciclo.elapsed import Elapsed, Period, check_elapsed, whole
from ciclo.errors import CicloError, MonitorError, check, warn
from ciclo.logs import Logs
from ciclo.resume import checked
from ciclo.state_copy import StateCopy

if TYPE_CHECKING:
    from ciclo.logs import LogsLike
    from ciclo.loop import LoopState

__all__ = ["NotFiniteError", "early_stopping", "nan_guard"]


class early_stopping(LoopCallback):  # noqa: N801  a name like the functions beside it
    """Stops when a logged value no longer improves.

    patience: number of steps without improvement, or a period: `ciclo.at(time=600)`
    min_delta: smaller changes do not count as an improvement
    baseline: the first best value must be better than this
    restore_best_weights: whether the loop returns the best state, however it ends
    looks: number of evaluations without improvement, instead of `patience`

    By hand: `stop, state = stopping(elapsed, state, logs)`.
    """

    moments = ("on_epoch_end",)

    def __init__(
        self,
        monitor: str,
        patience: int | Period | None = None,
        min_delta: float = 0.0,
        mode: str = "min",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        *,
        looks: int | None = None,
    ) -> None:
        check_name(monitor)
        check_mode("early_stopping", monitor, mode)
        if (patience is None) == (looks is None):
            raise ValueError(
                "early_stopping needs patience=100 (steps, or a period as ciclo.at(time=600)) or"
                " looks=3 (evaluations), and not both"
            )
        if patience is not None and not isinstance(patience, Period):
            patience = Period(whole("patience", patience))
            check("patience", patience.steps, lambda one: one > 0, "1 or more, or ciclo.at(...)")
        if looks is not None:
            check("looks", whole("looks", looks), lambda one: one > 0, "1 or more")
        delta = number(min_delta)
        check("min_delta", min_delta, lambda _: delta is not None and delta >= 0, "0 or more")
        if baseline is not None:
            check("baseline", baseline, lambda one: number(one) is not None, "a number, or None")
        self.monitor = monitor
        self.patience = patience
        self.looks = looks
        self.min_delta = delta or 0.0
        self.mode = mode
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.best_elapsed: Elapsed | None = None
        self._since: Elapsed | None = None  # the last improvement, or the first value
        self._looks = 0  # evaluations since the best one
        self._kept: StateCopy | None = None
        self._saved: dict[str, Any] | None = None  # from a checkpoint, until the loop starts

    def on_loop_start(self, loop_state: LoopState[Any]) -> None:
        saved = self._saved
        self._reset()
        if saved is None:
            return
        with checked("the checkpoint has another early_stopping"):
            self.best, self._looks = saved["best"], saved["looks"]
            self.best_elapsed = saved["best_elapsed"] and Elapsed.from_state_dict(
                saved["best_elapsed"]
            )
            self._since = saved["since"] and Elapsed.from_state_dict(saved["since"])
            if saved["is_kept"]:
                self._kept = StateCopy.of(saved["kept"], loop_state.state)

    def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
        logs = loop_state.logs if loop_state.logs.find(self.monitor) else None
        if logs is None:
            loop_state.defer(self._check_name)
        elif self._is_over(loop_state.elapsed, loop_state.state, logs.value(self.monitor)):
            loop_state.stop_iteration = True

    def __call__(self, elapsed: Elapsed, state: Any, logs: LogsLike) -> tuple[bool, Any]:
        """Whether to stop, and the state to continue with; for hand-written loops."""
        check_elapsed(elapsed, "the first argument of early_stopping")
        found = Logs(logs)
        if not found.find(self.monitor):
            raise missing("early_stopping", self.monitor, found)
        if not self._is_over(elapsed, state, found.value(self.monitor)):
            return False, state
        return True, state if self._kept is None else self._kept.restore()

    def _is_over(self, elapsed: Elapsed, state: Any, logged: Any) -> bool:
        """Records a value; returns whether the patience is exhausted."""
        value = number(logged)
        if value is None:
            raise CicloError(f"early_stopping monitors {self.monitor!r}, which is not a number")
        if self._since is None:
            self._since = elapsed
        if self._is_better(value):
            self.best, self.best_elapsed, self._since, self._looks = value, elapsed, elapsed, 0
            if self.restore_best_weights:
                self._keep(state)
            return False
        self._looks += 1
        if self.patience is not None:
            gone, steps = elapsed - self._since, self.patience.steps
            if self._looks == 1 and steps is not None and 1 < steps < gone.steps:
                warn(
                    f"early_stopping has patience={steps}, a number of steps, and looks at"
                    f" {self.monitor!r} every {gone.steps} steps, so it stops at the first look"
                    f" without improvement; for evaluations, use looks={steps}"
                )
            return self.patience.is_reached_by(gone)
        return self.looks is not None and self._looks >= self.looks

    def on_loop_end(self, loop_state: LoopState[Any]) -> None:
        if self._kept is not None:
            loop_state.state = self._kept.restore()
            self._kept = None

    def _is_better(self, value: float) -> bool:
        if isnan(value):
            return False
        sign = 1.0 if self.mode == "min" else -1.0
        bar = self.best if self.best is not None else self.baseline
        if bar is None:
            return True
        return sign * value < sign * bar - self.min_delta

    def _keep(self, state: Any) -> None:
        try:
            self._kept = StateCopy(state)
        except Exception as error:  # any error of the state's own copying
            error.add_note(
                "ciclo: early_stopping copies the best state, and this one cannot be copied;"
                " with restore_best_weights=False it needs no copy"
            )
            raise

    def _check_name(self, loop_state: LoopState[Any]) -> None:
        """After the step: raises if the name was never logged, or logged too late."""
        if loop_state.logs.find(self.monitor):
            raise MonitorError(
                f"early_stopping runs before {self.monitor!r} is logged, so it never sees it;"
                " put it after the callback that logs it"
            )
        if not loop_state.accumulated_logs.find(self.monitor) and not may_come(loop_state):
            raise missing(
                "early_stopping",
                self.monitor,
                loop_state.accumulated_logs,
                has_epochs=loop_state._epochs is not None,
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_elapsed": self.best_elapsed and self.best_elapsed.state_dict(),
            "since": self._since and self._since.state_dict(),
            "looks": self._looks,
            "is_kept": self._kept is not None,
            "kept": None if self._kept is None else self._kept.plain(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._saved = saved


class NotFiniteError(CicloError, ArithmeticError):
    """A logged value is NaN or infinite."""


class nan_guard(LoopCallback):  # noqa: N801  a name like the functions beside it
    """Ends the loop when a logged value is NaN or infinite, and says which and when.

    It checks a step when it is over, whatever its position among the callbacks.

    monitor: names to check; by default all scalars
    action: "raise" an error or "stop" the loop
    lag: device values are checked this many steps later (up to twice as many), so that the loop
        does not wait for them
    """

    def __init__(self, *monitor: str, action: str = "raise", lag: int = 8) -> None:
        check("action", action, lambda one: one in ("raise", "stop"), '"raise" or "stop"')
        for name in monitor:
            check_name(name)
        check("lag", lag, lambda one: whole("lag", one) is not None, "0 or more steps")
        self.monitor = monitor
        self.action = action
        self.lag = lag
        self._queue = device_values.Queue()
        self._missing: set[str] = set()  # monitored names that were not logged yet

    def on_loop_start(self, loop_state: LoopState[Any]) -> None:
        self._missing = set(self.monitor)

    def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
        loop_state.defer(self.guard)

    def guard(self, loop_state: LoopState[Any]) -> None:
        """Checks the logs of this step."""
        step = loop_state.elapsed.steps
        for name, value in scalars(loop_state.logs).items():
            if self.monitor and name not in self.monitor:
                continue
            self._missing.discard(name)
            kept, is_on_device = device_values.keep(value)
            if is_on_device:
                self._queue.put((step, name), kept)
            else:
                self._look_at(loop_state, [((step, name), kept)])
        if len(self._queue) and self._queue.oldest[0] <= step - self.lag:
            self._look_at(loop_state, self._queue.turn())

    def on_loop_end(self, loop_state: LoopState[Any]) -> None:
        self.guard(loop_state)  # an incomplete epoch is evaluated after its last step
        self._look_at(loop_state, self._queue.settle())
        if self._missing:
            there = ", ".join(loop_state.history.names()) or "nothing"
            names = ", ".join(map(repr, sorted(self._missing)))
            warn(f"nan_guard monitors {names}, which was never logged; the loop logged {there}")

    def _look_at(self, loop_state: LoopState[Any], came: list[tuple[tuple[int, str], Any]]) -> None:
        for (step, name), value in came:
            if isinstance(value, (int, float)) and not -inf < value < inf:
                self._queue = device_values.Queue()
                if self.action == "raise":
                    raise NotFiniteError(f"{name} is {value} at step {step}")
                loop_state.stop_iteration = True
