"""Who is recording: session, run, attempt, host, rank. From the environment, with no communication.

Every rank of a job computes the same run id on its own, and the children of a process that records
get its run id in their environment. A rank that nobody told is unknown, never 0: on several nodes
`LOCAL_RANK` alone does not say which of the ranks this is. torch.distributed knows best, as soon as
it is initialised.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any

from cirron import autostart, guard, system, wire
from cirron.record import clock

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

# The run that a process belongs to whose parent records. `CIRRON_RUN_ID` is the user's or the
# platform's, and has batches sent to stdout.
PARENT_RUN = "CIRRON_PARENT_RUN"

# For each fact, where it is looked for, best first.
RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def identify(environ: Mapping[str, str], anchor: clock.Anchor) -> wire.Session:
    """The session of this process."""
    session_id = clock.random_id()
    return wire.Session(
        id=session_id,
        run_id=run_id(environ) or session_id,
        attempt=attempt(environ),
        host=socket.gethostname(),
        pid=os.getpid(),
        rank=first_number(environ, RANK),
        local_rank=first_number(environ, LOCAL_RANK),
        world_size=first_number(environ, WORLD_SIZE),
        clock=wire.Clock(anchor.wall_ns, anchor.monotonic_ns, anchor.uncertainty_ns),
        pipeline_id=environ.get("CIRRON_PIPELINE_ID"),
        deployment_id=environ.get("CIRRON_DEPLOYMENT_ID"),
        workspace_id=environ.get("CIRRON_WORKSPACE_ID"),
    )


def run_id(environ: Mapping[str, str]) -> str | None:
    """The id that all ranks of a job share and that survives its restarts; None: make one up.

    A job of SLURM that a process submits gets the environment of that process, and is no part of
    its run. What torchrun says is for its own children: in theirs the launcher is another process.
    """
    if given := environ.get("CIRRON_RUN_ID"):
        return given
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"slurm-{array}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    if job := environ.get("SLURM_JOB_ID"):
        return f"slurm-{job}"
    if parent := environ.get(PARENT_RUN):
        return parent
    elastic = environ.get("TORCHELASTIC_RUN_ID")
    if elastic is None:
        return None
    if elastic != "none":
        return f"torchelastic-{elastic}"
    # torchrun without --rdzv-id calls every run "none". On one node its own process tells runs
    # apart; on several, the address where the ranks meet is all that they have in common.
    if environ.get("GROUP_WORLD_SIZE", "1") == "1":
        launcher = os.getppid()
        return f"torchrun-{socket.gethostname()}-{launcher}-{system.process_start(launcher)}"
    return f"torchrun-{environ.get('MASTER_ADDR')}-{environ.get('MASTER_PORT')}"


def is_child(environ: Mapping[str, str]) -> bool:
    """Whether another process of the run records, which this one is a child of.

    `cirron run` gives the run its id, and records nothing itself.
    """
    return PARENT_RUN in environ and environ.get(autostart.VARIABLE) != str(os.getppid())


def attempt(environ: Mapping[str, str]) -> int:
    """How often the job was restarted: by SLURM in thousands, by torchrun in ones."""
    slurm = first_number(environ, ("SLURM_RESTART_COUNT",)) or 0
    elastic = first_number(environ, ("TORCHELASTIC_RESTART_COUNT",)) or 0
    return slurm * 1000 + elastic


class HandedDown:
    """The run's id in the environment, for the children of this process."""

    def __init__(self) -> None:
        self._run_id = ""
        self._before: str | None = None
        self._pid = 0

    def give(self, environ: MutableMapping[str, str], run_id: str) -> None:
        """Puts it there."""
        self._before = environ.get(PARENT_RUN)
        self._run_id = environ[PARENT_RUN] = run_id
        self._pid = os.getpid()

    def take_back(self, environ: MutableMapping[str, str]) -> None:
        """Makes the environment as it was, unless the program has changed it since.

        In a forked child it stays: that is what it is for.
        """
        if environ.get(PARENT_RUN) == self._run_id and self._pid == os.getpid():
            if self._before is None:
                del environ[PARENT_RUN]
            else:
                environ[PARENT_RUN] = self._before


def distributed() -> tuple[int, int] | None:
    """The rank and the world size, if torch.distributed is initialised now."""
    torch: Any = sys.modules.get("torch.distributed")
    try:
        if torch is not None and torch.is_initialized():
            return torch.get_rank(), torch.get_world_size()
    except (AttributeError, RuntimeError, ValueError):  # half imported, or just being destroyed
        pass
    return None


def surroundings(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the session's span says of the machine, without asking any framework."""
    gpus = visible_gpus(environ)
    return {
        "device": "cuda" if gpus else "cpu",
        "cuda_count": gpus,
        "cpu_count": cores(),
        "mixed_precision": None,
    }


def cores() -> int | None:
    """How many processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def visible_gpus(environ: Mapping[str, str], driver: str = "/proc/driver/nvidia/gpus") -> int:
    """How many NVIDIA devices this process may use, as far as the driver's files tell."""
    try:
        present = len(os.listdir(driver))
    except OSError:
        return 0
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    return min(present, len([name for name in chosen.split(",") if name.strip() not in ("", "-1")]))


def first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first of these variables that is set, as a number; None when it is not one."""
    for name in names:
        text = environ.get(name)
        if not text:
            continue
        # A batch script, outside of srun, has SLURM_PROCID=0 and is no rank of anything.
        if name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS") and not environ.get(
            "SLURM_STEP_ID"
        ):
            continue
        try:
            return int(text)
        except ValueError:
            guard.warn("%s=%r is not a number; it is taken as unknown", name, text)
            return None
    return None
