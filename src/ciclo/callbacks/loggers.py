"""Loggers for TensorBoard, W&B, MLflow, Trackio and the console.

A package is imported when its logger is created. A logger runs at the end of an iteration, so it
sees everything that was logged, whatever its position among the callbacks. Device values are
written in batches, some steps later. Only rank 0 writes.
"""

from __future__ import annotations

import os
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

from ciclo import device_values, processes
from ciclo.callbacks.base import LoopCallback, scalars
from ciclo.elapsed import check_elapsed
from ciclo.errors import CallbackError, check, need
from ciclo.logs import Logs

if TYPE_CHECKING:
    from ciclo.elapsed import Elapsed
    from ciclo.logs import LogsLike
    from ciclo.loop import LoopState

__all__ = [
    "Logger",
    "console_logger",
    "mlflow_logger",
    "tensorboard_logger",
    "trackio_logger",
    "wandb_logger",
]

MAX_STEPS = 32  # device values of this many steps are fetched together


class Logger(LoopCallback):
    """The base of all loggers: `write` gets the numbers of a step as floats.

    By hand: `logger(elapsed, logs)` for each step, and `logger.finish()`.

    >>> class Printer(ciclo.Logger):
    ...     def write(self, step, date, scalars):
    ...         print(step, scalars)
    """

    _is_mine: bool | None = None  # whether this is rank 0; set when the loop starts

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._queue = device_values.Queue()
        self._due: int | None = None  # the last step in which the loop called it
        self._is_behind = False  # whether device values of recent steps are pending
        self._last: tuple[int, set[str]] = (-1, set())  # the latest step, and its names

    def on_loop_start(self, loop_state: LoopState[Any]) -> None:
        self._start()

    def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
        self._due = loop_state.elapsed.steps
        loop_state.defer(self._take)

    def on_loop_end(self, loop_state: LoopState[Any]) -> None:
        if self._due == loop_state.elapsed.steps:  # values logged after the last iteration
            self._take(loop_state)
        self.finish()

    def __call__(self, elapsed: Elapsed, logs: LogsLike | None = None) -> None:
        """Logs a step in a hand-written loop; call `finish` at the end."""
        check_elapsed(elapsed, "the first argument of a logger")
        if self._is_mine is None:
            self._start()
        self._log(elapsed, None if logs is None else Logs(logs))

    def finish(self) -> None:
        """Writes pending device values, and closes."""
        if self._is_mine:
            self._write(self._queue.settle())
            self.close()
        self._is_mine = None

    def _start(self) -> None:
        self._forget()  # here, because a subclass may not call our __init__
        self._is_mine = processes.is_first()
        if self._is_mine:
            self.open()

    def open(self) -> None:
        """Called at the start of a loop."""

    def write(self, step: int, date: float, scalars: dict[str, float]) -> None:
        """Writes the values of a step."""
        raise NotImplementedError

    def close(self) -> None:
        """Called at the end of a loop."""

    def _take(self, loop_state: LoopState[Any]) -> None:
        self._log(loop_state.elapsed, loop_state.logs)

    def _log(self, elapsed: Elapsed, logs: LogsLike | None) -> None:
        if not self._is_mine or not logs:
            return
        found = scalars(logs)
        had = self._last[1] if self._last[0] == elapsed.steps else set()
        self._last = (elapsed.steps, had | set(found))
        for name in [name for name in found if name not in had]:
            value, is_on_device = device_values.keep(found[name])
            self._is_behind = self._is_behind or is_on_device
            self._queue.put((elapsed.steps, elapsed.date, name), value)
        if not self._is_behind:
            self._write(self._queue.settle())
        elif len(self._queue) and self._queue.oldest[0] <= elapsed.steps - MAX_STEPS:
            self._write(self._queue.turn())

    def _write(self, came: list[tuple[tuple[int, float, str], Any]]) -> None:
        for (step, date), row in groupby(came, key=lambda one: one[0][:2]):
            numbers = {tag[2]: one for tag, one in row if isinstance(one, (int, float))}
            if numbers:
                self.write(step, date, {name: float(one) for name, one in numbers.items()})


class console_logger(Logger):  # noqa: N801  a name like the functions beside it
    """Prints a line for each step that is logged: `step 100: loss=0.5`."""

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__()
        if file is not None:
            check("file", file, lambda one: callable(one.write), "an open file")
        self._file = file

    def write(self, step: int, date: float, scalars: dict[str, float]) -> None:
        text = " ".join(f"{name}={value:.6g}" for name, value in scalars.items())
        print(f"step {step}: {text}", file=sys.stdout if self._file is None else self._file)


class tensorboard_logger(Logger):  # noqa: N801  a name like the functions beside it
    """Writes event files for TensorBoard into a folder, with TensorBoard's own writer."""

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        super().__init__()
        check("logdir", logdir, os.fspath, "the path of a folder")
        what = "ciclo.tensorboard_logger()"
        writer = "tensorboard.summary.writer.event_file_writer"
        self._writers = need(writer, what, "tensorboard")
        self._events = need("tensorboard.compat.proto.event_pb2", what, "tensorboard")
        self._summaries = need("tensorboard.compat.proto.summary_pb2", what, "tensorboard")
        self._logdir = os.fspath(logdir)
        self._writer: Any = None

    def open(self) -> None:
        self._writer = self._writers.EventFileWriter(self._logdir)

    def write(self, step: int, date: float, scalars: dict[str, float]) -> None:
        value = self._summaries.Summary.Value
        summary = self._summaries.Summary(
            value=[value(tag=name, simple_value=number) for name, number in scalars.items()]
        )
        self._writer.add_event(self._events.Event(wall_time=date, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class wandb_logger(Logger):  # noqa: N801  a name like the functions beside it
    """Logs to a run of W&B: the one given, or one that `wandb.init(**options)` starts.

    run: any object with `log(dict, step=)`
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        super().__init__()
        if run is None:
            self._wandb = need("wandb", "ciclo.wandb_logger()")
        elif not callable(getattr(run, "log", None)):
            raise CallbackError(
                f"wandb_logger({run!r}) needs an object with log(dict, step=), as"
                " wandb.init(project=...) returns"
            )
        self._given = run
        self._options = options
        self.run: Any = run

    def open(self) -> None:
        if self._given is None:
            self.run = self._wandb.init(**self._options)

    def write(self, step: int, date: float, scalars: dict[str, float]) -> None:
        self.run.log(scalars, step=step)

    def close(self) -> None:
        if self._given is None:
            self.run.finish()


class mlflow_logger(Logger):  # noqa: N801  a name like the functions beside it
    """Logs to the active run of MLflow, or to one that `mlflow.start_run(**options)` starts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._mlflow = need("mlflow", "ciclo.mlflow_logger()")
        self._options = options
        self._is_own = False

    def open(self) -> None:
        self._is_own = self._mlflow.active_run() is None
        if self._is_own:
            self._mlflow.start_run(**self._options)

    def write(self, step: int, date: float, scalars: dict[str, float]) -> None:
        self._mlflow.log_metrics(scalars, step=step)

    def close(self) -> None:
        if self._is_own:
            self._mlflow.end_run()


class trackio_logger(Logger):  # noqa: N801  a name like the functions beside it
    """Logs to a run of Trackio that `trackio.init(project, **options)` starts."""

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        self._trackio = need("trackio", "ciclo.trackio_logger()")
        self._options = {"project": project, **options}

    def open(self) -> None:
        self._trackio.init(**self._options)

    def write(self, step: int, date: float, scalars: dict[str, float]) -> None:
        self._trackio.log(scalars, step=step)

    def close(self) -> None:
        self._trackio.finish()
