"""Spans as text."""

from __future__ import annotations

import doctest
import io
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cirron import wire
from cirron.runs import tree as trees
from cirron.view import text


def span(
    id: str,
    name: str,
    parent: str | None = None,
    index: int | None = None,
    start: int = 0,
    end: int | None = 0,
    **attrs: Any,
) -> wire.Span:
    return wire.Span(id, name, parent, index, start, end, None, None, None, 1, 1, None, attrs, [])


def mark(id: str, span_id: str, name: str, value: Any, ts: int = 0, **more: Any) -> wire.Mark:
    return wire.Mark(id, span_id, name, "float", value, {}, ts, "point", **more)


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        (0, "0.0us"),
        (-5, "0.0us"),
        (1_449, "1.4us"),
        (9_949, "9.9us"),
        (9_950, "10us"),
        (142_000, "142us"),
        (999_499, "999us"),
        (999_500, "1.00ms"),
        (1_420_000, "1.42ms"),
        (40_000_000, "40.00ms"),
        (999_994_999, "999.99ms"),
        (999_995_000, "1.00s"),
        (3_200_000_000, "3.20s"),
        (59_994_000_000, "59.99s"),
        (59_995_000_000, "1m 0s"),
        (725_000_000_000, "12m 5s"),
        (3_599_600_000_000, "1h 0m"),
        (11_520_000_000_000, "3h 12m"),
        (183_600_000_000_000, "2d 3h"),
    ],
)
def test_durations_use_the_right_unit(ns: int, expected: str) -> None:
    """A duration is in us, ms, s or longer by size, and rounding never reaches the next unit."""
    assert expected == text.duration(ns)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0.52341, "0.5234"),
        (0.00001, "1e-05"),
        (100.0, "100"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1_000_000, "1000000"),
        (True, "True"),
        ("train", "train"),
        (None, "None"),
        (10**30, "18446744073709551615"),
        ("two\nlines \x1b[31m", "two\\nlines \\x1b[31m"),
        ("x" * 200, "x" * 77 + "..."),
    ],
)
def test_values_are_short_and_safe(given: Any, expected: str) -> None:
    """Floats have 4 significant digits; text stays on one line and cannot drive the terminal."""
    assert expected == text.value(given)


INVISIBLE = [
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
    "\ud800",
    "\udfff",
    "\ufeff",
    "\U000e0041",
]


class TestEscape:
    @pytest.mark.parametrize("character", INVISIBLE, ids=ascii)
    def test_what_a_terminal_acts_on(self, character: str) -> None:
        """Control codes, separators, bidi controls and half pairs become printable ASCII."""
        escaped = text.escape(f"a{character}b")

        assert escaped.isprintable()
        assert escaped.isascii()
        assert f"a{character}b" == eval(f"'{escaped}'")

    @pytest.mark.parametrize("given", ["", "plain", "Größe", "数", "é", "שלום", "\U0001f600"])
    def test_text_stays_as_it_is(self, given: str) -> None:
        """Letters of any script are not touched."""
        assert given == text.escape(given)

    def test_a_row_has_none(self) -> None:
        """Whatever the names and values of a span, its row is one printable line."""
        codes = "".join(INVISIBLE)
        attrs: dict[str, Any] = {codes: codes, "error": codes, "list": [codes]}
        tree = trees.build(
            [span("a", codes, None, 1, **attrs)],
            [mark("m", "a", codes, codes), mark("n", "root", codes, codes)],
        )

        assert all(line.isprintable() for line in text.render(tree).split("\n"))
        assert 2 == len(text.render(tree).split("\n"))


class TestJson:
    def test_it_decodes_to_the_same(self) -> None:
        """ASCII alone, and yet the very strings that were given."""
        given = {"".join(INVISIBLE).replace("\ud800", "").replace("\udfff", ""): ["数\U0001f600"]}
        encoded = text.to_json(given)

        assert encoded.isascii()
        assert encoded.isprintable()
        assert given == json.loads(encoded)

    def test_half_a_pair_does_not_break_it(self) -> None:
        """What UTF-8 cannot hold is replaced, as where it is recorded."""
        assert '"a?"' == text.to_json("a\ud800")

    def test_plain_text_is_left_alone(self) -> None:
        """Of ordinary content nothing changes."""
        assert '{"a":[1,"\\n"]}' == text.to_json({"a": [1, "\n"]})


class Stream(io.TextIOWrapper):
    """A stream that encodes to bytes, as stdout does."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding)

    def content(self) -> str:
        self.seek(0)
        return self.read()


class TestPrint:
    @pytest.mark.parametrize(
        ("encoding", "expected"),
        [
            ("utf-8", "Größe 数\n"),
            ("latin-1", "Größe \\u6570\n"),
            ("ascii", "Gr\\xf6\\xdfe \\u6570\n"),
        ],
    )
    def test_what_the_encoding_lacks_is_escaped(
        self, monkeypatch: pytest.MonkeyPatch, encoding: str, expected: str
    ) -> None:
        """A stream of any encoding gets all that it can hold."""
        stream = Stream(encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        text.print_safely("Größe 数")

        assert expected == stream.content()

    def test_a_stream_whose_encoding_is_not_what_it_says(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Then ASCII is what gets through."""

        class Liar(Stream):
            encoding = "utf-8"

        stream = Liar("ascii")
        monkeypatch.setattr(sys, "stdout", stream)
        text.print_safely("Größe")
        stream.flush()

        assert b"Gr\\xf6\\xdfe\n" == stream.buffer.getvalue()  # type: ignore[attr-defined]

    @pytest.mark.parametrize("case", ["none", "closed", "broken pipe", "no stream", "odd"])
    def test_a_stream_that_takes_nothing(self, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
        """Nothing is printed, and nothing raises."""
        closed = Stream("ascii")
        closed.close()
        broken = SimpleNamespace(encoding="utf-8", write=raiser(BrokenPipeError()))
        odd = SimpleNamespace(encoding=7, write=raiser(RuntimeError()))
        streams = {"none": None, "closed": closed, "broken pipe": broken, "odd": odd}
        monkeypatch.setattr(sys, "stdout", streams.get(case, object()))
        text.print_safely("Größe")


def raiser(error: Exception) -> Any:
    def write(_: str) -> None:
        raise error

    return write


@pytest.mark.parametrize(
    ("index", "marks", "expected"),
    [
        (0, {"epoch_loss": 0.5234}, "epoch[0] - 142us {epoch_loss=0.5234}"),
        (None, {}, "epoch - 142us"),
        (3, {}, "epoch[3] - 142us"),
        (None, {"a": 1, "b": "x"}, "epoch - 142us {a=1, b=x}"),
    ],
)
def test_a_line_shows_only_what_exists(
    index: int | None, marks: dict[str, Any], expected: str
) -> None:
    """Index and braces are there only when there is something to put in."""
    assert expected == text.line("epoch", index, 142_000, marks)


def test_integers_of_any_size() -> None:
    """An integer that Python refuses to write is shown as the nearest that a file can hold."""
    huge = 10**5000

    assert "step[18446744073709551615]" == text.label("step", huge)
    assert "-9223372036854775808" == text.value(-huge)
    assert "13992196986d 6h" == text.duration(huge)


def test_the_live_line_has_the_documented_format() -> None:
    """The live line is the documented one, to the letter."""
    assert "[cirron] epoch[0] - 142us {epoch_loss=0.5234}" == text.live_line(
        "epoch", 0, 142_000, {"epoch_loss": 0.5234}
    )


def test_docstring_examples() -> None:
    """The examples in the docstrings are true."""
    assert 0 == doctest.testmod(text).failed


class TestRender:
    def test_the_tree_is_indented_by_level(self) -> None:
        """Each level is indented by two spaces; open, failed and other attributes are told."""
        tree = trees.build(
            [
                span("e", "epoch", "s", 0, 0, 3_200_000_000),
                span(
                    "f",
                    "forward",
                    "e",
                    None,
                    1,
                    2_100_001,
                    mode="train",
                    data_load_ns=5_000,
                    nothing=None,
                ),
                span("b", "backward", "e", None, 2, 142_002, error="ValueError: bad"),
                span("s", "cirron.session", end=None),
            ],
            [mark("m", "e", "loss", 0.9, 1), mark("n", "e", "loss", 0.5, 2)],
            now_ns=4_000_000_000,
        )

        assert [
            "cirron.session - 4.00s (open)",
            "  epoch[0] - 3.20s {loss=0.9 -> 0.5}",
            "    forward - 2.10ms (mode=train, data_load=5.0us)",
            "    backward - 142us (error=ValueError: bad)",
        ] == text.render(tree).splitlines()

    def test_many_equal_spans_are_one_line(self) -> None:
        """Many alike spans are one line with count, median, worst, total and how marks moved."""
        spans = [
            span(str(n), "batch", None, n, n * 50_000_000, n * 50_000_000 + 2_100_000)
            for n in range(1_000)
        ]
        spans[17].end_ns = spans[17].start_ns + 40_000_000
        tree = trees.build(
            spans, [mark("a", "0", "loss", 0.9, 1), mark("b", "999", "loss", 0.5, 2)]
        )

        assert (
            "batch x1000 - median 2.10ms, worst 40.00ms [17], total 2.14s {loss=0.9 -> 0.5}"
            == text.render(tree)
        )

    def test_a_nan_in_between_shows(self) -> None:
        """A value that was NaN and recovered is told, for it shows at neither end."""
        tree = trees.build(
            [span("a", "epoch")],
            [
                mark("1", "a", "loss", 0.9, 1),
                mark("2", "a", "loss", None, 2, value_nonfinite="nan"),
                mark("3", "a", "loss", 0.5, 3),
            ],
        )

        assert "epoch - 0.0us {loss=0.9 -> 0.5 with 1 not finite}" == text.render(tree)

    def test_a_nan_at_the_end_shows_as_it_is(self) -> None:
        """A loss that ended as NaN says so."""
        tree = trees.build(
            [span("a", "epoch")],
            [
                mark("1", "a", "loss", 0.9, 1),
                mark("2", "a", "loss", None, 2, value_nonfinite="nan"),
            ],
        )

        assert "epoch - 0.0us {loss=0.9 -> nan}" == text.render(tree)

    def test_hidden_children_are_counted(self) -> None:
        """A parent with very many different children says how many are not shown."""
        tree = trees.build([span(str(n), f"n{n}", start=n, end=n) for n in range(100)], [])
        lines = text.render(tree).splitlines()

        assert 51 == len(lines)
        assert "... and 50 more spans: only 50 rows of a parent are shown" == lines[-1]

    def test_many_marks_and_attributes_are_cut(self) -> None:
        """A line stays readable with a hundred marks and attributes."""
        attrs: dict[str, Any] = {f"k{n}": n for n in range(100)}
        tree = trees.build(
            [span("a", "step", **attrs)],
            [mark(str(n), "a", f"m{n:03}", n, n) for n in range(100)],
        )
        (line,) = text.render(tree).splitlines()

        assert "m011=11, 88 more}" in line
        assert line.endswith("k5=5, 94 more)")

    def test_many_times_are_cut(self) -> None:
        """So does the line of many spans that share a hundred times."""
        attrs: dict[str, Any] = {f"k{n}_ns": n for n in range(100)}
        tree = trees.build([span(str(n), "step", **attrs) for n in range(30)], [])
        (line,) = text.render(tree).splitlines()

        assert line.endswith("k5: median 0.0us, total 0.1us, 94 more)")

    def test_scheduling_times_are_for_tools(self) -> None:
        """A row of many spans leaves out what the row of one leaves out."""
        times: dict[str, Any] = {"starved_ns": 5, "asleep_ns": 5, "children_ns": 5, "wait_ns": 5}
        tree = trees.build([span(str(n), "step", **times) for n in range(30)], [])

        assert text.render(tree).endswith("(wait: median 0.0us, total 0.1us)")

    def test_an_empty_tree_says_what_to_do(self) -> None:
        """A tree without spans is one sentence that says what to do."""
        found = text.render(trees.build([], []))

        assert 1 == len(found.splitlines())
        assert "ci.profile()" in found

    def test_marks_outside_any_span(self) -> None:
        """Marks made while nothing was open are shown too."""
        assert "outside any span {loss=0.5}" == text.render(
            trees.build([], [mark("m", "root", "loss", 0.5)])
        )


def steps_with_evaluations(every: int, count: int = 100) -> trees.Tree:
    """Steps with a forward each; some have an evaluation with two forwards of its own."""
    spans = [span("epoch", "epoch", None, 0, 0, 10**9)]
    for n in range(count):
        start = n * 1_000_000
        spans += [
            span(f"s{n}", "step", "epoch", n, start, start + 900_000),
            span(f"f{n}", "forward", f"s{n}", None, start, start + 100_000, mode="train"),
        ]
        if n % every == every - 1:
            spans.append(span(f"e{n}", "evaluation", f"s{n}", n // every, start, start + 700_000))
            spans += [
                span(f"v{n}.{k}", "forward", f"e{n}", None, start, start + 10_000, mode="eval")
                for k in range(30)
            ]
    return trees.build(spans, [])


class TestFoldedSteps:
    def test_few_evaluations_are_shown_with_their_step(self) -> None:
        """Where steps are one line, an evaluation in one of them says in which."""
        rows = text.render(steps_with_evaluations(40)).splitlines()

        assert "    evaluation[0] - 700us (in step[39])" in rows
        assert "    evaluation[1] - 700us (in step[79])" in rows

    def test_many_evaluations_are_shown_with_their_steps(self) -> None:
        """Evaluations that are one line say from which step to which they were."""
        rows = text.render(steps_with_evaluations(4)).splitlines()
        (row,) = [row for row in rows if "evaluation" in row]

        assert row.startswith("    evaluation x25 - median 700us")
        assert row.endswith("(in step[3] to step[99])")

    def test_what_every_step_has_needs_no_step(self) -> None:
        """A forward of each step, and a step of an epoch, say nothing of the kind."""
        rows = text.render(steps_with_evaluations(40)).splitlines()

        assert [] == [row for row in rows if "in epoch" in row]
        assert [] == [row for row in rows if "forward" in row and "in step" in row]

    def test_modes_are_kept_apart(self) -> None:
        """Forwards in training and in evaluation are two lines, each with its own median."""
        spans = [span("root", "run", None, None, 0, 10**9)]
        for n in range(30):
            start = n * 1_000_000
            spans += [
                span(f"t{n}", "forward", "root", None, start, start + 100_000, mode="train"),
                span(f"e{n}", "forward", "root", None, start, start + 10_000, mode="eval"),
            ]

        assert [
            "  forward x30 - median 100us, worst 100us, total 3.00ms (mode=train)",
            "  forward x30 - median 10us, worst 10us, total 300us (mode=eval)",
        ] == text.render(trees.build(spans, [])).splitlines()[1:]


class TestDetails:
    """What `cirron show` says of a line beside its time."""

    def test_shares_and_what_no_child_covers(self) -> None:
        """A line has its share of the one above; a parent, the time that no child covers."""
        tree = trees.build(
            [
                span("1", "epoch", end=100_000),
                span("2", "load", "1", start=0, end=25_000),
                span("3", "step", "1", start=20_000, end=60_000),
                span("4", "forward", "3", start=20_000, end=60_000),
            ],
            [],
        )

        assert [
            "epoch - 100us (self 40us)",
            "  load - 25us, 25%",
            "  step - 40us, 40%",
            "    forward - 40us",
        ] == text.render(tree, is_detailed=True).splitlines()
        assert "epoch - 100us" == text.render(tree).splitlines()[0]

    def test_folded_steps_show_share_gpu_and_peak(self) -> None:
        """Many steps have the share of all, the device's median of those measured, and the peak."""
        spans = [span("e", "epoch", end=1_000_000)]
        for n in range(30):
            one = span(f"s{n}", "step", "e", index=n, start=n * 10_000, end=(n + 1) * 10_000)
            one.gpu_ns = 9_000 + n if n % 2 else None
            one.memory_peak_bytes = n * 2**20
            spans.append(one)
        lines = text.render(trees.build(spans, []), is_detailed=True).splitlines()

        assert "epoch - 1.00ms (self 700us)" == lines[0]
        device = "gpu median 9.0us of 15 measured"
        assert lines[1].endswith(f"total 300us, 30% ({device}, peak 29.0 MiB)")

    def test_an_open_span_has_no_share(self) -> None:
        """What has not ended may still become more."""
        tree = trees.build([span("2", "a", "1", end=10), span("1", "epoch", end=None)], [], 100)

        assert ["epoch - 0.1us (open)", "  a - 0.0us, 10%"] == (
            text.render(tree, is_detailed=True).splitlines()
        )
