"""Progress bars: `keras_bar`, `tqdm_bar`, `rich_bar`. Only rank 0 draws.

A bar counts completed steps, so the last step of ten is 10/10. Device values are shown one redraw
late, when they are already computed: drawing never waits for the current step.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TextIO

from ciclo import device_values, processes
from ciclo.callbacks.base import LoopCallback, number, scalars
from ciclo.elapsed import Period, as_period, check_elapsed, clock
from ciclo.errors import check, need
from ciclo.logs import Logs

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import SupportsIndex

    from ciclo.elapsed import Elapsed
    from ciclo.logs import LogsLike
    from ciclo.loop import LoopState

__all__ = ["keras_bar", "rich_bar", "tqdm_bar"]

WIDTH = 20  # characters
REDRAW_S = 0.1  # in a terminal or a notebook
REPEAT_S = 10.0  # a line in a file or a pipe
UNDRAWABLE = (OSError, ValueError)  # a broken pipe, a closed file
UNITS = {"steps": "step", "samples": "sample", "tokens": "token", "time": "s", "date": "s"}


class Progress(NamedTuple):
    """What a bar shows."""

    done: float  # in the unit of the bar
    seconds: float  # since the start
    pace: float | None  # seconds per unit
    shown: dict[str, str]  # logged values
    is_last: bool


class Bar(LoopCallback):
    """The base of all bars: progress, logged values, and when to redraw."""

    moments = ("on_train_step", "on_epoch_end")
    redraw_s: ClassVar[float] = REDRAW_S

    def __init__(self, total: Period | SupportsIndex | None = None) -> None:
        self._given = None if total is None else as_period(total)
        self._reset()

    def _reset(self) -> None:
        self.total: float | None = None
        self.unit = "steps"
        self._start: float | None = None  # the first date of a bar over dates; 0 for others
        if self._given is not None:
            self._aim(self._given)
        self._is_mine: bool | None = None  # whether this is rank 0; set in the first step
        self._began = clock()
        self._first: tuple[float, float] | None = None  # count and clock after the first step
        self._shown: dict[str, str] = {}
        self._held: dict[str, Any] = {}  # device values of the last redraw
        self._newest: dict[str, Any] = {}
        self._drawn_at = -1e9
        self._latest: Elapsed | None = None
        self._latest_at = 0.0
        self._is_finished = False
        # For values shown as a mean: the sum (possibly on a device), the count, the last step.
        self._means: dict[str, tuple[Any, int, int]] = {}

    def __call__(self, elapsed: Elapsed, logs: LogsLike | None = None) -> None:
        """Updates the bar in a hand-written loop. The last step closes it."""
        check_elapsed(elapsed, "the first argument of a bar")
        self._update(elapsed, None if logs is None else Logs(logs))
        if self.total is not None and self._count(elapsed) >= self.total:
            self.close()

    def __loop_callback__(self, loop_state: LoopState[Any]) -> None:
        if self.total is None and loop_state.stop is not None:
            self._aim(loop_state.stop)
        self._update(loop_state.elapsed, loop_state.logs)

    def _update(self, elapsed: Elapsed, logs: LogsLike | None) -> None:
        now = clock()
        if self._is_mine is None:
            self._is_mine = processes.is_first()
        if self._start is None:
            self._start = elapsed.date if self.unit == "date" else 0
            self.total = None if self.total is None else self.total - self._start
        if self._first is None:  # the first step may compile, so it does not count for the pace
            self._first = (self._count(elapsed), now)
        if not self._is_mine or self._is_finished:
            return
        self._latest, self._latest_at = elapsed, now
        if logs:
            self._note(elapsed.steps, logs)
        if now - self._drawn_at >= self.redraw_s:
            self._draw(elapsed, now, False)
            self._drawn_at = now

    def _note(self, step: int, logs: LogsLike) -> None:
        """Keeps logged values for the next redraw."""
        self._newest.update(scalars(logs))

    def on_loop_start(self, loop_state: LoopState[Any]) -> None:
        self._reset()

    def on_loop_end(self, loop_state: LoopState[Any]) -> None:
        newest = scalars(loop_state.accumulated_logs)
        self._newest.update({n: v for n, v in newest.items() if n not in self._means})
        self.close()

    def close(self) -> None:
        """Draws the final state and ends the line, also if the loop ended early."""
        if self._is_mine and not self._is_finished and self._latest is not None:
            self._draw(self._latest, clock(), True)
            self._is_finished = True
            with suppress(*UNDRAWABLE):
                self._finish()

    def _aim(self, period: Period) -> None:
        self.unit, self.total = period._given()[0]

    def _count(self, elapsed: Elapsed) -> float:
        """The count after this step, in the bar's unit."""
        count: float = getattr(elapsed.done(), self.unit)
        return count - (self._start or 0)

    def _draw(self, elapsed: Elapsed, now: float, is_last: bool) -> None:
        for name, value in self._newest.items():
            kept, is_on_device = device_values.keep(value)
            if is_on_device and not is_last:
                kept, self._held[name] = self._held.get(name, kept), kept
            if (found := number(kept)) is not None:
                self._shown[name] = _figure(found)
        self._newest = {}
        count = self._count(elapsed)
        first_count, first_at = self._first or (0, 0.0)
        gone = self._latest_at - first_at
        pace = gone / (count - first_count) if count > first_count else None
        try:
            self.draw(Progress(count, now - self._began, pace, self._shown, is_last))
        except UNDRAWABLE:
            self._is_mine = False  # the output is gone; the run continues without a bar

    def draw(self, at: Progress) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Ends the line."""


class keras_bar(Bar):  # noqa: N801  a name like the functions beside it
    """A bar like that of Keras: count, bar, time left, time per step, values.

    total: where the loop ends, like `stop`; not needed in a loop that has a stop
    epoch, num_epochs: print a line `Epoch 1/5` above the bar; epochs count from 1
    width: of the bar, in characters
    verbose: 1 for a bar, 2 for one line at the end, 0 for nothing
    interval: seconds between redraws; by default 0.1, and 10 in a pipe or a file
    always_stateful: show the last logged values; False shows their means so far
    stateful_metrics: names whose last value is always shown
    unit_name: the name of a step
    file: where to draw; stdout by default
    """

    def __init__(
        self,
        total: Period | SupportsIndex | None = None,
        epoch: int | None = None,
        num_epochs: int | None = None,
        width: int = WIDTH,
        verbose: int = 1,
        interval: float | None = None,
        stateful_metrics: Iterable[str] | None = None,
        always_stateful: bool = True,
        unit_name: str | None = None,
        *,
        file: TextIO | None = None,
    ) -> None:
        check("verbose", verbose, lambda one: one in (0, 1, 2), "0, 1 or 2")
        check("width", width, lambda one: range(one) is not None, "a number of characters")
        if interval is not None:
            check("interval", interval, lambda one: one >= 0, "a number of seconds")
        if file is not None:
            check("file", file, lambda one: callable(one.write), "an open file")
        of = "" if num_epochs is None else f"/{num_epochs}"
        self._title = "" if epoch is None else f"Epoch {epoch}{of}"
        self.width = width
        self.verbose = verbose
        self.interval = interval
        self.always_stateful = always_stateful
        if isinstance(stateful_metrics, str):
            stateful_metrics = [stateful_metrics]
        names = () if stateful_metrics is None else stateful_metrics
        check("stateful_metrics", names, lambda one: iter(one) is not None, "a list of names")
        self.stateful_metrics = frozenset(names)
        self.unit_name = unit_name
        self._file = file
        super().__init__(total)

    def _reset(self) -> None:
        super()._reset()
        self._out: Any = sys.stdout if self._file is None else self._file
        self._is_terminal = _is_terminal(self._out)
        # A notebook's stream is not a terminal, but can overwrite a line too.
        is_notebook = type(self._out).__module__.startswith("ipykernel")
        self._can_rewrite = self._is_terminal or is_notebook
        self._length = 0
        self.redraw_s = REDRAW_S if self._can_rewrite else REPEAT_S  # type: ignore[misc]
        if self.interval is not None:
            self.redraw_s = self.interval  # type: ignore[misc]
        self._has_title = False

    def _note(self, step: int, logs: LogsLike) -> None:
        if self.always_stateful:
            super()._note(step, logs)
            return
        stateful = {*self.stateful_metrics, *logs.get("stateful_metrics", ())}
        for name, value in scalars(logs).items():
            if name in stateful:
                self._newest[name] = value
                continue
            total, count, last = self._means.get(name, (0, 0, -1))
            if step != last:  # at the end of an epoch a bar is called twice in one step
                self._means[name] = (total + value, count + 1, step)
                self._newest[name] = (total + value) / (count + 1)

    def draw(self, at: Progress) -> None:
        # A program without a console has no stdout.
        if self._out is None or self.verbose == 0 or (self.verbose == 2 and not at.is_last):
            return
        if self._title and not self._has_title:
            self._out.write(self._title + "\n")
        self._has_title = True
        text = self._text(at)
        if not self._can_rewrite:
            self._out.write(text + "\n")
        else:
            if self._is_terminal:  # a wrapped line cannot be overwritten
                text = text[: shutil.get_terminal_size().columns - 1]
            self._out.write("\r" + text + " " * max(self._length - len(text), 0))
            self._length = len(text)
        self._out.flush()

    def _finish(self) -> None:
        if self._can_rewrite and self._length:
            self._out.write("\n")
            self._out.flush()
            self._length = 0

    def _text(self, at: Progress) -> str:
        parts = []
        if self.total is None:
            parts.append(f"{at.done:g}/Unknown")
        else:
            done = min(at.done, self.total)
            width = len(f"{self.total:.0f}")
            full = int(self.width * done / self.total) if self.total else self.width
            line, rest = _glyphs(self._out)
            drawn = line * full + rest * (self.width - full)
            parts.append(f"{done:>{width}.0f}/{self.total:.0f} {drawn}")
        if self.total is None or at.is_last:
            parts.append(_clock(at.seconds))
        elif at.pace is not None:
            parts.append(_clock(at.pace * (self.total - at.done)))
        if at.pace is not None and self.unit in ("steps", "samples", "tokens"):
            parts.append(f"{_duration(at.pace)}/{self.unit_name or UNITS[self.unit]}")
        return " ".join(parts) + "".join(f" - {name}: {text}" for name, text in at.shown.items())


class tqdm_bar(Bar):  # noqa: N801  a name like the functions beside it
    """A tqdm bar; options go to `tqdm.auto.tqdm`."""

    def __init__(self, total: Period | SupportsIndex | None = None, **options: Any) -> None:
        self._tqdm = need("tqdm.auto", "ciclo.tqdm_bar()", "tqdm").tqdm
        self._options = options
        self._bar: Any = None
        super().__init__(total)

    def __call__(  # type: ignore[override]  # it is called with a batch where others have logs
        self, elapsed: Elapsed, batch: Any = None, logs: LogsLike | None = None
    ) -> None:
        """Updates the bar in a hand-written loop. The batch is optional."""
        super().__call__(elapsed, batch if isinstance(batch, Logs) else logs)

    def draw(self, at: Progress) -> None:
        if self._bar is None:
            options = {"total": self.total, "initial": at.done, "unit": UNITS[self.unit]}
            self._bar = self._tqdm(**{**options, **self._options})
        self._bar.set_postfix(at.shown, refresh=False)
        self._bar.update(at.done - self._bar.n)
        if at.is_last:
            self._bar.refresh()

    def _finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class rich_bar(Bar):  # noqa: N801  a name like the functions beside it
    """A rich bar."""

    def __init__(self, total: Period | SupportsIndex | None = None, *, console: Any = None) -> None:
        self._rich = need("rich.progress", "ciclo.rich_bar()", "rich")
        if console is not None:
            check("console", console, lambda one: callable(one.get_time), "a rich.console.Console")
        self._console = console
        self._progress: Any = None
        self._task: Any = None
        super().__init__(total)

    def draw(self, at: Progress) -> None:
        rich = self._rich
        if self._progress is None:
            self._progress = rich.Progress(
                rich.MofNCompleteColumn(),
                rich.BarColumn(),
                rich.TimeRemainingColumn(elapsed_when_finished=True),
                rich.TextColumn("{task.fields[shown]}"),
                console=self._console,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self.total, shown="")
        text = " - ".join(f"{name}: {value}" for name, value in at.shown.items())
        self._progress.update(self._task, completed=at.done, shown=text)

    def _finish(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _is_terminal(out: Any) -> bool:
    try:
        return bool(getattr(out, "isatty", lambda: False)())
    except UNDRAWABLE:
        return False


def _glyphs(out: Any) -> tuple[str, str]:
    """The characters of the bar: those of Keras, or ASCII if the stream needs it."""
    try:
        "━".encode(getattr(out, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "=", "."
    return "━", "─"


def _figure(value: float) -> str:
    """A number as Keras shows it: four decimals, or an exponent for small ones."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 or value != value else f"{value:.4e}"


def _clock(seconds: float) -> str:
    """A duration: 45s, 1:05, 2:03:04."""
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole}s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _duration(seconds: float) -> str:
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.0f}s"
    return f"{seconds * 1e3:.0f}ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f}us"
