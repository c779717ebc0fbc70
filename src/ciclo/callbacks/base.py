"""The base of callbacks: objects that a loop calls.

In `ciclo.loop`, a schedule says when, or `**ciclo.keras_bar(...)` means always; in the ready-made
loops, objects in `callbacks=[...]` register themselves at their moments.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from ciclo.device_values import is_running
from ciclo.errors import MonitorError, check, refuse_unknown, warn
from ciclo.schedules import Schedule, always

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from ciclo.logs import Logs, LogsLike
    from ciclo.loop import LoopState

__all__ = ["LoopCallback", "noop"]

# Names of metrics that should be maximised.
RISING = re.compile(r"(^|[_.])(acc|accuracy|auc|f1|iou|precision|recall|top\d+)(_|$)")


class Unpackable:
    """`{**callback}` is `{ciclo.always(): callback}`, with a new key each time."""

    def keys(self) -> Iterator[Schedule]:
        yield always()

    def __getitem__(self, schedule: Schedule) -> Self:
        return self

    def __iter__(self) -> Iterator[Schedule]:
        return self.keys()


class LoopCallback(Unpackable):
    """The base of callback objects; may also define `on_loop_start` and `on_loop_end`.

    >>> class Printer(ciclo.LoopCallback):
    ...     def __loop_callback__(self, loop_state):
    ...         print(loop_state.elapsed.steps)
    """

    #: When a ready-made loop calls it: "on_train_step", "on_epoch_end", and so on.
    moments: ClassVar[tuple[str, ...] | str] = ("on_train_step",)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        if options:
            import inspect

            found = inspect.signature(cls.__init__).parameters
            if all(one.kind is not one.VAR_KEYWORD for one in found.values()):
                refuse_unknown(cls.__name__, options, list(found)[1:])
        return super().__new__(cls)

    def __loop_callback__(self, loop_state: LoopState[Any]) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __loop_callback__(loop_state)")


class NoOp(LoopCallback):
    """A callback that does nothing: `bar if verbose else ciclo.noop`."""

    moments = ()
    name = "noop"

    def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> NoOp | None:
        return None if args or kwargs else self  # `noop()` is a callback too

    def keys(self) -> Iterator[Schedule]:
        return iter(())


noop = NoOp()


def scalars(logs: LogsLike) -> dict[str, Any]:
    """The scalars of all collections by name, for bars and loggers.

    A name that an earlier collection already has becomes `collection.name`.
    """
    found: dict[str, Any] = {}
    for collection, named in logs.items():
        for name, value in named.items():
            if is_running(type(value)):
                value = value.compute()
            if isinstance(value, (int, float)) or getattr(value, "shape", None) in ((), (1,)):
                found[f"{collection}.{name}" if name in found else name] = value
    return found


def missing(watcher: str, monitor: str, logs: Logs, *, has_epochs: bool = False) -> MonitorError:
    """The error for a monitored value that was not logged."""
    if has_epochs:
        hint = "Names that end in _valid or _test need validation or test data"
    else:
        hint = (
            "If an evaluation logs it later, give both the same schedule:"
            f" {{ciclo.every(500): [evaluate, {watcher}]}}"
        )
    return MonitorError(
        f"{watcher} monitors {monitor!r}, which was not logged; the logs have"
        f" {', '.join(logs.names()) or 'nothing'}. {hint}"
    )


def check_mode(watcher: str, monitor: str | None, mode: str) -> None:
    """Checks the name and the mode, and warns about a mode that is likely wrong."""
    if monitor is not None:
        check_name(monitor)
    check("mode", mode, lambda one: one in ("min", "max"), '"min" or "max"')
    if mode == "min" and RISING.search(monitor or ""):
        warn(
            f"{watcher} treats the smallest {monitor!r} as the best; if larger is better, use"
            ' mode="max"'
        )


def check_name(monitor: str) -> None:
    check("monitor", monitor, str, 'a logged name, as "loss_valid"')


def may_come(loop_state: LoopState[Any]) -> bool:
    """Whether the first epoch is still open, so that its evaluation may log a name."""
    epochs = loop_state._epochs
    return epochs is not None and epochs.is_open and not loop_state.epoch


def number(value: Any) -> float | None:
    """A scalar as a float, else None. Waits for device values."""
    if is_running(type(value)):
        value = value.compute()
    if isinstance(value, (int, float)):
        return float(value)
    if hasattr(value, "item") and getattr(value, "shape", ()) in ((), (1,)):
        try:
            return float(value.item())
        except (TypeError, ValueError):
            return None
    return None
