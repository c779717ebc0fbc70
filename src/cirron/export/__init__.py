"""Exports a run to the formats of other tools. One file per format; this one has their table.

A file gets its name only when it is complete: after an error, there is the old file or none. Rows
are read and written in chunks, so a run of any size can be exported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from cirron import errors, wire
from cirron.record import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cirron.runs.opened import Run
    from cirron.runs.relation import Rows


SORTED_SPANS = 500_000  # at a time


# The function that writes each format, and what the help says about it.
FORMS = {
    "perfetto": ("perfetto.write", "Perfetto's trace: spans, threads, marks as counters"),
    "chrome": ("chrome.write", "trace events as JSON, for chrome://tracing and others"),
    "otlp": ("otlp.write", "OpenTelemetry spans: a file, or an http(s) address"),
    "tensorboard": ("tensorboard.write", "marks as scalars, tensors as histograms: a folder"),
    "parquet": ("table.write_parquet", "the tables: a folder"),
    "csv": ("table.write_csv", "the tables: a folder"),
    "json": ("table.write_json", "the tables as one object"),
    "html": ("html.write", "a report as one HTML page"),
}


def export(run: Run, form: str, path: str | os.PathLike[str], **options: Any) -> None:
    """Writes a run to `path` in one of `FORMS`.

    >>> export(ci.open(), "perfetto", "run.pftrace")
    """
    if form not in FORMS:
        raise errors.one_of("format", form, FORMS)
    if not isinstance(path, (str, os.PathLike)):
        raise errors.out_of_range("path", path, "it must be the path of a file or a folder")
    module, function = FORMS[form][0].split(".")
    write = getattr(importlib.import_module(f"cirron.export.{module}"), function)
    write(run, os.path.expanduser(path), **options)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yields a temporary path in the same folder, and renames it to `path` at the end."""
    if os.path.isdir(path or "."):
        raise errors.SettingError(
            f"{path!r} is a folder, but this format writes one file: give the name of a file"
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise errors.SettingError(
            f"{path!r} is a device or a pipe, which cannot be replaced: give the name of a file"
        )
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise errors.SettingError(f"{path!r} cannot be written: there is no folder {folder!r}")
    partial = os.path.join(folder, f".{name[:80]}.{clock.random_id()[:8]}.tmp")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException as error:  # even Ctrl-C must not leave a partial file
        with contextlib.suppress(OSError):
            os.unlink(partial)
        if isinstance(error, OSError) and error.filename == partial:
            error.filename = path
        raise


@contextlib.contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """A file that gets its name when it is complete."""
    with replacing(path) as partial, open(partial, "xb") as file:
        yield file


def new_folder(path: str) -> None:
    """Creates the folder for a format with several files."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise errors.SettingError(
            f"{path!r} is a file, but this format writes a folder: give the name of a folder"
        )
    os.makedirs(path, exist_ok=True)


def spans_in_order(run: Run, sql: str, order: str, **given: Any) -> Iterator[Rows]:
    """The rows of a query over spans, by start.

    They are sorted in parts: sorting all spans of a long run would take gigabytes.
    """
    whole = run.sql("SELECT count(*), min(start_ns), max(start_ns) FROM spans").fetch()
    count, first, last = whole.rows[0]
    parts = 1 + count // SORTED_SPANS
    edges = [first + (last - first) * part // parts for part in range(1, parts)] if count else []
    for low, high in zip([first, *edges], [*(edge - 1 for edge in edges), last], strict=True):
        part = f"SELECT * FROM ({sql}) q WHERE start_ns BETWEEN :low AND :high ORDER BY {order}"  # noqa: S608
        yield from run.sql(part, **given, low=low, high=high).batches()


def attributes(text: str | None) -> dict[str, Any]:
    """The attributes of a record, which are untrusted JSON."""
    if text is None:
        return {}
    try:
        found: dict[str, Any] = wire.mend(msgspec.json.decode(text, type=dict[str, Any]))
        return found
    except (msgspec.MsgspecError, ValueError, RecursionError):  # too deep
        return {"attrs": text}


def listed(text: str | None) -> list[dict[str, Any]]:
    """The marks of a span, which the engine wrote as JSON."""
    return [] if text is None else msgspec.json.decode(text, type=list[dict[str, Any]])
