"""The commit of the program's code, and whether files were changed since.

The commit is read from git's files. Only changes need `git status`, which runs with a time limit,
without locks, hooks or monitors, and with its own environment. Nothing is read if the repository
belongs to another user, whose settings could make git run programs. Runs on a background thread.
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

MAX_BYTES = 2**20  # of files such as HEAD
MAX_PACKED_BYTES = 64 * 2**20
STATUS_S = 5.0
# HOME and XDG_CONFIG_HOME are needed for the user's settings, such as line endings.
PASSED_ON = ("PATH", "HOME", "XDG_CONFIG_HOME", "SYSTEMROOT")

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


class Repository(NamedTuple):
    """A working copy, and the folders of git."""

    top: str
    folder: str  # of this working copy: HEAD
    common: str  # shared by all working copies: branches


def find(start: str) -> Repository | None:
    """The repository that contains this folder, if it belongs to the user."""
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
    """The commit that is checked out, and the branch; None if there is none, or unknown."""
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
    """One `git status`, which can be aborted."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False

    def ask(self, repository: Repository, timeout_s: float = STATUS_S) -> bool | None:
        """Whether tracked files were changed; None: unknown, or not in time."""
        import shutil  # here, on the background thread: these imports are slow
        import subprocess

        git = shutil.which("git", path=self._environ.get("PATH"))
        if git is None or not os.path.isabs(git) or not may_have_children():
            return None
        environ = {name: self._environ[name] for name in PASSED_ON if name in self._environ}
        command = [git, "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "status"]
        # The line of the branch comes first, which proves that there was an answer.
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
                if self._is_given_up:  # before the process was started
                    self.give_up()
                try:
                    answer, _ = self._process.communicate(timeout=timeout_s)
                except subprocess.TimeoutExpired:
                    self.give_up()
                    return None
        except (OSError, ValueError, RuntimeError):  # git was removed, or Python is exiting
            return None
        lines = answer.splitlines()
        return len(lines) > 1 if lines and lines[0].startswith(b"## ") else None

    def give_up(self) -> None:
        """Kills git and its children."""
        self._is_given_up = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(OSError):
                if hasattr(os, "killpg"):
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()


def may_have_children() -> bool:
    """Whether the program would not notice a child process.

    It would if it has a handler for SIGCHLD, except torch's, which checks only the loader's own
    workers. Under gevent, child processes need its event loop.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    is_noticed = callable(handler) and not getattr(handler, "__module__", "").startswith("torch.")
    return not is_noticed and "gevent.monkey" not in sys.modules


def _read(path: str, limit: int = MAX_BYTES) -> str:
    return system.read_regular(path, limit).decode("utf-8").strip()


def _is_ours(path: str) -> bool:
    """Whether it belongs to this user, or that is unknown (Windows)."""
    return not hasattr(os, "getuid") or os.stat(path).st_uid == os.getuid()
