"""One JSON line per batch on standard output, for the platform that runs the process.

Each line is one write and one flush, so lines of several threads do not mix. A program that prints
without a final newline (a progress bar) puts its text in front of the JSON. Readers therefore look
for `{"__cirron_event__"` anywhere in a line.

Runs in a lane, which counts the batches that the stream does not accept.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from cirron import wire
from cirron.ship.sinks.base import Outcome, Sink

if TYPE_CHECKING:
    from cirron.ship.sinks.base import Sealed
    from cirron.ship.sinks.stream import Stream


class EventStream(Sink):
    def __init__(self, stream: Stream) -> None:
        self.sent = 0
        self._stream = stream

    def emit(self, batch: Sealed) -> Outcome:
        """Writes the batch's line, and one for each of its blobs."""
        lines = [event("trace_batch", batch)[:-1], b',"payload":', *batch.pieces, b"}\n"]
        for blob in batch.blobs:
            fields = {"path": str(blob.path.absolute()), "key": blob.key}
            lines.append(event("trace_blob", batch, **fields) + b"\n")
        self._write(b"".join(lines).decode())
        self.sent += 1
        return Outcome.DONE

    def close(self, deadline_ns: int) -> None:
        self._stream.close()

    def health(self) -> dict[str, object]:
        return {"event_stream_sent": self.sent}

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # LANG=C: write ASCII; nothing was written yet
            self._stream.write(
                re.sub(r"[^\x00-\x7f]+", lambda found: json.dumps(found[0])[1:-1], text)
            )


def event(kind: str, batch: Sealed, **fields: str) -> bytes:
    """An event without its payload."""
    return wire.encode(
        {
            "__cirron_event__": kind,
            "schema_version": wire.SCHEMA_VERSION,
            "sdk_version": batch.header.sdk_version,
            **fields,
        }
    )
