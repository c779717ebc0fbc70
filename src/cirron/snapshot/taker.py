"""Which models are watched, and what happens at an epoch boundary.

`watch`, `keep_gradients` and `take` run on the user's thread; they copy and leave. The rest is done
by a worker that starts with the first model: statistics, raw values, a look at the training's
health.

Copies that wait for the worker are bounded: one copy, or as many as fit in `PENDING_BYTES`. When
there is no room, `take` waits a moment, then leaves the snapshot out and counts it. The worker ends
with the session.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
import threading
import time
import weakref
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron import errors, guard, wire
from cirron.record import clock
from cirron.record.value import clip
from cirron.snapshot import blobs
from cirron.snapshot.base import paced
from cirron.snapshot.health import Judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from cirron.record.hot import Span
    from cirron.snapshot.base import Copy, Reader, Tensor
    from cirron.snapshot.stats import Summary

# Who reads which models: the module that a program with such a model has imported and the class of
# its models, then the reader's file and class.
READERS = (
    ("keras", "Layer", "cirron.snapshot.keras", "KerasReader"),  # on torch it is a Module too
    ("torch.nn", "Module", "cirron.snapshot.torch", "TorchReader"),
    ("cirron.snapshot.jax", "Held", "cirron.snapshot.jax", "JaxReader"),  # what `stand_in` returns
)

PENDING_BYTES = 64 * 2**20
WAIT_S = 0.025  # of the 50 ms that a boundary may take
LARGE_BYTES = 100 * 10**6  # warn once above this size of raw values of one epoch


class Watched:
    """A model, the reader that knows it, what is put before its names, and its kept gradients."""

    def __init__(self, own: Any, reader: Reader, taken: set[str]) -> None:
        self.reader = reader
        self.kept: deque[Kept] = deque(maxlen=1)  # two threads may pop at once: one has it
        self.model = refer(own)
        names = reader.names(own)
        self.prefix, number = "", 1
        while not taken.isdisjoint(self.prefix + name for name in names):
            kind = type(own).__name__
            self.prefix = f"{kind}." if number == 1 else f"{kind}_{number}."
            number += 1
        self.names = {self.prefix + name for name in names}

    def pop_kept(self) -> Kept | None:
        try:
            return self.kept.pop()
        except IndexError:
            return None


class Kept:
    """A model's gradients, copied after an optimizer step, for a loop that clears them then."""

    def __init__(self, gradients: list[Tensor]) -> None:
        self.copies: list[Copy] = []
        self._known: dict[str, tuple[Tensor, Callable[[], Any], int]] = {
            tensor.name: (tensor, weakref.ref(tensor.source), tensor.source._version)
            for tensor in gradients
        }

    def rest_of(self, tensors: list[Tensor]) -> list[Tensor]:
        """What of a model is to be copied beside these: no gradient that is as it was."""
        rest = []
        for tensor in tensors:
            if tensor.name in self._known:
                kept, reference, version = self._known[tensor.name]
                if reference() is tensor.source and tensor.source._version == version:
                    continue
                kept.is_replaced = True
            elif f"{tensor.name}.grad" in self._known:
                tensor.attrs.pop("no_gradient", None)
            rest.append(tensor)
        return rest


class Job(NamedTuple):
    """What was copied at one boundary."""

    copies: list[list[Copy]]  # by reader
    span_id: str
    epoch: int | None
    at_ns: int
    raw: bool


class Taken(NamedTuple):
    """What a boundary leaves: records, and the files that belong to them."""

    snapshots: list[wire.Snapshot]
    marks: list[wire.Mark]
    files: list[tuple[Path, str]]  # a file, and the key a server knows it by


class Taker:
    """Takes snapshots of the watched models."""

    def __init__(
        self,
        mode: str,
        sample_rate: float,
        *,
        folder: Path | None,  # None: raw values are not kept
        wall_ns: Callable[[int], int],
        deliver: Callable[[Taken], None],
        access: str = "private",
        chance: Callable[[], float] | None = None,
    ) -> None:
        self._mode = mode
        self._access = access
        self._sample_rate = sample_rate
        self._folder = folder
        self._wall_ns = wall_ns
        self._deliver = deliver
        self._chance = random.Random().random if chance is None else chance  # noqa: S311
        self._readers: dict[str, Reader] = {}
        self._watched: list[Watched] = []  # by the user
        self._found: list[Watched] = []  # by a framework's hooks
        self._seen: deque[int] = deque(maxlen=64)  # the last spans that had their snapshot
        self._warned: set[str] = set()
        self._has_swept = False
        self._judge = Judge()
        self._begin()

    def _begin(self) -> None:
        self.taken = 0
        self.skipped = 0
        self.unsaved = 0  # files of raw values
        self.held_ns = 0  # the last time the loop was held
        self._keeping_ns = 0  # since then, for gradients
        # A queue that may be put to in a signal's handler. None: there will be no more.
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_free = threading.Condition()
        self._pending = 0  # jobs
        self._pending_bytes = 0
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def after_fork(self) -> None:
        """In a forked child: the models are there, the worker is not, its jobs are the parent's."""
        self._begin()

    @property
    def is_watching(self) -> bool:
        return bool(self._watched)

    # -- on the user's thread ---------------------------------------------------------------

    def watch(self, model: Any) -> None:
        """Takes snapshots of the model from now on; one that is watched already stays as it is."""
        model = stand_in(model, [one.model() for one in self._watched])
        check(model)
        with guard.quiet("snapshot"):
            if self._find_known(model, self._watched) is None:
                watched = self._know(model)
                self._watched.append(watched)
                self._prepare(watched)

    def expect(self, model: Any) -> None:
        """A hook has found a model, of which it will have a snapshot taken."""
        with guard.quiet("snapshot"):
            if self._find_known(model, self._watched + self._found) is None:
                found = self._know(model)
                if found.names:  # else its parameters are still to come
                    self._found.append(found)
                    self._prepare(found)

    def keep_gradients(self, *models: Any) -> None:
        """After an optimizer step that may be the epoch's last: copies the gradients as they are.

        The next `take` uses them where the loop has cleared the model's own by then. It may be
        called again: the newest count. For the watched models, and those that a hook has found.
        """
        if not (self._watched or self._found) or self._is_stopped:
            return
        with guard.quiet("snapshot"):
            began = clock.now()
            known = [model for model in models if self._find_known(model, self._found) is not None]
            for one, own in self._current(known):
                if one.reader.clears_gradients:
                    self._keep(one, own)
            self._keeping_ns += clock.now() - began

    def _keep(self, one: Watched, own: Any) -> None:
        found = list(one.reader.read(own, one.prefix, only_gradients=True))
        if not found:
            return
        before = one.pop_kept()
        for copy in () if before is None else before.copies:
            copy.release()  # its memory is used again
        if self._has_room(sum(tensor.size_bytes for tensor in found)):
            kept = Kept(found)
            is_raw = self._mode != "stats" and self._folder is not None
            kept.copies = one.reader.copy(found, raw=is_raw, in_step=True) or []
            if kept.copies:
                one.kept.append(kept)

    def take(self, span: Span, *models: Any) -> None:
        """At the end of an epoch: copies the watched models, and those that a hook has found."""
        if not (self._watched or models) or self._is_stopped or span.sequence in self._seen:
            return
        with guard.quiet("snapshot"):
            began = clock.now()
            current = self._current(models)
            if not current:
                return
            self._seen.append(span.sequence)
            self._copy(span, current)
            self.held_ns = clock.now() - began + self._keeping_ns
            self._keeping_ns = 0
            span.set(snapshot_ns=self.held_ns)

    def _current(self, models: Iterable[Any]) -> list[tuple[Watched, Any]]:
        """The watched models, and these; those that are gone are left out."""
        current = list(self._watched)
        for model in models:
            if self._find_known(model, current) is None:
                known = self._find_known(model, self._found)
                if known is None:
                    known = self._know(model)
                    self._found.append(known)
                current.append(known)
        return [(one, own) for one in current if (own := one.model()) is not None]

    def _copy(self, span: Span, current: list[tuple[Watched, Any]]) -> None:
        is_chosen = self._mode == "full" or (
            self._mode == "sampled" and self._chance() < self._sample_rate
        )
        raw = is_chosen and self._folder is not None
        found: dict[Reader, tuple[list[Tensor], list[Copy]]] = {}
        for one, own in current:
            kept = one.pop_kept()
            tensors, copied = found.setdefault(one.reader, ([], []))
            with guard.quiet("snapshot"):  # one that fails takes nothing from the others
                its = list(one.reader.read(own, one.prefix))
                tensors += its if kept is None else kept.rest_of(its)
                copied += () if kept is None else kept.copies
        size = sum(one.size_bytes for some in found.values() for part in some for one in part)
        with self._is_free:
            has_room = self._is_free.wait_for(lambda: self._has_room(size), WAIT_S)
        if not has_room:
            self._skip("busy", "the worker is still busy with earlier ones")
            return
        copies = []
        for reader, (tensors, copied) in found.items():
            new = reader.copy(tensors, raw=raw)
            if new is not None:
                copies.append([*new, *copied])
        if len(copies) < len(found):
            self._skip("memory", f"a copy of {size / 1e6:,.0f} MB might not fit in free memory")
        if copies:
            job = Job(copies, span.id, span.index, self._wall_ns(clock.now()), raw)
            self._do(
                lambda: self._finish(job), sum(one.size_bytes for its in copies for one in its)
            )

    def _has_room(self, size: int) -> bool:
        return not self._pending_bytes or self._pending_bytes + size <= PENDING_BYTES

    def _skip(self, why: str, reason: str) -> None:
        self.skipped += 1
        if why not in self._warned:
            self._warned.add(why)
            guard.warn("a snapshot was left out: %s. ci.health() counts them", reason)

    def _know(self, model: Any) -> Watched:
        reader = self._reader_of(model)
        for known in (self._watched, self._found):
            known[:] = [one for one in known if one.model() is not None]
        names = {name for one in self._watched + self._found for name in one.names}
        watched = Watched(reader.unwrap(model), reader, names)
        self._do(lambda: self._judge.forget(watched.names))
        return watched

    def _find_known(self, model: Any, known: list[Watched]) -> Watched | None:
        own = self._reader_of(model).unwrap(model)
        return next((one for one in known if one.model() is own), None)

    def _prepare(self, new: Watched) -> None:
        """Has memory made ready for what is copied together: the watched ones, and a new one."""
        models = [
            (own, one.prefix)
            for one in dict.fromkeys((*self._watched, new))
            if one.reader is new.reader and (own := one.model()) is not None
        ]
        self._do(new.reader.prepare(models))

    def _reader_of(self, model: Any) -> Reader:
        file, kind = check(model)
        reader = self._readers.get(file)
        if reader is None:
            reader = self._readers[file] = getattr(importlib.import_module(file), kind)()
        return reader

    # -- waiting for the worker -------------------------------------------------------------

    def settle(self, deadline_ns: int) -> bool:
        """Waits until all that was copied is delivered. False: not by the deadline.

        Takes no lock: a signal's handler waits here too.
        """
        while self._pending and self._thread is not None and self._thread.is_alive():
            if clock.now() > deadline_ns:
                return False
            time.sleep(0.001)
        return True

    def stop(self, deadline_ns: int) -> bool:
        """Takes no more, waits for what is left, and lets the worker end. False: as `settle`."""
        self._is_stopped = True
        is_settled = self.settle(deadline_ns)
        self._jobs.put(None)
        return is_settled

    def counters(self) -> dict[str, Any]:
        """For `ci.health()`."""
        return {
            "snapshot_count": self.taken,
            "snapshot_skip_count": self.skipped,
            "snapshot_unsaved_count": self.unsaved,
            "snapshot_pending": self._pending,
            "snapshot_held_ns": self.held_ns,
        }

    # -- the worker -------------------------------------------------------------------------

    def _do(self, work: Callable[[], None], size: int = 0) -> None:
        def counted() -> None:
            try:
                with guard.quiet("snapshot"):
                    work()
            finally:
                with self._is_free:
                    self._pending -= 1
                    self._pending_bytes -= size
                    self._is_free.notify_all()

        with self._is_free:
            self._pending += 1
            self._pending_bytes += size
            self._jobs.put(counted)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=run, args=(self._jobs,), name="cirron-snapshots", daemon=True
                )
                self._thread.start()

    def _finish(self, job: Job) -> None:
        taken = Taken([], [], [])
        measured: list[tuple[Tensor, Summary]] = []
        try:
            for number, copies in enumerate(job.copies):
                addresses = self._save(job, copies, number, taken) if job.raw else (None, None)
                its = [
                    (tensor, summary)
                    for copy in copies
                    for tensor, summary in zip(copy.tensors, copy.summaries(), strict=True)
                    if not tensor.is_replaced
                ]
                for tensor, summary in paced(its):
                    address = addresses[tensor.is_gradient] if tensor.has_values else None
                    taken.snapshots.append(self._record(job, tensor, summary, address))
                measured += its
        finally:
            for copies in job.copies:
                for copy in copies:
                    copy.release()
        taken.marks.extend(
            wire.Mark(
                id=clock.random_id(),
                span_id=job.span_id,
                name="training_health",
                value_type="string",
                value=clip(text),
                attrs=attrs,
                ts_ns=job.at_ns,
                kind="point",
            )
            for text, attrs in self._judge.report(job.epoch, measured)
        )
        if taken.snapshots:
            self.taken += 1
        else:
            self.skipped += 1  # what was watched is gone
        self._deliver(taken)

    def _record(
        self, job: Job, tensor: Tensor, summary: Summary, address: str | None
    ) -> wire.Snapshot:
        attrs = dict(tensor.attrs)
        if summary.is_broken:
            attrs["nonfinite_count"] = summary.nan_count + summary.inf_count
            attrs["nan_count"] = summary.nan_count
            attrs["inf_count"] = summary.inf_count
        return wire.Snapshot(
            id=clock.random_id(),
            span_id=job.span_id,
            tensor_name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            mode=self._mode,
            stats=summary.stats,
            blob_uri=address,
            ts_ns=job.at_ns,
            attrs=attrs,
        )

    def _save(
        self, job: Job, copies: list[Copy], number: int, taken: Taken
    ) -> tuple[str | None, str | None]:
        """Writes the raw values; returns where the weights are, and where the gradients."""
        assert self._folder is not None
        found = [
            (tensor, copy, place)
            for copy in copies
            for place, tensor in enumerate(copy.tensors)
            if tensor.has_values and not tensor.is_replaced
        ]
        size = sum(copy.size_bytes for copy in copies)
        if size > LARGE_BYTES and "large" not in self._warned:
            self._warned.add("large")
            guard.warn(
                "the raw values of this epoch are %.1f MB (%d bytes, %d parameters), and more"
                " epochs follow; snapshots='stats' keeps none, a lower sample_rate fewer",
                size / 1e6,
                size,
                sum(math.prod(its.shape) for its, _, _ in found if not its.is_gradient),
            )
        if not self._has_swept:
            self._has_swept = True
            with guard.quiet("snapshot"):
                blobs.sweep(self._folder)
        addresses: list[str | None] = [None, None]
        for is_gradient, kind in enumerate(("weights", "gradients")):
            its = [one for one in found if one[0].is_gradient == is_gradient]
            if its:
                name = f"{kind}.safetensors" if not number else f"{kind}-{number}.safetensors"
                key = f"{blobs.FOLDER}/{job.span_id}/{name}"
                path = self._write(key, its)
                if path is None:
                    self.unsaved += 1
                else:
                    taken.files.append((path, key))
                    addresses[is_gradient] = path.absolute().as_uri()
        return addresses[0], addresses[1]

    def _write(self, key: str, found: list[tuple[Tensor, Copy, int]]) -> Path | None:
        """None: it could not be written, for whatever reason. The statistics are delivered."""
        assert self._folder is not None

        def save(path: Path) -> None:
            blobs.save({tensor.name: copy.value(place) for tensor, copy, place in found}, path)

        with guard.quiet("snapshot"):
            try:
                return blobs.write(self._folder, key, save, self._access)
            except OSError as error:
                if "unsaved" not in self._warned:
                    self._warned.add("unsaved")
                    guard.warn(
                        "raw values of a snapshot could not be written to %s (%s). Its statistics"
                        " are kept; ci.health() counts such files",
                        self._folder,
                        error.strerror or error,
                    )
        return None


def run(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """The worker: it knows its queue alone, so that a session that has ended is let go."""
    while (job := jobs.get()) is not None:
        job()
        del job  # and what it copied


def refer(own: Any) -> Callable[[], Any]:
    """Asks for a model later. It is kept alive by the program alone, where it can be."""
    try:
        return weakref.ref(own)
    except TypeError:
        return lambda: own


def stand_in(model: Any, known: list[Any]) -> Any:
    """What is watched for a tree of JAX arrays, which is a value: an object that has the newest."""
    if "jax" not in sys.modules:
        return model
    from cirron.snapshot.jax import hold

    return hold(model, known)


def check(model: Any) -> tuple[str, str]:
    """Who reads the model, as file and class; an error for what nothing here can read."""
    for module, base, file, kind in READERS:
        known = getattr(sys.modules.get(module), base, None)  # it may be half imported
        if isinstance(known, type) and isinstance(model, known):
            return file, kind
    raise errors.InputError(
        "ci.watch() takes a model, such as a torch.nn.Module or a tree of JAX arrays; got"
        f" {type(model).__name__}. Keras and Trainer models are found without it"
    )
