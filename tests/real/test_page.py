"""The page in a real browser, on runs that real training scripts make while the test watches."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
AXE = ROOT / "viewer" / "node_modules" / "axe-core" / "axe.min.js"
COMMAND = [sys.executable, "-m", "cirron", "serve", "--no-browser", "--port"]
TABS = ("overview", "timeline", "marks", "tensors", "ranks", "diff")
MARKUP = "<img src=x onerror='window.hit=1'>"
WAIT_MS = 30_000

# Trains on handwritten digits until it is told to stop; a line of input becomes a mark.
TRAINING = """
import os, queue, sys, threading, time
import torch
from sklearn.datasets import load_digits
import cirron as ci

given = queue.SimpleQueue()
read = lambda: [given.put(line.strip()) for line in sys.stdin]
threading.Thread(target=read, daemon=True).start()
torch.manual_seed(0)
torch.set_num_threads(1)
ci.profile(snapshots="stats", config={"epochs": 1000}, tags={"kind": "live"})
digits = load_digits()
data = torch.utils.data.TensorDataset(
    torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
loader = torch.utils.data.DataLoader(data, batch_size=64)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
ci.watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("ready", flush=True)
for epoch in range(1000):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        ci.mark("loss", loss.item())
        time.sleep(0.01)
        while not given.empty():
            name = given.get()
            if name == "stop":
                ci.shutdown()
                sys.exit()
            ci.mark(name, 1.0)
            print(time.time(), flush=True)
"""
# Markup wherever a program can put a word.
HOSTILE = f"""
import cirron as ci
word = {MARKUP!r}
ci.profile(tags={{"name": word, word: word}}, config={{word: word}})
for epoch in ci.epochs(range(2)):
    for step in ci.batches(range(30)):
        with ci.scope(word, **{{"attribute": word}}):
            ci.mark(word, step)
    ci.mark("said", word)
try:
    with ci.scope("fails"):
        raise RuntimeError(word)
except RuntimeError:
    pass
"""


class Script:
    """A training script that runs while the test watches."""

    def __init__(self, folder: Path, code: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CIRRON_FLUSH_INTERVAL": "0.5"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        if self.process.poll() is None:
            self.say("stop")
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scripts run and the server looks: at first a run with markup in every word."""
    found = tmp_path_factory.mktemp("runs")
    environ = os.environ | {"TORCHELASTIC_RUN_ID": "a-long-id-" * 8}
    subprocess.run([sys.executable, "-c", HOSTILE], cwd=found, env=environ, check=True, timeout=120)
    return found


@pytest.fixture(scope="module")
def training(folder: Path) -> Iterator[Script]:
    script = Script(folder, TRAINING)
    assert "ready" == script.line()
    yield script
    script.end()


@contextlib.contextmanager
def served(folder: Path, port: int | str = 0) -> Iterator[str]:
    """The first line that a server prints: its address with a one-time token."""
    server = subprocess.Popen([*COMMAND, str(port), str(folder)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.communicate(timeout=30)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as found:
        yield found


@pytest.fixture(scope="module")
def context(address: str) -> Iterator[Any]:
    """A browser that has logged in."""
    api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not there")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = browser.new_context(viewport={"width": 1280, "height": 800})
        found.set_default_timeout(WAIT_MS)
        page = found.new_page()
        page.goto(address)
        page.close()
        yield found
        browser.close()


class Watched:
    """A page of the browser, and its errors."""

    def __init__(self, context: Any, base: str) -> None:
        self.base = base
        self.complaints: list[str] = []
        self.page = context.new_page()
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console",
            lambda said: (
                self.complaints.append(said.text) if said.type in ("error", "warning") else None
            ),
        )

    def show(self, view: str) -> Any:
        self.page.goto("about:blank")  # another address of the same page would not load it anew
        self.page.goto(self.base + view)
        self.page.wait_for_selector("main h1")
        return self.page


@pytest.fixture
def watched(context: Any, address: str) -> Iterator[Watched]:
    found = Watched(context, address.split("?")[0])
    yield found
    found.page.close()
    assert [] == found.complaints


def until(page: Any, fact: str) -> None:
    """Waits for a fact of the page. Playwright's own way needs `eval`, which the policy refuses."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(fact):
        assert time.monotonic() < deadline, f"{fact} at {page.url}"
        page.wait_for_timeout(50)


def run_of(watched: Watched, kind: str) -> str:
    """The id of a run by a tag, as soon as the server knows it."""
    for _ in range(60):
        watched.page.goto(watched.base)
        runs = watched.page.evaluate("fetch('api/runs').then((one) => one.json())")["runs"]
        found = [run["id"] for run in runs if kind in run["tags"].values()]
        if found:
            return str(found[0])
        time.sleep(0.5)
    raise AssertionError(f"no run has the tag {kind!r}: {runs}")


def test_mark_is_on_the_page_within_two_seconds(watched: Watched, training: Script) -> None:
    """A mark of a running program appears without a reload, within two seconds."""
    page = watched.show(f"#/run/{run_of(watched, 'live')}/marks")
    page.wait_for_selector("h3:has-text('loss')")
    delays = []
    for number in range(3):
        time.sleep(1.3)  # at another moment between two flushes
        training.say(f"signal {number}")
        marked = float(training.line())
        page.wait_for_selector(f"h3:text-is('signal {number}')", state="attached")
        delays.append(time.time() - marked)

    assert statistics.median(delays) < 2.0, delays


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_tab_renders(watched: Watched, training: Script, scheme: str) -> None:
    """Each tab shows its content, without errors in the browser."""
    page = watched.page
    page.emulate_media(color_scheme=scheme)
    run, other = run_of(watched, "live"), run_of(watched, MARKUP)
    expected = {
        "overview": "section[aria-label='Step time'] canvas",
        "timeline": ".flame .box",
        "marks": ".uplot canvas",
        "tensors": "td button:text-is('0.weight')",
        "ranks": "td:has-text('running')",
        "diff": f"code:has-text('{other[-15:]}')",  # torchrun's: its start is every run's
    }
    for tab, selector in expected.items():
        watched.show(f"#/run/{run}/{tab}?with={other}")
        page.wait_for_selector(selector)
        assert scheme == page.evaluate("document.documentElement.dataset.theme")
    assert set(TABS) == set(expected)


def test_keys(watched: Watched, training: Script) -> None:
    """Everything is reached by keyboard, and `?` lists the keys."""
    page = watched.show(f"#/run/{run_of(watched, 'live')}/overview")
    page.keyboard.press("?")
    assert page.is_visible("dialog h2:text-is('Keys')")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    for number, tab in enumerate(TABS, 1):
        page.keyboard.press(str(number))
        until(page, f"location.hash.includes('/{tab}')")
    page.keyboard.press("2")
    page.wait_for_selector(".flame .box")
    page.keyboard.press("w")
    until(page, "location.hash.includes('from=')")
    page.keyboard.press("f")
    until(page, "!location.hash.includes('from=')")
    page.keyboard.press("/")
    assert "Search spans" == page.evaluate("document.activeElement.ariaLabel")
    page.keyboard.type("backward")
    page.keyboard.press("Enter")
    page.wait_for_selector(".panel h2:has-text('backward')")
    page.keyboard.press("Escape")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert before != page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")


def test_keys_in_any_order(watched: Watched, training: Script) -> None:
    """Whatever is pressed while runs, tabs and themes change, the page reports no error."""
    page = watched.show(f"#/run/{run_of(watched, 'live')}/overview?with={run_of(watched, MARKUP)}")
    chance = random.Random(1)
    for _ in range(150):
        page.keyboard.press(chance.choice([*"jjkcct?lxwsf[]/", *"111223456", "Escape", "Escape"]))
        page.wait_for_timeout(chance.choice([0, 5, 40, 200]))
    page.keyboard.press("Escape")


def test_deep_links_show_the_same(watched: Watched, training: Script) -> None:
    """Opening the address again shows the same range, selection and settings."""
    run = run_of(watched, "live")
    page = watched.show(f"#/run/{run}/timeline")
    page.wait_for_selector("td .name:has-text('optimizer_step')")  # its first spans are there
    page.fill("input[aria-label='Search spans']", "optimizer_step")
    page.press("input[aria-label='Search spans']", "Enter")
    page.wait_for_selector(".panel h2:has-text('optimizer_step')")
    until(page, "location.hash.includes('span=') && location.hash.includes('from=')")
    page.wait_for_timeout(600)
    link = page.evaluate("location.hash")
    again = watched.show(link)
    again.wait_for_selector(".panel h2:has-text('optimizer_step')")
    again.wait_for_timeout(600)
    assert link == again.evaluate("location.hash")

    page = watched.show(f"#/run/{run}/marks?x=epoch&smooth=0.5&log=1&q=lo")
    page.wait_for_selector("h3:text-is('loss')")
    assert "true" == page.get_attribute("button:text-is('epoch')", "aria-pressed")
    assert "true" == page.get_attribute("button:text-is('Log axis')", "aria-pressed")
    assert "0.5" == page.input_value("input[type=range]")
    assert "lo" == page.input_value("input[aria-label='Search marks']")


def test_markup_in_names_is_text(watched: Watched) -> None:
    """Names and texts of a run are shown as they are, and never become part of the page."""
    run = run_of(watched, MARKUP)
    page = watched.page
    for tab, selector in {
        "overview": "main h1",
        "marks": "h3.mono",
        "timeline": "td .name",
    }.items():
        watched.show(f"#/run/{run}/{tab}")
        page.wait_for_selector(selector)
        words = page.eval_on_selector_all(selector, "found => found.map((one) => one.innerText)")
        assert any(MARKUP in word for word in words), (tab, words)
        assert 0 == page.locator("img").count()
    page.fill("input[aria-label='Search spans']", MARKUP)
    page.press("input[aria-label='Search spans']", "Enter")
    page.wait_for_selector(".panel dd:has-text('onerror')")
    assert 0 == page.locator("img").count()
    assert None is page.evaluate("window.hit ?? null")


def test_long_words_stay_in_their_place(watched: Watched) -> None:
    """No tab scrolls sideways, and the command of the verdict does not cover its text."""
    run, page = run_of(watched, MARKUP), watched.page
    for tab in TABS:
        watched.show(f"#/run/{run}/{tab}")
        page.wait_for_timeout(500)
        wide = page.evaluate(
            "Math.max(...['html', 'main', '.content'].map((one) =>"
            " document.querySelector(one).scrollWidth - document.querySelector(one).clientWidth))"
        )
        assert 0 == wide, tab
    watched.show(f"#/run/{run}/overview")
    page.wait_for_selector(".verdict .side code")
    text, command = (page.locator(one).bounding_box() for one in ("div.said", ".side code"))
    assert text["x"] + text["width"] <= command["x"]


def test_accessibility(watched: Watched, training: Script) -> None:
    """axe finds nothing serious on any tab, dark or light."""
    if not AXE.exists():
        pytest.skip("axe-core is not there: npm ci in viewer/")
    run, other = run_of(watched, "live"), run_of(watched, MARKUP)
    page = watched.page
    source = AXE.read_text()
    found = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for tab in TABS:
            watched.show(f"#/run/{run}/{tab}?with={other}")
            page.wait_for_timeout(1500)
            page.evaluate(source)  # not by a script element: the page's policy would refuse it
            violations = page.evaluate("axe.run().then((one) => one.violations)")
            found += [
                (scheme, tab, one["id"], [node["html"][:200] for node in one["nodes"][:3]])
                for one in violations
                if one["impact"] in ("serious", "critical")
            ]

    assert [] == found, json.dumps(found, indent=1)


def test_empty_server_teaches(context: Any, tmp_path: Path) -> None:
    """A server without runs says how to record one."""
    with served(tmp_path) as found:
        page = context.browser.new_page()
        page.goto(found)
        page.wait_for_selector("h2:text-is('No runs here yet')", timeout=WAIT_MS)
        assert "ci.profile()" in page.inner_text("main")
        page.close()


def test_browser_that_is_not_logged_in_is_told_how(context: Any, address: str) -> None:
    """It does not look like a server without runs."""
    page = context.browser.new_page()
    page.goto(address.split("?")[0])

    page.wait_for_selector("main:has-text('not logged in')", timeout=WAIT_MS)

    assert "cirron serve" in page.inner_text("main")
    assert not page.is_visible("text=No runs here yet")
    page.close()


def test_list_and_head_follow_a_run(context: Any, tmp_path: Path) -> None:
    """A training that starts while the page is open is shown; when it dies, list and head say so.
    A server that is gone, and one that came back and does not know the browser, are told apart.
    """
    page = context.browser.new_page()
    with served(tmp_path) as found:
        port = found.split(":")[2].split("/")[0]
        page.goto(found)
        page.wait_for_selector("h2:text-is('No runs here yet')", timeout=WAIT_MS)
        script = Script(tmp_path, TRAINING)
        assert "ready" == script.line()
        page.wait_for_selector("header:has-text('running')", timeout=WAIT_MS)
        page.wait_for_selector("nav li .running", timeout=WAIT_MS)
        script.process.kill()
        script.process.communicate()
        page.wait_for_selector("header:has-text('killed')", timeout=WAIT_MS)
        page.wait_for_selector("nav li .died", timeout=WAIT_MS)
    page.wait_for_selector("nav:has-text('Is `cirron serve` still running?')", timeout=WAIT_MS)
    assert page.is_visible("header:has-text('killed')")  # what was there stays
    with served(tmp_path, port) as again:
        page.wait_for_selector("nav:has-text('Open the address that')", timeout=WAIT_MS)
        page.goto(again)
        page.wait_for_selector("nav li", timeout=WAIT_MS)
        assert not page.is_visible("nav:has-text('no connection')")
        page.goto(f"{again.split('?')[0]}#/run/%/overview?with=%")
        page.wait_for_selector("h2:text-is('This run cannot be shown')", timeout=WAIT_MS)
    page.close()


STEP_NS = 400 * 10**9
# The number of painted pixels of each canvas.
PAINTED = """found => found.map((one) => {
    const { data } = one.getContext('2d').getImageData(0, 0, one.width, one.height)
    return data.filter((part, at) => at % 4 === 3 && part).length
})"""


def test_slow_runs_with_long_ids(context: Any, tmp_path: Path) -> None:
    """Runs of a scheduler differ in the end of their ids, and a step may take minutes."""
    spool = tmp_path / ".cirron" / "spool"
    spool.mkdir(parents=True)
    for number in (1, 2):
        first_ns = number * 10**15
        spans: list[dict[str, Any]] = [
            {
                "id": f"{number:016x}{at:016x}",
                "name": "step",
                "parent_id": None,
                "index": at,
                "start_ns": first_ns + at * STEP_NS,
                "end_ns": first_ns + (at + 1) * STEP_NS,
                "cpu_ns": None,
                "gpu_ns": None,
                "memory_peak_bytes": None,
                "thread_id": 1,
                "pid": 1,
                "rank": 0,
                "attrs": {},
                "mark_ids": [],
            }
            for at in range(30)
        ]
        marks: list[dict[str, Any]] = [
            {
                "id": f"{number + 2 + value:016x}{at:016x}",
                "span_id": spans[at]["id"],
                "name": name,
                "value_type": "float",
                "value": value,
                "attrs": {},
                "ts_ns": spans[at]["end_ns"],
                "kind": "point",
            }
            for value, name in enumerate(("zero", "one"))
            for at in range(30)
        ]
        who = {
            "id": f"s{number}",
            "run_id": f"torchelastic-nightly-training-{number}",
            "attempt": 0,
            "host": "node",
            "pid": 1,
            "rank": 0,
            "local_rank": 0,
            "world_size": 1,
            "clock": {"wall_ns": first_ns, "monotonic_ns": 0, "uncertainty_ns": 0},
        }
        batch = {
            "schema_version": 1,
            "sdk_version": "1",
            "batch_id": f"{number:032x}",
            "created_ns": first_ns,
            "session": who,
            "spans": spans,
            "marks": marks,
        }
        (spool / f"{first_ns:020d}-{number:032x}.json").write_text(json.dumps(batch))
    page = context.browser.new_page()
    with served(tmp_path) as found:
        page.goto(found)
        page.wait_for_selector("h3:text-is('throughput')", timeout=WAIT_MS)
        page.wait_for_selector("span:has-text('0.0025')", timeout=WAIT_MS)
        page.keyboard.press("3")
        page.wait_for_selector("h3:text-is('zero')", timeout=WAIT_MS)
        until(page, "document.querySelectorAll('main canvas').length === 2")
        page.wait_for_timeout(500)
        one, zero = page.eval_on_selector_all("main canvas", PAINTED)
        assert zero > 0.8 * one, "a constant of 0 has a line and an axis, too"
        page.keyboard.press("c")
        page.keyboard.press("6")
        page.wait_for_selector(".chip:has-text('torchela…htly-training-1')", timeout=WAIT_MS)
        page.wait_for_selector(".chip:has-text('torchela…htly-training-2')", timeout=WAIT_MS)
    page.close()
