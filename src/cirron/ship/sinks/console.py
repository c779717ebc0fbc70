"""Prints one line per closed span, on a stream (`stdout`) or a logger (`log`)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cirron.ship.sinks import stream
from cirron.ship.sinks.base import Outcome, Sink
from cirron.view import text

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.ship.sinks.base import Sealed
    from cirron.ship.sinks.stream import Stream

LOGGER = "cirron.trace"


class Console(Sink):
    """Prints closed spans in the order in which they closed."""

    def __init__(
        self, write: Callable[[str], None], close: Callable[[], None] = lambda: None
    ) -> None:
        self._write = write
        self._close = close

    def emit(self, batch: Sealed) -> Outcome:
        for line in batch.lines:
            self._write(text.live_line(line.name, line.number, line.wall_ns, line.latest))
        return Outcome.DONE

    def close(self, deadline_ns: int) -> None:
        self._close()


def to_stream(stdout: Stream) -> Console:
    def write(line: str) -> None:
        stdout.write(text.encodable(line, stdout.file) + "\n")

    return Console(write, stdout.close)


def to_logger() -> Console:
    """The `log` sink: INFO on the logger `cirron.trace`."""
    logger = logging.getLogger(LOGGER)

    def write(line: str) -> None:
        with stream.logging:  # a fork now would leave the handler's lock held in the child
            logger.info("%s", line)

    return Console(write)
