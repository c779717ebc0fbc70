"""One slow destination holds nothing up: not the disk, the black box, a fork, or the exit."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Script, Scripts

FORK_S = 0.2
EXIT_S = 2.0
ON_DISK_S = 3.0
SPANS = 10_000

# What blocks, before `ci.profile()`; `ci` is not yet imported. Nothing of it prints to the test.
BLOCKED = {
    # The stream itself, unbuffered: what `python -u` and most job runners make.
    "stdout": """
reading, writing = os.pipe()
os.dup2(writing, 1)
options = {"output": ["spool", "stdout"]}
""",
    # Python's own buffering, whose lock a stuck writer holds: the interpreter wants it at the end.
    "buffered stdout": """
reading, writing = os.pipe()
sys.stdout = open(writing, "w")
options = {"output": ["spool", "stdout"]}
""",
    "event stream": """
reading, writing = os.pipe()
os.dup2(writing, 1)
os.environ["CIRRON_RUN_ID"] = "run-1"
options = {}
""",
    "buffered event stream": """
reading, writing = os.pipe()
sys.stdout = open(writing, "w")
os.environ["CIRRON_RUN_ID"] = "run-1"
options = {}
""",
    # At the end logging.shutdown() waits for the handler; the program lets it go right before.
    "log": """
import atexit, logging
gate = threading.Event()
class Stuck(logging.Handler):
    def emit(self, record):
        gate.wait(60)
logging.basicConfig(level=logging.INFO, handlers=[Stuck()])
atexit.register(gate.set)
options = {"output": ["spool", "log"]}
""",
    "a user's sink": """
gate = threading.Event()
class Stuck:
    def emit(self, batch):
        gate.wait(60)
options = {"sinks": [Stuck()]}
""",
    # Everything of it, not only `emit`.
    "a user's sink, all of it": """
gate = threading.Event()
class Stuck:
    def emit(self, batch):
        gate.wait(60)
    def wait(self, *args):
        gate.wait(60)
    tick = close = after_fork = health = flush = wait
options = {"sinks": [Stuck()]}
""",
}

SCRIPT = """
import json, os, sys, threading, time
said = os.dup(1)
def say(*words):
    os.write(said, (" ".join(map(str, words)) + "\\n").encode())
{blocked}
import cirron as ci

ci.profile(flush_interval=0.05, **options)

def record(count, **attrs):
    for _ in range(count):
        with ci.scope("a name that takes some room in a pipe", index=record.number, **attrs):
            ci.mark("value", record.number)
        record.number += 1
record.number = 0

def sink_drops(found):
    'All drops that health() counts, but those of the disk and of the ring.'
    total = 0
    for key, value in found.items():
        if isinstance(value, dict):
            total += sink_drops({{f"{{key}}.{{name}}": one for name, one in value.items()}})
        elif "drop" in key and not key.startswith(("record", "mark", "scope", "spool", "snapshot")):
            total += value if isinstance(value, int) else 0
    return total
"""


def start(scripts: Scripts, what: str, body: str) -> Script:
    return scripts.start(SCRIPT.format(blocked=BLOCKED[what]) + body)


def spans_on_disk(scripts: Scripts) -> int:
    runs = scripts.sessions()
    return sum(span.name.startswith("a name") for run in runs for span in run.spans)


def heartbeat(scripts: Scripts, pid: int) -> Any:
    found = list((scripts.home / "blackbox").glob(f"*-{pid}.json"))
    return json.loads(found[0].read_bytes())["heartbeat_ns"] if found else None


def assert_beats(scripts: Scripts, pid: int) -> None:
    """The black box is written anew, three times."""
    for _ in range(3):
        before = heartbeat(scripts, pid)
        scripts.wait_until(
            lambda before=before: heartbeat(scripts, pid) != before,  # type: ignore[misc]
            "the next heartbeat",
            timeout_s=1.0,
        )


def wait_for_spans(scripts: Scripts, count: int) -> None:
    deadline = time.monotonic() + ON_DISK_S
    while (found := spans_on_disk(scripts)) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert count == found, f"{found} of {count} spans on disk after {ON_DISK_S:g} s"


@pytest.mark.parametrize("what", BLOCKED)
def test_a_destination_that_blocks(scripts: Scripts, what: str) -> None:
    """All spans reach the disk, the black box beats on, forks take no time, and so does the exit;
    the process ends as it should.
    """
    script = start(
        scripts,
        what,
        f"""
record({SPANS})
say("recorded")
while not os.path.exists("go"):
    time.sleep(0.005)
slowest = 0
for number in range(5):
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    slowest = max(slowest, time.perf_counter() - began)
    os.waitpid(pid, 0)
began = time.perf_counter()
ci.flush()
say("fork", slowest, time.perf_counter() - began)
say("ending")
""",
    )
    script.wait_for("recorded")
    wait_for_spans(scripts, SPANS)
    assert_beats(scripts, script.pid)
    (scripts.folder / "go").touch()
    fork_s, flush_s = map(float, script.wait_for("fork").split()[1:])
    script.wait_for("ending")
    began = time.monotonic()
    ended = script.end()
    exit_s = time.monotonic() - began

    assert fork_s < FORK_S, f"a fork took {fork_s:.2f} s"
    assert flush_s < 1.0, f"ci.flush() took {flush_s:.2f} s"
    assert exit_s < EXIT_S, f"the exit took {exit_s:.2f} s"
    assert 0 == ended.status, f"exit status {ended.status}: {ended.err}"
    run = scripts.session()
    assert list(range(SPANS)) == sorted(
        span.index or 0 for span in run.spans if span.name.startswith("a name")
    )
    assert SPANS == len(run.marks)
    assert "clean" == scripts.state()


@pytest.mark.parametrize("what", ["stdout", "buffered event stream", "log", "a user's sink"])
def test_the_drop_is_counted(scripts: Scripts, what: str) -> None:
    """What a destination that blocks does not take is bounded, and counted in health()."""
    script = start(
        scripts,
        what,
        """
drops, rounds = 0, 0
while not drops and rounds < 100:
    record(2_000, note="y" * 1_000)
    ci.flush()
    drops, rounds = sink_drops(ci.health()), rounds + 1
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) // 1024 for line in file if line.startswith("VmHWM"))
say("dropped", drops, rounds, peak, record.number)
os._exit(0)
""",
    )
    drops, rounds, peak, recorded = map(int, script.wait_for("dropped").split()[1:])

    assert drops > 0, f"nothing counted after {rounds} rounds of 2,000 spans"
    assert peak < 400, f"{peak} MB of memory for what nobody takes"
    wait_for_spans(scripts, recorded)


@pytest.mark.parametrize("what", ["buffered stdout", "a user's sink"])
def test_sigterm_while_a_destination_blocks(scripts: Scripts, what: str) -> None:
    """SIGTERM ends the process as without us, at once, with everything on disk."""
    script = start(scripts, what, f'record({SPANS})\nsay("recorded")\ntime.sleep(600)\n')
    script.wait_for("recorded")
    began = time.monotonic()
    script.kill(signal.SIGTERM)
    ended = script.end()
    exit_s = time.monotonic() - began

    assert -signal.SIGTERM == ended.status
    assert exit_s < EXIT_S, f"the exit took {exit_s:.2f} s"
    assert SPANS == spans_on_disk(scripts)
    assert "signal" == scripts.state()


@pytest.mark.parametrize("what", ["buffered event stream"])
def test_a_child_of_a_blocked_process(scripts: Scripts, what: str) -> None:
    """A child that records while its parent's destination blocks ends quickly, its spans stored."""
    script = start(
        scripts,
        what,
        """
record(5_000)
time.sleep(0.3)  # some flush intervals: the destination is full now
pid = os.fork()
if pid == 0:
    record.number = 100_000
    record(1_000)
    sys.exit(0)
began = time.perf_counter()
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
say("child", status, time.perf_counter() - began)
""",
    )
    status, took_s = script.wait_for("child").split()[1:]
    assert "0" == status
    assert float(took_s) < EXIT_S, f"the child took {took_s} s to end"
    assert 0 == script.end().status
    assert 6_000 == spans_on_disk(scripts)


def test_a_warning_that_nobody_reads(scripts: Scripts) -> None:
    """A warning of ours that cannot be written, since stderr is a full pipe, does not stop the
    disk or the black box.
    """
    script = scripts.start("""
        import atexit, logging, os, threading, time
        said = os.dup(1)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        try:
            while True:
                os.write(writing, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(writing, True)
        os.dup2(writing, 2)

        def drain():  # logging waits for its handlers when the interpreter ends
            threading.Thread(target=lambda: [*iter(lambda: os.read(reading, 65536), b"")],
                             daemon=True).start()
        atexit.register(drain)
        import cirron as ci

        ci.Cirron(spool_max_bytes=50_000).profile(flush_interval=0.05)  # the cap is warned about
        number = 0
        while not os.path.exists("stop"):
            with ci.scope("a name", index=number):
                number += 1
            time.sleep(0.0005)
    """)
    scripts.wait_until(lambda: spans_on_disk(scripts), "a span on disk", timeout_s=5)
    for _ in range(20):  # past the cap, and on
        before = max((path.name for path in scripts.batch_files()), default="")
        scripts.wait_until(
            lambda before=before: any(path.name > before for path in scripts.batch_files()),  # type: ignore[misc]
            "another batch on disk",
            timeout_s=2,
        )
    assert_beats(scripts, script.pid)
    (scripts.folder / "stop").touch()
    began = time.monotonic()

    assert 0 == script.end().status
    assert time.monotonic() - began < EXIT_S
    assert "clean" == scripts.state()


# -- sinks that users write -----------------------------------------------------------------

SINKS = """
import json, os, sys, threading, time
import cirron as ci
from cirron.ship.sinks.base import Outcome

class Healthy:
    def __init__(self):
        self.payloads, self.ids = [], []
    def emit(self, batch):
        self.payloads.append(batch.payload)
        self.ids.append(batch.batch_id)
        return Outcome.DONE

class Bad(Healthy):
    def emit(self, batch):
        super().emit(batch)
        return act(batch)

healthy, bad = Healthy(), Bad()

def record(count):
    for _ in range(count):
        with ci.scope("span", index=record.number):
            ci.mark("value", record.number)
        record.number += 1
record.number = 0

def indices(sink):
    return [span["index"] for payload in sink.payloads for span in json.loads(payload)["spans"]
            if span["name"] == "span"]
"""

MISBEHAVIOURS = {
    "raises": "raise ValueError('no')",
    "raises each second time": "if len(bad.ids) % 2: raise OSError('no')\n    return Outcome.DONE",
    "raises SystemExit": "raise SystemExit(3)",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "raises GeneratorExit": "raise GeneratorExit",
    "raises MemoryError": "raise MemoryError",
    "recurses": "return act(batch)",
    "returns None": "return None",
    "returns garbage": "return {'not': 'an outcome'}",
    "returns what cannot be compared": "return type('Odd', (), {'__eq__': lambda *_: 1 / 0})()",
    "records": "[ci.mark('in emit', 1) for _ in range(10)]\n    return Outcome.DONE",
    "asks": "ci.health(); ci.trace(format='dict'); ci.flush()\n    return Outcome.DONE",
    "shuts down": "ci.shutdown()",
}


@pytest.mark.parametrize("what", MISBEHAVIOURS)
def test_a_sink_that_misbehaves(scripts: Scripts, what: str) -> None:
    """Whatever a user's sink does, the disk and a healthy sink beside it get every batch, in
    order, and the process ends quickly and well.
    """
    shut = what == "shuts down"
    script = scripts.start(
        SINKS
        + f"""
def act(batch):
    {MISBEHAVIOURS[what]}

ci.profile(flush_interval=3600, sinks=[bad, healthy])
for _ in range(5):
    record(200)
    ci.flush()
alive = {shut} or ci.health()["flusher_alive"]
print("ending", flush=True)
began = time.monotonic()
ci.shutdown()
took_s = time.monotonic() - began
stored = [] if {shut} else indices(healthy)
print(json.dumps([alive, took_s, stored == list(range(1_000)) or {shut}, len(bad.ids),
                  len(set(healthy.ids)) == len(healthy.ids)]))
"""
    )
    alive, took_s, all_in_order, tried, ids_differ = json.loads(script.end().out.split("\n")[1])

    assert took_s < EXIT_S, f"shutdown took {took_s:.2f} s"
    assert [True, True, True] == [alive, all_in_order, ids_differ]
    assert tried >= 1, "the sink was never called"
    if not shut:  # it ended its session early, which was its wish
        assert list(range(1_000)) == [span.index for span in scripts.spans("span")]
    assert "clean" == scripts.state()


def test_a_sink_gets_every_batch_in_order(scripts: Scripts) -> None:
    """A sink that is an object with `emit` alone gets what the spool gets: batches of JSON."""
    ended = scripts.run(
        SINKS
        + """
ci.profile(flush_interval=0.02, sinks=[healthy])
for _ in range(20):
    record(250)
    time.sleep(0.01)
ci.shutdown()
batches = [json.loads(payload) for payload in healthy.payloads]
print(json.dumps([indices(healthy) == list(range(5_000)), len(batches) > 1,
                  [batch["batch_id"] for batch in batches] == healthy.ids,
                  [batch["created_ns"] for batch in batches] ==
                  sorted(batch["created_ns"] for batch in batches),
                  sum(len(batch["marks"]) for batch in batches),
                  sum(span["name"] == "cirron.session" for b in batches for span in b["spans"])]))
"""
    )

    assert (0, "") == (ended.status, ended.err)
    assert [True, True, True, True, 5_000, 1] == json.loads(ended.out)
    assert 5_000 == len(scripts.spans("span"))


def test_a_slow_sink_gets_everything(scripts: Scripts) -> None:
    """A sink that takes its time, and keeps up in the end, gets every batch before the exit."""
    ended = scripts.run(
        SINKS
        + """
def act(batch):
    time.sleep(0.02)
    return Outcome.DONE

ci.profile(flush_interval=3600, sinks=[bad])
for _ in range(20):
    record(50)
    ci.flush()
ci.shutdown()
print(indices(bad) == list(range(1_000)))
"""
    )

    assert (0, "True\n", "") == ended


def test_sinks_without_a_spool(scripts: Scripts) -> None:
    """With output="none" a user's sink is the only destination, and nothing is written."""
    ended = scripts.run(
        SINKS
        + """
ci.profile(flush_interval=0.05, output="none", sinks=[healthy])
record(1_000)
ci.shutdown()
print(indices(healthy) == list(range(1_000)))
"""
    )

    assert (0, "True\n", "") == ended
    assert not scripts.home.exists()


@pytest.mark.parametrize("given", ["object()", "'text'", "[None]"])
def test_what_is_no_sink(scripts: Scripts, given: str) -> None:
    """What has no `emit` is refused at once, with an error that names `sinks` and `emit`."""
    ended = scripts.run(f"""
        import cirron as ci

        try:
            ci.profile(sinks={given})
        except ci.CirronError as error:
            print("sinks" in str(error), "emit" in str(error))
    """)

    assert (0, "True True\n", "") == ended


def test_a_sink_in_a_forked_child(scripts: Scripts) -> None:
    """A user's sink belongs to the process that gave it: a child's records reach the disk."""
    ended = scripts.run(
        SINKS
        + """
ci.profile(flush_interval=0.05, sinks=[healthy])
record(100)
ci.flush()
pid = os.fork()
if pid == 0:
    record(100)
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
ci.shutdown()
print(status, indices(healthy) == list(range(100)))
"""
    )

    assert (0, "0 True\n", "") == ended
    assert list(range(200)) == sorted(span.index or 0 for span in scripts.spans("span"))
