"""Differences between operating systems, in one place.

Tested on Linux. If a system lacks something, a function returns None or does without it, so that
recording works everywhere, with less information but no wrong information.
"""

from __future__ import annotations

import array
import errno
import os
import stat
import sys

try:
    import fcntl
    import termios

    HAS_FCNTL = True
except ImportError:  # Windows
    HAS_FCNTL = False

# Flags for all files: no links, not inherited by child programs, no waiting for the other end of a
# FIFO, and no conversion of line endings.
SAFE = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)

# A temporary shortage of this process or machine, not a problem of the file.
SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

CAN_RENAME_OPEN = os.name != "nt"

# IOV_MAX, the maximum number of pieces per call, is 1024 on Linux and macOS.
MAX_PIECES = 1024

# Limit of child processes whose CPU time is read: each takes about 20 us.
MAX_CHILDREN = 64


def create(path: str | os.PathLike[str], mode: int) -> int:
    """Creates a file. Raises FileExistsError if anything exists there, even a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE, mode)


def open_folder(path: str | os.PathLike[str]) -> int | None:
    """Opens a folder that is not a link, for `scandir` and `dir_fd`; None on Windows."""
    if not hasattr(os, "O_DIRECTORY"):
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "is a symbolic link", str(path))
        return None
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | SAFE)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Opens a regular file. Raises OSError for a link, a folder, a FIFO or a device."""
    return _open_regular(path, flags)[0]


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file. Raises OSError for anything else, or a larger file."""
    file, size = _open_regular(path, os.O_RDONLY)
    try:
        if size > limit:
            raise OSError(errno.EFBIG, f"is larger than {limit} bytes", str(path))
        pieces = [os.read(file, size + 1)]
        while len(pieces[-1]) > size:  # it has grown
            pieces.append(os.read(file, size + 1))
        return b"".join(pieces)
    finally:
        os.close(file)


def _open_regular(path: str | os.PathLike[str], flags: int) -> tuple[int, int]:
    if not hasattr(os, "O_NOFOLLOW") and os.path.islink(path):
        raise OSError(errno.ELOOP, "is a symbolic link", str(path))
    file = os.open(path, flags | SAFE)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return file, status.st_size


def write_all(file: int, pieces: list[bytes]) -> None:
    """Writes the pieces with as few calls as possible.

    Each call releases the GIL, and getting it back from a busy thread takes 5 ms.
    """
    if not hasattr(os, "writev"):  # Windows
        left = memoryview(b"".join(pieces))
        while left:
            left = left[os.write(file, left) :]
        return
    views = [memoryview(piece) for piece in pieces]
    while views:
        written = os.writev(file, views[:MAX_PIECES])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def lock(file: int) -> bool | None:
    """Locks a file until it is closed, even by kill -9. False: another process holds the lock.

    None if there are no locks: on Windows, or on Lustre mounted without `-o flock`.
    """
    if not HAS_FCNTL:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def pipe_level(file: int) -> tuple[int, int] | None:
    """The number of bytes in a pipe, and its capacity; None: not a pipe, or unknown."""
    waiting = array.array("i", [0])
    try:
        if not stat.S_ISFIFO(os.fstat(file).st_mode):
            return None
        fcntl.ioctl(file, termios.FIONREAD, waiting)
        return waiting[0], fcntl.fcntl(file, fcntl.F_GETPIPE_SZ)
    except (OSError, AttributeError, NameError):  # not Linux
        return None


def widen_pipe(file: int, size: int) -> None:
    """Sets the capacity of a pipe, if possible and allowed."""
    try:
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, size)
    except (OSError, AttributeError, NameError):  # a smaller pipe works too
        pass


def process_start(pid: int) -> str | None:
    """When a process started, in kernel ticks; distinguishes processes with the same id."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):  # not Linux, or no such process
        return None


def is_alive(pid: int, started: str | None = None) -> bool | None:
    """Whether a process runs: this one, not a later one with its id, and not a zombie.

    None: unknown.
    """
    if pid <= 0:  # for `os.kill` these are process groups
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the program's name, which may contain anything: field 3 (state), 22 (start).
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] not in (b"Z", b"X") and started in (None, fields[19].decode())
    except (OSError, IndexError):
        if os.path.exists("/proc/self/stat"):
            return False
    if os.name != "posix":  # on Windows, `os.kill` would end the process
        return None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it exists and belongs to another user
        pass
    return True


def resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, AttributeError, ValueError, IndexError):  # not Linux
        return None


def scheduled_ns() -> tuple[int, int] | None:
    """How long this thread has run, and how long it has waited for a CPU."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            ran, ready = map(int, file.read().split()[:2])
            return ran, ready
    except (OSError, ValueError):  # not Linux, or not counted by the kernel
        return None


def children_ns() -> int:
    """The CPU time of this thread's child processes, with the time that running ones waited for a
    CPU: on a busy machine, a worker that computes must not look like one that waits for a disk.
    """
    ended = os.times()
    total = round((ended.children_user + ended.children_system) * 1e9)
    try:
        with open("/proc/thread-self/children", "rb") as file:
            children = file.read().split()[:MAX_CHILDREN]
    except OSError:  # not Linux
        return total
    for child in children:
        try:
            with open(f"/proc/{int(child)}/schedstat", "rb") as file:
                total += sum(map(int, file.read().split()[:2]))
        except (OSError, ValueError, IndexError):  # it has just ended
            continue
    return total


def peak_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def raise_open_files(wanted: int) -> None:
    """Raises the limit of open files and connections to this number, as far as allowed."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_in_foreground() -> bool:
    """Whether Ctrl-C in the terminal reaches this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:  # there is none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
