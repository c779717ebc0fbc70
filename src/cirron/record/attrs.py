"""Copies attributes of any type when a span closes. Runs on the user's thread.

Mutable values are copied, within limits on depth, items and bytes. No method of the user's classes
is called: `type` gives the class, and containers are read with the methods of their built-in base.
Other objects are kept as `Foreign`, and a background thread calls `str` on them.
"""

from __future__ import annotations

import sys
from collections import deque
from itertools import islice

from cirron.guard import TRACE
from cirron.record.value import Deferred, clip, is_for_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MAX_NESTING = 6
MAX_ITEMS = 1_000  # in all containers of a record together
MAX_TEXT_BYTES = 16_384  # of one string
MAX_BYTES = 65_536  # of all attributes of a record, approximately
MAX_KEY = 256  # characters; strings up to this length need no further check
MAX_IN_TEXT = 20  # items of a set
MAX_FEW = 32  # up to this many short attributes need no further check

FIXED: set[type] = {str, int, float, bool, type(None), Deferred}  # and subclasses of Deferred
PLAIN_KEYS = frozenset((int, float, bool, type(None)))
# How a value of a subclass is read: enums that are numbers or texts, np.float64, np.str_.
SCALARS: dict[type, Any] = {bool: bool, int: int.__int__, float: float.__float__, str: str.__str__}
# Not from `types`, which would have to be imported.
FunctionType = type(lambda: None)
MappingProxyType = type(type.__dict__)
SimpleNamespace = type(sys.implementation)
VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
SEQUENCES: tuple[Any, ...] = (list, tuple, deque, *VIEWS)

# Values of these modules are immutable, and `str` of them calls no user code, except of a time with
# a user-defined time zone.
SAFE_MODULES = frozenset(
    ("datetime", "decimal", "enum", "fractions", "ipaddress", "pathlib", "uuid", "zoneinfo")
)
NUMPY = frozenset(("numpy",))
TORCH = frozenset(("torch", "torch.nn.parameter"))
JAX = frozenset(("jaxlib._jax", "jaxlib.xla_extension"))

# Attributes of a class, bypassing its metaclass:
NAME: Callable[[type], str] = type.__dict__["__name__"].__get__
MODULE: Callable[[type], Any] = type.__dict__["__module__"].__get__
# Arguments of an exception, bypassing its class:
ARGS: Callable[[BaseException], tuple[Any, ...]] = BaseException.__dict__["args"].__get__

as_text = 0  # values recorded as text, because JSON has no such type
cut = 0  # values that were shortened


class Foreign:
    """An object whose text is not known yet; see `ship/texts.py`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def settle(attrs: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a record as they are now: the same dict if all values are immutable."""
    global as_text, cut
    if type(attrs) is dict and len(attrs) <= MAX_FEW:
        for key in attrs:  # without the call of items()
            if type(key) is not str or len(key) > MAX_KEY:
                break
            value = attrs[key]
            kind = type(value)
            if kind is str:
                if len(value) > MAX_KEY:
                    break
            elif kind is int or kind is float or kind is bool or value is None:
                pass
            elif not is_fixed(kind):
                break
        else:
            return attrs
    copier = Copier()
    settled = copier.attrs(attrs)
    as_text += copier.as_text
    cut += copier.cut
    return settled


def is_fixed(kind: type) -> bool:
    """Whether values of this class are immutable. Does not call `__hash__` of a metaclass."""
    return type(kind) is type and kind in FIXED


def is_of(kind: type, modules: frozenset[str]) -> bool:
    """Whether a class is really defined in one of these modules."""
    module = MODULE(kind)
    is_named = type(module) is str and module in modules
    return is_named and vars(sys.modules[module]).get(NAME(kind)) is kind


def preview(attrs: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an open span; counters are updated only when it closes."""
    return Copier().attrs(attrs)


def name_of(value: object) -> str:
    """`<ClassName>`, for a value that cannot be described otherwise."""
    return f"<{clip(NAME(type(value)))}>"


def describe_error(kind: type[BaseException], error: BaseException | None, limit: int) -> str:
    """`Class: text` of an exception, whose `__str__` may raise anything."""
    try:
        text = "" if error is None else str.__str__(text_of(error))
    except BaseException as raised:  # protects the run from a user's method
        trace = TRACE(raised)
        is_just_now = trace is None or trace.tb_next is None  # else `__str__` itself raised it
        if is_just_now if issubclass(type(raised), KeyboardInterrupt) else is_for_program(raised):
            raise
        text = ""
    name = NAME(kind)
    return clip(f"{name}: {text[:limit]}" if text else name, limit)


def text_of(error: BaseException) -> str:
    """The text of an exception, within limits."""
    return str(error) if is_short(error) else show(Copier().value(ARGS(error), 0))


def is_short(error: BaseException) -> bool:
    """Whether it defines `__str__`, or its arguments are only strings and numbers."""
    has_own = type(type.__getattribute__(type(error), "__str__")) is FunctionType
    return has_own or all(type(arg) is str or is_fixed(type(arg)) for arg in ARGS(error))


class Copier:
    """Copies one record's attributes, until a limit is reached."""

    __slots__ = ("as_text", "bytes", "cut", "items")

    def __init__(self) -> None:
        self.as_text = 0
        self.cut = 0
        self.items = MAX_ITEMS
        self.bytes = MAX_BYTES

    def attrs(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """All attributes of a record, which share the limits."""
        if not issubclass(type(attrs), dict):  # assigned by the program
            attrs = {"attrs": attrs}
        found: dict[str, Any] = {}
        for key, value in dict.items(attrs):
            if len(found) == MAX_ITEMS:
                found["..."] = f"{dict.__len__(attrs) - MAX_ITEMS} more"
                self.cut += 1
                break
            found[self._key(key)] = self.value(value, 0)
        return found

    def value(self, value: Any, nesting: int) -> Any:
        """The value, a copy of it, or a `Foreign`; never raises because of the value."""
        kind = type(value)
        if kind is str:
            return self._string(value)
        if is_fixed(kind):
            self.bytes -= 8
            return value
        try:
            return self._other(value, kind, nesting)
        except BaseException as error:  # protects the run: another thread may change a list
            if is_for_program(error):
                raise
            return self._text(name_of(value))

    def _other(self, value: Any, kind: type, nesting: int) -> Any:
        if issubclass(kind, Deferred):
            FIXED.add(kind)
            return value
        for base, read in SCALARS.items():
            if issubclass(kind, base):
                return self.value(read(value), nesting)
        if issubclass(kind, dict):
            if nesting >= MAX_NESTING:
                return self._text("{...}")
            return self._mapping(value, nesting + 1)
        for sequence in SEQUENCES:
            if issubclass(kind, sequence):
                if nesting >= MAX_NESTING:
                    return self._text("[...]")
                items, count = sequence.__iter__(value), sequence.__len__(value)
                return self._sequence(items, count, nesting + 1)
        for group in (set, frozenset):
            if issubclass(kind, group):
                items, more = group.__iter__(value), group.__len__(value) - MAX_IN_TEXT
                shown = [show(self.value(item, nesting + 1)) for item in islice(items, MAX_IN_TEXT)]
                shown += [f"... {more} more"] if more > 0 else []
                return self._text(f"{{{', '.join(shown)}}}")
        for raw in (bytes, bytearray):
            if issubclass(kind, raw):
                return self._text(repr(raw(raw.__getitem__(value, slice(64)))))
        # `str` of these runs in C and holds the GIL until it is done.
        if kind is MappingProxyType:
            from gc import get_referents

            return self.value(get_referents(value)[0], nesting)
        if issubclass(kind, SimpleNamespace):
            inside = object.__getattribute__(value, "__dict__")
            return self._text(f"namespace{show(self.value(inside, nesting))}")
        if issubclass(kind, BaseException) and not is_short(value):
            return self._text(f"{NAME(kind)}{show(self.value(ARGS(value), nesting))}")
        if is_of(kind, SAFE_MODULES):
            zone = getattr(value, "tzinfo", None)
            if zone is not None and not is_of(type(zone), SAFE_MODULES):
                return Foreign(value)
            return self._text(str(value))
        enum = sys.modules.get("enum")
        if enum is not None and issubclass(kind, enum.Enum):
            return self._text(f"{NAME(kind)}.{object.__getattribute__(value, '_name_')}")
        if is_of(kind, NUMPY):
            return self._array(value, kind, nesting)
        if is_of(kind, TORCH):
            return self._tensor(value, kind)
        if is_of(kind, JAX) and hasattr(kind, "shape"):  # `str` would wait for the device
            return self._text(f"{NAME(kind)}(shape={value.shape}, dtype={value.dtype})")
        # `str` of other tensors may wait for a device or other ranks, and a thread that is in torch
        # when the process exits can crash it.
        if issubclass(kind, getattr(sys.modules.get("torch"), "Tensor", ())):
            return self._text(name_of(value))
        self.bytes -= 64
        return Foreign(value)

    def _mapping(self, value: dict[Any, Any], nesting: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        left = dict.__len__(value)
        for key, item in dict.items(value):
            if not self._take():
                found["..."] = f"{left} more"
                break
            found[self._key(key)] = self.value(item, nesting)
            left -= 1
        return found

    def _sequence(self, items: Iterable[Any], left: int, nesting: int) -> list[Any]:
        found: list[Any] = []
        for item in items:
            if not self._take():
                found.append(f"... {left} more")
                break
            found.append(self.value(item, nesting))
            left -= 1
        return found

    def _take(self) -> bool:
        """Whether there is room for one more item."""
        if self.items > 0 and self.bytes > 0:
            self.items -= 1
            return True
        self.cut += 1
        return False

    def _string(self, text: str) -> str:
        room = min(MAX_TEXT_BYTES, max(self.bytes, 64))
        if len(text) * 4 > room:
            short = clip(text, room)
            self.cut += len(short) < len(text)
            text = short
        self.bytes -= len(text)
        return text

    def _text(self, text: str) -> str:
        """A description in place of the value."""
        self.as_text += 1
        self.bytes -= len(text)
        return clip(text)

    def _key(self, key: Any) -> str:
        kind = type(key)
        if issubclass(kind, str):
            key = str.__str__(key)
            name = clip(key, MAX_KEY)
            self.cut += len(name) < len(key)
        else:
            is_plain = type(kind) is type and kind in PLAIN_KEYS
            name = str(key) if is_plain else name_of(key)
        self.bytes -= len(name)
        return name

    def _array(self, value: Any, kind: type, nesting: int) -> Any:
        """A NumPy scalar or array: its values if there are few, else shape and dtype."""
        if not hasattr(kind, "tolist") or value.dtype.hasobject:
            return Foreign(value)
        if value.dtype.kind in "mM" and value.ndim == 0:  # a time
            return self._text(str(value))
        if value.size <= MAX_ITEMS and value.nbytes <= 4 * MAX_BYTES:
            plain = value.tolist()
            # `tolist` returns a long double unchanged.
            return self._text(str(plain)) if type(plain) is kind else self.value(plain, nesting)
        return self._text(f"{kind.__name__}(shape={value.shape}, dtype={value.dtype})")

    def _tensor(self, value: Any, kind: type) -> Any:
        """The shape of a torch tensor: its values may not be computed yet."""
        if kind.__name__ not in ("Tensor", "Parameter"):  # dtype, device, Size: immutable
            return self._text(str(value))
        shape = tuple(value.shape)
        return self._text(f"{kind.__name__}(shape={shape}, dtype={value.dtype}, {value.device})")


def show(value: Any) -> str:
    """The text of a settled value."""
    kind = type(value)
    if kind is list:
        return f"({', '.join(map(show, value))})"
    if kind is dict:
        return f"({', '.join([f'{key}={show(item)}' for key, item in value.items()])})"
    return name_of(value.value) if kind is Foreign else repr(value)
