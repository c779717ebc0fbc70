"""SIGTERM while the program logs, and programs that never let another thread or task run."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from typing import TYPE_CHECKING

import pytest

import cirron as ci

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

EXIT_S = 2.0
ON_DISK_S = 3.0

# Forks a process for each signal, which is cheaper than an interpreter each; it profiles itself.
LOGGING = """
import json, logging, os, random, signal, sys, time
import cirron as ci

dice = random.Random(15)
found = []
for number in range({times}):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        {setup}
        ci.profile(flush_interval=0.02, output={output}, path=f"run-{{number}}")
        os.write(writing, b"x")
        for index in range(10**9):
            with ci.scope("span", index):
                {say}
    os.read(reading, 1)
    time.sleep(dice.uniform(0.03, 0.1))
    began = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    done = 0
    while not done and time.monotonic() - began < 8:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
    took_s = time.monotonic() - began
    if not done:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    os.close(reading), os.close(writing)
    found.append([os.waitstatus_to_exitcode(status), took_s])
    if sum(took_s > 2 for _, took_s in found) > 2:
        break  # it is slow: no need to wait for more
with open("found.json", "w") as file:
    json.dump(found, file)
"""
LOG_TO_A_FILE = 'logging.basicConfig(level=logging.INFO, filename="log.txt", force=True)'


@pytest.mark.parametrize(
    ("times", "output", "setup", "say"),
    [
        (20, '"log"', LOG_TO_A_FILE, 'logging.info("the main thread says %d", index)'),
        (6, '["spool", "log"]', LOG_TO_A_FILE, 'logging.info("the main thread says %d", index)'),
        (
            6,
            '["spool", "stdout"]',
            'sys.stdout = open("out.txt", "w")',
            'print("the main thread says", index)',
        ),
    ],
    ids=["log", "spool and log", "spool and stdout"],
)
def test_sigterm_while_the_main_thread_writes(
    scripts: Scripts, times: int, output: str, setup: str, say: str
) -> None:
    """SIGTERM, again and again, while the main thread logs or prints in a tight loop: each time the
    process dies of it, within 2 s, with its records stored.
    """
    scripts.start(LOGGING.format(times=times, output=output, setup=setup, say=say)).end(60)
    found = json.loads((scripts.folder / "found.json").read_text())
    slow = [round(took_s, 2) for _, took_s in found if took_s > EXIT_S]

    assert [] == slow, f"{len(slow)} of {len(found)} ends took long: {slow}"
    assert [-signal.SIGTERM] * times == [status for status, _ in found]
    if "spool" in output:
        for number in range(times):
            run = ci.open(scripts.folder / f"run-{number}")
            assert "signal" == run.state
            indices = sorted(one["index"] for one in run.spans.rows() if one["name"] == "span")
            assert list(range(len(indices))) == indices


# -- programs that never yield ----------------------------------------------------------------

BUSY = {
    "a thread": """
import cirron as ci
{profile}
busy()
""",
    "asyncio": """
import asyncio
import cirron as ci
{profile}
async def main():
    busy()
asyncio.run(main())
""",
    "gevent before the import": """
from gevent import monkey
monkey.patch_all()
import cirron as ci
{profile}
import gevent
gevent.spawn(busy).join()
""",
    "gevent after the import": """
import cirron as ci
from gevent import monkey
monkey.patch_all()
{profile}
import gevent
gevent.spawn(busy).join()
""",
    "gevent after profile": """
import cirron as ci
{profile}
from gevent import monkey
monkey.patch_all()
import gevent
gevent.spawn(busy).join()
""",
    "gevent in the main greenlet": """
from gevent import monkey
monkey.patch_all()
import cirron as ci
{profile}
busy()
""",
}
SPINS = """
import os, sys, time
def busy():
    'Records and computes for ever, and never yields to anybody.'
    number = 0
    print("busy", flush=True)
    while not {stops}:
        with ci.scope("span", number):
            ci.mark("value", number)
            sum(range(2_000))
        number += 1
    print("made", number, flush=True)
"""


def needs(what: str) -> None:
    if what.startswith("gevent") and importlib.util.find_spec("gevent") is None:
        pytest.skip("needs gevent: pip install gevent")


def spans(scripts: Scripts) -> list[int]:
    return sorted(
        span.index or 0 for run in scripts.sessions() for span in run.spans if span.name == "span"
    )


@pytest.mark.parametrize("what", BUSY)
def test_what_never_yields_is_on_disk(scripts: Scripts, what: str) -> None:
    """The spans of a task that never yields are on disk while it runs, and the black box beats;
    kill -9 leaves them there.
    """
    needs(what)
    body = SPINS.format(stops="False") + BUSY[what].format(
        profile="ci.profile(flush_interval=0.05)"
    )
    script = scripts.start(body)
    script.wait_for("busy")
    deadline = time.monotonic() + ON_DISK_S
    while len(found := spans(scripts)) < 500 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) >= 500, f"{len(found)} spans on disk after {ON_DISK_S:g} s"
    before = scripts.box()["heartbeat_ns"]
    scripts.wait_until(
        lambda: scripts.box()["heartbeat_ns"] > before, "the next heartbeat", timeout_s=2
    )
    script.kill(signal.SIGKILL)

    assert -signal.SIGKILL == script.end().status
    left = spans(scripts)
    assert list(range(len(left))) == left
    assert len(left) >= len(found)
    assert "killed" == scripts.state()


@pytest.mark.parametrize("what", [what for what in BUSY if "gevent" in what])
def test_the_end_under_gevent(scripts: Scripts, what: str) -> None:
    """A patched program that never yields ends as it should, with everything on disk, and flush()
    and health() work in it.
    """
    needs(what)
    stops = "number == 3_000"
    body = SPINS.format(stops=stops) + BUSY[what].format(profile="ci.profile(flush_interval=3600)")
    ended = scripts.run(
        body
        + """
began = time.perf_counter()
ci.flush()
print("flushed", time.perf_counter() - began < 2, ci.health()["flusher_alive"])
began = time.perf_counter()
ci.shutdown()
print("ended", time.perf_counter() - began < 2)
"""
    )

    assert (0, ["busy", "made 3000", "flushed True True", "ended True"]) == (
        ended.status,
        ended.out.splitlines(),
    )
    assert list(range(3_000)) == spans(scripts)
    assert 3_000 == len(scripts.session().marks)
    assert "clean" == scripts.state()


@pytest.mark.parametrize("what", ["gevent before the import", "gevent after profile", "asyncio"])
def test_sigterm_in_what_never_yields(scripts: Scripts, what: str) -> None:
    """SIGTERM kills a program that never yields as without us, at once, with everything stored."""
    needs(what)
    body = SPINS.format(stops="False") + BUSY[what].format(
        profile="ci.profile(flush_interval=3600)"
    )
    script = scripts.start(body)
    script.wait_for("busy")
    time.sleep(0.2)  # of recording: nothing says from outside how far it is
    began = time.monotonic()
    script.kill(signal.SIGTERM)
    ended = script.end()
    took_s = time.monotonic() - began

    assert -signal.SIGTERM == ended.status
    assert took_s < EXIT_S, f"the end took {took_s:.2f} s"
    found = spans(scripts)
    assert list(range(len(found))) == found
    assert len(found) > 100
    assert "signal" == scripts.state()


def test_greenlets_keep_their_scopes_apart(scripts: Scripts) -> None:
    """Greenlets that switch inside their scopes nest each under its own."""
    needs("gevent")
    ended = scripts.run("""
        from gevent import monkey
        monkey.patch_all()
        import gevent
        import cirron as ci

        def work(number):
            with ci.scope("outer", number):
                for step in range(5):
                    gevent.sleep(0)
                    with ci.scope("inner", number):
                        gevent.sleep(0)
                        ci.mark("number", number)

        ci.profile(flush_interval=0.05)
        gevent.joinall([gevent.spawn(work, number) for number in range(20)])
    """)

    assert 0 == ended.status, ended.err
    run = scripts.session()
    outer = {span.id: span.index for span in run.spans if span.name == "outer"}
    inner = {span.id: span for span in run.spans if span.name == "inner"}
    assert (20, 100, 100) == (len(outer), len(inner), len(run.marks))
    assert all(outer[span.parent_id or ""] == span.index for span in inner.values())
    assert all(inner[mark.span_id].index == mark.value for mark in run.marks)
