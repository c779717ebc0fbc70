"""What differs between operating systems, in one place. Linux is what the tests run on.

Where a system lacks something, the function says so (None) or does without, so that recording
works everywhere and a reader knows less, not something wrong.
"""

from __future__ import annotations

import os


def process_start(pid: int) -> str | None:
    """When a process began, as the kernel counts; tells a reused process id from the old one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):  # not Linux, or no such process
        return None


def resident_bytes() -> int | None:
    """Memory that the process has in RAM now."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, AttributeError, ValueError):  # not Linux
        return None
