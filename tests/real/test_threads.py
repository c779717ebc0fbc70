"""Many threads: none of their records lost without being counted, and nothing grows with them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

# `make test` scales the large run down; CIRRON_TEST_SPANS=2000000 runs it in full.
SPANS = int(os.environ.get("CIRRON_TEST_SPANS", "400000"))
THREADS = 16


def test_none_of_many_threads_is_lost(scripts: Scripts) -> None:
    """16 threads record 400,000 spans between them: each is on disk, or counted as dropped."""
    ended = scripts.run(
        f"""
        import json, threading
        import cirron as ci

        ci.profile()
        barrier = threading.Barrier({THREADS})

        def work(number):
            barrier.wait()
            for index in range({SPANS // THREADS}):
                with ci.scope("step", index):
                    pass

        threads = [threading.Thread(target=work, args=(n,)) for n in range({THREADS})]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ci.flush()
        print(json.dumps(ci.health()))
        """,
        timeout_s=60 + SPANS / 20_000,
    )

    health = json.loads(ended.out)
    assert 0 == ended.status
    # A disk that stalls for seconds makes the batches in memory too many.
    assert bool(health["records_lost"]) == ("written more slowly than" in ended.err)
    assert "" == ended.err or health["records_lost"]
    steps = scripts.spans("step")
    lost = health["record_drop_count"] + health["records_lost"]
    assert SPANS == len(steps) + lost
    assert SPANS > 1_000_000 or 0 == health["record_drop_count"]
    by_thread: dict[int, list[int | None]] = {}
    for span in steps:
        by_thread.setdefault(span.thread_id, []).append(span.index)
    assert THREADS == len(by_thread)
    if not lost:
        assert [list(range(SPANS // THREADS))] * THREADS == list(by_thread.values())


@pytest.mark.parametrize("pending", [200, 1_000, 5_000])
def test_what_a_full_ring_drops_is_counted(scripts: Scripts, pending: int) -> None:
    """With room for few records, each one is on disk or in record_drop_count, exactly."""
    ended = scripts.run(
        """
        import json, threading
        import cirron as ci

        ci.profile(flush_interval=0.05)

        def work(number):
            for index in range(4_000):
                with ci.scope("step", index):
                    ci.mark("value", index)
            ci.mark("last", number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ci.flush()
        print(json.dumps(ci.health()["record_drop_count"]))
        """,
        CIRRON_MAX_PENDING_RECORDS=str(pending),
    )

    dropped = int(ended.out)
    run = scripts.session()
    assert 0 == ended.status
    assert dropped > 0
    assert 16 * 8_001 == len(scripts.spans("step")) + len(run.marks) + dropped
    assert dropped == scripts.box()["counters"]["record_drop_count"]
    assert f"record_drop_count={dropped}" in scripts.show()


def test_threads_come_and_go(scripts: Scripts) -> None:
    """3,000 threads, 50 at a time: no record is lost, and no memory is kept for those gone."""
    ended = scripts.run(
        """
        import gc, json, threading
        import cirron as ci
        from cirron import session, system

        def work(number):
            with ci.scope("work", index=number):
                ci.mark("number", number)

        def generation(first):
            threads = [threading.Thread(target=work, args=(first + n,)) for n in range(50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        ci.profile(flush_interval=0.05)
        collector = session._session.collector
        sizes = []
        for first in range(0, 3000, 50):
            generation(first)
            if first in (1000, 2950):
                ci.flush()
                gc.collect()
                sizes.append(system.resident_bytes())
        kept = [len(getattr(collector, name)) for name in
                ("last_activity", "mark_ids", "latest", "marked_at", "_opened")]
        print(json.dumps([kept, sizes[1] - sizes[0]]))
        """,
    )

    kept, grown_bytes = json.loads(ended.out)
    assert (0, "") == (ended.status, ended.err)
    # Open is the session alone; of threads, only those of the last ticks are known.
    assert kept[1:] == [0, 0, 0, 1]
    assert kept[0] <= 50
    assert grown_bytes < 8 * 2**20  # about 2 MB of records kept for ci.trace(), and slack
    assert list(range(3000)) == sorted(span.index or 0 for span in scripts.spans("work"))
    marks = {mark.span_id: mark.value for mark in scripts.session().marks}
    assert all(marks[span.id] == span.index for span in scripts.spans("work"))


def test_values_that_come_late_leave_nothing_behind(scripts: Scripts) -> None:
    """Marks whose device answers after their span has closed are kept, and then forgotten."""
    ended = scripts.run(
        """
        import json, threading
        import cirron as ci
        from cirron import session

        class Scalar:  # as a device's: its value has to be waited for
            shape = ()
            def __init__(self, value):
                self.value = value
            def item(self):
                answered.wait()
                return self.value

        answered = threading.Event()
        ci.profile(flush_interval=0.02)
        for batch in ci.batches(range(500)):
            ci.mark("loss", Scalar(batch))
        answered.set()
        ci.flush()
        collector = session._session.collector
        print(json.dumps([len(getattr(collector, name)) for name in
                          ("mark_ids", "latest", "marked_at", "_waiting")]))
        """,
    )

    assert (0, "[0, 0, 0, 0]\n", "") == ended
    marks = {mark.id: mark for mark in scripts.session().marks}
    assert list(range(500)) == [
        marks[mark_id].value for span in scripts.spans("batch") for mark_id in span.mark_ids
    ]


def test_silence_in_a_scope(scripts: Scripts) -> None:
    """While a thread hangs in a scope, the stacks of all threads are in the black box."""
    script = scripts.start(
        """
        import threading
        import cirron as ci

        go_on = threading.Event()

        def hang_here():
            go_on.wait()

        def hang():
            with ci.scope("allreduce"):
                hang_here()
            with ci.scope("next"):
                moved_on.set()
                done.wait()

        moved_on, done = threading.Event(), threading.Event()
        ci.profile(flush_interval=0.05)
        thread = threading.Thread(target=hang, name="rank-worker", daemon=True)
        thread.start()
        """,
        driven=True,
        CIRRON_SILENCE_AFTER="1",
    )
    box = scripts.wait_for_box(lambda box: box["stacks"], "stacks")

    assert box["heartbeat_ns"] - box["silent_since_ns"] >= 1e9
    stacks = {stack["name"]: stack["frames"] for stack in box["stacks"]}
    assert "rank-worker" in stacks
    assert any("in hang_here" in frame and "script.py" in frame for frame in stacks["rank-worker"])
    assert any("<module>" in frame for frame in stacks["MainThread"])
    shown = scripts.show()
    assert "silent: nothing was recorded for" in shown
    assert "hang_here" in shown

    script.ask("go_on.set()")
    script.ask("moved_on.wait()")
    box = scripts.wait_for_box(lambda box: box["stacks"] is None, "no stacks any more")
    assert None is box["silent_since_ns"]
    assert ["cirron.session", "next"] == [span["name"] for span in box["open"]]
    script.ask("done.set()")
    assert 0 == script.end().status


def test_no_silence_where_something_is_recorded(scripts: Scripts) -> None:
    """A scope that is open for long, with others closing or marks made inside it, is not silent."""
    script = scripts.start(
        """
        import cirron as ci

        ci.profile(flush_interval=0.05)
        epoch = ci.scope("epoch", 0)
        epoch.__enter__()

        def step():
            with ci.scope("step"):
                pass
        """,
        driven=True,
        CIRRON_SILENCE_AFTER="0.5",
    )
    began_ns = scripts.wait_for_box(lambda box: box["open_count"] == 2, "the epoch")["heartbeat_ns"]
    for action in ("step()", "ci.mark('loss', 1)"):
        while True:
            script.ask(action)
            box = scripts.box()
            assert None is box["stacks"]
            if box["heartbeat_ns"] - began_ns > 1e9:  # twice the silence that it takes
                break
        began_ns = box["heartbeat_ns"]
    assert 0 == script.end().status
