"""No disk on the user's thread: however long the disk takes, recording does not wait for it."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Scripts
    from tests.real.hostile.conftest import HangingDisk

CALL_S = 0.2
INTERVAL_S = 0.2

# Whatever loads on first use is loaded by a first session elsewhere: it is the disk's turn here.
HEAD = """
import json, os, sys, threading, time
import cirron as ci

def timed(call, *args, **named):
    began = time.perf_counter()
    value = call(*args, **named)
    times[getattr(call, "__name__", str(call))] = time.perf_counter() - began
    return value
times = {}

def record(count, start=0):
    slowest = 0
    for number in range(start, start + count):
        began = time.perf_counter()
        with ci.scope("span", number):
            ci.mark("value", number)
        slowest = max(slowest, time.perf_counter() - began)
    times["scope"] = max(slowest, times.get("scope", 0))

options = json.loads(os.environ.get("OPTIONS", "{}"))
ci.Cirron(**options).profile(path="warm")
record(1)
ci.flush()
ci.trace(format="dict")
ci.shutdown()
times.clear()
"""
ENDPOINT = '{"api_key": "k", "api_endpoint": "http://127.0.0.1:9"}'


def assert_quick(times: dict[str, float]) -> None:
    slow = {what: f"{took_s:.2f} s" for what, took_s in times.items() if took_s > CALL_S}
    assert {} == slow, f"waited for the disk: {slow}"


@pytest.mark.parametrize("options", ["{}", ENDPOINT], ids=["file only", "with an endpoint"])
def test_a_disk_that_hangs_from_the_start(
    scripts: Scripts, hanging_disk: HangingDisk, options: str
) -> None:
    """While the disk hangs, profile(), scope(), mark(), trace() and health() return at once; when
    it comes back everything is written.
    """
    hanging_disk.hang()
    script = scripts.start(
        HEAD
        + """
timed(ci.Cirron(**options).profile, flush_interval=0.05)
print("started", flush=True)
record(5_000)
""",
        driven=True,
        OPTIONS=options,
        **hanging_disk.environ,
    )
    script.wait_for("started", timeout_s=5)
    script.ask("timed(ci.trace, format='dict') and None")
    script.ask("timed(ci.health) and None")
    scripts.wait_until(hanging_disk.is_stuck, "the worker to hang")
    script.ask("record(5_000, 5_000)")
    script.ask("timed(ci.trace, format='dict') and None")
    script.ask("timed(ci.health) and None")
    times = script.ask("times")
    assert not scripts.home.exists(), "the disk did not hang"
    hanging_disk.release()
    assert times.pop("trace") < 1.0  # it makes a tree of 10,000 spans
    assert_quick(times)

    script.ask("ci.flush() and None")
    assert list(range(10_000)) == [span.index for span in scripts.spans("span")]
    assert 0 == script.end().status
    assert "clean" == scripts.state()
    assert 10_000 == len(scripts.session().marks)


def test_a_disk_that_hangs_meanwhile(scripts: Scripts, hanging_disk: HangingDisk) -> None:
    """A disk that hangs in the middle of a run holds up no scope, and loses nothing."""
    script = scripts.start(
        HEAD + "ci.profile(flush_interval=0.05)\nrecord(1_000)\nci.flush()\n",
        driven=True,
        **hanging_disk.environ,
    )
    script.ask("times.clear()")
    hanging_disk.hang()
    scripts.wait_until(hanging_disk.is_stuck, "the worker to hang")
    for start in range(1_000, 5_000, 1_000):
        script.ask(f"record(1_000, {start})")
        script.ask("timed(ci.health) and None")
    times = script.ask("times")
    hanging_disk.release()
    assert_quick(times)

    script.ask("ci.flush() and None")
    assert list(range(5_000)) == [span.index for span in scripts.spans("span")]
    assert 0 == script.end().status


def test_a_fork_while_the_disk_hangs(scripts: Scripts, hanging_disk: HangingDisk) -> None:
    """While the disk hangs a fork takes no time, and neither does the child's first scope; when it
    comes back both processes' records are written.
    """
    script = scripts.start(
        HEAD
        + """
ci.Cirron(exit_timeout=10).profile(flush_interval=0.05)
record(100)
ci.flush()
print("ready", flush=True)
while not os.path.exists("hang.stuck"):
    time.sleep(0.002)
times.clear()
pid = timed(os.fork)
if pid == 0:
    record(100, 1_000)
    print("child", json.dumps(times), flush=True)
    sys.exit(0)
record(100, 100)
print("parent", json.dumps(times), flush=True)
print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        driven=False,
        **hanging_disk.environ,
    )
    script.wait_for("ready")
    hanging_disk.hang()
    lines = [script.wait_for(who, timeout_s=5) for who in ("child", "parent")]
    hanging_disk.release()
    ended = script.end()

    for line in lines:
        who, _, said = line.partition(" ")
        times = {f"{who}'s {what}": took_s for what, took_s in eval(said).items()}
        assert_quick(times)
    assert "status 0" in ended.out
    assert 0 == ended.status
    assert [*range(200), *range(1_000, 1_100)] == sorted(
        span.index or 0 for span in scripts.spans("span")
    )


@pytest.mark.parametrize("how", ["exit", "SIGTERM"])
def test_the_end_while_the_disk_hangs(
    scripts: Scripts, hanging_disk: HangingDisk, how: str
) -> None:
    """A process whose disk hangs ends within `exit_timeout`, with the status it has without us."""
    script = scripts.start(
        HEAD
        + """
ci.Cirron(exit_timeout=1).profile(flush_interval=0.05)
record(100)
ci.flush()
print("ready", flush=True)
while not os.path.exists("hang.stuck"):
    time.sleep(0.002)
record(100, 100)
print("recorded", flush=True)
while os.environ["HOW"] == "SIGTERM":
    time.sleep(1)
""",
        driven=False,
        HOW=how,
        **hanging_disk.environ,
    )
    script.wait_for("ready")
    hanging_disk.hang()
    script.wait_for("recorded")
    began = time.monotonic()
    if how == "SIGTERM":
        script.kill(signal.SIGTERM)
    ended = script.end()
    took_s = time.monotonic() - began
    hanging_disk.release()

    assert (-signal.SIGTERM if how == "SIGTERM" else 0) == ended.status
    assert took_s < 2.0, f"the end took {took_s:.2f} s"
    assert 100 <= len(scripts.spans("span"))


def test_the_main_thread_never_calls(scripts: Scripts, hanging_disk: HangingDisk) -> None:
    """Not one call to our folder comes from the user's thread: not in profile(), a scope, a forked
    child's first scope, flush(), health(), trace() or shutdown().
    """
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=0.05)
record(1_000)
ci.health()
ci.trace(format="dict")
ci.flush()
pid = os.fork()
if pid == 0:
    record(10)
    ci.flush()
    ci.shutdown()
    os._exit(0)
os.waitpid(pid, 0)
ci.shutdown()
ci.profile()
record(10)
""",
        timeout_s=15,
        **hanging_disk.environ,
    )

    assert 0 == ended.status
    assert 3 == len(list((scripts.home / "blackbox").glob("*.json")))
    calls = hanging_disk.calls()
    shown = [call.replace(str(scripts.folder), "") for call in calls[:5]]
    assert [] == calls, f"{len(calls)} calls of the main threads: {shown}"


@pytest.mark.parametrize("cap", ["1_000_000_000", "1_000"], ids=["within the cap", "past the cap"])
def test_a_folder_with_many_files(scripts: Scripts, cap: str) -> None:
    """With 30,000 files in the spool profile() returns at once, and the first records are on disk
    soon, though most of the files have to go.
    """
    scripts.run("import cirron as ci\nci.profile()\nwith ci.scope('old'): pass\n")
    spool = scripts.home / "spool"
    (original,) = scripts.batch_files()
    for number in range(30_000):
        os.link(original, spool / f"{number:020d}-{'a' * 32}.json")
    script = scripts.start(
        HEAD
        + f"""
timed(ci.Cirron(spool_max_bytes={cap}).profile, flush_interval=0.1)
record(100)
print("times", json.dumps(times), flush=True)
time.sleep(600)
"""
    )
    times = eval(script.wait_for("times").partition(" ")[2])
    began = time.monotonic()
    scripts.wait_until(
        lambda: any(name > original.name for name in os.listdir(spool) if name[-5:] == ".json"),
        "a batch of this run",
        timeout_s=5,
    )
    took_s = time.monotonic() - began

    assert_quick(times)
    assert took_s < 1.5, f"the first batch was on disk after {took_s:.2f} s"


@pytest.mark.parametrize(
    "fork",
    [
        "os.fork()",
        "multiprocessing.get_context('fork').Process(target=hang).start() or 1",
        "threading.Thread(target=lambda: os.fork() or hang()).start() or 1",
    ],
    ids=["fork", "multiprocessing", "fork in a thread"],
)
def test_a_child_that_hangs_in_its_first_scope(scripts: Scripts, fork: str) -> None:
    """A forked child that hangs in its very first scope has a black box that names the scope,
    within two flush intervals; after a kill it is what `show` tells.
    """
    script = scripts.start(
        HEAD
        + f"""
import multiprocessing

def hang():
    with ci.scope("first", 7, why="hangs"):
        print("child", os.getpid(), time.monotonic(), flush=True)
        time.sleep(600)

ci.profile(flush_interval={INTERVAL_S})
record(10)
pid = {fork}
if pid == 0:
    hang()
time.sleep(600)
"""
    )
    child, began = script.wait_for("child").split()[1:]
    boxes = scripts.home / "blackbox"
    scripts.wait_until(
        lambda: any(b'"first"' in path.read_bytes() for path in boxes.glob(f"*-{child}.json")),
        "a black box with the child's first scope",
        timeout_s=3,
    )
    took_s = time.monotonic() - float(began)

    assert took_s < 2 * INTERVAL_S + 0.2, f"the black box was there after {took_s:.2f} s"
    box = scripts.box(int(child))
    assert ["first", 7] == [box["open"][-1][key] for key in ("name", "index")]
    assert None is box["ended"]
    os.kill(int(child), signal.SIGKILL)
    assert "first[7]" in scripts.show()
