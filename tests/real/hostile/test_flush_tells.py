"""`ci.flush()` tells the truth: what is on disk, sent, held and lost, and why; so does health()."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests import spools

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.real.conftest import Script, Scripts
    from tests.real.hostile.conftest import HangingDisk, SmallDisk

# `record(n)` makes n spans with a mark each: 2 n records.
HEAD = """
import json, os, resource, threading, time
import cirron as ci

recorded = 0

def record(count, text="x"):
    global recorded
    for _ in range(count):
        with ci.scope("step", index=recorded // 2, text=text):
            ci.mark("value", recorded // 2)
        recorded += 2
    return recorded

def told(outcome):
    return [outcome.ok, outcome.on_disk, outcome.sent, outcome.held, outcome.lost, outcome.why]

def flush():
    'What flush() tells, and how long it took.'
    began = time.monotonic()
    found = told(ci.flush())
    return [time.monotonic() - began, *found]

def health():
    found = ci.health()
    keys = ("records_on_disk", "records_sent", "records_held", "records_lost", "flush_problem")
    return [found[key] for key in keys]
"""

FLUSH_S = 2.0


class Told:
    """What flush() told a driven script, beside what health() says right after."""

    def __init__(self, script: Script) -> None:
        took_s, *told = script.ask("flush()")
        assert took_s < FLUSH_S, f"ci.flush() took {took_s:.2f} s"
        self.ok, self.on_disk, self.sent, self.held, self.lost, self.why = told
        health = script.ask("health()")
        assert told[1:] == health, f"flush() told {told[1:]}, health() says {health}"


def stored(home: Path) -> int:
    """Spans and marks of `record` on disk."""
    runs = spools.read(home)
    return sum(
        len([span for span in run.spans if span.name == "step"]) + len(run.marks) for run in runs
    )


def test_all_is_well(scripts: Scripts) -> None:
    """On a healthy disk everything so far is on it; nothing is held, lost or sent."""
    script = scripts.start(HEAD + "ci.profile(flush_interval=3600)", driven=True)
    for count in (1, 500, 3_000):
        recorded = script.ask(f"record({count})")
        told = Told(script)

        assert (True, recorded, 0, 0, 0, None) == (
            told.ok,
            told.on_disk,
            told.sent,
            told.held,
            told.lost,
            told.why,
        )
        assert recorded == stored(scripts.home)
    assert 0 == script.end().status


def test_a_full_disk(scripts: Scripts, small_disk: SmallDisk) -> None:
    """On a full disk flush() says so: what is not on disk is held, and the disk is named. With
    space again everything is on it.
    """
    home = small_disk.folder / ".cirron"
    script = scripts.start(
        HEAD + f'ci.profile(path="{home}", flush_interval=3600)',
        driven=True,
    )
    script.ask("record(100)")
    assert 200 == Told(script).on_disk == stored(home)
    small_disk.fill()
    for expected in (2_200, 4_200):
        assert expected == script.ask("record(1_000, text='y' * 100)")
        told = Told(script)

        assert (False, 200, expected - 200, 0) == (told.ok, told.on_disk, told.held, told.lost)
        assert "No space left on device" in told.why
        assert str(home) in told.why or "disk" in told.why or "spool" in told.why
    assert 200 == stored(home)

    small_disk.free()
    told = Told(script)
    assert (True, 4_200, 0, 0, None) == (told.ok, told.on_disk, told.held, told.lost, told.why)
    assert 4_200 == stored(home)
    assert 0 == script.end().status


def test_a_file_that_may_not_grow(scripts: Scripts) -> None:
    """Under a limit on the size of files nothing is said to be on disk that is not."""
    script = scripts.start(HEAD + "ci.profile(flush_interval=3600)", driven=True)
    script.ask("record(10)")
    assert 20 == Told(script).on_disk
    script.ask("resource.setrlimit(resource.RLIMIT_FSIZE, (1_500, resource.RLIM_INFINITY))")
    script.ask("record(100)")
    told = Told(script)

    assert (False, 20, 200, 0) == (told.ok, told.on_disk, told.held, told.lost)
    assert "File too large" in told.why
    assert 20 == stored(scripts.home)


def test_a_folder_that_cannot_be(scripts: Scripts) -> None:
    """Where the folder is a file, nothing is on disk, all is held, and the reason is given."""
    scripts.home.write_text("precious")
    script = scripts.start(HEAD + "ci.profile(flush_interval=3600)", driven=True)
    script.ask("record(100)")
    told = Told(script)

    assert (False, 0, 200, 0) == (told.ok, told.on_disk, told.held, told.lost)
    assert told.why
    assert "precious" == scripts.home.read_text()


def test_what_is_lost_is_told(scripts: Scripts, small_disk: SmallDisk) -> None:
    """Past what memory may hold for a full disk, records are lost, and each is counted."""
    home = small_disk.folder / ".cirron"
    small_disk.fill()
    script = scripts.start(HEAD + f'ci.profile(path="{home}", flush_interval=3600)', driven=True)
    lost = 0
    for _ in range(40):  # of 8 MB: more than any process should hold
        recorded = script.ask("record(500, text='y' * 16_000)")
        told = Told(script)
        assert recorded == told.on_disk + told.held + told.lost, vars(told)
        lost = told.lost
        if lost:
            break
    assert lost > 0, "320 MB are held for a full disk"
    small_disk.free()
    script.ask("record(1)")
    told = Told(script)
    assert told.lost >= lost  # a disk of 2 MB takes little of it
    assert (False, True) == (told.ok, bool(told.why))
    assert recorded + 2 == told.on_disk + told.held + told.lost, vars(told)


def test_dropped_while_the_disk_hangs(scripts: Scripts, hanging_disk: HangingDisk) -> None:
    """While the disk hangs and the ring is full, `record_drop_count` is exact, at once."""
    script = scripts.start(
        HEAD
        + """
def timed_health():
    began = time.monotonic()
    found = ci.health()
    return [time.monotonic() - began, found["record_drop_count"]]
ci.Cirron(max_pending_records=1_000).profile(flush_interval=0.05)
record(10)
ci.flush()
""",
        driven=True,
        **hanging_disk.environ,
    )
    script.ask("recorded")
    hanging_disk.hang()
    scripts.wait_until(hanging_disk.is_stuck, "the worker to hang")
    counts = []
    for _ in range(4):
        script.ask("record(5_000)")
        took_s, dropped = script.ask("timed_health()")
        assert took_s < 1.0, f"health() took {took_s:.2f} s while the disk hangs"
        counts.append(dropped)
    recorded = script.ask("recorded")
    hanging_disk.release()
    script.ask("ci.flush().ok")
    lost = recorded - stored(scripts.home)

    assert counts[-1] > 0
    assert sorted(counts) == counts
    assert abs(lost - counts[-1]) <= 1, f"{lost} records are lost, {counts[-1]} were counted"
    assert abs(lost - script.ask("ci.health()['record_drop_count']")) <= 1
    assert 0 == script.end().status


def test_dropped_while_a_thread_records(scripts: Scripts) -> None:
    """What a small ring drops is told by flush() as lost: on disk plus lost is what was made."""
    script = scripts.start(
        HEAD + "ci.Cirron(max_pending_records=500).profile(flush_interval=3600)", driven=True
    )
    recorded = script.ask("record(50_000)")
    told = Told(script)

    assert told.on_disk == stored(scripts.home)
    assert abs(recorded - told.on_disk - told.held - told.lost) <= 1, vars(told)
    assert told.lost > 0


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Counts the records that it takes."""

    status = 200
    records = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        batch = json.loads(body)
        if Endpoint.status == 200:
            Endpoint.records += len(batch["spans"]) + len(batch["marks"])
        self.send_response(Endpoint.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    Endpoint.status, Endpoint.records = 200, 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_sent(scripts: Scripts, endpoint: str) -> None:
    """`sent` is what the endpoint took; while it refuses, all is on disk and nothing is sent."""
    Endpoint.status = 503
    script = scripts.start(
        HEAD + f'ci.Cirron(api_key="k", api_endpoint="{endpoint}").profile(flush_interval=0.1)',
        driven=True,
    )
    recorded = script.ask("record(1_000)")
    told = Told(script)
    assert (recorded, 0, 0) == (told.on_disk, told.sent, told.lost)
    Endpoint.status = 200
    scripts.wait_until(
        lambda: script.ask("flush()")[3] == recorded,
        f"sent={recorded}; it is {script.ask('flush()')}",
        timeout_s=15,
    )

    assert recorded == Endpoint.records
    assert True is script.ask("ci.flush().ok")


def test_without_a_session(scripts: Scripts) -> None:
    """Before profile(), after shutdown() and when off, flush() tells that nothing is there."""
    ended = scripts.run(
        HEAD
        + """
print(told(ci.flush()))
ci.profile(enabled=False)
record(10)
print(told(ci.flush()))
ci.shutdown()
profiler = ci.profile(output="none")
print(type(profiler.flush()) is type(ci.flush()) is type(ci.Cirron().flush()))
ci.shutdown()
outcome = ci.flush()
print(outcome.held, outcome.lost)
"""
    )

    nothing = "[True, 0, 0, 0, 0, None]"
    assert (0, f"{nothing}\n{nothing}\nTrue\n0 0\n", "") == ended


def test_of_a_forked_child(scripts: Scripts) -> None:
    """A child's flush() tells of the child's records."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
record(100)
ci.flush()
pid = os.fork()
if pid == 0:
    record(7)
    print(told(ci.flush()))
    os._exit(0)
os.waitpid(pid, 0)
print(told(ci.flush()))
"""
    )

    assert 0 == ended.status
    assert ["[True, 14, 0, 0, 0, None]", "[True, 200, 0, 0, 0, None]"] == ended.out.splitlines()


def test_many_threads_flush(scripts: Scripts) -> None:
    """Each of many threads that flush at once is told of its own records at least."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=0.01)
wrong = []
def work():
    for number in range(20):
        with ci.scope("step", index=number):
            ci.mark("value", number)
        outcome = ci.flush()
        if not outcome.ok or outcome.on_disk < 2 * (number + 1):
            wrong.append(told(outcome))
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(wrong[:3], ci.flush().on_disk)
"""
    )

    assert (0, "[] 320\n", "") == ended


def test_a_program_that_may_open_no_more_files(scripts: Scripts) -> None:
    """What is recorded meanwhile is held, said, and on disk once a file can be opened; a child that
    is forked meanwhile goes on quietly.
    """
    ended = scripts.run("""
        import os, resource
        import cirron as ci

        ci.profile(flush_interval=0.05)
        ci.flush()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        opened = []
        while len(opened) < 64:
            try:
                opened.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for index in range(10):
            with ci.scope("meanwhile", index):
                pass
        print(ci.flush().ok, ci.health()["errors"])
        child = os.fork()
        if child == 0:
            with ci.scope("child"):
                pass
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        for one in opened:
            os.close(one)
        print(ci.flush().ok)
    """)

    assert (0, "False {}\n0\nTrue\n") == ended[:2]
    said = {line.removeprefix("cirron: ")[:15] for line in ended.err.splitlines()}
    assert {"cannot write to"} == said  # by the child, too
    assert 10 == len(scripts.spans("meanwhile"))
