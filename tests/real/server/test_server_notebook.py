"""`run.show()`: the page in a notebook, from a server in its process."""

from __future__ import annotations

import http.server
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cirron.server.notebook import Shown


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """The page of a run of three steps."""
    record(tmp_path, monkeypatch)
    one = ci.open(tmp_path).show(height=400)
    yield one
    one.close()


def record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    ci.profile()
    for number in ci.batches(range(3)):
        ci.mark("loss", number)
    ci.shutdown()


def frame_of(shown: Shown) -> str:
    """The address in the frame that a cell shows."""
    (found,) = re.findall(r'<iframe src="([^"]+)"', shown._repr_html_())
    return str(found.replace("&amp;", "&"))


def test_a_cell_shows_a_frame(shown: Shown) -> None:
    """Its link logs in once, each rendering has its own, and only a notebook may frame it."""
    first, second = frame_of(shown), frame_of(shown)
    assert first != second
    for link in (first, second):
        jar = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        try:
            answer = jar.open(link.partition("#")[0], timeout=30)
        except urllib.error.HTTPError as error:  # where the page was not built
            answer = error
        policy = answer.headers["content-security-policy"]
        assert "frame-ancestors http://localhost:* http://127.0.0.1:*" in policy
        answer.close()
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(first.partition("#")[0], timeout=30)
    assert "token" not in repr(shown)


def test_a_process_ends_with_its_page_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is still open does not delay or break the exit."""
    record(tmp_path, monkeypatch)
    program = "import cirron as ci; shown = ci.open().show(); print(repr(shown))"

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert "served at http://127.0.0.1:" in done.stdout


@pytest.mark.heavy
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_browser_shows_the_frame(shown: Shown, host: str) -> None:
    """Also if the notebook is another site for the browser, which partitions its cookies."""
    sync_api = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("needs Chromium")
    cell = shown._repr_html_().encode()

    class Notebook(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><body>" + cell)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Notebook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=browser_path, args=["--no-sandbox"]
            )
            page = browser.new_page()
            page.goto(f"http://{host}:{server.server_port}/")
            page.wait_for_function("frames.length == 1")
            frame = page.frames[1]
            frame.wait_for_load_state()

            assert "token" not in frame.url
            assert 200 == frame.evaluate("fetch('/api/runs').then(one => one.status)")
            browser.close()
        server.shutdown()
