"""How long the page takes in a real browser: `python bench/page.py DIR`, of its newest run.

First paint of the run's overview, and 24 zooms and pans of its timeline: from the key to the new
lanes being there. On a busy machine these say little: look at the load, and at the CPU time that
the server takes for a zoom, its flame graph included. Writes `bench/results/page.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "src" / "cirron" / "server" / "page" / "assets"
RESULTS = ROOT / "bench" / "results" / "page.json"
ZOOMS = 24
NEWEST = "fetch('api/runs').then(one => one.json()).then(one => one.runs?.[0]?.id ?? null)"
PRESS = """key => {
    performance.clearMarks('lane')
    window.pressed = performance.now()
    document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))
}"""
TOOK = """() => {
    const marks = performance.getEntriesByName('lane')
    return marks.length ? marks[0].startTime - window.pressed : null
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    command = [sys.executable, "-m", "cirron", "serve", "--no-browser", "--port", "0"]
    server = subprocess.Popen(
        [*command, parser.parse_args().folder], stdout=subprocess.PIPE, text=True
    )
    try:
        figures = measure(server.stdout.readline().strip(), server.pid)
    finally:
        server.kill()
        server.wait()
    figures = {name: round(one, 1) for name, one in figures.items()}
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(address: str, pid: int) -> dict[str, float]:
    base = address.split("?")[0]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.goto(f"{address}#/run/none/overview")  # logs in, and asks for no run yet
        while (run := page.evaluate(NEWEST)) is None:
            page.wait_for_timeout(500)
        page.close()
        page = context.new_page()
        page.goto(f"{base}#/run/{run}/overview")
        page.wait_for_selector("main h1")
        first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        head = page.evaluate("performance.now()")
        page.wait_for_selector("section[aria-label='Step time'] canvas")
        steps = page.evaluate("performance.now()")
        page.wait_for_selector(".verdict")
        verdict = page.evaluate("performance.now()")
        page.goto("about:blank")
        page.goto(f"{base}#/run/{run}/timeline")
        while not page.evaluate("performance.getEntriesByName('lane').length"):
            page.wait_for_timeout(50)
        page.wait_for_timeout(3000)
        random_ = random.Random(0)
        times = []
        asked = []
        before_s = cpu_s(pid)
        page.on("request", lambda request: asked.append(request.url))
        for number in range(ZOOMS):
            key = "w" if number < 8 else random_.choice("wsad")
            page.mouse.move(random_.randrange(300, 1200), 400)
            asked.clear()
            page.evaluate(PRESS, key)
            page.wait_for_timeout(300)
            if any("/timeline?" in url for url in asked):  # else what was there was enough
                while page.evaluate(TOOK) is None:
                    page.wait_for_timeout(20)
                times.append(page.evaluate(TOOK))
        times.sort()
        zoom_cpu_s = (cpu_s(pid) - before_s) / len(times)
        browser.close()
    return {
        "load": round(os.getloadavg()[0], 1),
        "javascript_gzip_kb": sum(
            len(gzip.compress(one.read_bytes())) / 1000 for one in SCRIPTS.glob("*.js")
        ),
        "first_paint_ms": first,
        "run_ms": head,
        "steps_ms": steps,
        "verdict_ms": verdict,
        "zooms_that_asked": len(times),
        "zoom_median_ms": statistics.median(times),
        "zoom_worst_ms": times[-1],
        "zoom_server_cpu_ms": 1000 * zoom_cpu_s,
    }


if __name__ == "__main__":
    main()
