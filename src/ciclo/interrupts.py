"""Stops a running loop after its current step, on Ctrl-C or a signal.

Ctrl-C: the first one stops the loop after the step, the second raises `KeyboardInterrupt`. A SIGINT
handler of the user is not replaced.

SIGTERM, and under SLURM also SIGUSR1 (`sbatch --signal=USR1@60`): a loop that saves checkpoints
saves and raises `Preempted`; the second signal has its usual effect. The user's own handler runs
too.

All processes of a job stop at the same step. Handlers are installed only in the main thread, and
an inner loop uses those of the outer loop.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from ciclo import _seam
from ciclo.elapsed import clock
from ciclo.errors import need
from ciclo.processes import Process

if TYPE_CHECKING:
    from types import FrameType

    from ciclo.loop import Result

__all__ = ["Preempted"]

# A launcher may forward a signal that the whole job already got: both count as one.
ECHO_S = 1.0
_current: Interrupts | None = None  # the outermost loop of the main thread


class Preempted(SystemExit):
    """A signal ended the loop after saving. The exit status is 128 plus the signal number.

    `result` is what the loop would have returned.
    """

    def __init__(self, number: int, result: Result[Any]) -> None:
        super().__init__(128 + number)
        self.signal = number
        self.result = result


class TorchGroup:
    """Processes connected by torch agree on the step to stop at, through the shared store.

    The first process that gets the signal chooses the next step. Training synchronises the
    processes in each step, so none is beyond that.
    """

    loops = 0  # the same number in all processes

    def __init__(self, distributed: Any) -> None:
        TorchGroup.loops += 1
        self._key = f"ciclo/stop/{TorchGroup.loops}"
        self._store = distributed.distributed_c10d._get_default_store()
        self._last: int | None = None

    def agree(self, asked: int | None, step: int) -> int | None:
        """The signal that any process got."""
        if self._last is None:
            if asked is not None:
                self._store.compare_set(self._key, "", f"{asked} {step + 1}")
            if self._store.check([self._key]):
                number, last = self._store.get(self._key).decode().split()
                self._last, asked = int(last), int(number)
        return asked

    def is_time(self, step: int) -> bool:
        return self._last is not None and step >= self._last


class JaxGroup:
    """Processes connected by JAX use its preemption service to agree on a step."""

    def __init__(self) -> None:
        self._multihost = need("jax.experimental.multihost_utils", "a loop of several processes")

    def agree(self, asked: int | None, step: int) -> int | None:
        if asked is None and self._multihost.reached_preemption_sync_point(step):
            return int(signal.SIGTERM)
        return asked

    def is_time(self, step: int) -> bool:
        return True


def _group() -> TorchGroup | JaxGroup | None:
    process = Process()
    if process.count == 1:
        return None
    if process.torch is not None:
        return TorchGroup(process.torch)
    config = sys.modules["jax"].config
    return JaxGroup() if getattr(config, "jax_enable_preemption_service", True) else None


class Interrupts:
    """Handles signals while a loop runs; a context manager."""

    def __init__(self, is_wanted: bool, is_saved: bool = False) -> None:
        self.count = 0  # number of Ctrl-C
        self.preemption: int | None = None  # the signal that was received
        self.may_stop = False  # whether the loop must call `stops` after each step
        self._is_wanted = is_wanted
        self._is_saved = is_saved
        self._outer: Interrupts | None = None
        self._previous: dict[int, Any] = {}
        self._group: TorchGroup | JaxGroup | None = None  # processes that stop at the same step
        self._asked_at = 0.0
        self._is_over = False

    def stops(self, step: int) -> bool:
        """Whether the loop should stop after this step.

        An inner loop ends on Ctrl-C, but not on a signal: it is part of a step.
        """
        if self._group is not None:
            self.preemption = self._group.agree(self.preemption, step)
            if self.preemption is not None:
                return self._group.is_time(step)
        elif self.preemption is not None:
            return True
        if self.count > 0:
            return True
        return self._outer is not None and self._is_wanted and self._outer.count > 0

    def stop_outer(self) -> None:
        """Makes the outer loop stop after its step too."""
        if self._outer is not None:
            self._outer.count += 1
            self._outer.may_stop = True

    @property
    def is_urgent(self) -> bool:
        """Whether Ctrl-C was pressed twice."""
        return self.count > 1 or (self._outer is not None and self._outer.is_urgent)

    def __enter__(self) -> Interrupts:
        global _current
        import threading

        if threading.current_thread() is not threading.main_thread():
            return self
        self._outer = _current
        if self._outer is None:
            _current = self
        self.may_stop = self._outer is not None
        if self._is_wanted and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self)
        if self._is_saved and not (self._outer is not None and self._outer._is_saved):
            self._group = _group()
            self.may_stop = self.may_stop or self._group is not None
            if isinstance(self._group, JaxGroup):
                return self  # JAX installs its own handler
            in_slurm = bool(os.environ.get("SLURM_JOB_ID")) and hasattr(signal, "SIGUSR1")
            for number in (signal.SIGTERM, *([signal.SIGUSR1] if in_slurm else [])):
                # Ignored signals and handlers set outside Python are not replaced.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self)
        return self

    def __exit__(self, *error: object) -> None:
        global _current
        self._is_over = True
        if _current is self:
            _current = None
        for number, previous in self._previous.items():
            if signal.getsignal(number) is self:
                signal.signal(number, previous)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupt()
            return
        previous: Any = self._previous.get(number)
        is_fatal = _seam.is_fatal(number, previous)
        if self._is_over:
            pass  # the program kept a reference to this handler
        elif self.preemption is None:
            self.preemption = number
            self.may_stop = True
            self._asked_at = clock()
            name = signal.Signals(number).name
            # Not print: the signal may have interrupted one.
            os.write(2, f"\nciclo: {name}: saving after this step; again stops at once\n".encode())
        elif number == self.preemption and clock() - self._asked_at < ECHO_S:
            return
        else:
            self._is_over = True
        if not is_fatal:
            previous(number, frame)
        elif self._is_over:
            signal.signal(number, previous)
            os.kill(os.getpid(), number)

    def _interrupt(self) -> None:
        self.count += 1
        self.may_stop = True
        if self.count > 1 or self._is_over:
            raise KeyboardInterrupt
        os.write(2, b"\nciclo: stopping after this step; Ctrl-C again stops at once\n")
