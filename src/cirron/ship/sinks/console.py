"""One line a closed span, for people: on a stream (`stdout`) or on a logger (`log`)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TextIO

from cirron import guard
from cirron.ship.sinks import stream
from cirron.ship.sinks.base import Outcome
from cirron.view import text

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.ship.sinks.base import Sealed

LOGGER = "cirron.trace"


class Console:
    """Prints closed spans in the order in which they closed."""

    def __init__(self, write: Callable[[str], None], name: str) -> None:
        self._write = write
        self._name = name
        self._failures = 0

    def emit(self, batch: Sealed) -> Outcome:
        try:
            for line in batch.lines:
                shown = text.live_line(line.name, line.number, line.wall_ns, line.latest)
                with stream.writing:
                    self._write(shown)
        except (OSError, ValueError) as error:  # a stream that was closed or broke
            self._failures += 1
            if self._failures == 1:
                guard.warn("the %r output stopped working: %s", self._name, error)
            return Outcome.DROPPED
        return Outcome.DONE

    def tick(self) -> None:
        pass

    def close(self, deadline_ns: int) -> None:
        pass

    def after_fork(self) -> None:
        pass

    def health(self) -> dict[str, object]:
        return {f"{self._name}_failures": self._failures} if self._failures else {}


def to_stream(file: TextIO) -> Console:
    """The `stdout` sink, on the stream that was stdout when profiling began."""

    def write(line: str) -> None:
        file.write(line + "\n")
        file.flush()

    return Console(write, "stdout")


def to_logger() -> Console:
    """The `log` sink: INFO on the logger `cirron.trace`."""
    logger = logging.getLogger(LOGGER)
    return Console(lambda line: logger.info("%s", line), "log")
