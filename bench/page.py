"""How long the page takes in a real browser: `python bench/page.py ADDRESS [--run ID]`.

First paint of the run's overview, and 24 zooms and pans of its timeline: from the key to the new
lanes being there. ADDRESS is what `cirron serve --no-browser DIR` prints.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics

from playwright.sync_api import sync_playwright

ZOOMS = 24
NEWEST = "fetch('api/runs').then(one => one.json()).then(one => one.runs[0].id)"
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
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--run")
    given = parser.parse_args()
    base = given.address.split("?")[0]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        context = browser.new_context(
            viewport={"width": 1280, "height": 800}, reduced_motion="reduce"
        )
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.goto(f"{given.address}#/run/none/overview")  # logs in, and asks for no run yet
        run = given.run or page.evaluate(NEWEST)
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
        print(
            f"first paint {first:.0f} ms, the run {head:.0f} ms, its steps {steps:.0f} ms,"
            f" its verdict {verdict:.0f} ms"
        )

        page.goto("about:blank")
        page.goto(f"{base}#/run/{run}/timeline")
        while not page.evaluate("performance.getEntriesByName('lane').length"):
            page.wait_for_timeout(50)
        page.wait_for_timeout(3000)
        random_ = random.Random(0)
        times = []
        asked = []
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
        print(
            f"{len(times)} zooms that asked: median {statistics.median(times):.0f} ms,"
            f" worst {times[-1]:.0f} ms"
        )
        browser.close()


if __name__ == "__main__":
    main()
