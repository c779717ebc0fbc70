"""Who is recording: what the environment says of run, attempt and rank."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from cirron import system, wire
from cirron.record import clock
from cirron.session import identity

if TYPE_CHECKING:
    from pathlib import Path

ANCHOR = clock.Anchor(1_000, 10, 1)
STEP = {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "rank", "local_rank", "world_size"),
    [
        ({}, None, None, None),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, 3, 1, 8),
        ({"RANK": "0"}, 0, None, None),
        ({"LOCAL_RANK": "1"}, None, 1, None),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "16"}, None, 1, 16),
        ({"RANK": ""}, None, None, None),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "6",
            },
            5,
            1,
            6,
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, 2, None, 4),
        ({**STEP, "SLURM_PROCID": "7", "SLURM_LOCALID": "3", "SLURM_NTASKS": "8"}, 7, 3, 8),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, None, None, None),
        ({**STEP, "RANK": "1", "SLURM_PROCID": "7"}, 1, None, None),
    ],
    ids=[
        "nothing",
        "torchrun",
        "rank-0",
        "local-rank-alone",
        "local-rank-and-size",
        "empty",
        "openmpi",
        "pmi",
        "srun",
        "sbatch-is-no-rank",
        "rank-before-slurm",
    ],
)
def test_an_unknown_rank_is_never_the_local_rank(
    environ: dict[str, str], rank: int | None, local_rank: int | None, world_size: int | None
) -> None:
    """A rank that is not given is unknown, and the local rank never stands for it."""
    found = identity.identify(environ, ANCHOR)

    assert (rank, local_rank, world_size) == (found.rank, found.local_rank, found.world_size)


def test_a_rank_that_is_no_number(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that is not a number is unknown, with a warning."""
    assert identity.identify({"RANK": "first"}, ANCHOR).rank is None
    assert "RANK='first' is not a number and is ignored" in caplog.text


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"CIRRON_RUN_ID": "mine", "SLURM_JOB_ID": "7"}, "mine"),
        ({"SLURM_JOB_ID": "7"}, "slurm-7"),
        (
            {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "9"},
            "slurm-7_3",
        ),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "abc"}, "slurm-7"),
        ({"TORCHELASTIC_RUN_ID": "abc"}, "torchelastic-abc"),
        ({"CIRRON_PARENT_RUN": "p"}, "p"),
        ({"CIRRON_PARENT_RUN": "p", "CIRRON_RUN_ID": "mine"}, "mine"),
        ({"CIRRON_PARENT_RUN": "p", "SLURM_JOB_ID": "7"}, "slurm-7"),
        ({"CIRRON_PARENT_RUN": "p", "TORCHELASTIC_RUN_ID": "abc"}, "p"),
        (
            {
                "TORCHELASTIC_RUN_ID": "none",
                "GROUP_WORLD_SIZE": "2",
                "MASTER_ADDR": "node0",
                "MASTER_PORT": "29500",
            },
            "torchrun-node0-29500",
        ),
    ],
)
def test_all_ranks_compute_the_same_run_id(environ: dict[str, str], expected: str) -> None:
    """All ranks of a job compute the same run id, from the best variable that there is."""
    assert expected == identity.identify(environ, ANCHOR).run_id


def test_torchrun_without_an_id() -> None:
    """torchrun calls every run "none": on one node the launcher tells runs apart."""
    first, second = (
        identity.identify({"TORCHELASTIC_RUN_ID": "none"}, ANCHOR).run_id for _ in range(2)
    )

    assert first == second
    assert first.startswith(f"torchrun-{socket.gethostname()}-{os.getppid()}-")


def test_a_run_id_is_made_up() -> None:
    """Without any, the session's id is the run's, and is new each time."""
    first, second = identity.identify({}, ANCHOR), identity.identify({}, ANCHOR)

    assert first.id == first.run_id
    assert first.id != second.id
    assert 32 == len(first.id)


def test_the_run_is_handed_down_while_it_lasts() -> None:
    """Children find the run in the environment, which is then as it was before."""
    for before in ({}, {"CIRRON_PARENT_RUN": "outer"}):
        environ: dict[str, str] = dict(before)
        handed_down = identity.HandedDown()
        handed_down.give(environ, "run")

        assert {"CIRRON_PARENT_RUN": "run"} == environ

        handed_down.take_back(environ)

        assert before == environ


def test_a_run_that_the_program_has_set_since_stays() -> None:
    """What the program has put into the environment meanwhile is its own."""
    environ: dict[str, str] = {}
    handed_down = identity.HandedDown()
    handed_down.give(environ, "run")
    environ["CIRRON_PARENT_RUN"] = "mine"
    handed_down.take_back(environ)

    assert {"CIRRON_PARENT_RUN": "mine"} == environ


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"SLURM_RESTART_COUNT": "3"}, 3000),
        ({"SLURM_RESTART_COUNT": "3", "TORCHELASTIC_RESTART_COUNT": "2"}, 3002),
    ],
)
def test_attempts_count_restarts(environ: dict[str, str], expected: int) -> None:
    """Attempts count up with each restart, of either kind."""
    assert expected == identity.identify(environ, ANCHOR).attempt


def test_the_platform_s_ids() -> None:
    """Pipeline, deployment and workspace come from the platform's variables."""
    found = identity.identify(
        {
            "CIRRON_PIPELINE_ID": "p",
            "CIRRON_DEPLOYMENT_ID": "d",
            "CIRRON_WORKSPACE_ID": "w",
        },
        ANCHOR,
    )

    assert ("p", "d", "w") == (found.pipeline_id, found.deployment_id, found.workspace_id)


def test_host_process_and_clock() -> None:
    """The session has the host, the process and the clock's anchor."""
    found = identity.identify({}, ANCHOR)

    assert (socket.gethostname(), os.getpid()) == (found.host, found.pid)
    assert wire.Clock(1_000, 10, 1) == found.clock


def test_a_variable_that_is_not_text() -> None:
    """Bytes in a variable that are not UTF-8 cost no batch."""
    session = identity.identify({"CIRRON_RUN_ID": "run-\udcff"}, ANCHOR)
    header = wire.Header(
        schema_version=1, sdk_version="0", batch_id="b", created_ns=1, session=session
    )
    batch = wire.decode_batch(b"".join(wire.encode_batch(header, wire.Sections())[0]))

    assert batch.session is not None
    assert "run-?" == batch.session.run_id


class TestClock:
    def test_the_anchor_is_the_closest_reading(self) -> None:
        """Of several readings the one with the least time in between is kept."""
        times = iter([0, 100, 200, 210, 300, 340])
        walls = iter([1, 2, 3])
        anchor = clock.read_anchor(lambda: next(times), lambda: next(walls), tries=3)

        assert (2, 205, 10) == (anchor.wall_ns, anchor.monotonic_ns, anchor.uncertainty_ns)
        assert 2 + 95 == anchor.at(300)

    def test_a_process_start_tells_processes_apart(self) -> None:
        """The start of this process is known and stays; of none it is None."""
        start: Any = system.process_start(os.getpid())

        assert start == system.process_start(os.getpid())
        assert start is not None
        assert system.process_start(2**30) is None


@pytest.mark.parametrize(
    ("chosen", "count"), [(None, 2), ("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3", 2)]
)
def test_gpus_that_may_be_used(tmp_path: Path, chosen: str | None, count: int) -> None:
    """Devices are counted from the driver's files, and CUDA_VISIBLE_DEVICES can only hide some."""
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}

    assert count == identity.visible_gpus(environ, str(tmp_path))
    assert 0 == identity.visible_gpus(environ, str(tmp_path / "no driver"))
