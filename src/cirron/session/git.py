"""Which commit the program's code is at, and whether it was changed since.

The commit is read from git's files. Only for changes `git status` is asked, within a time limit.
It takes no locks, runs no hook or monitor, and gets an environment of its own. Where the repository
belongs to another user nothing is read: that user's settings could make git run programs. Runs on a
background thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cirron import system

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

MAX_BYTES = 2**20  # of HEAD and the like
MAX_PACKED_BYTES = 64 * 2**20
STATUS_S = 5.0
# HOME and XDG_CONFIG_HOME lead git to the user's settings, such as line endings.
PASSED_ON = ("PATH", "HOME", "XDG_CONFIG_HOME", "SYSTEMROOT")

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


class Repository(NamedTuple):
    """A working copy, and where git keeps what it knows."""

    top: str
    folder: str  # its own: HEAD
    common: str  # of all working copies: branches


def find(start: str) -> Repository | None:
    """The repository that holds this folder, if it is the user's own."""
    here = Path(os.path.realpath(start))
    top = next((str(at) for at in (here, *here.parents) if os.path.lexists(at / ".git")), None)
    if top is None:
        return None
    folder = marker = os.path.join(top, ".git")
    with contextlib.suppress(OSError, ValueError):
        if not os.path.isdir(marker):  # a linked working copy, or a submodule
            said = _read(marker)
            if not said.startswith("gitdir: "):
                return None
            folder = os.path.join(top, said.removeprefix("gitdir: "))
        common = folder
        with contextlib.suppress(FileNotFoundError):
            common = os.path.join(folder, _read(os.path.join(folder, "commondir")))
        found = Repository(top, folder, common)
        if all(map(_is_ours, (marker, *found))):
            return found
    return None


def commit(repository: Repository) -> tuple[str | None, str | None]:
    """The commit that is checked out, and the branch; None where there is none, or nobody says."""
    with contextlib.suppress(OSError, ValueError):
        head = _read(os.path.join(repository.folder, "HEAD"))
        if not head.startswith("ref: "):
            return (head if _COMMIT.fullmatch(head) else None), None
        name = head.removeprefix("ref: ")
        return _ref(repository, name), name.removeprefix("refs/heads/")
    return None, None


def _ref(repository: Repository, name: str) -> str | None:
    if not name.startswith("refs/") or ".." in name:
        return None
    with contextlib.suppress(OSError, ValueError):
        value = _read(os.path.join(repository.common, *name.split("/")))
        if _COMMIT.fullmatch(value):
            return value
    with contextlib.suppress(OSError, ValueError):
        packed = _read(os.path.join(repository.common, "packed-refs"), MAX_PACKED_BYTES)
        for line in packed.split("\n"):
            value, _, of = line.partition(" ")
            if of == name and _COMMIT.fullmatch(value):
                return value
    return None


class Status:
    """One `git status`, which may be given up."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False

    def ask(self, repository: Repository, timeout_s: float = STATUS_S) -> bool | None:
        """Whether files that git knows were changed; None: nobody can tell in time."""
        import shutil  # here, on the background thread: these two take as long as all of ours
        import subprocess

        git = shutil.which("git", path=self._environ.get("PATH"))
        if git is None or not os.path.isabs(git) or not may_have_children():
            return None
        environ = {name: self._environ[name] for name in PASSED_ON if name in self._environ}
        command = [git, "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "status"]
        # The branch's line comes first, so that an answer is told from none.
        command += ["--porcelain", "--branch", "--untracked-files=no", "--ignore-submodules=dirty"]
        try:
            with subprocess.Popen(  # noqa: S603  nothing in it comes from outside
                command,
                cwd=repository.top,
                env={**environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the program
            ) as self._process:
                if self._is_given_up:  # in between
                    self.give_up()
                try:
                    answer, _ = self._process.communicate(timeout=timeout_s)
                except subprocess.TimeoutExpired:
                    self.give_up()
                    return None
        except (OSError, ValueError, RuntimeError):  # git has gone, or the interpreter is going
            return None
        lines = answer.splitlines()
        return len(lines) > 1 if lines and lines[0].startswith(b"## ") else None

    def give_up(self) -> None:
        """Ends git, with what it has started."""
        self._is_given_up = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(OSError):
                if hasattr(os, "killpg"):
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()


def may_have_children() -> bool:
    """Whether a child of ours would go unnoticed.

    Not where the program has a handler for the end of a child: it would be called for ours. The one
    of torch is fine: it looks at the loader's own workers. gevent's processes need its event loop.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    is_noticed = callable(handler) and not getattr(handler, "__module__", "").startswith("torch.")
    return not is_noticed and "gevent.monkey" not in sys.modules


def _read(path: str, limit: int = MAX_BYTES) -> str:
    return system.read_regular(path, limit).decode("utf-8").strip()


def _is_ours(path: str) -> bool:
    """Whether it belongs to this user, or nobody can tell (Windows)."""
    return not hasattr(os, "getuid") or os.stat(path).st_uid == os.getuid()
