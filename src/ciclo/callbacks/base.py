"""What every callback of ciclo is: an object that a loop calls, and that says when.

In `ciclo.loop` it stands beside a schedule or is unpacked, `**ciclo.keras_bar(...)`; in the
ready-made loops it goes into `callbacks=[...]` and registers itself at its moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ciclo.schedules import Schedule, always

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ciclo.loop import LoopState


class LoopCallback:
    """The base of callbacks that are objects. `on_loop_start` and `on_loop_end` may be added.

    >>> class Printer(ciclo.LoopCallback):
    ...     def __loop_callback__(self, loop_state):
    ...         print(loop_state.elapsed.steps)
    """

    #: Where a ready-made loop calls it: "on_train_step", "on_epoch_end", and so on.
    moments: ClassVar[tuple[str, ...]] = ("on_train_step",)

    def __loop_callback__(self, loop_state: LoopState[Any]) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no __loop_callback__(loop_state)")

    # `{**callback}` is `{ciclo.always(): callback}`, with a key of its own.

    def keys(self) -> Iterator[Schedule]:
        yield always()

    def __getitem__(self, schedule: Schedule) -> LoopCallback:
        return self

    def __iter__(self) -> Iterator[Schedule]:
        return self.keys()


class noop(LoopCallback):  # noqa: N801  a name like the functions beside it
    """A callback that does nothing, to stand where another may be: `bar if verbose else noop()`."""

    moments = ()

    def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def keys(self) -> Iterator[Schedule]:
        return iter(())


def number(value: Any) -> float | None:
    """A value as a float; None for what is no single number. Waits for a device."""
    if isinstance(value, (int, float)):
        return float(value)
    if hasattr(value, "item") and getattr(value, "shape", ()) in ((), (1,)):
        try:
            return float(value.item())
        except (TypeError, ValueError):
            return None
    return None
