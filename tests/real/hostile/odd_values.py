"""Values that a user may pass as attributes, and that hurt whoever looks at them carelessly.

`GROUPS` maps a name to a function that makes `(label, value)` pairs. Scripts of the tests import
this module in a process of their own.
"""

from __future__ import annotations

import array
import asyncio
import collections
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import sys
import threading
import types
import unittest.mock
import uuid
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Labelled = list[tuple[str, Any]]


class Elusive(BaseException):
    """An exception that does not let itself be asked what it is, or where it was raised."""

    @property  # type: ignore[misc]  # that is the point
    def __class__(self) -> Any:
        raise ZeroDivisionError("class")

    @property
    def __traceback__(self) -> Any:  # type: ignore[override]  # as above
        raise ZeroDivisionError("traceback")


ERRORS: dict[str, type[BaseException]] = {
    "Exception": Exception,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "GeneratorExit": GeneratorExit,
    "Elusive": Elusive,
}
BASES: tuple[type, ...] = (object, list, dict, str, int, float, tuple, set, bytes)
METHODS = (
    "__bool__",
    "__class__",
    "__contains__",
    "__eq__",
    "__float__",
    "__format__",
    "__getattribute__",
    "__getitem__",
    "__hash__",
    "__index__",
    "__int__",
    "__iter__",
    "__len__",
    "__repr__",
    "__str__",
    "copy",
    "encode",
    "isoformat",
    "item",
    "items",
    "keys",
    "tolist",
)
# Set it to let everything go on that blocks.
gate = threading.Event()
FILLED: dict[type, Any] = {
    list: [1, 2],
    dict: {"a": 1},
    str: "text",
    int: 7,
    float: 0.5,
    tuple: (1, 2),
    set: {1, 2},
    bytes: b"raw",
}


def broken(base: type, methods: tuple[str, ...], act: Callable[[], Any]) -> Any:
    """An instance of a subclass, some of whose methods only `act`."""

    def method(self: Any, *args: Any, **named: Any) -> Any:
        return act()

    body: dict[str, Any] = dict.fromkeys(methods, method)
    if "__class__" in body:
        body["__class__"] = property(method)
    if "__eq__" in body:
        body.setdefault("__hash__", object.__hash__)
    made = type(f"Broken{base.__name__.title()}", (base,), body)
    return made(FILLED[base]) if base in FILLED else made()


def raising(kind: str) -> Labelled:
    """Each method of each base raises; then all of them at once, and those of a class's class."""

    def act() -> Any:
        raise ERRORS[kind](kind)

    found = [
        (f"{base.__name__} with {method}", broken(base, (method,), act))
        for base in BASES
        for method in METHODS
    ]
    found += [(f"{base.__name__} with all", broken(base, METHODS, act)) for base in BASES]

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise ERRORS[kind](kind)

        def __instancecheck__(cls, instance: object) -> bool:
            raise ERRORS[kind](kind)

    class OfMeta(metaclass=Meta):
        def __repr__(self) -> str:
            raise ERRORS[kind](kind)

    zone = broken(datetime.tzinfo, ("utcoffset", "tzname", "dst"), act)
    found.append(("a time with a zone that raises", datetime.datetime(2020, 1, 2, tzinfo=zone)))
    found.append(("a class whose class raises", OfMeta))
    found.append(("an instance of a class whose class raises", OfMeta()))
    return found


def blocking() -> Labelled:
    """Each method waits until the gate opens, as a lock or a network would make it."""

    def act() -> Any:
        gate.wait(30)
        return NotImplemented

    bases = (object, list, dict, str)
    methods = ("__class__", "__iter__", "__len__", "__repr__", "__str__", "items", "keys")
    found = [
        (f"{base.__name__} with {method}", broken(base, (method,), act))
        for base in bases
        for method in methods
    ]
    found += [(f"{base.__name__} with all", broken(base, METHODS, act)) for base in bases]
    # What the text of a time asks, and a class that only says whose it is.
    zone = broken(datetime.tzinfo, ("utcoffset",), act)
    found.append(("a time with a zone", datetime.datetime(2020, 1, 2, tzinfo=zone)))
    forged = broken(decimal.Decimal, ("__str__", "__repr__"), act)
    type(forged).__module__ = "decimal"
    return [*found, ("a class with a false module", forged)]


def cyclic() -> Labelled:
    """Containers that hold themselves."""
    own_list: list[Any] = [1]
    own_list.append(own_list)
    own_dict: dict[str, Any] = {"a": 1}
    own_dict["self"] = own_dict
    own_tuple = ([],)  # type: ignore[var-annotated]
    own_tuple[0].append(own_tuple)
    wide: list[Any] = []
    wide += [wide] * 1_000
    one: list[Any] = []
    other: dict[str, Any] = {"one": one}
    one.append(other)
    queue: collections.deque[Any] = collections.deque()
    queue.append(queue)
    ordered: collections.OrderedDict[str, Any] = collections.OrderedDict()
    ordered["self"] = ordered
    user: collections.UserDict[str, Any] = collections.UserDict()
    user["self"] = user
    space = types.SimpleNamespace()
    space.self = space
    return [
        ("a list", own_list),
        ("a dict", own_dict),
        ("a tuple", own_tuple),
        ("a thousand times itself", wide),
        ("a list in a dict in the list", one),
        ("a deque", queue),
        ("an ordered dict", ordered),
        ("a UserDict", user),
        ("a namespace", space),
    ]


def shared() -> Labelled:
    """Containers that are small in memory, and 2^40 items when expanded; and very deep ones."""
    lists: Any = [1]
    dicts: Any = {"leaf": 1}
    tuples: Any = (1,)
    mixed: Any = "leaf"
    for _ in range(40):
        lists = [lists, lists]
        dicts = {"left": dicts, "right": dicts}
        tuples = (tuples, tuples)
        mixed = [mixed, {"it": mixed}, (mixed,)]
    wide: Any = list(range(1_000))
    for _ in range(6):
        wide = [wide] * 1_000
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    deep_dict: Any = {}
    for _ in range(100_000):
        deep_dict = {"in": deep_dict}
    return [
        ("lists", lists),
        ("dicts", dicts),
        ("tuples", tuples),
        ("mixed", mixed),
        ("1,000 to the seventh", wide),
        ("100,000 lists deep", deep),
        ("100,000 dicts deep", deep_dict),
        ("1,000 long texts", ["x" * 16_000] * 1_000),
        ("a long key", {"k" * 10_000_000: 1}),
    ]


def large() -> Labelled:
    """A million items, or 50 MB."""
    million = range(1_000_000)
    return [
        ("a list", list(million)),
        ("a tuple", tuple(million)),
        ("a dict", dict.fromkeys(million, 1)),
        ("a set", set(million)),
        ("a frozenset", frozenset(million)),
        ("a deque", collections.deque(million)),
        ("an array", array.array("d", million)),
        ("a range", range(10**15)),
        ("text", "x" * 50_000_000),
        ("text that is not ASCII", "\N{SNOWMAN}" * 17_000_000),
        ("bytes", b"\xff" * 50_000_000),
        ("a bytearray", bytearray(50_000_000)),
        ("a memoryview", memoryview(b"\0" * 50_000_000)),
        ("an int", 1 << 10_000_000),
        ("a decimal", decimal.Decimal(10) ** 999_999),
        ("a fraction", fractions.Fraction(1, 3 << 1_000_000)),
    ]


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 1


class Words(str):
    __slots__ = ()


class Table(dict[str, int]):
    """Its contents are elsewhere."""

    def keys(self) -> Any:
        return ["not there"]

    def __getitem__(self, key: str) -> int:
        raise KeyError(key)


class Dead:
    """Something to point at."""


def dead_proxy() -> Any:
    return weakref.proxy(Dead())


def ordinary() -> Labelled:
    """What users pass without a thought."""

    def words() -> Iterator[str]:
        yield "never asked for"
        raise AssertionError("somebody ran the user's generator")

    lock = threading.Lock()
    lock.acquire()
    raising_default: Any = collections.defaultdict(lambda: 1 / 0, a=1)
    return [
        ("a dead proxy", dead_proxy()),
        ("a list with a dead proxy", [1, dead_proxy()]),
        ("an enum", Colour.RED),
        ("an IntEnum", Size.SMALL),
        ("a str subclass", Words("w")),
        ("a dict subclass", Table(a=1)),
        ("a path", pathlib.Path("some/where")),
        ("a time", datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC)),
        ("a timedelta", datetime.timedelta(days=1)),
        ("a generator", words()),
        ("an iterator", iter([1, 2])),
        ("a map", map(print, ["somebody ran the user's iterator"])),
        ("nan", float("nan")),
        ("infinity", float("-inf")),
        ("a huge int", 10**400),
        ("a lone surrogate", "a\ud800b"),
        ("bytes as text", b"\xff\xfe".decode("utf-8", "surrogateescape")),
        ("NUL", "a\0b"),
        ("control characters", "\x1b[31mred\x07\x9b\u202e"),
        ("keys of all kinds", {1: 1, None: 2, (1, 2): 3, "\ud800": 4, b"b": 5, 1.5: 6}),
        ("keys that read the same", {1: "int", "1": "str"}),
        ("bytes", b"raw\0"),
        ("a complex", 1 + 2j),
        ("a signalling NaN", decimal.Decimal("sNaN")),
        ("a uuid", uuid.UUID(int=7)),
        ("a mapping proxy", types.MappingProxyType({"a": 1})),
        ("a chain map", collections.ChainMap({"a": 1})),
        ("a defaultdict", raising_default),
        ("a mock", unittest.mock.MagicMock()),
        ("a module", sys),
        ("a class", Dead),
        ("a function", dead_proxy),
        ("an exception", ValueError("\ud800")),
        ("a frame", sys._getframe()),
        ("a held lock", lock),
        ("a closed file", io.StringIO()),
        ("a thread", threading.current_thread()),
        ("Ellipsis", ...),
        ("NotImplemented", NotImplemented),
        ("a slice", slice(1, 2)),
    ]


def arrays() -> Labelled:
    """Arrays and tensors, small and large."""
    import numpy as np
    import torch

    holder = np.empty(3, dtype=object)
    holder[0] = dead_proxy()
    holder[1] = holder
    return [
        ("a NumPy array", np.arange(10)),
        ("ten million numbers", np.zeros(10_000_000)),
        ("an array of objects", holder),
        ("a NumPy scalar", np.float32(0.5)),
        ("a NumPy text", np.str_("text")),
        ("a thousand long doubles", np.ones(1_000, dtype=np.longdouble)),
        ("a complex long double", np.clongdouble(1)),
        ("a thousand texts of 1 MB", np.zeros(1_000, dtype="U250000")),
        ("a NaT", np.datetime64("NaT")),
        ("a record array", np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])),
        ("a tensor", torch.arange(10)),
        ("ten million in a tensor", torch.zeros(10_000_000)),
        ("a tensor with grad", torch.ones(3, requires_grad=True)),
        ("a meta tensor", torch.empty(3, device="meta")),
        ("a sparse tensor", torch.eye(3).to_sparse()),
        ("a dtype", torch.float32),
        ("a module", torch.nn.Linear(2, 2)),
        ("a list of tensors", [torch.zeros(1_000)] * 1_000),
    ]


GROUPS: dict[str, Callable[[], Labelled]] = {
    **{kind: lambda kind=kind: raising(kind) for kind in ERRORS},  # type: ignore[misc]
    "blocking": blocking,
    "cyclic": cyclic,
    "shared": shared,
    "large": large,
    "ordinary": ordinary,
    "arrays": arrays,
}
