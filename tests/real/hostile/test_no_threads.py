"""Where Python starts no thread, nothing is lost without a word, and nobody waits for one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from tests import spools

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

# What Python raises where the system, or a container's limit, grants no more threads.
NO_THREADS = """
import _thread, time
started = _thread.start_new_thread
def refuse(*args, **kwargs):
    raise RuntimeError("can't start new thread")
def refuse_threads(is_on):
    import threading
    _thread.start_new_thread = threading._start_new_thread = refuse if is_on else started
refuse_threads(True)
import cirron as ci
def flush():
    began = time.monotonic()
    told = ci.flush()
    return [told.ok, told.on_disk, told.why, time.monotonic() - began < 10]
ci.profile(frameworks=[])
for index in range(20):
    with ci.scope("step", index):
        pass
"""

WHY = "no background thread could be started (can't start new thread)"


def test_flush_does_not_wait_for_a_thread_that_could_not_be_started(scripts: Scripts) -> None:
    """`ci.flush()` says at once what is wrong, and so does health(); the end says what is lost."""
    script = scripts.start(NO_THREADS, driven=True)

    assert [False, 0, WHY, True] == script.ask("flush()")
    assert [WHY, 20] == script.ask("[ci.health()['flush_problem'], ci.health()['records_pending']]")
    ended = script.end()
    assert 0 == ended.status
    assert f"cirron: {WHY}; training goes on" in ended.err
    assert f"cirron: 20 records were not stored: {WHY}\n" in ended.err


def test_threads_are_started_as_soon_as_they_can_be(scripts: Scripts) -> None:
    """A flush after the shortage stores everything that has waited."""
    script = scripts.start(NO_THREADS, driven=True)
    script.ask("refuse_threads(False)")

    assert [True, 20, None, True] == script.ask("flush()")
    assert 0 == script.end().status
    (run,) = spools.read(scripts.home)
    assert list(range(20)) == [span.index for span in run.spans if span.name == "step"]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the module has another name")
def test_a_subinterpreter_is_told(scripts: Scripts) -> None:
    """Python has no daemon threads in a subinterpreter: that is said, and the program goes on."""
    ended = scripts.run("""
import _xxsubinterpreters as interpreters
inner = interpreters.create()
interpreters.run_string(inner, '''
import cirron as ci
ci.profile(frameworks=[])
with ci.scope("inner"):
    pass
print(ci.flush().ok)
ci.shutdown()
''')
import cirron as ci
ci.profile(frameworks=[])
with ci.scope("outer"):
    pass
print(ci.flush().ok)
""")

    assert (0, "False\nTrue\n") == (ended.status, ended.out)
    assert "Traceback" not in ended.err
    assert "cirron: 1 records were not stored: no background thread" in ended.err
