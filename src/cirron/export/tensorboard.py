"""TensorBoard event files: marks are scalars, snapshots of tensors are histograms by epoch.

Each session is a TensorBoard run with its own folder. The step of a value is the one logged with
it, else the number of the training step over all epochs, else the epoch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from cirron import errors, export
from cirron.export import timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cirron.runs.opened import Run, Session

MAX_STEP = 10**18
# Steps of an evaluation are counted separately, because their path differs.
_MARKS = """
SELECT m.name, m.value, m.ts_ns, m.attrs, COALESCE(
    steps.number, m.epoch, row_number() OVER (PARTITION BY m.name ORDER BY m.ts_ns, m.key) - 1
) AS step
FROM marks m
LEFT JOIN (
    SELECT key, row_number() OVER (PARTITION BY path ORDER BY start_ns, key) - 1 AS number
    FROM spans WHERE session = :session AND key = step_key
) steps ON steps.key = m.step_key
WHERE m.session = :session AND m.value IS NOT NULL
ORDER BY m.ts_ns, m.key
"""
_SNAPSHOTS = """
SELECT tensor, ts_ns, bins, counts, mean, min, max, norm,
    COALESCE(epoch, row_number() OVER (PARTITION BY tensor ORDER BY ts_ns) - 1) AS epoch
FROM snapshots WHERE session = :session AND bins IS NOT NULL AND counts IS NOT NULL
ORDER BY ts_ns, tensor
"""


def write(run: Run, path: str) -> None:
    """Writes a folder, for `tensorboard --logdir`."""
    errors.need("tensorboardX", 'export "tensorboard"')
    from tensorboardX import RecordWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

    def histogram(row: tuple[Any, ...]) -> Any:
        tensor, ts_ns, bins, counts, mean, low, high, norm, epoch = row
        count = sum(counts)
        content = HistogramProto(
            min=low or 0.0,
            max=high or 0.0,
            num=count,
            sum=(mean or 0.0) * count,
            sum_squares=(norm or 0.0) * (norm or 0.0),  # which may be inf, where ** 2 raises
            bucket_limit=bins[1:],
            bucket=counts,
        )
        return event_of(Summary.Value(tag=tensor, histo=content), epoch, ts_ns)

    def event_of(value: Any, step: int, ts_ns: int | None) -> Any:
        return Event(wall_time=(ts_ns or 0) / 1e9, step=step, summary=Summary(value=[value]))

    def events(session: Session) -> Iterator[Any]:
        yield Event(wall_time=session.first_ns / 1e9, file_version="brain.Event:2")
        for _, rows in run.sql(_MARKS, session=session.key).batches():
            for name, value, ts_ns, attrs, step in rows:
                logged = export.attributes(attrs).get("step")
                if isinstance(logged, (int, float)) and logged == logged:
                    step = int(max(-MAX_STEP, min(logged, MAX_STEP)))
                yield event_of(Summary.Value(tag=name, simple_value=value), step, ts_ns)
        for _, rows in run.sql(_SNAPSHOTS, session=session.key).batches():
            yield from map(histogram, rows)

    names: set[str] = set()
    for session in run.sessions:
        name = timeline.process_name(session, session.pid).replace("/", "_").replace("\0", "_")
        if name in names:
            name += f" {session.id[:8]}"
        names.add(name)
        folder = os.path.abspath(os.path.join(path, name))
        export.new_folder(folder)
        # The name depends only on the session, so a second export replaces the first.
        file = f"events.out.tfevents.{session.first_ns // 10**9}.cirron"
        with export.replacing(os.path.join(folder, file)) as partial:
            writer = RecordWriter(partial)
            try:
                for event in events(session):
                    writer.write(event.SerializeToString())
            finally:
                writer.close()
