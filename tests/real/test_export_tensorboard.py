"""TensorBoard's files, read back by TensorBoard."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from tensorboard.backend.event_processing import event_accumulator

import cirron as ci

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real import export_cases
    from tests.real.export_cases import NAMES, START_NS, Writer, session
else:
    import export_cases
    from export_cases import NAMES, START_NS, Writer, session


def read(folder: Path) -> event_accumulator.EventAccumulator:
    everything = dict.fromkeys(event_accumulator.DEFAULT_SIZE_GUIDANCE, 0)
    found = event_accumulator.EventAccumulator(str(folder), size_guidance=everything)
    found.Reload()
    return found


def single(value: float) -> float:
    """As the format has it: 32 bits."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


def test_marks_are_scalars(tmp_path: Path) -> None:
    """Each value is there, at its time; steps are counted over the epochs."""
    run = export_cases.plain(tmp_path)
    run.export("tensorboard", tmp_path / "logs")

    for rank in (0, 1):
        found = read(tmp_path / "logs" / f"rank {rank} (node)")
        assert ["accuracy", "loss"] == sorted(found.Tags()["scalars"])
        marks = run.sql(
            "SELECT value, ts_ns FROM marks WHERE name = 'loss' AND rank = :rank ORDER BY ts_ns",
            rank=rank,
        ).fetch()
        assert [
            (step, single(value), ts_ns / 1e9) for step, (value, ts_ns) in enumerate(marks.rows)
        ] == [(one.step, one.value, one.wall_time) for one in found.Scalars("loss")]
        assert [(0, 0.0), (1, 0.5)] == [(one.step, one.value) for one in found.Scalars("accuracy")]


def test_tensors_are_histograms(tmp_path: Path) -> None:
    """A snapshot is a histogram of its epoch, with its bins and counts."""
    export_cases.plain(tmp_path, ranks=1).export("tensorboard", tmp_path / "logs")
    found = read(tmp_path / "logs" / "rank 0 (node)")

    assert ["fc.weight", "fc.weight.grad"] == sorted(found.Tags()["histograms"])
    first, second = found.Histograms("fc.weight")
    assert (0, 1) == (first.step, second.step)
    assert (START_NS + 5_000_000) / 1e9 == first.wall_time
    assert list(range(16)) == first.histogram_value.bucket
    assert [number / 8 - 1 for number in range(1, 17)] == first.histogram_value.bucket_limit
    assert (-1, 1, 120, 60, 9) == (
        second.histogram_value.min,
        second.histogram_value.max,
        second.histogram_value.num,
        second.histogram_value.sum,
        second.histogram_value.sum_squares,
    )


def test_a_logged_step_is_kept(tmp_path: Path) -> None:
    """A value that a logger got with a step of its own has that one."""
    writer = Writer(tmp_path, session(rank=0))
    root = writer.span("cirron.session", 0, 1000)
    for at, step in enumerate((500, 1000.0, 10**30)):
        writer.mark(root, "logged", 1.0, at, step=step)
    writer.seal()
    ci.open(tmp_path).export("tensorboard", tmp_path / "logs")

    found = read(tmp_path / "logs" / "rank 0 (node)").Scalars("logged")
    assert [500, 1000, 10**18] == [one.step for one in found]


def test_written_again_it_is_the_same(tmp_path: Path) -> None:
    """A second export takes the place of the first, which TensorBoard would add up."""
    run = export_cases.plain(tmp_path, ranks=1)
    for _ in range(2):
        run.export("tensorboard", tmp_path / "logs")

    assert 10 == len(read(tmp_path / "logs" / "rank 0 (node)").Scalars("loss"))


def test_whatever_a_file_holds_is_read_back(tmp_path: Path) -> None:
    """Odd names and values, in a folder whose name stays inside of the one that was given."""
    export_cases.hostile(tmp_path).export("tensorboard", tmp_path / "logs")
    (folder,) = (tmp_path / "logs").iterdir()
    found = read(folder)

    assert set(NAMES) <= set(found.Tags()["scalars"])
    assert set(NAMES) - {""} <= set(found.Tags()["histograms"])
    odd = [one.value for one in found.Scalars("odd")]
    assert 8 == len(odd)
    assert 1 == sum(value != value for value in odd)
