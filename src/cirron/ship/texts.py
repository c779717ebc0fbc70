"""Calls `str` on the user's objects.

`str(value)` is user code: it may raise anything, or never return. It is called once per object, on
a separate thread, with a time limit. Objects of a class that takes longer are described by the name
of the class from then on. After a few such classes, `str` is not called at all.
"""

from __future__ import annotations

import weakref
from typing import Any

from cirron.record.attrs import name_of
from cirron.record.value import clip
from cirron.ship.threads import Worker, new_lock

WAIT_S = 0.1
MAX_STUCK = 3


class Texts:
    """Gets one text at a time; the collector's lock ensures that."""

    def __init__(self) -> None:
        self._asker: Asker | None = None
        self._stuck = 0
        self._slow: list[weakref.ref[type]] = []  # not a set: a metaclass may define __hash__

    def of(self, value: Any) -> str:
        """`str(value)`, or `<ClassName>` if that fails or takes too long."""
        kind = type(value)
        if self._stuck >= MAX_STUCK or any(slow() is kind for slow in self._slow):
            return name_of(value)
        if self._asker is None:
            self._asker = Asker()
        text = self._asker.ask(value)
        if text is None:  # it is still running, and blocks that thread
            self._asker.worker.stop()
            self._asker = None
            self._stuck += 1
            self._slow.append(weakref.ref(kind))
            return name_of(value)
        return text

    def stop(self) -> None:
        if self._asker is not None:
            self._asker.worker.stop()
            self._asker = None


class Asker:
    def __init__(self) -> None:
        self._value: Any = None
        self._text: str | None = None
        self._done = new_lock()
        self._done.acquire()
        self.worker = Worker(self._run, "cirron-texts")
        self._has_started = self.worker.start()

    def ask(self, value: Any) -> str | None:
        """The text, or None if it takes longer than `WAIT_S`."""
        if not self._has_started:
            return name_of(value)
        self._value, self._text = value, None
        self.worker.wake()
        return self._text if self._done.acquire(timeout=WAIT_S) else None

    def _run(self) -> None:
        while not self.worker.is_stopping:
            self.worker.rest(3600.0)
            value, self._value = self._value, None
            if value is not None:
                try:
                    text = clip(str.__str__(str(value)))
                except BaseException:  # noqa: BLE001  protects the recording from user code
                    text = name_of(value)
                del value
                self._text = text
                self._done.release()
