"""Which models are watched, and what happens at an epoch boundary.

`watch`, `keep_gradients` and `take` run on the user's thread and only make copies. A worker thread,
which starts with the first model, computes statistics, saves raw values and checks the health of
the training.

The queue of the worker is bounded: one snapshot, or as many as fit in `PENDING_BYTES`. If it is
full, `take` waits up to `WAIT_S`, then skips the snapshot and counts it. The worker ends with the
session.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
import time
import weakref
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from cirron import errors, guard
from cirron.record import clock
from cirron.snapshot.records import Job, Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from cirron.record.hot import Span
    from cirron.snapshot.host import Copier, Copy, HostCopier, Reader, Tensor
    from cirron.snapshot.records import Taken

# The module and class of the models that can be read, and the file whose `READER` reads them. A
# program that has such a model has imported the module.
READERS = (
    ("keras", "Layer", "cirron.snapshot.keras"),  # on torch it is a Module too
    ("torch.nn", "Module", "cirron.snapshot.torch"),
    ("cirron.snapshot.jax", "WatchedTree", "cirron.snapshot.jax"),  # what `stand_in` returns
)

PENDING_BYTES = 64 * 2**20
WAIT_S = 0.025  # of the 50 ms that a boundary may take


class KnownModel:
    """A model, its reader, and the prefix of its names."""

    def __init__(self, own: Any, reader: Reader, taken: set[str]) -> None:
        self.reader = reader
        self.is_watched = False  # by the user; else only if a hook asks for a snapshot of it
        self.is_prepared = False
        self.model = refer(own)
        names = reader.names(own)
        self.prefix, number = "", 1
        while not taken.isdisjoint(self.prefix + name for name in names):
            kind = type(own).__name__
            self.prefix = f"{kind}." if number == 1 else f"{kind}_{number}."
            number += 1
        self.names = {self.prefix + name for name in names}


class KeptGradients:
    """Copies of a model's gradients after an optimizer step, because a loop may clear them."""

    def __init__(self, gradients: list[Tensor]) -> None:
        self.copies: list[Copy] = []
        self._known: dict[str, tuple[Tensor, Callable[[], Any], int]] = {
            tensor.name: (tensor, weakref.ref(tensor.source), tensor.source._version)
            for tensor in gradients
        }

    def rest_of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tensors that still have to be copied: all but unchanged gradients."""
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


class Taker:
    """Takes snapshots of the watched models."""

    def __init__(
        self,
        mode: str,
        sample_rate: float,
        *,
        folder: Path | None,  # None: raw values are not saved
        wall_ns: Callable[[int], int],
        deliver: Callable[[Taken], None],
        access: str = "private",
        chance: Callable[[], float] | None = None,
    ) -> None:
        # The share of snapshots whose raw values are saved.
        self._raw_share = {"stats": 0.0, "sampled": sample_rate, "full": 1.0}[mode] if folder else 0
        self._wall_ns = wall_ns
        self._deliver = deliver
        self._chance = random.Random().random if chance is None else chance  # noqa: S311
        self._models: list[KnownModel] = []
        self.is_watching = False
        self._kept: dict[KnownModel, KeptGradients] = {}
        self._warned: set[str] = set()
        self._host: HostCopier | None = None  # created for the first model: it imports NumPy
        self._recorder = Recorder(mode, folder, access)
        self.begin()

    def begin(self) -> None:
        """Also called in a forked child, which keeps the models but not the worker and its jobs."""
        self.taken = 0
        self.skipped = 0
        self._recorder.unsaved = 0
        self.held_ns = 0  # how long the last boundary blocked the loop
        self._keeping_ns = 0  # spent on copies of gradients since then
        self._steps = 0  # of optimizers, in this epoch
        self._steps_before = 0  # in the previous epoch
        # A queue that a signal handler may put to. None ends the worker.
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_free = threading.Condition()
        self._pending = 0  # jobs
        self._pending_bytes = 0
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    # -- on the user's thread ---------------------------------------------------------------

    def watch(self, model: Any) -> None:
        """Takes snapshots of the model from now on. Watching it twice has no further effect."""
        model = stand_in(model, [one.model() for one in self._models if one.is_watched])
        check(model)
        with guard.quiet("snapshot"):
            one = self._know(model)
            one.is_watched = self.is_watching = True
            self._prepare(one)

    def expect(self, model: Any) -> None:
        """A hook has found a model and will request a snapshot of it."""
        with guard.quiet("snapshot"):
            self._prepare(self._know(model))

    def keep_gradients(self, *, is_last: bool = True) -> None:
        """Called after each optimizer step while a model is watched. Copies the gradients if it is
        the last step of the epoch, or has the number of the last step of the previous epoch.

        The next `take` uses the latest copies if the loop has cleared the gradients by then.
        """
        self._steps += 1
        is_last = is_last or self._steps == self._steps_before
        if not is_last or self._is_stopped:
            return
        with guard.quiet("snapshot"):
            began = clock.now()
            for one, own in self._current():
                if one.reader.is_in_place:
                    self._keep(one, own)
            self._keeping_ns += clock.now() - began

    def _keep(self, one: KnownModel, own: Any) -> None:
        found = list(one.reader.read(own, one.prefix, only_gradients=True))
        if not found:  # the optimizer of another model has stepped
            return
        before = self._kept.pop(one, None)
        release(() if before is None else before.copies)  # their memory is reused
        if self._has_room(sum(tensor.size_bytes for tensor in found)):
            kept = KeptGradients(found)
            kept.copies = self._copy(found, raw=self._raw_share > 0, in_step=True) or []
            if kept.copies:
                self._kept[one] = kept

    def take(self, span: Span, *models: Any) -> None:
        """Copies the watched models and these, at the end of an epoch."""
        if self._is_stopped or "snapshot_ns" in (span.attrs or ()):  # another hook was first
            return
        with guard.quiet("snapshot"):
            began = clock.now()
            current = self._current([self._know(model) for model in models])
            if not current:
                return
            self._steps_before, self._steps = self._steps, 0
            self._snapshot(span, current)
            self.held_ns = clock.now() - began + self._keeping_ns
            self._keeping_ns = 0
            span.set(snapshot_ns=self.held_ns)

    def _current(self, others: Sequence[KnownModel] = ()) -> list[tuple[KnownModel, Any]]:
        """The watched models and these, without those that no longer exist."""
        asked = [one for one in self._models if one.is_watched or one in others]
        return [(one, own) for one in asked if (own := one.model()) is not None]

    def _snapshot(self, span: Span, current: list[tuple[KnownModel, Any]]) -> None:
        raw = self._chance() < self._raw_share
        tensors: list[Tensor] = []
        kept_copies: list[Copy] = []
        all_kept, self._kept = self._kept, {}
        for one, own in current:
            # Two threads may pop at once: only one gets it.
            kept = all_kept.pop(one, None) or KeptGradients([])
            with guard.quiet("snapshot"):  # a model that fails must not affect the others
                tensors += kept.rest_of(one.reader.read(own, one.prefix))
                kept_copies += kept.copies
        size = sum(part.size_bytes for parts in (tensors, kept_copies) for part in parts)
        with self._is_free:
            has_room = self._is_free.wait_for(lambda: self._has_room(size), WAIT_S)
        copies = self._copy(tensors, raw=raw) if has_room else None
        if copies is not None:
            at_ns = self._wall_ns(clock.now())
            job = Job(copies + kept_copies, span.id, span.index, at_ns, raw)
            self._do(partial(self._finish, job), size)
            return
        release(kept_copies)
        if has_room:
            self._skip("memory", f"a copy of {size / 1e6:,.0f} MB might not fit in free memory")
        else:
            self._skip("busy", "the worker is still busy with earlier ones")

    def _copy(
        self, tensors: list[Tensor], *, raw: bool, in_step: bool = False
    ) -> list[Copy] | None:
        """Copies the tensors on their devices. None: there is not enough memory."""
        copies: list[Copy] = []
        for copier, its in self._by_copier(tensors).items():
            new = copier.copy(its, raw=raw, in_step=in_step)
            if new is None:
                release(copies)
                return None
            copies += new
        return copies

    def _by_copier(self, tensors: list[Tensor]) -> dict[Copier, list[Tensor]]:
        if self._host is None:
            from cirron.snapshot.host import HostCopier

            self._host = HostCopier()
        found: dict[Copier, list[Tensor]] = {self._host: []}
        for tensor in tensors:
            found.setdefault(tensor.copier or self._host, []).append(tensor)
        return found

    def _has_room(self, size: int) -> bool:
        return not self._pending_bytes or self._pending_bytes + size <= PENDING_BYTES

    def _skip(self, why: str, reason: str) -> None:
        self.skipped += 1
        if why not in self._warned:
            self._warned.add(why)
            guard.warn("a snapshot was skipped: %s. ci.health() counts them", reason)

    def _know(self, model: Any) -> KnownModel:
        reader: Reader = importlib.import_module(check(model)).READER
        own = reader.unwrap(model)
        # A model that a hook has found before its parameters existed is looked at again.
        self._models = [
            one for one in self._models if one.model() is not None and (one.names or one.is_watched)
        ]
        for one in self._models:
            if one.model() is own:
                return one
        known = KnownModel(own, reader, {name for one in self._models for name in one.names})
        self._models.append(known)
        self._do(partial(self._recorder.judge.forget, known.names))
        return known

    def _prepare(self, new: KnownModel) -> None:
        """Prepares the copiers for a snapshot of the watched models and a new one."""
        if new.is_prepared or not new.names:
            return
        new.is_prepared = True
        weights = [
            tensor
            for one, own in self._current([new])
            if one.reader.is_in_place
            for tensor in one.reader.read(own, one.prefix)
            if not tensor.is_gradient
        ]
        for copier, its in self._by_copier(weights).items():
            self._do(partial(copier.prepare, its))

    # -- waiting for the worker -------------------------------------------------------------

    def settle(self, deadline_ns: int) -> bool:
        """Waits until all snapshots are delivered. False: some are not by the deadline.

        Takes no lock, because a signal handler may wait here too.
        """
        while self._pending and self._thread is not None and self._thread.is_alive():
            if clock.now() > deadline_ns:
                return False
            time.sleep(0.001)
        return True

    def stop(self, deadline_ns: int) -> bool:
        """Takes no more snapshots, waits for the pending ones, and ends the worker.

        Returns what `settle` returns.
        """
        self._is_stopped = True
        is_settled = self.settle(deadline_ns)
        self._jobs.put(None)
        return is_settled

    def counters(self) -> dict[str, Any]:
        """For `ci.health()`."""
        return {
            "snapshot_count": self.taken,
            "snapshot_skip_count": self.skipped,
            "snapshot_unsaved_count": self._recorder.unsaved,
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
        try:
            taken = self._recorder.finish(job)
        finally:
            release(job.copies)
        if taken.snapshots:
            self.taken += 1
        else:
            self.skipped += 1  # the watched models no longer exist
        self._deliver(taken)


def run(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """The worker. It refers to its queue only, so that an ended session can be freed."""
    while (job := jobs.get()) is not None:
        job()
        del job  # frees its copies


def release(copies: Iterable[Copy]) -> None:
    for copy in copies:
        copy.release()


def refer(own: Any) -> Callable[[], Any]:
    """A weak reference to the model, or a strong one if its class has no weak references."""
    try:
        return weakref.ref(own)
    except TypeError:
        return lambda: own


def stand_in(model: Any, known: list[Any]) -> Any:
    """For a tree of JAX arrays, the object that stands for its latest value; else the model."""
    if "jax" not in sys.modules:
        return model
    from cirron.snapshot.jax import hold

    return hold(model, known)


def check(model: Any) -> str:
    """The file that reads a model; raises if there is none."""
    for module, base, file in READERS:
        known = getattr(sys.modules.get(module), base, None)  # it may be partly imported
        if isinstance(known, type) and isinstance(model, known):
            return file
    raise errors.InputError(
        "ci.watch() takes a model, such as a torch.nn.Module or a tree of JAX arrays; got"
        f" {type(model).__name__}. Keras and Trainer models are found without it"
    )
