"""How a process can end by itself, and what is on disk then."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

HEAD = """
import os, sys, threading, time
import cirron as ci

def train(count=100):
    for epoch in ci.epochs(range(1)):
        for batch in ci.batches(range(count)):
            ci.mark("loss", batch)
"""


def ended_how(scripts: Scripts) -> tuple[str, str | None]:
    """What the black box says of the end."""
    ended = scripts.box()["ended"]
    return ended["how"], ended["detail"]


def test_the_end_of_the_script(scripts: Scripts) -> None:
    """A script that ends leaves everything on disk, the session's span closed, and says clean."""
    ended = scripts.run(HEAD + "ci.profile(flush_interval=3600); train()")

    assert (0, "", "") == ended
    assert 100 == len(scripts.spans("batch"))
    (root,) = scripts.spans("cirron.session")
    assert all(root.start_ns <= span.start_ns for span in scripts.spans("batch"))
    assert (root.end_ns or 0) >= max(span.end_ns or 0 for span in scripts.spans("batch"))
    assert (root.cpu_ns or 0) > 0
    assert ("clean", None) == ended_how(scripts)
    assert [] == scripts.box()["open"]


@pytest.mark.parametrize(
    ("code", "status", "how"),
    [
        ("sys.exit(3)", 3, ("exception", "SystemExit: 3")),
        ("sys.exit('no data')", 1, ("exception", "SystemExit: no data")),
        ("sys.exit(0)", 0, ("clean", None)),
        ("exit(3)", 3, ("exception", "SystemExit: 3")),
        ("raise SystemExit", 0, ("clean", None)),
        ("raise SystemExit(len(''))", 0, ("clean", None)),
        ("raise SystemExit(3)", 3, ("exception", "SystemExit: 3")),
        ("raise SystemExit(\n'no data')", 1, ("exception", "SystemExit: no data")),
    ],
)
def test_sys_exit(scripts: Scripts, code: str, status: int, how: tuple[str, str | None]) -> None:
    """sys.exit() keeps its status; one that is not 0 is a failure, as it is to a launcher."""
    ended = scripts.run(HEAD + f"ci.profile(flush_interval=3600); train(); {code}")

    assert status == ended.status
    assert 100 == len(scripts.spans("batch"))
    assert how == ended_how(scripts)


def test_sys_exit_that_is_caught(scripts: Scripts) -> None:
    """A program that catches its SystemExit and goes on has ended well; sys.exit is put back."""
    body = """
own = sys.exit
ci.profile(flush_interval=3600)
try:
    sys.exit(3)
except SystemExit:
    train()
ci.shutdown()
assert sys.exit is own
ci.profile(flush_interval=3600)
threading.Thread(target=sys.exit, args=(3,)).start()
train()
try:
    raise SystemExit(3)
except SystemExit:
    pass
"""
    assert 0 == scripts.run(HEAD + body).status
    boxes = [json.loads(path.read_bytes()) for path in scripts.home.glob("blackbox/*.json")]
    assert ["clean", "clean"] == [box["ended"]["how"] for box in boxes]


def test_an_exception(scripts: Scripts) -> None:
    """An uncaught exception has its traceback and status as ever, and its text in the black box."""
    body = """
if os.environ.get("PROFILE") != "no":
    ci.profile(flush_interval=3600)
train()
with ci.scope("failing"):
    raise ValueError("loss is \\udcff NaN")
"""
    bare = scripts.run(HEAD + body, PROFILE="no")
    ended = scripts.run(HEAD + body)

    assert 1 == ended.status
    assert bare == ended
    assert 100 == len(scripts.spans("batch"))
    assert "ValueError: loss is ? NaN" == scripts.spans("failing")[0].attrs["error"]
    assert ("exception", "ValueError: loss is ? NaN") == ended_how(scripts)
    assert "exception: ValueError: loss is ? NaN" in scripts.show()


@pytest.mark.parametrize(
    ("text", "detail"),
    [("1 / 0", "BadError"), ("'x' * 10**7", "BadError: " + "x" * (4096 - len("BadError: ")))],
)
def test_an_exception_without_a_decent_text(scripts: Scripts, text: str, detail: str) -> None:
    """An exception whose text fails, or is megabytes, does not cost the records."""
    ended = scripts.run(
        HEAD
        + f"""
class BadError(Exception):
    def __str__(self):
        return {text}
ci.profile(flush_interval=3600)
train()
raise BadError
"""
    )

    assert 1 == ended.status
    assert 100 == len(scripts.spans("batch"))
    assert ("exception", detail) == ended_how(scripts)


def test_shutdown_in_an_except_block(scripts: Scripts) -> None:
    """A program that deals with an exception and shuts down ended cleanly."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
try:
    raise ValueError("dealt with")
except ValueError:
    ci.shutdown()
"""
    )

    assert (0, "", "") == ended
    assert ("clean", None) == ended_how(scripts)


def test_much_is_unflushed(scripts: Scripts) -> None:
    """Exit while 100,000 records are unflushed takes a bounded time, and all are on disk."""
    script = scripts.start(
        HEAD
        + """
ci.profile(flush_interval=3600)
train(50_000)
print("leaving")
"""
    )
    script.wait_for("leaving")
    began = time.monotonic()
    ended = script.end()
    took_s = time.monotonic() - began

    assert (0, "") == (ended.status, ended.err)
    assert took_s < 5.0  # exit_timeout
    assert 50_000 == len(scripts.spans("batch"))
    assert 50_000 == len(scripts.session().marks)
    assert 0 == scripts.box()["counters"]["record_drop_count"]


def test_the_exit_is_bounded(scripts: Scripts) -> None:
    """When a disk hangs, the exit waits for exit_timeout and no longer, and says what is lost."""
    script = scripts.start(
        HEAD
        + """
from cirron import system
system.write_all = lambda file, pieces: time.sleep(600)
ci.profile(flush_interval=3600)
train()
print("leaving")
""",
        CIRRON_EXIT_TIMEOUT="0.5",
    )
    script.wait_for("leaving")
    began = time.monotonic()
    ended = script.end()

    assert 0 == ended.status
    assert time.monotonic() - began < 5.0
    # 100 batches, their marks, the epoch and the session
    assert "cirron: 202 records were not stored within exit_timeout=0.5s\n" == ended.err


def test_a_device_that_never_answers(scripts: Scripts) -> None:
    """A device scalar that never comes holds up the exit for a bounded time, and is counted."""
    script = scripts.start(
        HEAD
        + """
class Scalar:
    shape = ()
    def item(self):
        time.sleep(600)
ci.profile(flush_interval=3600)
train()
for _ in range(7):
    ci.mark("hanging", Scalar())
print("leaving")
"""
    )
    script.wait_for("leaving")
    began = time.monotonic()
    ended = script.end()

    assert 0 == ended.status
    assert time.monotonic() - began < 5.0
    assert 100 == len(scripts.session().marks)
    assert 7 == scripts.box()["counters"]["mark_drop_count"]


def test_threads_that_go_on(scripts: Scripts) -> None:
    """Daemon threads that record through the exit do not keep the process from ending."""
    ended = scripts.run(
        HEAD
        + """
def work():
    while True:
        with ci.scope("endless"):
            time.sleep(0.0001)
ci.profile(flush_interval=0.1)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
train(10_000)
"""
    )

    assert (0, "") == (ended.status, ended.err)
    assert 10_000 == len(scripts.spans("batch"))
    assert ("clean", None) == ended_how(scripts)


def test_threads_that_are_waited_for(scripts: Scripts) -> None:
    """What a thread records while the interpreter waits for it at the end is on disk."""
    ended = scripts.run(
        HEAD
        + """
def work():
    main_is_over.wait()
    with ci.scope("late"):
        ci.mark("late", 1)
main_is_over = threading.Event()
ci.profile(flush_interval=3600)
threading.Thread(target=work).start()
main = threading.main_thread()
threading.Thread(target=lambda: (main.join(), main_is_over.set())).start()
"""
    )

    assert (0, "", "") == ended
    assert 1 == len(scripts.spans("late"))
    assert [1] == [mark.value for mark in scripts.session().marks]


def test_another_session_after_shutdown(scripts: Scripts) -> None:
    """Sessions of one process, one after the other, are kept apart and lose nothing."""
    ended = scripts.run(
        HEAD
        + """
for number in range(3):
    ci.profile(flush_interval=3600)
    train(10 + number)
    ci.shutdown()
    ci.shutdown()
print(threading.active_count())
"""
    )

    assert (0, "1\n", "") == ended
    runs = scripts.sessions()
    assert [10, 11, 12] == [sum(span.name == "batch" for span in run.spans) for run in runs]
    assert ["clean"] * 3 == scripts.states()


def test_flush_from_many_threads_at_the_end(scripts: Scripts) -> None:
    """Threads that call flush() while the session ends do not hang."""
    ended = scripts.run(
        HEAD
        + """
def work():
    while not over.wait(0.0005):
        ci.flush()
over = threading.Event()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(20):
    ci.profile(flush_interval=3600)
    train(10)
    ci.shutdown()
over.set()
for thread in threads:
    thread.join(10)
print(sum(thread.is_alive() for thread in threads))
"""
    )

    assert (0, "0\n", "") == ended
    assert 20 == len(scripts.sessions())
