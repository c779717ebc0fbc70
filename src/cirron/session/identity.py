"""Who is recording: session, run, attempt, host, rank. From the environment, with no communication.

Every rank of a job computes the same run id on its own. A rank that nobody told is unknown, never
0: on several nodes `LOCAL_RANK` alone does not say which of the ranks this is.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from cirron import guard, system, wire
from cirron.record import clock

if TYPE_CHECKING:
    from collections.abc import Mapping

# For each fact, where it is looked for, best first.
RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def identify(
    environ: Mapping[str, str], anchor: clock.Anchor, parents_run: str | None = None
) -> wire.Session:
    """The session of this process; of a forked one that nobody told its run, in its parent's."""
    session_id = clock.random_id()
    return wire.Session(
        id=session_id,
        run_id=run_id(environ) or parents_run or session_id,
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
    """The id that all ranks of a job share and that survives its restarts; None: make one up."""
    if given := environ.get("CIRRON_RUN_ID"):
        return given
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        return f"slurm-{array}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    if job := environ.get("SLURM_JOB_ID"):
        return f"slurm-{job}"
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


def attempt(environ: Mapping[str, str]) -> int:
    """How often the job was restarted: by SLURM in thousands, by torchrun in ones."""
    slurm = first_number(environ, ("SLURM_RESTART_COUNT",)) or 0
    elastic = first_number(environ, ("TORCHELASTIC_RESTART_COUNT",)) or 0
    return slurm * 1000 + elastic


def surroundings(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the session's span says of the machine, without asking any framework."""
    gpus = visible_gpus(environ)
    return {
        "device": "cuda" if gpus else "cpu",
        "cuda_count": gpus,
        "mixed_precision": None,
    }


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
