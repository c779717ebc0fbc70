"""Limits everywhere: on names, attributes, batches, black boxes, folders and waiting values."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import Scripts

MB = 2**20
GROWTH_BYTES = 300 * MB
BATCH_BYTES = 8 * MB
BOX_BYTES = 2 * MB

# `grown()`: by how many bytes memory has grown at most. `counted()`: counters that have moved.
HEAD = """
import contextvars, json, os, resource, sys, threading, time
import cirron as ci

resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))  # a machine has other users

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

def grown():
    return memory("VmHWM") - resident

def counters():
    return {key: value for key, value in ci.health().items() if key.endswith("_count")}

def counted():
    now = counters()
    return {key: value - before.get(key, 0) for key, value in now.items()
            if value != before.get(key, 0)}

def begin(**options):
    global resident, before
    ci.Cirron(**{"flush_interval": 0.05, **options}).profile()
    with ci.scope("warm up"):
        ci.mark("warm up", 1)
    ci.flush()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts here
    resident, before = memory("VmRSS"), counters()

def tell(**found):
    print(json.dumps({"grown": grown(), "counted": counted(), **found}), flush=True)
"""


def run(scripts: Scripts, body: str, timeout_s: float = 15.0) -> dict[str, Any]:
    """Runs a script to its end; returns what it told."""
    ended = scripts.run(HEAD + body, timeout_s)
    assert 0 == ended.status, ended.err
    told: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    assert told["grown"] < GROWTH_BYTES, f"memory grew by {told['grown'] / MB:.0f} MB"
    return told


def sizes(folder: Path) -> dict[str, int]:
    found = {}
    for path in folder.glob("*"):
        try:
            found[path.name] = path.stat().st_size
        except FileNotFoundError:  # merged or evicted just now
            continue
    return found


def largest_batch(scripts: Scripts) -> int:
    return max(sizes(scripts.home / "spool").values())


def spooled(scripts: Scripts) -> int:
    return sum(sizes(scripts.home / "spool").values())


def box_bytes(scripts: Scripts) -> int:
    return max(sizes(scripts.home / "blackbox").values())


def test_long_names(scripts: Scripts) -> None:
    """800 scopes and 800 marks whose names are 1 MB each leave small files, and memory is bounded;
    each name is there, cut, and counted.
    """
    told = run(
        scripts,
        """
begin()
for number in range(800):
    name = f"{number:08d}" + "n" * 1_000_000
    with ci.scope(name, number):
        ci.mark(name, number)
ci.flush()
tell()
""",
    )

    assert spooled(scripts) < 5 * MB, f"{spooled(scripts) / MB:.0f} MB on disk"
    run_ = scripts.session()
    names = {span.name[:8]: span for span in run_.spans}
    assert {f"{number:08d}" for number in range(800)} <= set(names)
    assert {f"{number:08d}n" for number in range(800)} <= {mark.name[:9] for mark in run_.marks}
    assert max(told["counted"].values(), default=0) >= 800, told["counted"]
    assert "00000007nnn" in scripts.show()


def test_long_names_in_the_black_box(scripts: Scripts) -> None:
    """Open scopes, marks and threads with names of 1 MB leave a small black box."""
    run(
        scripts,
        """
begin(flush_interval=3600)
stopping = threading.Event()
spans = [ci.scope(f"{number} " + "n" * 1_000_000, number) for number in range(50)]
for span in spans:
    span.__enter__()
    ci.mark("m" * 1_000_000, 1)
def work():
    with ci.scope("in a thread"):
        stopping.wait()
threads = [threading.Thread(target=work, name=f"{n} " + "t" * 1_000_000) for n in range(20)]
for thread in threads:
    thread.start()
ci.flush()
import pathlib
(box,) = pathlib.Path(".cirron/blackbox").glob("*.json")
size = box.stat().st_size
stopping.set()
for thread in threads:
    thread.join()
for span in reversed(spans):
    span.__exit__(None, None, None)
tell(size=size)
assert size < 2 * 2**20, size
""",
    )

    assert spooled(scripts) < 5 * MB, f"{spooled(scripts) / MB:.0f} MB on disk"


@pytest.mark.parametrize(
    "given",
    [
        'items=["x" * 16_000] * 1_000',
        'table={f"{key:04d}" * 500: "x" * 16_000 for key in range(1_000)}',
        'deep=[[["x" * 16_000] * 100] * 100] * 100',
        '**{f"key{key}": "x" * 16_000 for key in range(1_000)}',
        '**{f"{key:04d}" + "k" * 1_000_000: 1 for key in range(16)}',
        '**{f"key{key}": 1 for key in range(20_000)}',
    ],
    ids=["list", "dict", "deep", "many", "long keys", "20,000 keys"],
)
def test_large_attributes(scripts: Scripts, given: str) -> None:
    """16 MB of attributes on each of 100 spans and marks: no file is above 8 MB, the folder is
    within its cap, every span is there, and what was cut is counted.
    """
    told = run(
        scripts,
        f"""
attrs = dict({given})
begin(spool_max_bytes=64 * 2**20)
for number in range(100):
    with ci.scope("span", number, **attrs):
        ci.mark("mark", number, **attrs)
ci.flush()
tell()
""",
    )

    assert largest_batch(scripts) <= BATCH_BYTES, f"a file of {largest_batch(scripts) / MB:.0f} MB"
    assert spooled(scripts) <= 64 * MB
    assert list(range(100)) == [span.index for span in scripts.spans("span")]
    assert 101 == len(scripts.session().marks)
    assert max(told["counted"].values(), default=0) >= 100, told["counted"]


def test_many_large_records(scripts: Scripts) -> None:
    """80 MB of records, each within its own limit: batches stay below 8 MB, merged ones too."""
    run(
        scripts,
        """
begin(flush_interval=3600)
for number in range(5_000):
    with ci.scope("span", number, text="x" * 16_000):
        pass
ci.flush()
for number in range(200):
    with ci.scope("small", number, text="x" * 16_000):
        pass
    ci.flush()
tell()
""",
    )

    assert largest_batch(scripts) <= BATCH_BYTES, f"a file of {largest_batch(scripts) / MB:.0f} MB"
    assert list(range(5_000)) == [span.index for span in scripts.spans("span")]
    assert list(range(200)) == [span.index for span in scripts.spans("small")]


def test_many_mark_names(scripts: Scripts) -> None:
    """500,000 mark names on one open span: the black box stays small, and every mark is there."""
    script = scripts.start(
        HEAD
        + """
begin(flush_interval=0.1)
with ci.scope("open"):
    for number in range(500_000):
        ci.mark(f"value {number}", number)
    ci.flush()
    print("marked", flush=True)
    sys.stdin.read()
    tell()
""",
        driven=True,
    )
    most = 0
    while "marked" not in script.out:
        most = max([most, *sizes(scripts.home / "blackbox").values()])
        assert None is script.process.poll(), script.err
        time.sleep(0.02)
    most = max(most, box_bytes(scripts))
    assert most <= BOX_BYTES, f"a black box of {most / MB:.1f} MB"
    ended = script.end()
    told = json.loads(ended.out.splitlines()[-1])

    assert 0 == ended.status
    assert told["grown"] < GROWTH_BYTES, f"memory grew by {told['grown'] / MB:.0f} MB"
    stored = scripts.session()
    assert 500_001 == len(stored.marks) + told["counted"].get("record_drop_count", 0)
    assert ["open"] == [span.name for span in stored.spans if span.name == "open"]


def test_many_open_spans(scripts: Scripts) -> None:
    """1,500 open spans with large attributes and many marks leave a small black box."""
    run(
        scripts,
        """
begin(flush_interval=3600)
for number in range(1_500):
    def enter():
        ci.scope("open", number, text="x" * 16_000).__enter__()
        for mark in range(50):
            ci.mark(f"mark {mark}", "v" * 256)
    contextvars.copy_context().run(enter)
ci.flush()
import pathlib
(box,) = pathlib.Path(".cirron/blackbox").glob("*.json")
size = box.stat().st_size
tell(size=size)
assert size < 2 * 2**20, size
""",
    )

    assert largest_batch(scripts) <= BATCH_BYTES, f"a file of {largest_batch(scripts) / MB:.0f} MB"
    assert 1_500 == len(scripts.spans("open"))


def test_a_huge_index(scripts: Scripts) -> None:
    """An index beyond 64 bits costs its neighbours nothing."""
    run(
        scripts,
        """
begin()
for number in range(10):
    with ci.scope("before", number):
        pass
    with ci.scope("huge", (-1) ** number * 10 ** (100 * number)):
        pass
    with ci.scope("after", number):
        pass
tell()
""",
    )

    assert [10, 10, 10] == [len(scripts.spans(name)) for name in ("before", "huge", "after")]


def test_dead_black_boxes(scripts: Scripts) -> None:
    """Of 30,000 black boxes of dead processes about 1,000 are left after a session: those of
    processes that live stay, and so does what is not ours.
    """
    living = scripts.start(
        "import cirron as ci\nci.profile(flush_interval=3600)\nci.flush()\nprint('there')\n",
        driven=True,
    )
    living.wait_for("there")
    folder = scripts.home / "blackbox"
    (alive,) = folder.glob("*.json")
    scripts.run("import cirron as ci\nci.profile()\n")
    (dead,) = set(folder.glob("*.json")) - {alive}
    day_ago = time.time() - 86_400
    os.utime(dead, (day_ago, day_ago))
    for number in range(30_000):  # links: making as many files takes six times as long
        os.link(dead, folder / f"{number:032x}-{4_000_000 + number}.json")
    foreign = [folder / "notes.txt", folder / "mine.json", folder / "0123-45.json"]
    for path in foreign:
        path.write_text("the user's")
        os.utime(path, (day_ago - 1e6, day_ago - 1e6))
    os.utime(alive, (day_ago - 1e6, day_ago - 1e6))
    body = """
        import os, time
        import cirron as ci

        ci.profile(flush_interval=0.05)
        deadline = time.monotonic() + 5
        while len(os.listdir(".cirron/blackbox")) > 1_200 and time.monotonic() < deadline:
            time.sleep(0.02)
    """
    before = set(folder.glob("*.json"))
    assert 0 == scripts.run(body).status
    left = list(folder.glob("*.json"))

    assert len(left) <= 1_200, f"{len(left)} black boxes are left"
    assert len(left) >= 500, f"only {len(left)} black boxes are left"
    assert alive.exists(), "the black box of a living process is gone"
    assert 1 == len(set(left) - before), "the session's own black box is gone"
    assert ["the user's"] * 3 == [path.read_text() for path in foreign]
    assert 0 == living.end().status


def test_a_cap_that_processes_share(scripts: Scripts) -> None:
    """Eight processes that write much into one folder with a cap of 1 MB keep it under 2 MB."""
    body = """
        import sys, time
        import cirron as ci

        ci.Cirron(spool_max_bytes=1_000_000).profile(flush_interval=0.1)
        number, began = 0, time.monotonic()
        while time.monotonic() - began < 3:
            for _ in range(20):
                with ci.scope("span", number, text="x" * 300):
                    number += 1
            time.sleep(0.02)
        ci.flush()
        print(number, ci.health()["spool_drop_count"])
    """
    processes = [scripts.start(body) for _ in range(8)]
    most = 0
    while any(script.process.poll() is None for script in processes):
        most = max(most, sum(sizes(scripts.home / "spool").values()))
        time.sleep(0.02)
    ended = [script.end() for script in processes]
    left = sum(sizes(scripts.home / "spool").values())

    assert [0] * 8 == [one.status for one in ended]
    written = sum(int(one.out.split()[0]) for one in ended)
    assert written * 400 > 4_000_000, f"only {written} spans were made"
    assert most < 2_000_000, f"the folder reached {most:,} bytes"
    assert 100_000 < left < 2_000_000
    assert scripts.sessions()
    assert sum(int(one.out.split()[1]) for one in ended) > 0


def test_values_that_never_arrive(scripts: Scripts) -> None:
    """Marks whose device never answers are waited for within a bound: the rest is counted, other
    records are on disk, and flush and exit are not held up.
    """
    script = scripts.start(
        HEAD
        + """
class Stuck:
    shape = ()
    def item(self):
        threading.Event().wait(600)

begin(exit_timeout=3)
for number in range(200_000):
    ci.mark("never", Stuck())
    if number % 100 == 0:
        with ci.scope("fine", number // 100):
            ci.mark("fine", number // 100)
        time.sleep(0.0005)  # so that the worker keeps up, and the values wait at its end
began = time.monotonic()
ci.flush()
tell(flush_s=time.monotonic() - began)
"""
    )
    ended = script.end(20)
    told = json.loads(ended.out.splitlines()[-1])

    assert 0 == ended.status
    assert told["grown"] < 100 * MB, f"memory grew by {told['grown'] / MB:.0f} MB"
    assert told["flush_s"] < 4.0, f"ci.flush() took {told['flush_s']:.1f} s"
    waiting = 200_000 - sum(told["counted"].values())
    assert waiting <= 150_000, f"{waiting:,} values are waited for: {told['counted']}"
    run = scripts.session()
    fine = sorted(span.index or 0 for span in run.spans if span.name == "fine")
    assert list(range(2_000)) == fine
    assert 2_000 == sum(mark.name == "fine" for mark in run.marks)
    counters = scripts.box()["counters"]
    lost = counters["mark_drop_count"] + counters["record_drop_count"]
    stored = sum(mark.name == "never" for mark in run.marks)
    assert abs(200_000 - stored - lost) <= 1, f"{200_000 - stored} are missing, {lost} counted"


def test_a_value_that_never_arrives_and_a_short_exit(scripts: Scripts) -> None:
    """However short `exit_timeout` is, a value that never arrives costs itself alone."""
    ended = scripts.run("""
        import threading
        import cirron as ci

        class Stuck:
            shape = ()
            def item(self):
                threading.Event().wait(600)

        ci.Cirron(exit_timeout=1).profile(flush_interval=3600)
        for number in range(100):
            with ci.scope("span", number):
                ci.mark("never", Stuck())
    """)

    assert (0, "") == (ended.status, ended.err)
    assert list(range(100)) == [span.index for span in scripts.spans("span")]
    assert "clean" == scripts.state()
    assert 100 == scripts.box()["counters"]["mark_drop_count"]
