"""Spans as text: the live lines of the console sinks, and the tree that `ci.trace()` prints.

Names and values come from untrusted files and programs, so all text goes through `escape`: control
sequences never reach a terminal. The notebook view uses `cells` for the text of its rows.
"""

from __future__ import annotations

import collections
import itertools
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron import wire
from cirron.runs import tree as trees

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PARTIAL = "(older spans are no longer in memory; if there is a spool, `cirron show` has them)"
EPOCHS = '(the epochs in between are one row: --name epoch, or name="epoch", shows each)'
EMPTY = (
    'No spans here: record some with ci.profile() or `with ci.scope("name"):`,'
    " or ask for another name= or last=."
)

# Limits of what a row shows. The data is complete.
MAX_TEXT = 80
MAX_MARKS = 12
# Attributes with the settings of loader and model, and with scheduling times. They are for tools,
# and too many for a line.
SETTINGS = ("loader_", "loading_ns", "model_", "starved_ns", "asleep_ns", "children_ns")
MAX_ATTRS = 6
MAX_COMMAND = 300
MAX_CONFIG = 12
MAX_GPU_NAMES = 3
COMMIT_DIGITS = 10
# Time that no child covers is mentioned above this share of the span.
MIN_OWN_SHARE = 0.05

# The units of a duration: the upper limit of each, its length, its decimals and its name. The limit
# is half of the last digit below the next unit, so that rounding never gives 1000us or 60.00s.
_UNITS = (
    (9_950, 1e3, 1, "us"),
    (999_500, 1e3, 0, "us"),
    (999_995_000, 1e6, 2, "ms"),
    (59_995_000_000, 1e9, 2, "s"),
)

# A program may record any integer, but Python refuses to format or divide very long ones. In a file
# an integer has 64 bits; a sum of durations has a few more.
_SMALLEST = -(2**63)
_LARGEST = 2**64 - 1
_LONGEST_NS = 2**80


def duration(ns: int) -> str:
    """A duration in a suitable unit.

    >>> duration(142_000), duration(1_420_000), duration(3_200_000_000), duration(725_000_000_000)
    ('142us', '1.42ms', '3.20s', '12m 5s')
    """
    ns = max(0, min(ns, _LONGEST_NS))
    for limit, length, decimals, name in _UNITS:
        if ns < limit:
            return f"{ns / length:.{decimals}f}{name}"
    minutes, seconds = divmod(round(ns / 1e9), 60)
    if minutes < 60:
        return f"{minutes}m {seconds}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours}h"


def value(given: Any) -> str:
    """The value of a mark or an attribute: floats with 4 significant digits, text on one line.

    >>> value(0.52341), value(0.00001), value(float("nan")), value(1000000)
    ('0.5234', '1e-05', 'nan', '1000000')
    """
    if isinstance(given, float):
        return f"{given:.4g}"
    return _integer(given) if type(given) is int else plain(str(given))


def plural(count: int, noun: str) -> str:
    """`1 run`, `2 runs`, `3 batches`, `4 processes`."""
    ending = "es" if noun.endswith(("tch", "ss")) else "s"
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}{ending}"


def plain(text: str, limit: int = MAX_TEXT) -> str:
    """The text on one line, truncated and escaped."""
    return escape(text if len(text) <= limit else text[: limit - 3] + "...")


def escape(text: str) -> str:
    r"""The text with everything escaped that is not printable.

    That is control codes (C0, DEL, C1), line separators, bidi and other invisible formatting, and
    lone surrogates.

    >>> print(escape("red: \x1b[31m, reversed: \u202e, next line: \x85"))
    red: \x1b[31m, reversed: \u202e, next line: \x85
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def encodable(text: str, stream: object) -> str:
    """The text with characters escaped that the encoding of a stream does not have."""
    encoding = "ascii" if stream is None else getattr(stream, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    except (LookupError, TypeError):  # not a real stream
        return text.encode("ascii", "backslashreplace").decode()


def is_terminal(stream: Any) -> bool:
    """Whether `sys.stdout` or `sys.stderr` is a terminal. Either may be None, or closed."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def print_safely(text: str, name: str = "stdout") -> None:
    """Prints to `sys.stdout` or `sys.stderr`, even if the program closed or replaced it."""
    file = getattr(sys, name)
    if file is None:  # `print` would use sys.stdout
        return
    for stream in (file, None):
        try:
            print(encodable(text, stream), file=file)
        except UnicodeError:  # it does not have the encoding that it claims: try ASCII
            continue
        except Exception:  # noqa: BLE001  a broken stream must not break the program
            pass
        break


def to_json(content: Any) -> str:
    """The content as strict JSON in ASCII, safe for a terminal."""
    text = wire.encode(content).decode()
    if text.isascii() and "\x7f" not in text:  # JSON already escapes control codes below 32
        return text
    return re.sub(r"[^ -~]", _json_escape, text)


def _json_escape(character: re.Match[str]) -> str:
    units = character[0].encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def label(name: str, index: int | None) -> str:
    """`epoch[0]`, or `forward` without an index."""
    return plain(name) if index is None else f"{plain(name)}[{_integer(index)}]"


def _integer(given: int) -> str:
    return str(max(_SMALLEST, min(given, _LARGEST)))


def line(name: str, index: int | None, wall_ns: int, marks: Mapping[str, Any]) -> str:
    """A span on one line.

    >>> line("epoch", 0, 142_000, {"epoch_loss": 0.52341})
    'epoch[0] - 142us {epoch_loss=0.5234}'
    """
    shown = [f"{plain(key)}={value(marked)}" for key, marked in marks.items()]
    return _join(Cells(label(name, index), duration(wall_ns), shown, []))


def live_line(name: str, index: int | None, wall_ns: int, marks: Mapping[str, Any]) -> str:
    """The line that the console sinks print when a span closes."""
    return f"[cirron] {line(name, index, wall_ns, marks)}"


def render(tree: trees.Tree, *, is_detailed: bool = False) -> str:
    """The tree as indented lines. Similar spans share a line, so the text is short for any run.

    `is_detailed`: each line also has its share of the parent's time, and `_details`.
    """
    lines = []
    above: list[trees.Row] = []  # the current path: possible parents of the next row
    has_folded_epochs = False
    for row in trees.flatten(trees.outline(tree)):
        words = cells(row, tree.now_ns)
        if is_detailed and not isinstance(row.item, trees.Rest):
            share = _share(row.item, above[row.depth - 1].item if row.depth else None, tree.now_ns)
            details = _details(row.item, tree.now_ns)
            words = words._replace(time=words.time + share, notes=words.notes + details)
        lines.append("  " * row.depth + _join(words))
        above[row.depth :] = [row]
        if row.depth and row.item.name == "epoch" and isinstance(row.item, trees.Folded):
            has_folded_epochs = True
    if tree.marks:
        lines.append(outside(tree.marks))
    if has_folded_epochs:
        lines.append(EPOCHS)
    if tree.is_partial:
        lines.append(PARTIAL)
    return "\n".join(lines) if lines else EMPTY


def _share(item: trees.Node | trees.Folded, above: trees.Item | None, now_ns: int) -> str:
    """The share of the parent's time; empty for all of it, and for open spans."""
    if above is None or isinstance(above, trees.Rest) or item.is_open:
        return ""
    whole_ns = trees.total_ns(above, now_ns)
    percent = 100 * trees.total_ns(item, now_ns) / whole_ns if whole_ns else 100.0
    if percent >= 99.5:  # more than 100 % if threads run in parallel
        return ""
    return f", {percent:.0f}%" if percent >= 9.5 else f", {percent:.1f}%"


def _details(item: trees.Node | trees.Folded, now_ns: int) -> list[str]:
    """GPU time, peak memory, and the time that no child covers, if it is long."""
    notes = []
    nodes = trees.members(item)
    gpu = sorted(node.gpu_ns for node in nodes if node.gpu_ns is not None)
    if gpu:
        is_one = isinstance(item, trees.Node)
        said = f"gpu {'' if is_one else 'median '}{duration(gpu[len(gpu) // 2])}"
        notes.append(said if len(gpu) == len(nodes) else f"{said} of {len(gpu):,} measured")
    peaks = [node.memory_peak_bytes for node in nodes if node.memory_peak_bytes is not None]
    if peaks:
        notes.append(f"peak {size(max(peaks))}")
    if not item.is_open and any(node.children for node in nodes):
        own_ns = sum(trees.uncovered_ns(node, now_ns) for node in nodes)
        if own_ns > MIN_OWN_SHARE * trees.total_ns(item, now_ns):
            notes.append(f"self {duration(own_ns)}")
    return notes


def size(count: float) -> str:
    """A number of bytes in a suitable unit.

    >>> size(512), size(3 * 2**30)
    ('512 B', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def outside(marks: Iterable[Any]) -> str:
    """The line for marks recorded outside of any span."""
    latest = {mark.name: trees.mark_value(mark) for mark in marks}
    shown = (f"{plain(name)}={value(marked)}" for name, marked in latest.items())
    return f"outside any span {{{', '.join(_at_most(MAX_MARKS, shown, len(latest)))}}}"


def program(known: wire.Program) -> list[str]:
    """What ran, in a few lines: command, commit, versions, GPUs, tags, configuration."""
    lines = []
    if known.script is not None:
        where = "" if known.folder is None else f" in {plain(known.folder, MAX_COMMAND)}"
        lines.append(f"ran {command(known)}{where}")
    around = [] if known.commit is None else [commit(known)]
    if known.python is not None:
        around.append(f"Python {plain(known.python)}")
    around += [f"{plain(name)} {plain(version)}" for name, version in known.versions.items()]
    around += _at_most(MAX_GPU_NAMES, *_counted(known.gpus))
    if around:
        lines.append(", ".join(around))
    if known.tags:
        lines.append(f"tags {tags(known)}")
    if known.config:
        lines.append(f"config {config(known)}")
    return lines


def program_in_short(known: wire.Program) -> list[str]:
    """What distinguishes a run in a list of runs."""
    parts = [] if known.script is None else [plain(command(known))]
    if known.commit is not None:
        parts.append(commit(known))
    if known.tags:
        parts.append(f"tags {tags(known)}")
    return [*parts, config(known)] if known.config else parts


def command(known: wire.Program) -> str:
    """The script with its arguments; secrets were removed when they were recorded."""
    return plain(" ".join([known.script or "", *known.arguments]), MAX_COMMAND)


def commit(known: wire.Program) -> str:
    """The commit, and whether there were uncommitted changes."""
    branch = "" if known.branch is None else f" on {plain(known.branch)}"
    changed = " with changes" if known.dirty else ""
    return f"commit {plain((known.commit or '')[:COMMIT_DIGITS])}{branch}{changed}"


def tags(known: wire.Program) -> str:
    shown = (plain(f"{name}={given}" if given else name) for name, given in known.tags.items())
    return ", ".join(_at_most(MAX_CONFIG, shown, len(known.tags)))


def config(known: wire.Program) -> str:
    """The values of the configuration, each with its path."""
    leaves = dict(_leaves(known.config))
    return ", ".join(_at_most(MAX_CONFIG, itertools.starmap(_attr, leaves.items()), len(leaves)))


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, given in values.items():
        if isinstance(given, dict) and given:
            yield from ((f"{name}.{inner}", leaf) for inner, leaf in _leaves(given))
        else:
            yield name, given


def _counted(names: list[str]) -> tuple[list[str], int]:
    """The distinct names with their counts; and how many there are."""
    counts = collections.Counter(names)
    shown = [plain(name) if n == 1 else f"{n} x {plain(name)}" for name, n in counts.items()]
    return shown, len(shown)


class Cells(NamedTuple):
    """The text of a row: label, duration, marks, and notes."""

    label: str
    time: str
    marks: list[str]
    notes: list[str]


def cells(row: trees.Row, now_ns: int) -> Cells:
    item = row.item
    if isinstance(item, trees.Rest):
        return Cells(_rest(item), "", [], [])
    notes = ["open"] if item.is_open else []
    if row.inside is not None:
        first, last = (label(node.name, node.index) for node in row.inside)
        notes.insert(0, f"in {first}" if first == last else f"in {first} to {last}")
    if item.error is not None:
        notes.append(f"error={plain(item.error)}")
    if isinstance(item, trees.Folded):
        worst = "" if item.worst_index is None else f" [{_integer(item.worst_index)}]"
        time = (
            f"median {duration(item.median_ns)}, worst {duration(item.worst_ns)}{worst},"
            f" total {duration(item.total_ns)}"
        )
        times = [
            f"{plain(key[:-3])}: median {duration(median)}, total {duration(total)}"
            for key, (total, median) in item.times.items()
            if not key.startswith(SETTINGS)
        ]
        notes += itertools.starmap(_attr, item.traits.items())
        notes += _at_most(MAX_ATTRS, times, len(times))
        return Cells(f"{plain(item.name)} x{item.count}", time, _marks(item.marks), notes)
    attrs = {
        key: given
        for key, given in item.attrs.items()
        if key != "error" and given is not None and not key.startswith(SETTINGS)
    }
    return Cells(
        label(item.name, item.index),
        duration(item.wall_ns(now_ns)),
        _marks(trees.series([item])) if item.marks else [],
        notes + _at_most(MAX_ATTRS, itertools.starmap(_attr, attrs.items()), len(attrs)),
    )


def _join(row: Cells) -> str:
    text = f"{row.label} - {row.time}" if row.time else row.label
    if row.marks:
        text += f" {{{', '.join(row.marks)}}}"
    if row.notes:
        text += f" ({', '.join(row.notes)})"
    return text


def _rest(rest: trees.Rest) -> str:
    spans = "span" if rest.count == 1 else "spans"
    if rest.shown:
        return f"... and {rest.count} more {spans}: only {rest.shown} rows of a parent are shown"
    return f"... and {rest.count} {spans} inside, left out to keep this short"


def _marks(marks: Mapping[str, trees.Series]) -> list[str]:
    shown = (f"{plain(name)}={_series(marked)}" for name, marked in marks.items())
    return _at_most(MAX_MARKS, shown, len(marks))


def _series(marked: trees.Series) -> str:
    if marked.count == 1:
        return value(marked.last)
    ends = value(marked.first), value(marked.last)
    text = " -> ".join(ends)
    # Non-finite values in the middle do not show in the first and last value.
    if marked.nonfinite_count and not {"nan", "inf", "-inf"}.intersection(ends):
        text += f" with {marked.nonfinite_count} not finite"
    return text


def _attr(key: str, given: Any) -> str:
    if key.endswith("_ns") and isinstance(given, int):
        return f"{plain(key[:-3])}={duration(given)}"
    return f"{plain(key)}={plain(value(given), MAX_TEXT // 2)}"


def _at_most(limit: int, texts: Iterable[str], count: int) -> list[str]:
    """The first of these texts, and how many more there are. The others are not computed."""
    shown = list(itertools.islice(texts, limit))
    return shown if count <= limit else [*shown, f"{count - limit} more"]
