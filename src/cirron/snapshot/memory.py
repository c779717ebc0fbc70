"""How much memory a copy may take."""

from __future__ import annotations

from pathlib import Path

# Of what is free, a copy takes at most this part: the rest is the program's.
PART = 0.25

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's limit, which /proc/meminfo does not know of


def available_bytes() -> int | None:
    """What the host, and the container, have left; None where nobody says."""
    return min(
        (known for known in (host_bytes(), container_bytes()) if known is not None), default=None
    )


def host_bytes() -> int | None:
    try:
        for line in MEMINFO.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        pass
    return None


def container_bytes() -> int | None:
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max": a ValueError, there is none
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        # Files that were read and are still in memory: they go when somebody needs the room.
        cached = next(
            (int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0
        )
        return max(0, limit - used + cached)
    except (OSError, ValueError):
        return None
