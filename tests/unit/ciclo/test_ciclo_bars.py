"""Progress bars, in terminals, pipes and notebooks."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

import pytest

import ciclo
from ciclo.callbacks import bars

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Each look at the clock is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(bars, "clock", fake)
    return fake


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def closed() -> io.StringIO:
    out = io.StringIO()
    out.close()
    return out


class NotebookStream(io.StringIO):
    pass


NotebookStream.__module__ = "ipykernel.iostream"


def drawn(out: io.StringIO) -> list[str]:
    """What was shown one after the other on a line that is drawn over."""
    return [text.rstrip() for text in out.getvalue().split("\r") if text]


def log_loss(batch: int) -> Any:
    return {"metrics": {"loss": 1 / (batch + 1)}}


def steps(bar: ciclo.LoopCallback, count: int = 4, **options: Any) -> None:
    ciclo.loop(0, range(count), [(ciclo.every(1), log_loss), (ciclo.every(1), bar)], **options)


class TestKerasBar:
    def test_looks_as_in_keras(self, clock: Clock) -> None:
        """Count, bar, time left, time a step, values; at the end the time it took."""
        out = Terminal()
        steps(ciclo.keras_bar(4, file=out))

        assert [
            "1/4 ━━━━━─────────────── - loss: 1.0000",
            "2/4 ━━━━━━━━━━────────── 2s 1s/step - loss: 0.5000",
            "3/4 ━━━━━━━━━━━━━━━───── 1s 1s/step - loss: 0.3333",
            "4/4 ━━━━━━━━━━━━━━━━━━━━ 0s 1s/step - loss: 0.2500",
            "4/4 ━━━━━━━━━━━━━━━━━━━━ 5s 1s/step - loss: 0.2500",
        ] == drawn(out)
        assert out.getvalue().endswith("\n")

    def test_written_by_hand(self, clock: Clock) -> None:
        """As the seed has it: called with elapsed and logs, and it ends at its last step."""
        out = Terminal()
        bar = ciclo.keras_bar(total=2, file=out)
        for elapsed, batch in ciclo.elapse(range(2)):
            bar(elapsed, log_loss(batch))

        assert drawn(out)[-1].startswith("2/2 ━━━━━━━━━━━━━━━━━━━━ ")
        assert 1 == out.getvalue().count("\n")

    def test_the_end_comes_from_the_loop(self, clock: Clock) -> None:
        """A loop that has a stop needs no total."""
        out = Terminal()
        steps(ciclo.keras_bar(file=out), stop=3)

        assert drawn(out)[-1].startswith("3/3 ")

    def test_without_an_end(self, clock: Clock) -> None:
        """It counts, and says that the end is unknown."""
        out = Terminal()
        steps(ciclo.keras_bar(file=out))

        assert "4/Unknown 5s 1s/step - loss: 0.2500" == drawn(out)[-1]

    def test_without_values(self, clock: Clock) -> None:
        """It draws even when nothing is logged."""
        out = Terminal()
        ciclo.loop(0, range(2), {**ciclo.keras_bar(2, file=out)})

        assert "2/2 ━━━━━━━━━━━━━━━━━━━━ 3s 1s/step" == drawn(out)[-1]

    def test_a_loop_that_ends_early(self, clock: Clock) -> None:
        """The bar stops where the loop did, and leaves its line."""
        out = Terminal()
        steps(ciclo.keras_bar(10, file=out), count=2)

        assert drawn(out)[-1].startswith(" 2/10 ━━━━────────────────")
        assert out.getvalue().endswith("\n")

    def test_by_samples(self, clock: Clock) -> None:
        """A total in samples counts samples."""
        out = Terminal()
        bar = ciclo.keras_bar(ciclo.at(samples=40), file=out)
        steps(bar, batch_size_fn=lambda shapes: 10)

        assert [f"{n}/40" for n in (10, 20, 30, 40, 40)] == [text.split()[0] for text in drawn(out)]
        assert drawn(out)[1].split(" ")[2:4] == ["2s", "100ms/sample"]

    def test_in_a_pipe(self) -> None:
        """A file gets whole lines, few of them, and the last."""
        out = io.StringIO()
        steps(ciclo.keras_bar(1000, file=out), count=1000)
        first, last = out.getvalue().splitlines()

        assert first.startswith("   1/1000 ")
        assert last.startswith("1000/1000 ━━━━━━━━━━━━━━━━━━━━ ")

    def test_in_a_notebook(self, clock: Clock) -> None:
        """A notebook's stream is no terminal, but its line is drawn over."""
        out = NotebookStream()
        steps(ciclo.keras_bar(4, file=out))

        assert 5 == len(drawn(out))
        assert 1 == out.getvalue().count("\n")

    def test_a_stream_that_cannot_draw(self, clock: Clock) -> None:
        """Where the glyphs cannot be written there are others."""

        class Ascii(Terminal):
            encoding = "ascii"

        out = Ascii()
        steps(ciclo.keras_bar(4, file=out))

        assert drawn(out)[1].startswith("2/4 ==========.......... 2s")

    def test_a_line_is_never_wrapped(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a narrow terminal the line is cut: one that wraps cannot be drawn over."""
        monkeypatch.setenv("COLUMNS", "30")
        out = Terminal()
        steps(ciclo.keras_bar(4, file=out))

        assert all(len(text) < 30 for text in drawn(out))

    def test_until_a_date(self, clock: Clock) -> None:
        """A bar that ends at a date counts the seconds until then."""
        out = Terminal()
        bar = ciclo.keras_bar(ciclo.at(date=1_700_000_100.0), file=out)
        for seconds in (0, 25, 50):
            bar(ciclo.Elapsed(date=1_700_000_000.0 + seconds))

        assert drawn(out)[-1].startswith(" 50/100 ━━━━━━━━━━──────────")

    @pytest.mark.parametrize("out", [Unread(), closed(), None], ids=["pipe", "closed", "none"])
    def test_where_nothing_can_be_drawn(self, out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pipe that nobody reads, a closed file, no stdout: the run goes on without a bar."""
        monkeypatch.setattr(sys, "stdout", out)

        assert 5 == ciclo.loop(0, range(5), {**ciclo.keras_bar()}).elapsed.steps

    def test_only_rank_0_draws(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Other ranks are silent."""
        monkeypatch.setenv("RANK", "3")
        out = Terminal()
        steps(ciclo.keras_bar(4, file=out))

        assert "" == out.getvalue()

    def test_used_again_it_starts_afresh(self, clock: Clock) -> None:
        """A second loop has a bar of its own."""
        out = Terminal()
        bar = ciclo.keras_bar(2, file=out)
        steps(bar, count=2)
        steps(bar, count=2)

        assert 2 == out.getvalue().count("\n")

    @pytest.mark.parametrize(
        ("function", "value", "text"),
        [
            (bars._clock, 45.4, "45s"),
            (bars._clock, 65, "1:05"),
            (bars._clock, 7384, "2:03:04"),
            (bars._duration, 0.0123, "12ms"),
            (bars._duration, 0.000045, "45us"),
            (bars._duration, 3.2, "3s"),
            (bars._figure, 0.12345678, "0.1235"),
            (bars._figure, 1.5e-5, "1.5000e-05"),
            (bars._figure, 0.0, "0.0000"),
            (bars._figure, float("nan"), "nan"),
        ],
    )
    def test_figures(self, function: Callable[[float], str], value: float, text: str) -> None:
        """Lengths of time and values are as Keras shows them."""
        assert text == function(value)


def test_tqdm_bar() -> None:
    """Real tqdm counts to the end, with the values, and is closed."""
    pytest.importorskip("tqdm")
    out = io.StringIO()
    steps(ciclo.tqdm_bar(4, file=out, mininterval=0))

    assert "4/4 [" in out.getvalue()
    assert "loss=0.2500" in out.getvalue()


def test_tqdm_bar_by_samples() -> None:
    """A total in samples needs nothing more."""
    pytest.importorskip("tqdm")
    out = io.StringIO()
    steps(
        ciclo.tqdm_bar(ciclo.at(samples=40), file=out, mininterval=0),
        batch_size_fn=lambda shapes: 10,
    )

    assert "40/40 [" in out.getvalue()


def test_rich_bar() -> None:
    """Real rich counts to the end, with the values, and is stopped."""
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=100)
    steps(ciclo.rich_bar(4, console=console))

    assert "4/4" in console.file.getvalue()
    assert "loss: 0.2500" in console.file.getvalue()
