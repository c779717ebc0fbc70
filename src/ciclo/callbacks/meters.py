"""Callbacks that measure the run or the model: `throughput` and `ema`."""

from __future__ import annotations

import sys
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Any

from ciclo import averages
from ciclo._trees import mapped
from ciclo.averages import EmaState
from ciclo.callbacks.base import LoopCallback
from ciclo.checkpoints.tree import typed
from ciclo.errors import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from ciclo.elapsed import Elapsed
    from ciclo.logs import LogsLike
    from ciclo.loop import LoopState

__all__ = ["ema", "throughput"]


class throughput(LoopCallback):  # noqa: N801  a name like the functions beside it
    """Logs steps, samples and (if batches have them) tokens per second."""

    def __init__(self, window: int = 100) -> None:
        check("window", window, lambda one: type(one) is int and one >= 1, "1 or more steps")
        self._seen: deque[Elapsed] = deque(maxlen=window + 1)

    def on_loop_start(self, loop_state: LoopState[Any]) -> None:
        self._seen.clear()

    def __loop_callback__(self, loop_state: LoopState[Any]) -> LogsLike | None:
        self._seen.append(loop_state.elapsed)
        gone = self._seen[-1] - self._seen[0]
        if gone.time <= 0:
            return None
        rates = {
            "steps_per_second": gone.steps / gone.time,
            "samples_per_second": gone.samples / gone.time,
        }
        if gone.tokens:
            rates["tokens_per_second"] = gone.tokens / gone.time
        return {"metrics": rates}


class ema(LoopCallback):  # noqa: N801  a name like the functions beside it
    """An exponential moving average of the state, or of the part that `select` returns.

    `ema.value` has the structure of that part; for a torch module, that of its state dict.

    >>> average = ciclo.ema(0.999, select=lambda state: state.params)
    """

    def __init__(self, decay: float = 0.999, *, select: Callable[[Any], Any] | None = None) -> None:
        check("decay", decay, lambda one: 0 <= one < 1, "0 or more and less than 1")
        if select is not None:
            check("select", select, callable, "a function: lambda state: state.params")
        self.decay = decay
        self.select = select
        self._average = EmaState(0, None)

    @property
    def value(self) -> Any:
        """The average so far; None before the first step."""
        count, total = self._average
        if not count:
            return None
        share = averages.share(count, self.decay)
        return _combined(lambda old, new: new / share, total, total)

    def on_loop_start(self, loop_state: LoopState[Any]) -> None:
        count, total = self._average
        if count:  # from a checkpoint, it has no types yet
            self._average = EmaState(count, typed(total, _zeros(self._picked(loop_state))))

    def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
        picked = self._picked(loop_state)
        before = self._average if self._average.count else EmaState(0, _zeros(picked))
        self._average = averages.moved(before, picked, self.decay, _combined)

    def _picked(self, loop_state: LoopState[Any]) -> Any:
        state = loop_state.state
        picked = state if self.select is None else self.select(state)
        return picked.state_dict() if hasattr(picked, "state_dict") else picked

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._average.count, "sum": self._average.ema}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if "is_first" in saved:  # an older checkpoint, whose average has no bias correction
            saved = {"count": 0 if saved["is_first"] else inf, "sum": saved["value"]}
        self._average = EmaState(saved["count"], saved["sum"])


def _zeros(like: Any) -> Any:
    return _combined(lambda old, new: new * 0, like, like)


def _combined(function: Callable[[Any, Any], Any], old: Any, new: Any) -> Any:
    """Applies a function to the floating-point leaves; other leaves are taken from `new`."""
    jax = sys.modules.get("jax")
    has_arrays = jax is not None and any(isinstance(x, jax.Array) for x in jax.tree.leaves(new))
    walk = mapped if jax is None or not has_arrays else jax.tree.map

    def leaf(new: Any, old: Any) -> Any:
        detached = new.detach() if hasattr(new, "detach") else new
        if isinstance(new, float) or "float" in str(getattr(new, "dtype", "")):
            return function(old, averages.wide(detached))
        return detached.clone() if hasattr(detached, "clone") else detached

    return walk(leaf, new, old)
