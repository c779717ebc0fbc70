"""What a notebook cell shows."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import nbclient
import nbformat
import pytest

from cirron import wire
from cirron.runs import tree as trees
from cirron.view import notebook, text

SOURCE = Path(notebook.__file__).parents[2]


def span(
    id: str,
    name: str,
    parent: str | None = None,
    index: int | None = None,
    start: int = 0,
    end: int | None = 10,
    **attrs: Any,
) -> wire.Span:
    return wire.Span(id, name, parent, index, start, end, None, None, None, 1, 1, None, attrs, [])


class Balanced(HTMLParser):
    """Fails on a tag that is closed wrongly; keeps the tags and the text outside of <style>."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)


def parse(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert [] == parser.open
    return parser


class TestHtml:
    def test_rows_nest(self) -> None:
        """A span with children is a <details> with its own row as the summary."""
        tree = trees.build([span("e", "epoch", index=0), span("f", "forward", "e")], [])
        parsed = parse(notebook.to_html(tree))

        assert 1 == parsed.tags.count("details")
        assert ["epoch[0]", "0.0us", "forward", "0.0us"] == parsed.texts

    def test_bars_have_place_and_length_within_the_root(self) -> None:
        """A bar starts where the span starts within its root and is as long as it lasted."""
        tree = trees.build(
            [span("e", "epoch", start=100, end=200), span("f", "forward", "e", start=125, end=175)],
            [],
        )

        assert [("0.00", "100.00"), ("25.00", "50.00")] == re.findall(
            r"left:min\(([\d.]+)%,100% - 2px\);width:([\d.]+)%", notebook.to_html(tree)
        )

    def test_everything_is_escaped(self) -> None:
        """Names, marks, attributes and errors cannot bring in markup."""
        evil = "<script>alert('x')</script>&\""
        attrs: dict[str, Any] = {evil: evil, "error": evil}
        tree = trees.build(
            [span("a", evil, **attrs)],
            [wire.Mark("m", "a", evil, "string", evil, {}, 1, "point")],
        )
        html = notebook.to_html(tree)

        assert "<script" not in html
        assert evil in "".join(parse(html).texts)

    def test_no_formula_and_no_hidden_direction(self) -> None:
        """A "$" in a name is not handed to MathJax, and bidi controls and codes are escaped."""
        evil = "$\\href{javascript:alert(1)}{x}$ \u202e\u2066\x1b\x9b"
        attrs: dict[str, Any] = {evil: evil}
        html = notebook.to_html(trees.build([span("a", evil, **attrs)], []))
        (start,) = re.findall(r"^<div class=\"([^\"]*)\">", html)

        assert {"tex2jax_ignore", "mathjax_ignore"} <= set(start.split())
        assert "\\u202e\\u2066\\x1b\\x9b" in "".join(parse(html).texts)
        assert not re.search("[\u202e\u2066\x1b\x9b]", html)

    def test_circles_and_huge_numbers(self) -> None:
        """Spans that are each other's parents, at the ends of time, make a whole page."""
        spans = [
            span(str(n), "step", str((n + 1) % 300), 10**5000, 2**63, -(2**63)) for n in range(300)
        ]
        parsed = parse(notebook.to_html(trees.build(spans, [])))

        assert any("step" in found for found in parsed.texts)

    def test_no_script_and_nothing_from_outside(self) -> None:
        """The HTML is self-contained: no JavaScript, no links, and its CSS touches only itself."""
        html = notebook.to_html(trees.build([span("a", "step")], []))
        selectors = re.findall(r"^([.\w][^{\n]*)\{", notebook.STYLE, re.MULTILINE)

        assert not re.search(r"<script|https?:|url\(|@import|\son\w+=", html)
        assert selectors
        assert all(selector.startswith(".cirron-trace") for selector in selectors)

    def test_folded_rows_say_what_they_stand_for(self) -> None:
        """A folded row has count, median and worst."""
        spans = [span(str(n), "batch", index=n, start=n, end=n + 10) for n in range(100)]
        tree = trees.build(spans, [])
        texts = parse(notebook.to_html(tree)).texts

        assert ["batch x100", "median 0.0us, worst 0.0us [0], total 1.0us"] == texts

    def test_an_open_span_is_unfolded_at_any_depth(self) -> None:
        """The way to where the process is can be seen without a click."""
        spans = [span(str(n), "level", str(n - 1), start=n, end=None) for n in range(6)]
        html = notebook.to_html(trees.build(spans, [], now_ns=100))

        assert 5 == html.count("<details open>")

    @pytest.mark.parametrize("shape", [(10, 2_000, 4), (50, 50, 40), (18, 19, 290)])
    def test_a_hundred_thousand_spans_stay_small(self, shape: tuple[int, int, int]) -> None:
        """Whatever the shape of a large run, a cell does not blow up the notebook."""
        spans = []
        for a in range(shape[0]):
            spans.append(span(f"{a}", "a" * 80, start=a, key="v" * 80))
            for b in range(shape[1]):
                spans.append(span(f"{a}.{b}", f"b{b % 20}" * 40, f"{a}", start=a, key="v" * 80))
                spans += [
                    span(f"{a}.{b}.{c}", f"c{c}" * 40, f"{a}.{b}", start=a, key="v" * 80)
                    for c in range(shape[2])
                ]
        html = notebook.to_html(trees.build(spans, []))

        assert 80_000 < len(spans)
        assert 200_000 > len(html)

    def test_an_empty_tree_shows_the_same_sentence_as_text(self) -> None:
        """No spans: the same sentence as in text."""
        assert [text.EMPTY] == parse(notebook.to_html(trees.build([], []))).texts

    def test_repr_is_the_text(self) -> None:
        """Where HTML cannot be shown the view reads as the text tree."""
        tree = trees.build([span("a", "step", index=3)], [])

        assert text.render(tree) == repr(tree)


class TestInNotebook:
    def with_shell(self, monkeypatch: pytest.MonkeyPatch, shell: object) -> bool:
        module = ModuleType("IPython")
        module.get_ipython = lambda: shell  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", module)
        return notebook.in_notebook()

    def test_not_without_ipython(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A plain interpreter is no notebook, and IPython is not imported to find out."""
        code = (
            "import sys; from cirron.view import notebook;"
            " assert notebook.in_notebook() is False; assert 'IPython' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SOURCE)})

    def test_not_without_a_shell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """IPython that is only imported, as many libraries do, is no notebook."""
        assert not self.with_shell(monkeypatch, None)

    def test_not_in_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The IPython prompt in a terminal shows text."""
        assert not self.with_shell(monkeypatch, type("TerminalInteractiveShell", (), {})())

    def test_in_a_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A shell of Jupyter, or any with a kernel, renders HTML."""
        assert self.with_shell(monkeypatch, type("ZMQInteractiveShell", (), {})())
        assert self.with_shell(monkeypatch, SimpleNamespace(kernel=object()))


def test_a_real_kernel_renders_the_view(tmp_path: Path) -> None:
    """In a Jupyter kernel a cell that ends in a view gets HTML, with text beside it."""
    code = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
from cirron import wire
from cirron.runs import tree
from cirron.view import notebook
assert notebook.in_notebook()
spans = [wire.Span("a", "epoch", None, 0, 0, 142000, None, None, None, 1, 1, None, {{}}, [])]
tree.build(spans, [])
"""
    v4: Any = nbformat.v4
    cells = [v4.new_code_cell(code)]
    book = v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=120, resources=resources).execute()
    (output,) = [found for found in book.cells[0].outputs if found.output_type == "execute_result"]

    assert "epoch[0] - 142us" == output.data["text/plain"]
    assert "epoch[0]" in parse(output.data["text/html"]).texts


def test_a_real_kernel_reads_a_run(tmp_path: Path) -> None:
    """In a Jupyter kernel results of `ci.open()` are tables, and `ci.report()` has a verdict."""
    start = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
import cirron as ci
ci.profile()
for _ in ci.batches(range(30)):
    ci.mark("loss", 0.5)
"""
    shown = ["ci.report()", "run = ci.open(); run", "run.steps", "run.series('loss')", "run.runs"]
    v4: Any = nbformat.v4
    book = v4.new_notebook(cells=[v4.new_code_cell(one) for one in [start, *shown]])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=120, resources=resources).execute()
    results = [cell.outputs[-1].data["text/html"] for cell in book.cells[1:]]

    assert "VERDICT" in results[0]
    assert ["<table>"] * 4 == [one[:7] for one in results[1:]]


def test_a_tree_that_lost_its_beginning_says_so() -> None:
    """As in text, a tree whose older spans had to go ends with a line that says it."""
    tree = trees.build([], [])
    tree.is_partial = True

    assert "older spans are no longer in memory" in notebook.to_html(tree)
