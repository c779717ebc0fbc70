"""Processes that fork, with and without exec: each record once, under its own process."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Scripts
    from tests.spools import Recorded


HEAD = """
import multiprocessing, os, subprocess, sys, threading, time
import cirron as ci

def wait(pid):
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)

def work(number):
    with ci.scope("work", index=number):
        ci.mark("number", number)
    return os.getpid()
"""


def by_pid(run: Recorded, name: str) -> dict[int, list[int | None]]:
    """The indices of the spans of that name, by process, in order."""
    found: dict[int, list[int | None]] = {}
    for span in sorted(run.spans, key=lambda span: span.start_ns):
        if span.name == name:
            found.setdefault(span.pid, []).append(span.index)
    return found


def assert_ids_are_distinct(scripts: Scripts) -> None:
    """No id is in the files twice, before the reader leaves out second copies."""
    batches = [json.loads(path.read_bytes()) for path in scripts.batch_files()]
    ids = [
        record["id"] for batch in batches for kind in ("spans", "marks") for record in batch[kind]
    ]
    assert len(set(ids)) == len(ids)


def test_a_forked_child_records(scripts: Scripts) -> None:
    """A child of os.fork() records on: its own spans, once, with its pid, under the session."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
for number in range(5):
    work(number)
pid = os.fork()
for number in range(10, 13) if pid == 0 else range(20, 23):
    work(number)
if pid:
    print(os.getpid(), pid, wait(pid))
"""
    )

    parent, child, status = map(int, ended.out.split())
    run = scripts.session()
    assert (0, 0) == (ended.status, status)
    assert {parent: [0, 1, 2, 3, 4, 20, 21, 22], child: [10, 11, 12]} == by_pid(run, "work")
    assert [0, 1, 2, 3, 4, 10, 11, 12, 20, 21, 22] == sorted(
        mark.value  # type: ignore[type-var]
        for mark in run.marks
    )
    assert_ids_are_distinct(scripts)
    (root,) = scripts.spans("cirron.session")
    assert parent == root.pid
    assert {root.id} == {span.parent_id for span in scripts.spans("work")}
    spans = {span.id: span for span in run.spans}
    assert all(spans[mark.span_id].index == mark.value for mark in run.marks)
    assert ["clean", "clean"] == [scripts.box(pid)["ended"]["how"] for pid in (parent, child)]


def test_a_child_that_records_nothing_writes_nothing(scripts: Scripts) -> None:
    """A child that records nothing leaves no file and no thread behind, however it ends."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=0.02)
for end in (lambda: os._exit(0), lambda: sys.exit(0), ci.shutdown, ci.flush, ci.health):
    pid = os.fork()
    if pid == 0:
        time.sleep(0.1)  # some flush intervals
        print("threads", threading.active_count())
        end()
        sys.exit()
    wait(pid)
print("parent", os.getpid())
"""
    )

    parent = int(ended.out.split()[-1])
    assert ["1"] * 5 == ended.out.split()[1:-2:2]
    (box,) = (scripts.home / "blackbox").glob("*.json")
    assert box.name.endswith(f"-{parent}.json")
    assert {parent} == {span.pid for span in scripts.session().spans}
    assert 1 == len(scripts.batch_files())


def test_a_child_that_hangs_in_its_first_scope(scripts: Scripts) -> None:
    """A child that never leaves its first scope has a black box which says where it is."""
    script = scripts.start(
        HEAD
        + """
ci.profile(flush_interval=0.05)
pid = os.fork()
if pid == 0:
    with ci.scope("stuck", index=7):
        time.sleep(600)
print("child", pid, flush=True)
wait(pid)
"""
    )
    pid = int(script.wait_for("child").split()[1])
    scripts.wait_until(
        lambda: list((scripts.home / "blackbox").glob(f"*-{pid}.json")), "the child's black box"
    )
    scripts.wait_until(lambda: scripts.box(pid)["open"], "what the child has open")
    box = scripts.box(pid)
    os.kill(pid, signal.SIGKILL)

    assert [("stuck", 7)] == [
        (span["name"], span["index"]) for span in box["open"] if span["name"] != "cirron.session"
    ]
    assert (pid, None) == (box["pid"], box["ended"])
    assert 0 == script.end().status


def test_ids_of_batches(scripts: Scripts) -> None:
    """A batch's id is 16 hex digits of its process, and its number there."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
for number in range(3):
    work(number)
    ci.flush()
pid = os.fork()
if pid == 0:
    for number in range(2):
        work(number)
        ci.flush()
    os._exit(0)
sys.exit(wait(pid))
"""
    )
    batches = [json.loads(path.read_bytes()) for path in scripts.batch_files()]
    found: dict[int, list[str]] = {}
    for batch in batches:
        (pid,) = {span["pid"] for span in batch["spans"]}
        found.setdefault(pid, []).append(batch["batch_id"])
    parent, child = sorted(found.values(), key=len, reverse=True)

    assert 0 == ended.status
    assert ([1, 2, 3, 4], [1, 2]) == tuple(
        [int(batch_id[16:], 16) for batch_id in ids] for ids in (parent, child)
    )
    assert [1, 1] == [len({batch_id[:16] for batch_id in ids}) for ids in (parent, child)]
    assert parent[0][:16] != child[0][:16]


def test_a_fork_inside_a_scope(scripts: Scripts) -> None:
    """A scope that is open when the process forks is recorded once, by the parent."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
with ci.scope("outer"):
    for epoch in ci.epochs(range(1)):
        ci.mark("before", 1)
        pid = os.fork()
        if pid == 0:
            ci.mark("in child", 2)
            work(7)
        else:
            status = wait(pid)
            ci.mark("in parent", 3)
if pid:
    print(os.getpid(), pid, status)
"""
    )

    parent, child, status = map(int, ended.out.split())
    run = scripts.session()
    (root,) = scripts.spans("cirron.session")
    (outer,) = scripts.spans("outer")
    (epoch,) = scripts.spans("epoch")
    (inner,) = scripts.spans("work")
    assert 0 == status
    assert [parent, parent, parent, child] == [one.pid for one in (root, outer, epoch, inner)]
    assert root.id == inner.parent_id
    assert {"before": epoch.id, "in parent": epoch.id, "in child": root.id, "number": inner.id} == {
        mark.name: mark.span_id for mark in run.marks
    }
    assert "truncated" not in outer.attrs
    assert_ids_are_distinct(scripts)


def test_a_grandchild(scripts: Scripts) -> None:
    """A child's child has ids and a black box of its own, also where the child records nothing."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
work(0)
print(os.getpid())
pids = []
for first in (True, False):
    pid = os.fork()
    if pid == 0:
        if first:
            work(1)
        print(os.getpid())
        inner = os.fork()
        if inner == 0:
            work(2)
            print(os.getpid())
        elif first:
            work(3)
        if inner:
            sys.exit(wait(inner))
        sys.exit()
    assert wait(pid) == 0
work(4)
"""
    )

    parent, child, grandchild, silent, other = map(int, ended.out.split())
    assert 0 == ended.status
    run = scripts.session()
    assert {parent: [0, 4], child: [1, 3], grandchild: [2], other: [2]} == by_pid(run, "work")
    assert silent not in {span.pid for span in run.spans}
    assert 4 == len(list((scripts.home / "blackbox").glob("*.json")))
    assert_ids_are_distinct(scripts)
    (root,) = scripts.spans("cirron.session")
    assert {root.id} == {span.parent_id for span in scripts.spans("work")}


def test_a_fork_before_profile(scripts: Scripts) -> None:
    """Processes that fork before profile() and then each call it share no id."""
    ended = scripts.run(
        HEAD
        + """
work(0)
pid = os.fork()
ci.profile(flush_interval=3600)
for number in range(1, 4):
    work(number)
if pid:
    print(os.getpid(), pid, wait(pid))
"""
    )

    parent, child, status = map(int, ended.out.split())
    assert 0 == status
    runs = scripts.sessions()
    assert {parent: [1, 2, 3], child: [1, 2, 3]} == {
        pid: indices for run in runs for pid, indices in by_pid(run, "work").items()
    }
    assert_ids_are_distinct(scripts)


def test_a_process_of_multiprocessing(scripts: Scripts) -> None:
    """What a forked `multiprocessing.Process` records is on disk when it has ended."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
context = multiprocessing.get_context("fork")
processes = [context.Process(target=work, args=(number,)) for number in range(4)]
for process in processes:
    process.start()
for process in processes:
    process.join()
print([process.pid for process in processes], [process.exitcode for process in processes])
"""
    )

    pids, statuses = json.loads("[" + ended.out.replace("] [", "], [") + "]")
    run = scripts.session()
    assert [0, 0, 0, 0] == statuses
    assert {pid: [number] for number, pid in enumerate(pids)} == by_pid(run, "work")
    assert 4 == len(run.marks)
    assert_ids_are_distinct(scripts)
    assert ["clean"] * 4 == [scripts.box(pid)["ended"]["how"] for pid in pids]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_that_profiles_itself(scripts: Scripts, method: str) -> None:
    """A `multiprocessing` child that calls profile() itself loses nothing when it ends."""
    ended = scripts.run(
        HEAD
        + f"""
def train(number):
    ci.profile(flush_interval=3600)
    work(number)
    work(number + 1)
    print(os.getpid())

if __name__ == "__main__":
    process = multiprocessing.get_context("{method}").Process(target=train, args=(5,))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
    )

    child = int(ended.out)
    assert (0, "") == (ended.status, ended.err)
    assert {child: [5, 6]} == by_pid(scripts.session(), "work")
    assert [child] == [span.pid for span in scripts.spans("cirron.session")]
    assert "clean" == scripts.state()


def test_a_forked_rank_has_its_own_session(scripts: Scripts) -> None:
    """A child that was forked under a session and calls profile() has one of its own: its own
    rank, in the same run.
    """
    ended = scripts.run(
        HEAD
        + """
def train(rank):
    os.environ["RANK"] = str(rank)
    ci.profile()
    work(rank)

if __name__ == "__main__":
    ci.profile()
    ranks = [multiprocessing.get_context("fork").Process(target=train, args=(n,)) for n in (0, 1)]
    for rank in ranks: rank.start()
    for rank in ranks: rank.join()
"""
    )

    assert (0, "") == (ended.status, ended.err)
    runs = scripts.sessions()
    assert {None, 0, 1} == {run.session.rank for run in runs}
    assert 1 == len({run.session.run_id for run in runs})


def test_a_process_that_fails(scripts: Scripts) -> None:
    """The black box of a forked `multiprocessing` child names the exception it died of."""
    ended = scripts.run(
        HEAD
        + """
def fail():
    work(1)
    raise RuntimeError("no such luck")
ci.profile(flush_interval=3600)
process = multiprocessing.get_context("fork").Process(target=fail)
process.start()
process.join()
print(process.pid, process.exitcode)
"""
    )

    child, status = map(int, ended.out.split())
    assert 1 == status
    assert {child: [1]} == by_pid(scripts.session(), "work")
    assert ("exception", "RuntimeError: no such luck") == (
        scripts.box(child)["ended"]["how"],
        scripts.box(child)["ended"]["detail"],
    )


@pytest.mark.parametrize("end", ["pool.close(); pool.join()", "pool.terminate()"])
def test_a_pool(scripts: Scripts, end: str) -> None:
    """What the workers of a forked pool record is on disk, whether they end or are terminated."""
    ended = scripts.run(
        HEAD
        + f"""
ci.profile(flush_interval=3600)
pool = multiprocessing.get_context("fork").Pool(3)
pids = pool.map(work, range(60), chunksize=1)
workers = [process.pid for process in pool._pool]
{end}
pool.join()
print(sorted(set(pids)))
"""
    )

    pids = json.loads(ended.out)
    run = scripts.session()
    assert set(pids) == set(by_pid(run, "work"))
    assert list(range(60)) == sorted(span.index or 0 for span in scripts.spans("work"))
    assert list(range(60)) == sorted(mark.value for mark in run.marks)  # type: ignore[type-var]
    assert_ids_are_distinct(scripts)
    # A worker that is terminated may be on its way out already.
    expected = {"clean"} if "close" in end else {"clean", "signal"}
    assert {scripts.box(pid)["ended"]["how"] for pid in pids} <= expected


def test_a_fork_while_a_thread_records(scripts: Scripts) -> None:
    """Forking while other threads record, flush and read does not hang, and loses nothing."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=0.01)
stopping = threading.Event()
done = [0, 0]
def record(which):
    while not stopping.is_set():
        for _ in range(20):
            with ci.scope("busy", index=which):
                ci.mark("value", which)
        done[which] += 20
        stopping.wait(0.0005)
def look():
    while not stopping.is_set():
        ci.trace(format="dict", last=3)
        ci.health()
        stopping.wait(0.001)
threads = [threading.Thread(target=record, args=(which,)) for which in (0, 1)]
threads.append(threading.Thread(target=look))
for thread in threads:
    thread.start()
children = []
for number in range(30):
    pid = os.fork()
    if pid == 0:
        work(number)
        ci.flush()
        ci.trace(format="json")
        os._exit(0)
    children.append(pid)
statuses = [wait(pid) for pid in children]
stopping.set()
for thread in threads:
    thread.join()
print(sum(statuses), sum(done), *children)
""",
        timeout_s=60,
    )

    failed, busy, *children = map(int, ended.out.split())
    run = scripts.session()
    assert (0, 0) == (ended.status, failed)
    assert {pid: [number] for number, pid in enumerate(children)} == by_pid(run, "work")
    assert busy == len(scripts.spans("busy"))
    assert busy == sum(mark.name == "value" for mark in run.marks)
    assert_ids_are_distinct(scripts)


def test_a_fork_from_a_thread(scripts: Scripts) -> None:
    """A child that was forked by another thread than the main one records and ends as any other."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
def fork():
    pid = os.fork()
    if pid == 0:
        work(1)
        ci.shutdown()
        os._exit(0)
    print(pid, wait(pid))
thread = threading.Thread(target=fork)
thread.start()
thread.join()
"""
    )

    child, status = map(int, ended.out.split())
    assert 0 == status
    assert {child: [1]} == by_pid(scripts.session(), "work")
    assert "clean" == scripts.box(child)["ended"]["how"]


def test_threads_of_a_child(scripts: Scripts) -> None:
    """A child whose threads all make its first record at once loses none of them."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
pid = os.fork()
if pid == 0:
    barrier = threading.Barrier(8)
    def race(number):
        barrier.wait()
        for _ in range(50):
            work(number)
    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
else:
    print(pid, wait(pid))
"""
    )

    child, status = map(int, ended.out.split())
    assert 0 == status
    assert 400 == len(by_pid(scripts.session(), "work")[child])
    assert 400 == len(scripts.session().marks)
    assert_ids_are_distinct(scripts)


def test_a_child_is_killed(scripts: Scripts) -> None:
    """After a child was killed, its black box tells what it was doing; the parent's is clean."""
    script = scripts.start(
        HEAD
        + """
ci.profile(flush_interval=0.05)
pid = os.fork()
if pid == 0:
    with ci.scope("hanging", index=4):
        ci.mark("loss", 1.5)
        print("child", os.getpid())
        time.sleep(600)
print("status", wait(pid))
"""
    )
    child = int(script.wait_for("child").split()[1])
    scripts.wait_for_file(scripts.home / "blackbox", f"*-{child}.json", "hanging")
    os.kill(child, signal.SIGKILL)
    ended = script.end()

    assert "status -9" in ended.out
    assert ["hanging"] == [span["name"] for span in scripts.box(child)["open"]]
    assert None is scripts.box(child)["ended"]
    assert "clean" == scripts.box(script.pid)["ended"]["how"]


def test_a_child_gets_a_signal(scripts: Scripts) -> None:
    """SIGTERM ends a forked child as without us, with what it recorded on disk."""
    ended = scripts.run(
        HEAD
        + """
import signal
ci.profile(flush_interval=3600)
for records in (True, False):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        if records:
            work(3)
        os.write(writing, b"x")
        time.sleep(600)
    os.read(reading, 1)
    os.kill(pid, signal.SIGTERM)
    print(pid, wait(pid))
"""
    )

    child, status, other, other_status = map(int, ended.out.split())
    assert (-signal.SIGTERM, -signal.SIGTERM) == (status, other_status)
    assert {child: [3]} == by_pid(scripts.session(), "work")
    assert "signal" == scripts.box(child)["ended"]["how"]
    assert [] == list((scripts.home / "blackbox").glob(f"*-{other}.json"))


def test_a_child_can_start_a_session_of_its_own(scripts: Scripts) -> None:
    """A child may shut the parent's session down for itself and profile anew."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
work(0)
pid = os.fork()
if pid == 0:
    ci.shutdown()
    ci.profile(flush_interval=3600)
work(1)
if pid:
    print(os.getpid(), pid, wait(pid))
"""
    )

    parent, child, status = map(int, ended.out.split())
    assert 0 == status
    runs = scripts.sessions()
    assert [{parent: [0, 1]}, {child: [1]}] == [by_pid(run, "work") for run in runs]
    assert ["clean", "clean"] == scripts.states()
    assert_ids_are_distinct(scripts)


def test_exec(scripts: Scripts) -> None:
    """A subprocess that is no business of ours runs as without us and leaves no record."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
with ci.scope("call"):
    print(subprocess.run([sys.executable, "-c", "import sys; print('cirron' in sys.modules)"],
                         capture_output=True, text=True, check=True).stdout.strip())
    print(subprocess.run("echo shell", shell=True, capture_output=True, text=True,
                         preexec_fn=lambda: None).stdout.strip())
    pid = os.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", "print('replaced')"])
    wait(pid)
"""
    )

    assert (0, "False\nshell\nreplaced\n", "") == ended
    assert {"cirron.session", "call"} == {span.name for span in scripts.session().spans}
    assert 1 == len(list((scripts.home / "blackbox").glob("*.json")))


def test_spawn(scripts: Scripts) -> None:
    """Spawned processes that profile have sessions of their own, in one run where it has an id."""
    ended = scripts.run(
        HEAD
        + """
def train(number):
    ci.profile(flush_interval=3600, output=["spool"])
    work(number)

if __name__ == "__main__":
    ci.profile(flush_interval=3600)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=train, args=(number,)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    work(2)
    print(*[process.pid for process in processes], os.getpid(), file=sys.stderr)
""",
        CIRRON_RUN_ID="run-1",
    )

    first, second, parent = map(int, ended.err.split())
    runs = scripts.sessions()
    assert {first: [0], second: [1], parent: [2]} == {
        pid: indices for run in runs for pid, indices in by_pid(run, "work").items()
    }
    assert ["run-1"] * 3 == [run.session.run_id for run in runs]
    assert ["clean"] * 3 == scripts.states()
    assert_ids_are_distinct(scripts)


def test_what_is_dropped_in_a_child_is_counted(scripts: Scripts) -> None:
    """In a forked child, too, records are on disk or counted as dropped."""
    ended = scripts.run(
        HEAD
        + """
ci.profile(flush_interval=3600)
pid = os.fork()
if pid == 0:
    for number in range(20_000):
        work(number)
else:
    print(pid, wait(pid))
""",
        CIRRON_MAX_PENDING_RECORDS="500",
    )

    child, status = map(int, ended.out.split())
    assert 0 == status
    run = scripts.session()
    stored = len(by_pid(run, "work")[child]) + len(run.marks)
    assert 40_000 == stored + scripts.box(child)["counters"]["record_drop_count"]


@pytest.mark.parametrize("output", ["stdout", "log", "event_stream"])
def test_a_fork_while_we_print(scripts: Scripts, output: str) -> None:
    """A child that is forked while our thread is inside a write to stdout can print as well."""
    ended = scripts.run(
        f"""
        import array, fcntl, logging, os, sys, termios, threading, time
        import cirron as ci

        reading, writing = os.pipe()
        os.set_inheritable(writing, True)
        sys.stdout = sys.stderr = os.fdopen(writing, "w")  # buffered, and nobody reads it yet
        logging.basicConfig(level=logging.INFO)
        ci.profile(flush_interval=0.05, output={output.replace("event_stream", "none")!r})
        for number in range(3_000):
            with ci.scope("a name that takes some room in a pipe", index=number):
                pass

        def waiting():
            size = array.array("i", [0])
            fcntl.ioctl(reading, termios.FIONREAD, size)
            return size[0]

        def read():
            while os.read(reading, 65536):
                pass

        while waiting() < 60_000:  # until our thread is stuck in its write
            time.sleep(0.001)
        # A fork waits for a logging handler, which is the user's, for a moment only.
        threading.Timer({0.02 if output == "log" else 0.1}, read).start()
        pid = os.fork()
        if pid == 0:
            print("child")
            sys.stdout.flush()
            os._exit(0)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                os.write(1, b"ended" if status == 0 else b"failed")
                break
            time.sleep(0.001)
        else:
            os.write(1, b"hangs")
            os.kill(pid, 9)
        os._exit(0)
        """,
        CIRRON_RUN_ID="run-1" if output == "event_stream" else "",
    )

    assert "ended" == ended.out
