"""The core works without what only Linux has: its names are removed before cirron is imported."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

# What macOS or Windows lacks. The standard library looks before it uses them, and so must we.
PRELUDE = """
import builtins, io, os, select, signal, sys, threading, time

for name in (
    "O_CLOEXEC O_DIRECTORY O_DSYNC O_NOATIME O_NOFOLLOW O_NONBLOCK O_PATH O_SYNC O_TMPFILE"
    " chown fchmod fchown fdatasync fork forkpty fstatvfs getegid geteuid getgid getgroups"
    " getloadavg getpgid getpgrp getpriority getresuid getsid getuid initgroups lchown lockf"
    " memfd_create mkfifo nice openpty pidfd_open posix_fadvise posix_fallocate posix_spawn"
    " posix_spawnp pread preadv pwrite pwritev readv register_at_fork sched_getaffinity"
    " sched_yield sendfile set_blocking setpgid setpriority setsid statvfs sync sysconf"
    " sysconf_names uname wait wait3 wait4 waitid writev"
).split():
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm",
             "pthread_kill", "pthread_sigmask", "setitimer", "sigpending", "sigwait",
             "sigwaitinfo", "sigtimedwait", "siginterrupt"):
    if hasattr(signal, name):
        delattr(signal, name)
for name in ("poll", "epoll"):
    if hasattr(select, name):
        delattr(select, name)
for module in ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog"):
    sys.modules[module] = None  # so that an import fails, as it does there
os.supports_dir_fd = os.supports_fd = os.supports_follow_symlinks = frozenset()


def without(module, name):
    real = getattr(module, name)

    def call(path, *args, **named):
        if not isinstance(path, int) and os.fsdecode(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)
        if any(named.get(key) is not None for key in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
            raise NotImplementedError("dir_fd unavailable on this platform")
        if module is os and isinstance(path, int) and name in ("scandir", "listdir", "chmod"):
            raise TypeError(f"{name}: path should be string, bytes or os.PathLike, not int")
        if module is os and name == "open" and not isinstance(path, int) and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **named)

    setattr(module, name, call)


for name in ("open", "stat", "lstat", "scandir", "listdir", "readlink", "access", "unlink",
             "remove", "rename", "replace", "mkdir", "rmdir", "chmod", "utime", "link", "symlink"):
    without(os, name)
without(io, "open")
builtins.open = io.open
import pathlib
import cirron as ci
"""

RECORDS = """
ci.Cirron(flush_interval=0.05, **{options}).profile()
for epoch in ci.epochs(range(3)):
    for batch in ci.batches(range(20)):
        ci.mark("loss", 1 / (batch + 1))
with ci.scope("open", why="it is looked at"):
    ci.mark("inside", 7)
    outcome = ci.flush()
    print("open", ci.health()["errors"], flush=True)
    {then}
"""


def show(scripts: Scripts) -> str:
    """What `cirron show` prints where those names are missing."""
    ended = scripts.run(
        PRELUDE
        + """
import runpy
sys.argv = ["cirron", "show", "."]
runpy.run_module("cirron", run_name="__main__", alter_sys=True)
"""
    )
    assert 0 == ended.status, ended.err
    return ended.out


def test_the_names_are_gone(scripts: Scripts) -> None:
    """These tests can fail: what they remove is really gone."""
    ended = scripts.run(
        PRELUDE
        + """
def fails(call):
    try:
        call()
    except (AttributeError, ImportError, OSError, NotImplementedError) as error:
        return True
for call in (lambda: os.writev, lambda: __import__("fcntl"), lambda: os.O_NOFOLLOW,
             lambda: os.fork, lambda: open("/proc/self/stat"), lambda: os.getuid,
             lambda: pathlib.Path("/proc/self/statm").read_text(), lambda: signal.pthread_kill,
             lambda: os.open("x", os.O_RDONLY, dir_fd=3), lambda: os.open(".", os.O_RDONLY)):
    assert fails(call)
print(os.path.exists("/proc"), pathlib.Path("/proc/self/stat").exists())
"""
    )

    assert (0, "False False\n", "") == ended


@pytest.mark.parametrize(
    "options",
    ["{}", "{'output': ['spool', 'stdout', 'log']}", "{'spool_max_bytes': 4_000}"],
    ids=["spool", "all outputs", "past the cap"],
)
def test_recording(scripts: Scripts, options: str) -> None:
    """Everything is recorded, flushed and shown; the black box has what is open."""
    script = scripts.start(
        PRELUDE + RECORDS.format(options=options, then="sys.stdin.read()"), driven=True
    )
    said = script.wait_for("open {")
    box = scripts.wait_for_box(lambda box: box["open_count"] == 2, "the open scope")
    ended = script.end()

    assert "open {}" == said
    assert ["cirron.session", "open"] == [span["name"] for span in box["open"]]
    assert {"inside": 7} == box["open"][1]["latest"]
    assert 0 == ended.status, ended.err
    run = scripts.session()
    assert "clean" == scripts.state()
    if "max_bytes" not in options:
        names = [span.name for span in run.spans]
        assert [3, 60, 1, 1] == [
            names.count(name) for name in ("epoch", "batch", "open", "cirron.session")
        ]
        assert 61 == len(run.marks)
    else:
        assert sum(path.stat().st_size for path in scripts.batch_files()) < 20_000
    assert [] == [path.name for path in scripts.home.rglob("*.tmp")]
    assert "open" in show(scripts)


def test_the_end(scripts: Scripts) -> None:
    """A normal end stores everything; what was lost is told by flush()."""
    ended = scripts.run(PRELUDE + RECORDS.format(options="{}", then="pass"))

    assert (0, "open {}\n", "") == ended
    assert 60 == len(scripts.spans("batch"))
    assert "clean" == scripts.state()
    assert "clean" in show(scripts)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals(scripts: Scripts, number: signal.Signals) -> None:
    """SIGTERM and kill -9 leave what they leave on Linux."""
    script = scripts.start(PRELUDE + RECORDS.format(options="{}", then="time.sleep(600)"))
    script.wait_for("open {")
    scripts.wait_for_box(lambda box: box["open_count"] == 2, "the open scope")
    script.kill(number)

    assert -number == script.end().status
    assert 60 == len(scripts.spans("batch"))
    shown = show(scripts)
    assert ("SIGTERM" if number == signal.SIGTERM else "killed") in shown
    assert "open" in shown


def test_many_flushes(scripts: Scripts) -> None:
    """Merging small files, and a second session in the folder, work as well."""
    body = """
ci.profile(flush_interval=3600)
for number in range(150):
    with ci.scope("span", number):
        pass
    ci.flush()
"""
    for _ in range(2):
        ended = scripts.run(PRELUDE + body)
        assert (0, "") == (ended.status, ended.err)

    assert [list(range(150))] * 2 == [
        sorted(span.index or 0 for span in run.spans if span.name == "span")
        for run in scripts.sessions()
    ]
    assert len(scripts.batch_files()) < 200  # merged
