"""SIGTERM and SIGINT: the program ends as it would without us, and what it recorded is on disk."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Ended, Scripts

# With a handler alone 1 in 900 hung. Read here: the tests themselves see none of our variables.
POOLS = int(os.environ.get("CIRRON_TEST_POOLS", "40"))

# The interval is so long that only the signal itself can have brought the records to disk.
HEAD = """
import asyncio, os, signal, sys, time
import cirron as ci

def profile():
    if os.environ.get("PROFILE") != "no":
        ci.profile(flush_interval=3600)

def train(seconds=600):
    for epoch in ci.epochs(range(1)):
        for batch in ci.batches(range(100)):
            ci.mark("loss", batch)
        with ci.scope("stuck"):
            print("ready")
            time.sleep(seconds)
"""


def after(scripts: Scripts, body: str, number: signal.Signals, profile: str = "yes") -> Ended:
    """Runs a script, sends it a signal once it is ready, and waits for its end."""
    script = scripts.start(HEAD + body, PROFILE=profile)
    script.wait_for("ready")
    # A signal between `print` and the system call of `time.sleep` is Python's to handle after the
    # sleep, with any handler of Python code. That race is not what is tested here.
    time.sleep(0.2)
    script.kill(number)
    return script.end()


def assert_all_on_disk(scripts: Scripts) -> None:
    """Every batch and mark of `train` is there once, and so are the spans that were open."""
    run = scripts.session()
    assert list(range(100)) == [span.index for span in scripts.spans("batch")]
    assert list(range(100)) == sorted(mark.value for mark in run.marks)  # type: ignore[type-var]
    assert 1 == len(scripts.spans("epoch"))
    assert 1 == len(scripts.spans("stuck"))


class TestTerm:
    """SIGTERM."""

    def test_default_disposition(self, scripts: Scripts) -> None:
        """SIGTERM kills the process as without us, with everything stored and open spans ended."""
        ended = after(scripts, "profile(); train()", signal.SIGTERM)

        assert (-signal.SIGTERM, "ready\n", "") == ended
        assert_all_on_disk(scripts)
        assert [True, True] == [
            scripts.spans(name)[0].attrs.get("truncated") for name in ("epoch", "stuck")
        ]
        assert "truncated" not in scripts.spans("cirron.session")[0].attrs
        assert not any("truncated" in span.attrs for span in scripts.spans("batch"))
        assert ("signal", "SIGTERM") == (
            scripts.box()["ended"]["how"],
            scripts.box()["ended"]["detail"],
        )
        assert ["SIGTERM"] == [one["name"] for one in scripts.box()["signals"]]
        assert "signal" == scripts.state()
        assert "SIGTERM at" in scripts.show()

    def test_where_it_was(self, scripts: Scripts) -> None:
        """After SIGTERM the black box still has what was open, and where the threads were."""
        after(scripts, "profile(); train()", signal.SIGTERM)
        box = scripts.box()

        assert ["cirron.session", "epoch", "stuck"] == [span["name"] for span in box["open"]]
        (main,) = [stack for stack in box["stacks"] if stack["name"] == "MainThread"]
        assert main["frames"][-1].endswith("in train")
        shown = scripts.show()
        assert "it was in epoch[0] > stuck, " in shown
        assert "where the threads were:" in shown

    def test_a_pool_that_ends_at_once(self, scripts: Scripts) -> None:
        """Workers that are told to end while they are ending do so at once."""
        ended = scripts.run("""
            import multiprocessing, time
            import cirron as ci

            def work(number):
                with ci.scope("child", number):
                    return number

            if __name__ == "__main__":
                ci.profile()
                began = time.perf_counter()
                for _ in range(10):
                    with multiprocessing.get_context("fork").Pool(2) as pool:
                        pool.map(work, range(4))
                print(time.perf_counter() - began < 4)  # one that waited would take 5 s
        """)

        assert (0, "True\n", "") == ended[:3]

    def test_no_worker_misses_its_end(self, scripts: Scripts) -> None:
        """Of many pools, each of whose workers may be about to wait for a lock, all end."""
        ended = scripts.run(
            f"""
            import multiprocessing
            import cirron as ci

            def work(number):
                with ci.scope("child", number):
                    return number

            if __name__ == "__main__":
                ci.profile(output="none")
                for _ in range({POOLS}):
                    with multiprocessing.get_context("fork").Pool(2) as pool:
                        assert [0, 1, 2, 3] == pool.map(work, range(4))
                print("ended")
            """,
            timeout_s=30.0 + POOLS / 10,
        )

        assert (0, "ended\n", "") == ended[:3]

    @pytest.mark.parametrize("is_blocked", [False, True])
    def test_a_fork_changes_no_mask(self, scripts: Scripts, is_blocked: bool) -> None:
        """After a fork, parent, child and a program that is started have the mask of before."""
        ended = scripts.run(f"""
            import os, signal, subprocess, sys
            import cirron as ci

            if {is_blocked}:
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            ci.profile()
            say = "import signal; print(int(signal.SIGTERM in signal.pthread_sigmask(0, [])))"
            if not os.fork():
                exec(say)
                os._exit(0)
            os.wait()
            exec(say)
            subprocess.run([sys.executable, "-c", say], preexec_fn=lambda: None)
        """)

        assert (0, f"{is_blocked:d}\n" * 3, "") == ended

    def test_a_fork_that_fails(self, scripts: Scripts) -> None:
        """Where no process can be made, SIGTERM still ends the program."""
        if os.getuid():
            pytest.skip("needs root, to become a user that may not fork")
        ended = scripts.run("""
            import os, resource, signal
            import cirron as ci

            ci.profile(output="none")
            os.setuid(65534)  # root may always fork
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
            try:
                os.fork()
            except BlockingIOError:
                print("refused")
            os.kill(os.getpid(), signal.SIGTERM)
        """)

        assert (-signal.SIGTERM, "refused\n", "") == ended

    def test_open_spans_of_other_threads_are_ended(self, scripts: Scripts) -> None:
        """Spans that are open in other threads when SIGTERM comes are stored as cut short."""
        ended = after(
            scripts,
            """
import threading
profile()
def work(number):
    with ci.scope("work", index=number):
        started.wait()
        time.sleep(600)
started = threading.Barrier(4)
for number in range(3):
    threading.Thread(target=work, args=(number,), daemon=True).start()
started.wait()
train()
""",
            signal.SIGTERM,
        )

        assert -signal.SIGTERM == ended.status
        assert [(0, True), (1, True), (2, True)] == sorted(
            (span.index, span.attrs.get("truncated")) for span in scripts.spans("work")
        )

    def test_a_handler_set_before(self, scripts: Scripts) -> None:
        """A handler that the user set before profile() is called and decides the exit status."""
        ended = after(
            scripts,
            """
def stop(number, frame):
    print("stopping", number, frame.f_code.co_name)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
profile(); train()
""",
            signal.SIGTERM,
        )

        assert (7, "ready\nstopping 15 train\n") == ended[:2]
        assert_all_on_disk(scripts)
        ended_by = scripts.box()["ended"]
        assert ("exception", "SystemExit: 7") == (ended_by["how"], ended_by["detail"])
        assert ["SIGTERM"] == [one["name"] for one in scripts.box()["signals"]]

    def test_a_handler_set_after(self, scripts: Scripts) -> None:
        """A handler that the user sets after profile() is called and decides the exit status."""
        ended = after(
            scripts,
            """
def stop(number, frame):
    print("stopping", number)
    sys.exit(7)
profile()
signal.signal(signal.SIGTERM, stop)
train()
""",
            signal.SIGTERM,
        )

        assert (7, "ready\nstopping 15\n") == ended[:2]
        assert_all_on_disk(scripts)
        ended_by = scripts.box()["ended"]
        assert ("exception", "SystemExit: 7") == (ended_by["how"], ended_by["detail"])

    def test_a_handler_that_exits_at_once(self, scripts: Scripts) -> None:
        """Even before a handler that calls os._exit(), what was recorded is stored."""
        ended = after(
            scripts,
            """
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))
profile(); train()
""",
            signal.SIGTERM,
        )

        assert 9 == ended.status
        assert list(range(100)) == [span.index for span in scripts.spans("batch")]
        assert ["SIGTERM"] == [one["name"] for one in scripts.box()["signals"]]
        assert ["cirron.session", "epoch", "stuck"] == [
            span["name"] for span in scripts.box()["open"]
        ]
        assert "killed" == scripts.state()

    def test_a_handler_that_goes_on(self, scripts: Scripts) -> None:
        """A program whose handler only takes note keeps recording, and ends as it likes."""
        ended = after(
            scripts,
            """
noted = []
signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
profile()
with ci.scope("first"):
    print("ready")
    while not noted:
        time.sleep(0.01)
with ci.scope("second"):
    ci.mark("noted", noted[0])
""",
            signal.SIGTERM,
        )

        assert 0 == ended.status
        assert [1, 1] == [len(scripts.spans(name)) for name in ("first", "second")]
        assert "truncated" not in scripts.spans("first")[0].attrs
        assert [15] == [mark.value for mark in scripts.session().marks]
        assert "clean" == scripts.state()

    def test_ignored_stays_ignored(self, scripts: Scripts) -> None:
        """A program that ignores SIGTERM still ignores it."""
        ended = after(
            scripts,
            """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
profile(); train(seconds=0.3)
print(signal.getsignal(signal.SIGTERM).name)
""",
            signal.SIGTERM,
        )

        assert (0, "ready\nSIG_IGN\n", "") == ended
        assert_all_on_disk(scripts)
        assert "clean" == scripts.state()

    def test_a_handler_of_asyncio(self, scripts: Scripts) -> None:
        """A handler that a running event loop has for SIGTERM works as without us."""
        body = """
async def main():
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    profile()
    with ci.scope("serve"):
        print("ready")
        await stopping.wait()
    print("stopped")
asyncio.run(main())
"""
        bare = after(scripts, body, signal.SIGTERM, profile="no")
        ended = after(scripts, body, signal.SIGTERM)

        assert (0, "ready\nstopped\n", "") == bare == ended
        assert 1 == len(scripts.spans("serve"))

    def test_during_shutdown(self, scripts: Scripts) -> None:
        """SIGTERM while the last records are being written waits until they are."""
        ended = after(
            scripts,
            """
profile()
for batch in ci.batches(range(60_000)):
    ci.mark("loss", batch)
print("ready")
""",
            signal.SIGTERM,
        )

        assert ended.status in (0, -signal.SIGTERM)  # whichever was faster
        assert 60_000 == len(scripts.spans("batch"))
        assert scripts.box()["ended"]["how"] in ("clean", "signal")

    def test_a_second_one(self, scripts: Scripts) -> None:
        """A second SIGTERM while the first is dealt with changes nothing."""
        script = scripts.start(
            HEAD
            + """
profile()
for batch in ci.batches(range(60_000)):
    ci.mark("loss", batch)
print("ready")
time.sleep(600)
"""
        )
        script.wait_for("ready")
        script.kill(signal.SIGTERM)
        script.kill(signal.SIGTERM)
        ended = script.end()

        assert -signal.SIGTERM == ended.status
        assert 60_000 == len(scripts.spans("batch"))
        assert "signal" == scripts.box()["ended"]["how"]

    def test_while_recording(self, scripts: Scripts) -> None:
        """SIGTERM in the middle of a hot loop ends the process and stores what came before."""
        script = scripts.start(
            HEAD
            + """
profile()
number = 0
while True:
    with ci.scope("step", index=number):
        number += 1
        if number % 5000 == 0:
            print("reached", number)
"""
        )
        script.wait_for("reached 20000")
        script.kill(signal.SIGTERM)
        ended = script.end()

        assert -signal.SIGTERM == ended.status
        reached = int(ended.out.split()[-1])
        assert set(range(reached - 1)) <= {span.index for span in scripts.spans("step")}
        assert "signal" == scripts.box()["ended"]["how"]


class TestInt:
    """SIGINT, which is Ctrl-C."""

    def test_not_caught(self, scripts: Scripts) -> None:
        """Ctrl-C ends the program with the status and the traceback it has without us."""
        bare = after(scripts, "profile(); train()", signal.SIGINT, profile="no")
        ended = after(scripts, "profile(); train()", signal.SIGINT)

        assert bare == ended
        assert -signal.SIGINT == ended.status
        assert ended.err.rstrip().endswith("KeyboardInterrupt")
        assert_all_on_disk(scripts)
        assert "KeyboardInterrupt" == scripts.spans("stuck")[0].attrs["error"]
        assert ("signal", "SIGINT") == (
            scripts.box()["ended"]["how"],
            scripts.box()["ended"]["detail"],
        )
        assert "signal" == scripts.state()

    def test_caught(self, scripts: Scripts) -> None:
        """A program that catches KeyboardInterrupt and goes on keeps recording."""
        ended = after(
            scripts,
            """
profile()
try:
    train()
except KeyboardInterrupt:
    print("caught")
with ci.scope("afterwards"):
    ci.mark("saved", True)
print(ci.health()["enabled"])
""",
            signal.SIGINT,
        )

        assert (0, "ready\ncaught\nTrue\n", "") == ended
        assert 1 == len(scripts.spans("afterwards"))
        assert True in [mark.value for mark in scripts.session().marks]
        assert "clean" == scripts.state()

    def test_under_asyncio(self, scripts: Scripts) -> None:
        """Under asyncio.run() Ctrl-C cancels the main task, as without us."""
        body = """
async def main():
    with ci.scope("serve"):
        try:
            print("ready")
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            print("cancelled")
            raise
profile()
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(4)
"""
        bare = after(scripts, body, signal.SIGINT, profile="no")
        ended = after(scripts, body, signal.SIGINT)

        assert (4, "ready\ncancelled\ninterrupted\n", "") == bare == ended
        assert "CancelledError" == scripts.spans("serve")[0].attrs["error"]

    def test_default_disposition(self, scripts: Scripts) -> None:
        """With SIG_DFL for SIGINT the process is killed by it, with everything stored."""
        body = "signal.signal(signal.SIGINT, signal.SIG_DFL); profile(); train()"
        bare = after(scripts, body, signal.SIGINT, profile="no")
        ended = after(scripts, body, signal.SIGINT)

        assert (-signal.SIGINT, "ready\n", "") == bare == ended
        assert_all_on_disk(scripts)
        assert True is scripts.spans("stuck")[0].attrs.get("truncated")
        assert ("signal", "SIGINT") == (
            scripts.box()["ended"]["how"],
            scripts.box()["ended"]["detail"],
        )

    @pytest.mark.parametrize("order", ["before", "after"])
    def test_a_handler_of_the_users(self, scripts: Scripts, order: str) -> None:
        """The user's own SIGINT handler is called, whether set before or after profile()."""
        setting = "signal.signal(signal.SIGINT, lambda number, frame: sys.exit(number + 10))"
        first, second = (setting, "profile()") if order == "before" else ("profile()", setting)
        ended = after(scripts, f"{first}\n{second}\ntrain()", signal.SIGINT)

        assert (12, "ready\n", "") == ended
        assert_all_on_disk(scripts)


def test_handlers_are_as_before_after_shutdown(scripts: Scripts) -> None:
    """After shutdown() every handler is the one from before profile(), or the user's later one."""
    ended = scripts.run(
        HEAD
        + """
def mine(number, frame):
    pass
before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
profile()
ci.shutdown()
print(before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)])
profile()
signal.signal(signal.SIGTERM, mine)
ci.shutdown()
print(signal.getsignal(signal.SIGTERM) is mine)
"""
    )

    assert (0, "True\nTrue\n", "") == ended


def test_a_handler_that_is_put_back_late(scripts: Scripts) -> None:
    """A program that puts our old handler back after a shutdown still dies of a signal."""
    ended = after(
        scripts,
        """
profile()
ours = signal.signal(signal.SIGTERM, lambda number, frame: None)
ci.shutdown()
signal.signal(signal.SIGTERM, ours)
profile()
print("ready")
time.sleep(600)
""",
        signal.SIGTERM,
    )

    assert (-signal.SIGTERM, "ready\n", "") == ended


def test_a_time_limit_while_garbage_is_collected(scripts: Scripts) -> None:
    """An exception of a signal handler reaches the program, also during a garbage collection."""
    ended = scripts.run("""
        import gc, signal
        import cirron as ci

        def limit(*_):
            raise TimeoutError

        signal.signal(signal.SIGALRM, limit)
        gc.set_threshold(5)
        ci.profile()
        caught = 0
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                for _ in range(100_000):
                    cycle = []
                    cycle.append(cycle)
            except TimeoutError:
                caught += 1
        print(caught)
    """)

    assert (0, "300\n", "") == ended
