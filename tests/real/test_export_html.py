"""The report: one page that loads nothing, runs nothing, and says what happened."""

from __future__ import annotations

import html.parser
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci

if TYPE_CHECKING:
    from tests.real import export_cases
    from tests.real.export_cases import MARKUP, Writer, session
else:
    import export_cases
    from export_cases import MARKUP, Writer, session

ROOT = Path(__file__).parents[2]
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "section", "div", "span", "b", "p"),
    *("h1", "h2", "h3", "table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "g", "rect", "path", "text", "polyline", "circle"),
}


class Page(html.parser.HTMLParser):
    """What is on a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.metas: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "meta":
            self.metas.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def exported(run: Any, folder: Path) -> str:
    run.export("html", folder / "report.html")
    return (folder / "report.html").read_text("utf-8")


def test_a_plain_run(tmp_path: Path) -> None:
    """It names the run, its phases, marks, ranks and tensors."""
    page = Page(exported(export_cases.plain(tmp_path), tmp_path))

    for title in ("Step time", "Phases", "Marks", "Processes", "Timeline", "Tensors"):
        assert title in page.words
    for name in ("run run", "forward", "loss", "rank 1 on node", "fc.weight", "66", "24"):
        assert name in page.words
    assert "Problems" not in page.words


def test_the_verdict_comes_first(tmp_path: Path) -> None:
    """The page says what `cirron report` says: the verdict, and what to do."""
    run = export_cases.plain(tmp_path)
    page = Page(exported(run, tmp_path))
    verdict = run.report().verdict

    assert f"{verdict.kind}: {verdict.summary}" in page.words
    assert page.words.index("Verdict") < page.words.index("Phases")


def test_names_are_never_markup(tmp_path: Path) -> None:
    """Whatever names hold, the page has only our own tags, and shows the names as text."""
    text = exported(export_cases.hostile(tmp_path), tmp_path)
    page = Page(text)

    assert page.tags <= TAGS
    assert not {name for name in page.attributes if name.startswith("on")}
    assert not page.attributes & {"href", "src", "style", "xlink:href", "srcset", "action"}
    assert MARKUP in page.words
    assert not [c for c in text if ord(c) < 32 and c != "\n"]


def test_its_policy_allows_nothing(tmp_path: Path) -> None:
    """The head forbids scripts, images, fonts and connections; one style is named by its hash."""
    text = exported(export_cases.plain(tmp_path), tmp_path)
    (policy,) = [
        one["content"] or ""
        for one in Page(text).metas
        if one.get("http-equiv") == "Content-Security-Policy"
    ]

    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text


def test_merged_spans_are_drawn_where_they_were(tmp_path: Path) -> None:
    """Blocks of merged spans end on the timeline where the span around them ends."""
    writer = Writer(tmp_path, session(rank=0))
    root = writer.span("cirron.session", 0, 130_000)
    for at in range(0, 130_000, 100):
        writer.span("tick", at, at + 50, root)
    writer.seal()
    text = exported(ci.open(tmp_path), tmp_path)
    rect = r'<rect[^>]* x="([\d.]+)"[^>]* width="([\d.]+)"[^>]*><title>{title}'

    def ends(title: str) -> list[float]:
        found = re.findall(rect.format(title=title), text)
        return [float(x) + float(width) for x, width in found]

    assert ends("cirron.session")[0] == pytest.approx(max(ends("[0-9,]+ spans")), rel=0.02)


def test_problems_come_first(tmp_path: Path) -> None:
    """Errors of spans, marks that are not finite, and lost processes are named."""
    writer = Writer(tmp_path, session(rank=0))
    root = writer.span("cirron.session", 0, 1000)
    writer.span("save", 10, 20, root, attrs={"error": "OSError: full"})
    writer.mark(root, "loss", float("nan"), 30)
    writer.mark(root, "training_health", "dead: fc.weight", 40)
    writer.seal()
    page = Page(exported(ci.open(tmp_path), tmp_path))

    for problem in (
        "1 x save: OSError: full",
        "mark loss: 1 x not a finite number",
        "dead: fc.weight (1 x)",
    ):
        assert problem in page.words


def test_where_a_killed_process_was(tmp_path: Path) -> None:
    """Of a killed program the page says what it was in."""
    code = (
        "import os, signal, cirron as ci\n"
        "ci.profile()\n"
        "with ci.scope('stuck'):\n"
        "    ci.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    page = Page(exported(ci.open(tmp_path), tmp_path))

    assert "killed" in page.words
    assert [word for word in page.words if "it was in cirron.session/stuck" in word]


def test_a_large_run_is_a_small_page(tmp_path: Path) -> None:
    """The size of the page does not grow with the run."""
    large = tmp_path / "large"
    generate = f"{ROOT}/bench/spools.py {large} --spans 200000 --ranks 16".split()
    subprocess.run([sys.executable, *generate], check=True, capture_output=True)
    text = exported(ci.open(large), tmp_path)

    assert len(text) < 400_000
    assert "200,0" in text


def test_nothing_but_a_session(tmp_path: Path) -> None:
    """A run in which nothing happened is a page as well."""
    writer = Writer(tmp_path, session())
    writer.span("cirron.session", 0, 0)
    writer.seal()
    page = Page(exported(ci.open(tmp_path), tmp_path))

    assert "Timeline" in page.words
    assert "Marks" not in page.words


@pytest.mark.heavy
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(tmp_path: Path, scheme: Any) -> None:
    """A browser shows it without a complaint, asks for nothing else, and runs nothing."""
    sync_api = pytest.importorskip("playwright.sync_api")
    import shutil

    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("needs chromium")
    exported(export_cases.hostile(tmp_path), tmp_path)
    said: list[str] = []
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 900})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        charts = page.locator("svg:not(.bar):not(.spark)")
        sizes = [charts.nth(number).bounding_box() for number in range(charts.count())]
        wide = page.evaluate("document.documentElement.scrollWidth")
        browser.close()

    assert [] == said
    assert [(tmp_path / "report.html").as_uri()] == asked
    assert {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme] == back
    assert sizes
    assert all(box and box["width"] > 5 and box["height"] > 5 for box in sizes)
    assert wide <= 1200
