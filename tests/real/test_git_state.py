"""The commit that a program ran from, with real repositories and a real `git`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from cirron.session import git

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import Scripts

    from cirron import wire

NAMES = {
    f"GIT_{who}_{what}": f"{what.lower()}@localhost"
    for who in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}
PROGRAM = """
    import cirron as ci
    ci.profile()
"""


def run_git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-c", "init.defaultBranch=main", *arguments],
        cwd=folder,
        env={**os.environ, **NAMES},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.strip()


def make_repository(folder: Path) -> str:
    """A repository with one commit, which is returned."""
    folder.mkdir(exist_ok=True)
    run_git(folder, "init", "-q")
    (folder / "known.txt").write_text("a")
    run_git(folder, "add", "known.txt")
    run_git(folder, "commit", "-qm", "first")
    return run_git(folder, "rev-parse", "HEAD")


def read(folder: Path) -> tuple[str | None, str | None, bool | None]:
    repository = git.find(str(folder))
    assert repository is not None
    return *git.commit(repository), git.Status(os.environ).ask(repository)


def ran(scripts: Scripts) -> wire.Program:
    """Runs a small program, and returns what its session says that it was."""
    assert (0, "") == scripts.run(PROGRAM)[::2]
    return scripts.session().program


def test_a_program_in_a_repository(scripts: Scripts) -> None:
    """The session has commit, branch and whether tracked files were changed."""
    commit = make_repository(scripts.folder)
    found = ran(scripts)

    assert (commit, "main", False) == (found.commit, found.branch, found.dirty)
    assert f"commit {commit[:10]} on main, Python" in scripts.show()


def test_a_program_with_changes(scripts: Scripts) -> None:
    """A changed file makes it dirty; a new one, such as what we write, does not."""
    make_repository(scripts.folder)
    (scripts.folder / "known.txt").write_text("b")

    assert ran(scripts).dirty is True
    assert "on main with changes, Python" in scripts.show()


def test_a_program_outside_of_any(scripts: Scripts) -> None:
    """Without a repository nothing is said."""
    found = ran(scripts)

    assert (None, None, None) == (found.commit, found.branch, found.dirty)
    assert "commit" not in scripts.show()


def test_the_script_s_repository_counts(scripts: Scripts, tmp_path: Path) -> None:
    """A program that is started elsewhere is at the commit of its script."""
    commit = make_repository(tmp_path / "code")
    (tmp_path / "code" / "main.py").write_text("import cirron as ci\nci.profile()\n")
    other = tmp_path / "elsewhere"
    make_repository(other)
    subprocess.run([sys.executable, "../code/main.py"], cwd=other, check=True)
    scripts.home = other / ".cirron"
    found = scripts.session().program

    assert (commit, "../code/main.py", str(other)) == (found.commit, found.script, found.folder)


def test_forms_of_a_repository(tmp_path: Path) -> None:
    """Subfolders, packed branches, a detached head and linked working copies are all read."""
    commit = make_repository(tmp_path / "a")
    (tmp_path / "a" / "deep" / "er").mkdir(parents=True)

    assert (commit, "main", False) == read(tmp_path / "a" / "deep" / "er")

    run_git(tmp_path / "a", "pack-refs", "--all")

    assert not (tmp_path / "a" / ".git" / "refs" / "heads" / "main").exists()
    assert (commit, "main", False) == read(tmp_path / "a")

    run_git(tmp_path / "a", "worktree", "add", "-q", "-b", "side/line", "../b")
    (tmp_path / "b" / "known.txt").write_text("b")
    run_git(tmp_path / "b", "commit", "-qam", "second")
    second = run_git(tmp_path / "b", "rev-parse", "HEAD")

    assert (second, "side/line", False) == read(tmp_path / "b")

    run_git(tmp_path / "b", "checkout", "-q", "--detach")

    assert (second, None, False) == read(tmp_path / "b")


def test_a_repository_without_a_commit(tmp_path: Path) -> None:
    """A branch may be there before its first commit."""
    run_git(tmp_path, "init", "-q")

    assert (None, "main", False) == read(tmp_path)


@pytest.mark.parametrize("content", [b"gitdir: ../none", b"rubbish", b"\xff", b""])
def test_a_git_file_that_leads_nowhere(tmp_path: Path, content: bytes) -> None:
    """A `.git` that is no repository is none."""
    (tmp_path / ".git").write_bytes(content)

    assert git.find(str(tmp_path)) is None


def test_someone_else_s_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a repository of another user nothing is read and nothing is run."""
    make_repository(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)

    assert git.find(str(tmp_path)) is None


def test_a_monitor_of_the_repository_does_not_run(tmp_path: Path) -> None:
    """Programs that the repository's settings name are not started."""
    make_repository(tmp_path)
    monitor = tmp_path / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    monitor.chmod(0o755)
    run_git(tmp_path, "config", "core.fsmonitor", str(monitor))
    index = (tmp_path / ".git" / "index").stat().st_mtime_ns
    os.utime(tmp_path / "known.txt", ns=(1, 1))  # git would like to note that in the index

    assert read(tmp_path)[2] is False
    assert not (tmp_path / "ran").exists()
    assert index == (tmp_path / ".git" / "index").stat().st_mtime_ns


class TestAnotherGit:
    """A program called git that is not."""

    def put(self, folder: Path, body: str) -> str:
        tools = folder / "tools"
        tools.mkdir()
        (tools / "git").write_text(f"#!{sys.executable}\n{body}")
        (tools / "git").chmod(0o755)
        return f"{tools}:{os.environ['PATH']}"

    def test_one_that_hangs(self, scripts: Scripts) -> None:
        """The program ends no later for it than half a second, and nothing is left over."""
        commit = make_repository(scripts.folder)
        path = self.put(
            scripts.folder,
            "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)",
        )
        began = time.monotonic()
        ended = scripts.run(
            PROGRAM
            + """
    import os, time
    while not os.path.exists("pid") or not os.path.getsize("pid"): time.sleep(0.01)
    began = time.monotonic()
    ci.shutdown()
    print(time.monotonic() - began)
""",
            PATH=path,
        )
        found = scripts.session().program
        pid = int((scripts.folder / "pid").read_text())

        assert (0, "") == (ended.status, ended.err)
        assert float(ended.out) < 2
        assert time.monotonic() - began < 20
        assert (commit, None) == (found.commit, found.dirty)
        scripts.wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the end of git")

    def test_what_it_is_told(self, scripts: Scripts) -> None:
        """It gets none of the program's variables but the paths, and takes no locks."""
        make_repository(scripts.folder)
        path = self.put(
            scripts.folder, "import os\nopen('told', 'w').write(repr(dict(os.environ)))"
        )
        scripts.run(PROGRAM, PATH=path, CIRRON_API_KEY="k", GIT_DIR="/none", HF_TOKEN="t")
        told = eval((scripts.folder / "told").read_text())

        assert "0" == told["GIT_OPTIONAL_LOCKS"]
        assert {"PATH", "HOME", "GIT_OPTIONAL_LOCKS", "LC_ALL"} >= {
            name for name in told if not name.startswith(("LC_CTYPE", "XDG_", "__"))
        }

    @pytest.mark.parametrize("body", ["raise SystemExit(128)", "print('? x')", "print()"])
    def test_one_that_does_not_answer(self, scripts: Scripts, body: str) -> None:
        """What is no answer of git's says nothing."""
        make_repository(scripts.folder)
        scripts.run(PROGRAM, PATH=self.put(scripts.folder, body))

        assert scripts.session().program.dirty is None


def test_no_git_at_all(scripts: Scripts) -> None:
    """Without the program the commit is known, and whether files were changed is not."""
    commit = make_repository(scripts.folder)
    scripts.run(PROGRAM, PATH=str(scripts.folder))
    found = scripts.session().program

    assert (commit, None) == (found.commit, found.dirty)


def test_a_program_that_minds_its_children(scripts: Scripts) -> None:
    """A handler for the end of a child is never called for one of ours."""
    make_repository(scripts.folder)
    ended = scripts.run(
        """
        import signal
        signal.signal(signal.SIGCHLD, lambda *given: print("a child"))
        import cirron as ci
        ci.profile()
        """
    )

    assert (0, "", "") == ended
    assert scripts.session().program.dirty is None


def test_one_process_of_a_run_asks(scripts: Scripts) -> None:
    """Of a thousand ranks, and of a process and its children, only the first runs git."""
    commit = make_repository(scripts.folder)
    body = """
        import subprocess, sys
        import cirron as ci
        ci.profile()
        if sys.argv[1:] != ["child"]:
            subprocess.run([sys.executable, "script.py", "child"], check=True)
        """
    for rank in ("0", "1"):
        scripts.run(body, RANK=rank, CIRRON_RUN_ID="one", CIRRON_OUTPUT="spool")
    found = {
        (run.session.rank, *run.program.arguments): (run.program.commit, run.program.dirty)
        for run in scripts.sessions()
    }

    assert {
        (0,): (commit, False),
        (0, "child"): (commit, None),
        (1,): (commit, None),
        (1, "child"): (commit, None),
    } == found
