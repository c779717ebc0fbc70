"""Turns the copies of a boundary into records, marks of health, and files of raw values.

Runs on the worker. A file gets its final name only when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cirron import files, guard, wire
from cirron.record import clock
from cirron.record.value import clip
from cirron.snapshot.health import Judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    from cirron.snapshot.host import Copy, Tensor
    from cirron.snapshot.stats import Summary

    Found: TypeAlias = tuple[Tensor, Copy, int]  # and its index in the copy

T = TypeVar("T")

FOLDER = "snapshots"
RESERVED = "__metadata__"  # safetensors cannot hold a tensor of this name
LARGE_BYTES = 100 * 10**6  # warn once above this size of raw values of one epoch

# Incomplete files are removed after this time. A younger one may belong to a running process.
STALE_NS = 3600 * 10**9

# The worker pauses after this much work. A thread that runs Python releases the GIL only every
# 5 ms, and the training thread would wait that long each time it needs the GIL.
TURN_NS = 300_000
PAUSE_S = 0.0001  # long enough for another thread to wake up and take the GIL

# The name of each type in NumPy and torch -> its name in safetensors, and the size of a value in
# bytes. Other types are stored as a wider one.
STORED = {
    "bool": ("BOOL", 1),
    **{f"int{bits}": (f"I{bits}", bits // 8) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (f"U{bits}", bits // 8) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (f"F{bits}", bits // 8) for bits in (16, 32, 64)},
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "complex128": ("F64", 16),  # as its parts
}


class Job(NamedTuple):
    """The copies of one boundary."""

    copies: list[Copy]
    span_id: str
    epoch: int | None
    at_ns: int
    raw: bool


class Taken(NamedTuple):
    """The records of a boundary, and their files."""

    snapshots: list[wire.Snapshot]
    marks: list[wire.Mark]
    files: list[tuple[Path, str]]  # each with its key on the server


class Recorder:
    """Turns copies into records, one boundary after the other."""

    def __init__(self, mode: str, folder: Path | None, access: str) -> None:
        self.judge = Judge()
        self.unsaved = 0  # files of raw values
        self._mode = mode
        self._folder = folder
        self._access = access
        self._warned: set[str] = set()
        self._has_swept = False

    def finish(self, job: Job) -> Taken:
        taken = Taken([], [], [])
        if job.raw:
            self._save(job, taken)
        measured: list[tuple[Tensor, Summary]] = []
        for copy in job.copies:
            for tensor, summary in paced(zip(copy.tensors, copy.summaries(), strict=True)):
                if not tensor.is_replaced:
                    taken.snapshots.append(self._record(job, tensor, summary))
                    measured.append((tensor, summary))
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
            for text, attrs in self.judge.report(job.epoch, measured)
        )
        return taken

    def _record(self, job: Job, tensor: Tensor, summary: Summary) -> wire.Snapshot:
        attrs = dict(tensor.attrs)
        if summary.broken_count:
            attrs["nonfinite_count"] = summary.broken_count
            attrs |= {"nan_count": summary.nan_count, "inf_count": summary.inf_count}
        return wire.Snapshot(
            id=clock.random_id(),
            span_id=job.span_id,
            tensor_name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            mode=self._mode,
            stats=summary.stats,
            blob_uri=tensor.blob_uri,
            ts_ns=job.at_ns,
            attrs=attrs,
        )

    def _save(self, job: Job, taken: Taken) -> None:
        """Writes the raw values."""
        assert self._folder is not None
        found = [
            (tensor, copy, place)
            for copy in job.copies
            for place, tensor in enumerate(copy.tensors)
            if not (tensor.is_replaced or tensor.name == RESERVED or "unmeasured" in tensor.attrs)
        ]
        size = sum(copy.size_bytes for copy in job.copies)
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
                sweep(self._folder)
        for kind in ("weights", "gradients"):
            its = [one for one in found if one[0].is_gradient is (kind == "gradients")]
            key = f"{FOLDER}/{job.span_id}/{kind}.safetensors"
            path = self._write(self._folder, key, its) if its else None
            if path is not None:
                taken.files.append((path, key))
                uri = path.absolute().as_uri()
                for tensor, _, _ in its:
                    tensor.blob_uri = uri

    def _write(self, folder: Path, key: str, found: list[Found]) -> Path | None:
        """Writes a file; None if that fails. The statistics are delivered anyway."""
        with guard.quiet("snapshot"):
            try:
                return write(folder, key, safetensors(found), self._access)
            except OSError as error:
                if "unsaved" not in self._warned:
                    self._warned.add("unsaved")
                    guard.warn(
                        "raw values of a snapshot could not be written to %s (%s). Its statistics"
                        " are kept; ci.health() counts such files",
                        folder,
                        error.strerror or error,
                    )
        self.unsaved += 1
        return None


def paced(items: Iterable[T]) -> Iterator[T]:
    """The items, with a pause after each `TURN_NS` of work on them."""
    began = clock.now()
    for item in items:
        yield item
        if clock.now() - began > TURN_NS:
            time.sleep(PAUSE_S)
            began = clock.now()


def write(folder: Path, key: str, chunks: Iterable[Any], access: str = "private") -> Path:
    """Writes a file, and renames it to `<folder>/<key>` when it is on disk."""
    target = folder / key
    part = target.with_name(target.name + ".tmp")
    home = files.Folder(target.parent.parent, files.SPAN, access)
    home.make()
    home.make_inside(target.parent.name)
    try:
        with open(home.create(f"{part.parent.name}/{part.name}"), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:  # also Ctrl-C: leaves no incomplete file
        part.unlink(missing_ok=True)
        raise
    return target


def stored_type(dtype: str) -> str:
    """The type as which values of this type are stored."""
    if dtype in STORED:
        return dtype
    return "int8" if "int" in dtype else "float32"


def safetensors(found: list[Found]) -> Iterator[Any]:
    """The content of a safetensors file: the length of the header, the header, the values."""
    # Widest types first, so that every tensor is aligned.
    found = sorted(found, key=lambda one: -STORED[stored_type(one[0].dtype)][1])
    header: dict[str, Any] = {}
    size = 0
    for tensor, _, _ in found:
        code, width = STORED[stored_type(tensor.dtype)]
        first, size = size, size + math.prod(tensor.shape) * width
        shape = [*tensor.shape, 2] if tensor.dtype == "complex128" else tensor.shape
        header[tensor.name] = {"dtype": code, "shape": shape, "data_offsets": [first, size]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor, copy, place in found:
        yield stored(tensor, copy.value(place))


def stored(tensor: Tensor, values: Any) -> Any:
    """The bytes of the values in row-major order, as their `stored_type`."""
    import numpy as np  # by now the program or a reader has imported it

    if tensor.dtype not in STORED:
        decoded = values if tensor.decode is None else tensor.decode(values)
        values = decoded.astype(stored_type(tensor.dtype))
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def sweep(folder: Path) -> None:
    """Removes incomplete files of killed processes."""
    home = files.Folder(folder / FOLDER, files.SPAN)
    home.find()
    for part in home.path.glob("*/*.tmp") if home.is_ours else ():
        if not home.is_name(part.parent.name) or part.parent.is_symlink():
            continue
        with suppress(OSError):  # another process has removed it, or it belongs to another user
            status = part.lstat()
            if stat.S_ISREG(status.st_mode) and clock.wall() - status.st_mtime_ns > STALE_NS:
                part.unlink()
