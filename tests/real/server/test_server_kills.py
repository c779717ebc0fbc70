"""`kill -9` of any process at any moment: acknowledged batches are stored once."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import cirron as ci
from cirron.runs import store
from cirron.server.compactor import Compactor
from cirron.server.depot import Depot

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.server import server_kills
    from tests.real.server.serving import batch, session
else:
    import server_kills
    from serving import batch, session


@pytest.mark.timeout(300)
def test_servers_that_are_killed(tmp_path: Path) -> None:
    """A few rounds of what `make soak` does a hundred times."""
    done = server_kills.run(tmp_path, rounds=3, ranks=4, seed=17)

    assert done["batches"] > 10


# Kills itself at a call of one of these, the first or the second time, before or after it.
DYING = """
import os, signal, sys
from cirron.runs import objects, store
from cirron.server.compactor import Compactor
from cirron.server.depot import Depot

where, name, at, when = sys.argv[1:]
kind = store.Store if name in ("write", "commit", "compact") else objects.LocalObjects
real = getattr(kind, name)
calls = 0

def dying(*given, **named):
    global calls
    calls += 1
    if calls == int(at) and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    found = real(*given, **named)
    if calls == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
    return found

setattr(kind, name, dying)
compactor = Compactor(Depot(where))
while compactor.run():
    pass
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "at"), [("write", 1), ("write", 3), ("commit", 1), ("remove", 1), ("remove", 4)]
)
def test_a_compactor_that_dies_at_each_step(tmp_path: Path, name: str, at: int, when: str) -> None:
    """Between write, commit and delete: the next one finishes; no record is lost or doubled."""
    depot = Depot(tmp_path)
    who = session("dying")
    batches = [batch(who, steps=3, first=3 * number) for number in range(6)]
    for one in batches:
        depot.add(f"inbox/{one['batch_id']}.json", [json.dumps(one).encode()])

    command = [sys.executable, "-c", DYING, str(tmp_path), name, str(at), when]
    died = subprocess.run(command, timeout=60)
    assert -signal.SIGKILL == died.returncode
    # A client that had no answer sends again what may be stored by now.
    depot.add(f"inbox/{batches[0]['batch_id']}.json", [json.dumps(batches[0]).encode()])
    compactor = Compactor(depot)
    while compactor.run():
        pass

    run = ci.open(tmp_path)
    assert 36 == len(run.spans)
    assert sorted(one["id"] for one in run.spans.rows()) == sorted(
        span["id"] for one in batches for span in one["spans"]
    )
    assert [] == depot.objects.list("inbox/")
    assert [] == depot.objects.list("refused/")


def test_other_things_in_the_inbox_are_left_alone(tmp_path: Path) -> None:
    """A folder, a pipe, a link or a file with another name stops no batch, and is no work."""
    depot = Depot(tmp_path)
    one = batch(session("one"), steps=1)
    depot.add(f"inbox/{one['batch_id']}.json", [json.dumps(one).encode()])
    inbox = tmp_path / "inbox"
    (inbox / f"{'0' * 32}.json").mkdir()
    (inbox / f"{'1' * 32}.json").symlink_to(__file__)
    os.mkfifo(inbox / f"{'2' * 32}.json")
    (inbox / "notes.txt").write_text("none")
    (inbox / "x\n.json").write_text("{}")
    compactor = Compactor(depot)

    while compactor.run():
        pass

    assert 2 == len(ci.open(tmp_path, run="one").spans)
    assert 5 == len(list(inbox.iterdir()))
    assert [] == depot.objects.list("refused/")


def test_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are received and stored there, too."""

    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    depot = Depot(tmp_path)
    one = batch(session("one"), steps=1)
    depot.add(f"inbox/{one['batch_id']}.json", [json.dumps(one).encode()])

    Compactor(depot).run()

    assert 2 == len(ci.open(tmp_path, run="one").spans)


def test_segments_of_two_runs_are_merged_while_nothing_comes(tmp_path: Path) -> None:
    """A round merges the small segments of one run; those of the other are merged afterwards, when
    the inbox is empty.
    """
    depot = Depot(tmp_path)
    runs = [session("one"), session("other")]
    compactor = Compactor(depot)
    for number in range(store.MANY):
        for who in runs:
            one = batch(who, steps=1, first=number)
            depot.add(f"inbox/{one['batch_id']}.json", [json.dumps(one).encode()])
        compactor.run()
    while compactor.run():
        pass

    segments = [one.run_id for one in compactor.store.manifest.segments]
    assert max(segments.count("one"), segments.count("other")) < store.MANY
    assert [2 * store.MANY] * 2 == [len(ci.open(tmp_path, run=who["run_id"]).spans) for who in runs]
