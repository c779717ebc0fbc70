"""One run for a process and its children, their ranks, and what they say that they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

SECRET = "hunter2hunter2"

HEAD = """
import multiprocessing, os, subprocess, sys
import cirron as ci

def work(*given):
    ci.profile()
    with ci.scope("work"):
        pass
    ci.shutdown()

def forked():
    if os.fork() == 0:
        work()
        os._exit(0)
    os.wait()

def started(method):
    process = multiprocessing.get_context(method).Process(target=work)
    process.start()
    process.join()

def other_script():
    subprocess.run([sys.executable, "-c", "import cirron as ci; ci.profile()"], check=True)
"""

WAYS = {
    "spawn": "started('spawn')",
    "fork": "started('fork')",
    "forkserver": "started('forkserver')",
    "os.fork": "forked()",
    "subprocess": "other_script()",
    "grandchild": "subprocess.run([sys.executable, '-c', 'import script; script.other_script()'])",
}


@pytest.mark.parametrize("way", WAYS)
def test_children_are_of_the_same_run(scripts: Scripts, way: str) -> None:
    """However a child is started, it records into its parent's run, in a session of its own."""
    ended = scripts.run(
        HEAD + f"if __name__ == '__main__':\n    ci.profile()\n    {WAYS[way]}\n    ci.shutdown()\n"
    )
    runs = scripts.sessions()

    assert (0, "") == (ended.status, ended.err)
    assert 2 == len({run.session.id for run in runs})
    assert 1 == len({run.session.run_id for run in runs})
    assert "other run" not in scripts.show()


def test_scripts_that_are_started_one_after_the_other(scripts: Scripts) -> None:
    """Two programs of one shell are two runs, and so are two sessions of one program."""
    body = "import cirron as ci\nci.profile()\nci.shutdown()\nci.profile()\n"
    scripts.run(body)
    scripts.run(body)

    assert 4 == len({run.session.run_id for run in scripts.sessions()})


def test_the_environment_is_as_it_was(scripts: Scripts) -> None:
    """The run is one variable in the environment, only while it lasts; transport stays as it is."""
    ended = scripts.run(
        """
        import os
        import cirron as ci
        before = dict(os.environ)
        ci.profile()
        during = dict(os.environ)
        print(during.pop("CIRRON_PARENT_RUN") == ci.health()["run_id"], during == before)
        print(ci.health()["transport"])
        ci.shutdown()
        print(before == os.environ)
        ci.profile(enabled=False)
        print(before == os.environ)
        """
    )

    assert "True True\nfile_only\nTrue\nTrue\n" == ended.out


def test_hogwild(scripts: Scripts) -> None:
    """torch's processes that share a model are one run."""
    pytest.importorskip("torch")
    ended = scripts.run(
        """
        import torch, torch.multiprocessing as mp
        import cirron as ci

        ci.profile()

        def train(rank, weight):
            with ci.scope("train", index=rank):
                weight += 1

        if __name__ == "__main__":
            weight = torch.zeros(1).share_memory_()
            mp.spawn(train, args=(weight,), nprocs=2)
            ci.shutdown()
        """,
        timeout_s=120,
    )
    runs = scripts.sessions()

    assert (0, 3) == (ended.status, len(runs)), ended.err
    assert 1 == len({run.session.run_id for run in runs})
    assert {0, 1} == {span.index for run in runs for span in run.spans if span.name == "train"}
    assert {None} == {run.session.rank for run in runs}


def test_ranks_that_torch_tells(scripts: Scripts) -> None:
    """A rank that torch.distributed is given after ci.profile() is in the batches from then on."""
    pytest.importorskip("torch")
    ended = scripts.run(
        """
        import torch.distributed as dist, torch.multiprocessing as mp
        import cirron as ci

        def train(rank, store):
            ci.profile()
            with ci.scope("before"):
                ci.flush()
            ci.flush()
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            with ci.scope("train"):
                dist.barrier()
            ci.flush()
            dist.destroy_process_group()
            with ci.scope("after"):
                pass
            ci.shutdown()

        if __name__ == "__main__":
            import tempfile
            ci.profile()
            mp.spawn(train, args=(tempfile.mktemp(),), nprocs=2)
            ci.shutdown()
        """,
        timeout_s=120,
    )
    runs = scripts.sessions()
    found = {
        (run.session.rank, run.session.world_size, span.name, span.rank)
        for run in runs
        for span in run.spans
        if span.name != "cirron.session"
    }

    assert (0, 1) == (ended.status, len({run.session.run_id for run in runs})), ended.err
    assert {
        (rank, 2, name, None if name == "before" else rank)
        for rank in (0, 1)
        for name in ("before", "train", "after")
    } == found


def test_torchrun_of_a_profiled_process(scripts: Scripts) -> None:
    """Workers of torchrun, and their children, are of one run; so is whoever started torchrun."""
    pytest.importorskip("torch")
    body = """
        import subprocess, sys
        import cirron as ci
        ci.profile()
        if "RANK" in __import__("os").environ:
            subprocess.run([sys.executable, "-c", "import cirron as ci; ci.profile()"], check=True)
        elif "torchrun" in sys.argv:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            subprocess.run([sys.executable, *launcher, "script.py"], check=True)
        """
    scripts.run(body, timeout_s=120)  # only writes the script
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CIRRON_")}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for command in ([*launcher, "script.py"], ["script.py", "torchrun"]):
        subprocess.run([sys.executable, *command], cwd=scripts.folder, env=environ, check=True)
    sizes: dict[str, int] = {}
    for run in scripts.sessions():
        sizes[run.session.run_id] = sizes.get(run.session.run_id, 0) + 1

    assert [1, 4, 5] == sorted(sizes.values())


def test_what_a_program_says_of_itself(scripts: Scripts) -> None:
    """Script, arguments, folder, versions, tags and configuration are on the session; no secret is
    in any file.
    """
    (scripts.folder / "train.py").write_text(
        "import cirron as ci\n"
        f"ci.profile(tags=['baseline'], config={{'lr': 0.1, 'api_key': '{SECRET}'}})\n"
        "import numpy\n"
        "ci.flush()\n"
    )
    given = ["--lr", "0.1", "--api-key", SECRET, f"--url=http://me:{SECRET}@host", f"KEY={SECRET}"]
    subprocess.run([sys.executable, "train.py", *given], cwd=scripts.folder, check=True)
    found = scripts.session().program
    files = [path for path in scripts.home.rglob("*") if path.is_file()]

    assert "train.py" == found.script
    assert [
        "--lr",
        "0.1",
        "--api-key",
        "***",
        "--url=http://***@host",
        "KEY=***",
    ] == found.arguments
    assert (str(scripts.folder), sys.version.split()[0]) == (found.folder, found.python)
    assert ({"baseline": ""}, {"lr": 0.1, "api_key": "***"}) == (found.tags, found.config)
    assert {"numpy"} == set(found.versions)
    assert [] == [path for path in files if SECRET in path.read_text()]
    assert "ran train.py --lr 0.1 --api-key ***" in scripts.show()


def test_what_a_killed_program_said(scripts: Scripts) -> None:
    """It is known of a program that was killed before its first batch."""
    scripts.start(
        """
        import os, signal, sys
        import cirron as ci
        ci.profile(tags={"team": "vision"})
        print("ready", flush=True)
        sys.stdin.read() or signal.pause()
        """
    ).wait_for("ready")
    scripts.wait_for_box(
        lambda box: "program" in box["session"] and box["session"]["program"], "it"
    )
    box = scripts.wait_for_box(lambda box: "tags" in box["session"]["program"], "tags")

    assert {"team": "vision"} == box["session"]["program"]["tags"]
    assert "tags team=vision" in scripts.show()


def test_tags_of_the_environment_and_the_project(scripts: Scripts) -> None:
    """Tags may come from pyproject.toml and CIRRON_TAGS, configuration from CIRRON_CONFIG."""
    (scripts.folder / "pyproject.toml").write_text('[tool.cirron]\ntags = ["of-file"]\n')
    body = "import cirron as ci\nci.profile(config={'lr': 0.1})\n"
    scripts.run(body)
    scripts.run(body, CIRRON_TAGS="a, b=c", CIRRON_CONFIG=json.dumps({"beta": True}))
    found = [run.program for run in scripts.sessions()]

    assert [{"of-file": ""}, {"a": "", "b": "c"}] == [one.tags for one in found]
    assert [{"lr": 0.1}, {"beta": True, "lr": 0.1}] == [one.config for one in found]
