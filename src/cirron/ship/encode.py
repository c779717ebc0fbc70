"""Encodes records for the wire: ordinary ones in bulk by C functions, unusual ones one by one.

Python does not switch threads inside a C function, so the background thread gets enough done per
turn even if many other threads are busy.
"""

from __future__ import annotations

import array
import math
import operator
import os
import struct
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from cirron import wire
from cirron.record import attrs as attributes
from cirron.record import clock
from cirron.record.hot import MAX_NAME, Settled
from cirron.ship.texts import Texts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    Columns: TypeAlias = tuple[Any, ...]  # one list per field

# A span with more marks lists only the newest ids; every mark names its span.
MAX_MARK_IDS = 1_000

# Cached ids of parents.
MAX_PARENTS = 10_000

# Attributes with their own field in the record.
GAUGES = frozenset(("cpu_ns", "gpu_ns", "memory_peak_bytes"))

# Types that JSON has, and their names as the type of a mark's value.
TYPES = {float: "float", int: "int", bool: "bool", str: "string"}

_NO_ATTRS: dict[str, Any] = {}
_NO_MARKS: list[str] = []
_PLAIN = frozenset((str, bool, type(None)))
_SCALARS = frozenset((*TYPES, type(None)))
_INDICES = frozenset((int, type(None)))
MAX_INT = 2**63 - 1


class Encoder:
    """Makes the wire form of a process's records. A record that fails affects no other."""

    def __init__(self, anchor: clock.Anchor, rank: Callable[[], int | None]) -> None:
        self.failed = 0  # records that could not be encoded
        self.texts_made = 0
        self.asks = True  # whether `str` is called on the user's objects
        self.texts = Texts()
        self.ids = clock.ids
        self._parents: dict[int, str | None] = {0: None}  # their ids, by number
        self._offset = anchor.wall_ns - anchor.monotonic_ns
        self._rank = rank  # may become known later
        self._pid = os.getpid()

    def encoded(self, records: list[Any]) -> bytes:
        """The records as JSON, joined by commas."""
        if not records:
            return b""
        try:
            return wire.encode_records(records)
        except Exception:  # noqa: BLE001  protects the others from a record that cannot be encoded
            good = []
            for record in records:
                try:
                    good.append(wire.encode_records([record]))
                except Exception:  # noqa: BLE001  as above
                    self.failed += 1
            return b",".join(good)

    # -- spans --------------------------------------------------------------------------------

    def encoded_spans(self, columns: Columns, mark_ids: Iterable[list[str]]) -> tuple[bytes, int]:
        attrs = columns[4]
        is_plain = are_plain(values_of(attrs)) and GAUGES.isdisjoint(keys_of(attrs))
        if is_plain and are_short(mark_ids):
            try:
                # One chain of C calls, which no other thread can interrupt.
                made = self._made_spans(columns, mark_ids, filled(attrs))
                (encoded,) = map(wire.encode_list, map(list, (made,)))
            except (ValueError, OverflowError):  # a name with lone surrogates
                pass
            else:
                return encoded[1:-1], len(columns[0])
        spans = self.spans(columns, mark_ids)
        return self.encoded(spans), len(spans)

    def spans(self, columns: Columns, mark_ids: Iterable[list[str]]) -> list[wire.Span]:
        """The wire form of spans, given the ids of their marks."""
        attrs = columns[4]
        ready = [one if one.__class__ is Settled else _NO_ATTRS for one in attrs]
        spans = list(self._made_spans(columns, mark_ids, ready))
        if not are_short(mark_ids):
            for span in spans:
                if len(span.mark_ids) > MAX_MARK_IDS:
                    span.mark_ids = span.mark_ids[-MAX_MARK_IDS:]
                    span.attrs = {**span.attrs, "mark_ids": f"the newest {MAX_MARK_IDS} only"}
        return [
            span
            for span, one, given in zip(spans, attrs, ready, strict=True)
            if not one or one is given or self._filled(self._fill_span, span, one)
        ]

    def _made_spans(
        self,
        columns: Columns,
        mark_ids: Iterable[list[str]],
        attrs: Iterable[dict[str, Any]],
    ) -> Iterator[wire.Span]:
        numbers, parents, names, indices, _, starts, ends, threads = columns
        offset = repeat(self._offset)
        return map(
            wire.Span,
            hex_of(self.ids.prefix, numbers),
            names,
            map(self._parent_ids(parents).__getitem__, parents),
            indices,
            map(operator.add, starts, offset),
            map(operator.add, ends, offset),
            *repeat(repeat(None), len(GAUGES)),
            threads,
            repeat(self._pid),
            repeat(self._rank()),
            attrs,
            mark_ids,
        )

    def _parent_ids(self, parents: Iterable[int]) -> dict[int, str | None]:
        known = self._parents
        new = list(set(parents).difference(known))
        if new:
            if len(known) > MAX_PARENTS:
                known = self._parents = {0: None}
                new = list(set(parents).difference(known))
            known.update(zip(new, self.ids_of(new), strict=True))
        return known

    def _fill_span(self, span: wire.Span, attrs: dict[str, Any]) -> None:
        plain = self._plain_attrs(attrs)
        for gauge in GAUGES:
            if gauge in plain and (plain[gauge] is None or plain[gauge].__class__ is int):
                setattr(span, gauge, plain.pop(gauge))
        span.attrs = {**plain, **span.attrs}

    # -- marks --------------------------------------------------------------------------------

    def marks(self, columns: Columns, ids: list[str]) -> list[wire.Mark]:
        """The wire form of marks whose values are known."""
        _, spans, names, values, kinds, attrs, times = columns
        is_plain = None not in values and are_plain(values) and are_plain(values_of(attrs))
        made = map(
            wire.Mark,
            ids,
            self.ids_of(spans)
            if all(spans)
            else [self.ids.hex(span) if span else "root" for span in spans],
            names,
            map(TYPES.get, map(type, values)),
            values,
            filled(attrs) if is_plain else repeat(_NO_ATTRS),
            map(operator.add, times, repeat(self._offset)),
            kinds,
        )
        marks = list(made)
        if is_plain:
            return marks
        fill = self._fill_mark
        return [m for m, one in zip(marks, attrs, strict=True) if self._filled(fill, m, one)]

    def ids_of(self, numbers: Sequence[int]) -> list[str]:
        """The ids of records other than the root."""
        inherited = self.ids.inherited
        if inherited and min(numbers) <= inherited[0][0]:
            return list(map(self.ids.hex, numbers))
        return hex_of(self.ids.prefix, numbers)

    def _fill_mark(self, mark: wire.Mark, attrs: dict[str, Any] | None) -> None:
        mark.value_type, mark.value, mark.value_nonfinite = typed(mark.value)
        if attrs:
            mark.attrs = self._plain_attrs(attrs)

    # -- attributes ---------------------------------------------------------------------------

    def _filled(self, fill: Callable[[Any, Any], None], record: Any, attrs: Any) -> bool:
        try:
            fill(record, attrs)
        except Exception:  # noqa: BLE001  protects the other records from this one
            self.failed += 1
            return False
        return True

    def _plain_attrs(self, attrs: dict[str, Any]) -> dict[str, Any]:
        return {key: self.plain(value) for key, value in attrs.items()}

    def plain(self, value: Any) -> Any:
        """A settled value (`record/attrs.py`) in a form that JSON can hold."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            if value in wire.INTEGERS:
                return value
            self.texts_made += self.asks
            bits = value.bit_length()  # too many for JSON readers
            return str(value) if bits <= 256 else f"<int of {bits} bits>"
        if kind is float:
            return value if value - value == 0 else str(value)
        if kind is list:
            return [self.plain(item) for item in value]
        if kind is dict:
            return {key: self.plain(item) for key, item in value.items()}
        if kind is attributes.Foreign:
            if not self.asks:
                return attributes.name_of(value.value)
            self.texts_made += 1
            return self.texts.of(value.value)
        return value.value  # a Deferred


def span_columns(closed: list[Any]) -> tuple[list[Any], Columns]:
    """Spans, and their columns. A name or index that the program set to another type is fixed."""
    columns = transpose(closed)
    names, indices = columns[2:4]
    kinds = set(map(type, indices))
    try:
        are_names = len("".join(names)) <= MAX_NAME * len(names)
    except TypeError:
        are_names = False
    if are_names and kinds <= _INDICES and (int not in kinds or fit(filter(None, indices))):
        return closed, columns
    fixed = [(*one[:2], as_name(one[2]), as_index(one[3]), *one[4:]) for one in closed]
    return fixed, transpose(fixed)


def as_name(name: Any) -> str:
    """A valid name of a span."""
    is_text = issubclass(type(name), str)
    return str.__str__(name)[:MAX_NAME] if is_text else attributes.name_of(name)


def as_index(index: Any) -> int | None:
    """A valid index of a span, within 64 bits."""
    try:
        return max(-MAX_INT, min(operator.index(index), MAX_INT))
    except Exception:  # noqa: BLE001  protects the other records from a user's method
        return None


def transpose(records: list[Any]) -> Columns:
    """The columns of records of one kind."""
    if not records:
        return ((),) * 8
    width = len(records[0])
    fields = list(chain.from_iterable(records))  # `zip` would keep an iterator per record
    return tuple(fields[at::width] for at in range(width))


def values_of(attrs: Columns) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, filter(None, attrs))))


def keys_of(attrs: Columns) -> set[str]:
    return set().union(*filter(None, attrs))


def filled(attrs: Columns) -> Iterable[dict[str, Any]]:
    """The attributes of the records, {} for those without any."""
    return [one or _NO_ATTRS for one in attrs] if any(attrs) else repeat(_NO_ATTRS)


def are_plain(values: Collection[Any]) -> bool:
    """Whether JSON can hold all of these values unchanged."""
    kinds = set(map(type, values))
    if not kinds <= _SCALARS:
        return False
    floats = values if kinds == {float} else [one for one in values if type(one) is float]
    integers = [one for one in values if type(one) is int] if int in kinds else ()
    return all(map(math.isfinite, floats)) and fit(integers)


def fit(integers: Iterable[int]) -> bool:
    """Whether all of them fit into 64 bits, which JSON readers support."""
    try:
        array.array("q", integers)
    except OverflowError:
        return False
    return True


def are_short(mark_ids: Iterable[list[str]]) -> bool:
    """Whether no span has too many marks to list."""
    return not isinstance(mark_ids, list) or max(map(len, mark_ids), default=0) <= MAX_MARK_IDS


def hex_of(prefix: str, numbers: Sequence[int]) -> list[str]:
    """Each number as 16 hex digits after the prefix."""
    digits = struct.pack(f">{len(numbers)}Q", *numbers).hex(",", 8)
    return f"{prefix}{digits.replace(',', f',{prefix}')}".split(",") if digits else []


def weigh_all(attrs: Columns) -> int:
    """The approximate size of the settled attributes of records, in bytes."""
    values = values_of(attrs)
    texts = [one for one in values if type(one) is str]
    others = [one for one in values if type(one) in (list, dict)]
    keys = chain.from_iterable(filter(None, attrs))
    return sum(map(len, chain(keys, texts))) + sum(map(weigh, others))


def weigh(value: Any) -> int:
    """The approximate size of a settled value, in bytes."""
    kind = type(value)
    if kind is str:
        return len(value)
    if kind is dict:
        return sum(map(len, value)) + sum(map(weigh, value.values()))
    return sum(map(weigh, value)) if kind is list else 16


def typed(value: Any) -> tuple[str, Any, str | None]:
    """A mark's value on the wire: its type, the value, and the name of a non-finite value."""
    kind = value.__class__
    if kind is float:
        return ("float", value, None) if value - value == 0 else ("float", None, str(value))
    if kind is bool:
        return "bool", value, None
    if kind is int:
        return ("int", value, None) if value in wire.INTEGERS else typed(as_float(value))
    return "string", value, None


def as_float(value: int) -> float:
    """The nearest float of an integer that is too large for JSON readers."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
