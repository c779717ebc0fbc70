"""Who is recording: session, run, attempt, host, rank. From the environment, with no communication.

Every rank of a job computes the same run id by itself, and child processes get the run id through
their environment. A rank that is not given is unknown, never 0: with several nodes, `LOCAL_RANK` is
not enough. torch.distributed takes precedence as soon as it is initialised.
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

# The run id for child processes. `CIRRON_RUN_ID` is set by the user or the platform, and also sends
# batches to stdout.
PARENT_RUN = "CIRRON_PARENT_RUN"

# The variables for each value, in order of precedence.
RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def identify(environ: Mapping[str, str], anchor: clock.Anchor) -> wire.Session:
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
    """The id that all ranks of a job share, also after restarts; None: generate one.

    A SLURM job inherits the environment of the process that submits it, but is a separate run, so
    SLURM's id comes first. torchrun's id holds only for its direct children.
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
    # Without --rdzv-id, torchrun calls every run "none". On one node, its process identifies the
    # run; on several nodes, the ranks share only the rendezvous address.
    if environ.get("GROUP_WORLD_SIZE", "1") == "1":
        launcher = os.getppid()
        return f"torchrun-{socket.gethostname()}-{launcher}-{system.process_start(launcher)}"
    return f"torchrun-{environ.get('MASTER_ADDR')}-{environ.get('MASTER_PORT')}"


def is_child(environ: Mapping[str, str]) -> bool:
    """Whether this is a child of another process that records the run.

    `cirron run` sets the run id but records nothing itself.
    """
    return PARENT_RUN in environ and environ.get(autostart.VARIABLE) != str(os.getppid())


def attempt(environ: Mapping[str, str]) -> int:
    """How often the job was restarted: restarts by SLURM count as 1000, by torchrun as 1."""
    slurm = first_number(environ, ("SLURM_RESTART_COUNT",)) or 0
    elastic = first_number(environ, ("TORCHELASTIC_RESTART_COUNT",)) or 0
    return slurm * 1000 + elastic


class HandedDown:
    """Sets the run id in the environment, for child processes."""

    def __init__(self) -> None:
        self._run_id = ""
        self._before: str | None = None
        self._pid = 0

    def give(self, environ: MutableMapping[str, str], run_id: str) -> None:
        self._before = environ.get(PARENT_RUN)
        self._run_id = environ[PARENT_RUN] = run_id
        self._pid = os.getpid()

    def take_back(self, environ: MutableMapping[str, str]) -> None:
        """Restores the environment, unless the program has changed it since.

        A forked child keeps the variable.
        """
        if environ.get(PARENT_RUN) == self._run_id and self._pid == os.getpid():
            if self._before is None:
                del environ[PARENT_RUN]
            else:
                environ[PARENT_RUN] = self._before


def distributed() -> tuple[int, int] | None:
    """The rank and the world size, if torch.distributed is initialised."""
    torch: Any = sys.modules.get("torch.distributed")
    try:
        if torch is not None and torch.is_initialized():
            return torch.get_rank(), torch.get_world_size()
    except (AttributeError, RuntimeError, ValueError):  # half imported, or just being destroyed
        pass
    return None


def surroundings(environ: Mapping[str, str]) -> dict[str, Any]:
    """The machine's attributes for the session's span, without using a framework."""
    gpus = visible_gpus(environ)
    return {
        "device": "cuda" if gpus else "cpu",
        "cuda_count": gpus,
        "cpu_count": cores(),
        "mixed_precision": None,
    }


def cores() -> int | None:
    """How many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def visible_gpus(environ: Mapping[str, str], driver: str = "/proc/driver/nvidia/gpus") -> int:
    """How many NVIDIA devices this process may use, according to the driver's files."""
    try:
        present = len(os.listdir(driver))
    except OSError:
        return 0
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    return min(present, len([name for name in chosen.split(",") if name.strip() not in ("", "-1")]))


def first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first of these variables that is set, as a number; None if it is not a number."""
    for name in names:
        text = environ.get(name)
        if not text:
            continue
        # A batch script outside srun has SLURM_PROCID=0 but is not a rank.
        if name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS") and not environ.get(
            "SLURM_STEP_ID"
        ):
            continue
        try:
            return int(text)
        except ValueError:
            guard.warn("%s=%r is not a number and is ignored", name, text)
            return None
    return None
