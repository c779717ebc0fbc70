"""Attributes of any kind: copied when a span closes, within limits, by no method of the user's."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import pathlib
import signal
import sys
import threading
import time
import types
import uuid
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

import cirron as ci
from cirron import guard, testing
from cirron.record import attrs as attributes
from cirron.record.attrs import MAX_BYTES, MAX_ITEMS, MAX_KEY, MAX_NESTING, Foreign, settle
from cirron.record.value import Deferred

if TYPE_CHECKING:
    from collections.abc import Callable


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 1


class Wrapped(torch.Tensor):
    """A tensor without data of its own, as a DTensor or a quantized one is."""

    @staticmethod
    def __new__(cls) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("a method of the user's was called")


class Point(NamedTuple):
    x: int
    y: int


def weigh(value: Any) -> int:
    """About how many bytes a settled value takes."""
    if isinstance(value, dict):
        return sum(len(key) + weigh(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(weigh, value))
    return len(value) if isinstance(value, str) else 8


def count(value: Any) -> int:
    """How many values there are in a settled one, containers included."""
    if isinstance(value, (dict, list)):
        items = value.values() if isinstance(value, dict) else value
        return 1 + sum(map(count, items))
    return 1


def depth(value: Any) -> int:
    if isinstance(value, (dict, list)):
        items = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, items), default=0)
    return 0


def settled(value: Any) -> Any:
    return settle({"key": value})["key"]


@pytest.fixture
def counts() -> Callable[[], tuple[int, int]]:
    """How many values were stored as text, and how many were cut, since the test began."""
    as_text, cut = attributes.as_text, attributes.cut
    return lambda: (attributes.as_text - as_text, attributes.cut - cut)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (True, True),
        (2**70, 2**70),
        (0.5, 0.5),
        ("text", "text"),
        (Size.SMALL, 1),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
        ((1, (2, [3])), [1, [2, [3]]]),
        ({1: "a", None: "b", 1.5: "c"}, {"1": "a", "None": "b", "1.5": "c"}),
        (collections.OrderedDict(a=1, b=2), {"a": 1, "b": 2}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (Point(1, 2), [1, 2]),
        (collections.deque([1, 2]), [1, 2]),
        ({"a": 1}.keys(), ["a"]),
        ({"a": 1}.values(), [1]),
        ({"a": 1}.items(), [["a", 1]]),
        (types.MappingProxyType({"a": [1]}), {"a": [1]}),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_json_holds(given: Any, expected: Any, counts: Any) -> None:
    """What JSON can hold is stored as it is, of the plain types."""
    found = settled(given)

    assert (expected, repr(expected), (0, 0)) == (found, repr(found), counts())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Colour.RED, "Colour.RED"),
        (b"raw", "b'raw'"),
        (bytearray(b"raw"), "bytearray(b'raw')"),
        (b"x" * 10**6, repr(b"x" * 64)),
        (pathlib.PurePosixPath("a/b"), "a/b"),
        (datetime.date(2020, 1, 2), "2020-01-02"),
        (datetime.timedelta(days=1), "1 day, 0:00:00"),
        (decimal.Decimal("1.5"), "1.5"),
        (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (np.zeros((1_000, 1_000)), "ndarray(shape=(1000, 1000), dtype=float64)"),
        (types.SimpleNamespace(a=1, b=["x", object()]), "namespace(a=1, b=('x', <object>))"),
        (ValueError([1, {"a": b"raw"}]), "ValueError((1, (a=\"b'raw'\")))"),
        (torch.arange(3), "Tensor(shape=(3,), dtype=torch.int64, cpu)"),
        (torch.nn.Parameter(torch.ones(2)), "Parameter(shape=(2,), dtype=torch.float32, cpu)"),
        (torch.empty(3, device="meta"), "Tensor(shape=(3,), dtype=torch.float32, meta)"),
        (Wrapped(), "<Wrapped>"),
        (jax.numpy.ones(2), "ArrayImpl(shape=(2,), dtype=float32)"),
        (torch.float16, "torch.float16"),
        (torch.device("cpu"), "cpu"),
        (torch.Size([2, 3]), [2, 3]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_described(given: Any, expected: Any, counts: Any) -> None:
    """What JSON cannot hold is described at once where no method of the user's is needed."""
    found = settled(given)
    as_text, cut = counts()

    assert (expected, 0) == (found, cut)
    assert (isinstance(expected, str), isinstance(expected, str)) == (
        as_text > 0,
        as_text in (1, 2),
    )


@pytest.mark.parametrize(
    "given",
    [
        object(),
        1 + 2j,
        range(3),
        int,
        print,
        sys,
        ValueError("x"),
        np.array([object()], dtype=object),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_only_its_methods_describe(given: Any, counts: Any) -> None:
    """Anything else waits for the background thread, as it is."""
    found = settled(given)

    assert (Foreign, True) == (type(found), found.value is given)
    assert (0, 0) == counts()  # its text is counted when it is asked for


def test_what_cannot_change_is_not_copied() -> None:
    """A few plain attributes cost nothing: they are the same dict."""
    attrs = {"a": 1, "b": "x", "c": 0.5, "d": None, "e": Deferred(None)}

    assert attrs is settle(attrs)


def test_copied_when_the_span_closes() -> None:
    """What the user changes after the end of a span does not change the record."""
    items, table, buffer = [1, [2]], {"a": {"b": 1}}, bytearray(b"ab")
    array = np.arange(3)
    with testing.capture() as recorded:
        with ci.scope("s", items=items, table=table, buffer=buffer, array=array):
            items.append("inside")
        ci.mark("m", 1.0, items=items)
        items[1].append("after")  # type: ignore[attr-defined]
        items.clear()
        table["a"]["b"] = 2
        buffer[0] = 0
        array[0] = 7

    assert {
        "items": [1, [2], "inside"],
        "table": {"a": {"b": 1}},
        "buffer": "bytearray(b'ab')",
        "array": [0, 1, 2],
    } == recorded.spans[0].attrs
    assert {"items": [1, [2], "inside"]} == recorded.marks[0].attrs


class TestLimits:
    def test_long_text_is_cut_and_counted(self, counts: Any) -> None:
        """A text is cut, between characters, and counted."""
        found = settle({"short": "x" * 4_000, "long": "ü" * 10**6})

        assert (4_000, "ü" * 8_192) == (len(found["short"]), found["long"])
        assert (0, 1) == counts()

    @pytest.mark.parametrize(
        "given",
        [list(range(10**6)), tuple(range(10**6)), dict.fromkeys(range(10**6)).keys()],
        ids=["list", "tuple", "keys"],
    )
    def test_long_lists_keep_their_first_items(self, given: Any, counts: Any) -> None:
        """Of a long list the first items are kept, and a last one says how many more there are."""
        found = settled(given)

        assert list(range(900)) == found[:900]
        assert (10**6, (0, 1)) == (len(found) - 1 + more(found[-1]), counts())

    def test_large_dicts_keep_their_first_keys(self, counts: Any) -> None:
        """Of a large dict the first keys are kept, and one more says how many there are."""
        found = settled({number: number for number in range(10**6)})

        assert {str(number): number for number in range(900)}.items() <= found.items()
        assert (10**6, (0, 1)) == (len(found) - 1 + more("... " + found["..."]), counts())

    def test_attributes_of_a_record_are_limited_in_number(self) -> None:
        """A record has a limit for its attributes together."""
        attrs: dict[str, Any] = {f"a{number}": [number] for number in range(5_000)}
        found = settle(attrs)

        assert attrs.items() >= {key: found[key] for key in list(found)[:400]}.items()
        assert (True, True) == (len(found) <= MAX_ITEMS + 1, "more" in found["..."])

    @pytest.mark.parametrize(
        "given",
        [
            ["x" * 16_000] * 1_000,
            {str(number): "x" * 16_000 for number in range(1_000)},
            [["x" * 100] * 100] * 100,
            {"k" * 200 + str(number): 1 for number in range(1_000)},
            [b"x" * 1_000] * 1_000,
            [[object()] * 100] * 100,
        ],
        ids=["texts", "values", "lists", "keys", "bytes", "objects"],
    )
    def test_attributes_of_a_record_are_limited_in_bytes(self, given: Any) -> None:
        """However they are put together, the attributes of a record have a limit in bytes."""
        found = settle({"key": given, "next": "x" * 100_000})

        assert weigh(found) < 1.5 * MAX_BYTES
        assert count(found) <= MAX_ITEMS + 100

    def test_deep_nesting_ends_in_dots(self) -> None:
        """What is nested too deep ends in dots."""
        given: Any = "leaf"
        for _ in range(100_000):
            given = [given]
        found = settled(given)

        assert MAX_NESTING == depth(found)
        assert repr(["[...]"]) in repr(found)
        while isinstance(given, list):  # or its end would recurse
            given = given.pop()

    @pytest.mark.parametrize(
        "make", [lambda x: [x, x], lambda x: (x, x), lambda x: {"a": x, "b": x}]
    )
    def test_exponential_nesting_is_not_expanded(self, make: Any) -> None:
        """What is small in memory and endless when expanded is neither expanded nor waited for."""
        given: Any = 1
        for _ in range(60):
            given = make(given)
        began = time.monotonic()
        found = settled(given)

        assert count(found) <= 2 * MAX_ITEMS
        assert (MAX_NESTING, True) == (depth(found), time.monotonic() - began < 1)

    @pytest.mark.parametrize(
        "make",
        [
            lambda x: collections.deque([x, x]),
            lambda x: types.SimpleNamespace(a=x, b=x),
            lambda x: types.MappingProxyType({"a": x, "b": x}),
            lambda x: {"a": x, "b": x}.values(),
            lambda x: {"a": x, "b": x}.items(),
            ValueError,
            lambda x: ValueError(x, [x, x]),
            lambda x: KeyError(x, x),
        ],
    )
    def test_shared_where_c_makes_the_text(self, make: Any) -> None:
        """The text of such a value would be endless, and hold the interpreter lock all the time."""
        given: Any = [[1]]
        for _ in range(60):
            given = make([given, given])
        began = time.monotonic()
        found = settled(given)

        assert count(found) <= 2 * MAX_ITEMS
        assert (True, True) == (weigh(found) < MAX_BYTES, time.monotonic() - began < 1)

    def test_an_exception_that_holds_much(self) -> None:
        """An exception that leaves a scope is described within limits, and passes as it is."""
        given: Any = [1]
        for _ in range(60):
            given = [given, given]
        error = ValueError(given)
        began = time.monotonic()
        with (
            testing.capture() as recorded,
            pytest.raises(ValueError, check=lambda raised: raised is error),
            ci.scope("s"),
        ):
            raise error

        assert recorded.spans[0].attrs["error"].startswith("ValueError: ((((")
        assert (True, True) == (
            len(recorded.spans[0].attrs["error"]) <= 256,
            time.monotonic() - began < 1,
        )

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (ValueError("text"), "ValueError: text"),
            (ValueError(), "ValueError"),
            (KeyError("k"), "KeyError: 'k'"),
            (
                OSError(2, "No such file", "a.txt"),
                "FileNotFoundError: [Errno 2] No such file: 'a.txt'",
            ),
            (ValueError("shapes", (1, 2)), "ValueError: ('shapes', (1, 2))"),
        ],
        ids=lambda given: repr(given).partition(" at 0x")[0],
    )
    def test_usual_exceptions(self, error: Exception, expected: str) -> None:
        """The usual exceptions read as they always did."""
        with testing.capture() as recorded, pytest.raises(type(error)), ci.scope("s"):
            raise error

        assert {"error": expected} == recorded.spans[0].attrs

    def test_cycles_end(self) -> None:
        """What holds itself comes to an end."""
        items: list[Any] = [1]
        items.append(items)
        table: dict[str, Any] = {"items": items}
        table["self"] = table

        assert MAX_NESTING == depth(settled(items)) == depth(settled(table))

    @pytest.mark.parametrize(
        ("key", "expected"),
        [
            ("k" * 10**6, "k" * MAX_KEY),
            ("ü" * 10**6, "ü" * (MAX_KEY // 2)),
            (1.5, "1.5"),
            (None, "None"),
            ((1, 2), "<tuple>"),
            (b"raw", "<bytes>"),
            (np.str_("text"), "text"),
        ],
        ids=lambda given: repr(given)[:10],
    )
    def test_keys_become_short_text(self, key: Any, expected: str) -> None:
        """A key is a short text; what is none is named by its class."""
        assert {expected: 1} == settled({key: 1})
        if isinstance(key, str):
            assert {expected: [1]} == settle({key: [1]})
            assert {expected: 1} == settle({key: 1})


def more(text: str) -> int:
    assert text.startswith("... ")
    assert text.endswith(" more")
    return int(text[4:-5])


METHODS = (
    "__bool__",
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
    "encode",
    "items",
    "keys",
    "tolist",
)


class Called(BaseException):
    """A method of the user's was called."""


def refuse(*_: Any, **__: Any) -> Any:
    raise Called


class TestMethodsOfTheUser:
    """None is called while the user's thread waits."""

    @pytest.mark.parametrize(
        ("base", "given", "expected"),
        [
            (str, "text", "text"),
            (int, 7, 7),
            (float, 0.5, 0.5),
            (list, [1, 2], [1, 2]),
            (tuple, (1, 2), [1, 2]),
            (dict, {"a": 1}, {"a": 1}),
            (collections.OrderedDict, {"a": 1}, {"a": 1}),
            (collections.deque, [1, 2], [1, 2]),
            (bytes, b"raw", "b'raw'"),
            (bytearray, b"raw", "bytearray(b'raw')"),
        ],
        ids=lambda given: getattr(given, "__name__", ""),
    )
    def test_subclasses_are_read_with_built_in_methods(
        self, base: type, given: Any, expected: Any
    ) -> None:
        """A subclass of a built-in type is read by the methods of that type."""
        plain = type("Plain", (base,), {})(given)
        rude = type("Rude", (base,), {})(given)
        for name in METHODS:
            setattr(type(rude), name, refuse)

        assert (expected, type(expected)) == (settled(plain), type(settled(plain)))
        assert (expected, type(expected)) == (settled(rude), type(settled(rude)))
        assert {"key": [expected]} == settle({"key": [rude]})

    def test_methods_of_other_classes_are_not_called(self) -> None:
        """An object of another class is not asked anything."""
        rude = type("Rude", (), dict.fromkeys(METHODS, refuse))()

        assert Foreign is type(settled(rude))
        assert {"<Rude>": 1} == settled({rude_key(): 1})

    def test_what_an_object_says_of_its_class(self) -> None:
        """`__class__` may lie, or raise."""
        liar = type("Liar", (), {"__class__": property(lambda self: dict)})()
        rude = type("Rude", (), {"__class__": property(refuse)})()

        assert (Foreign, Foreign) == (type(settled(liar)), type(settled(rude)))

    @pytest.mark.parametrize(
        "method",
        ["__getattribute__", "__hash__", "__eq__", "__instancecheck__", "__subclasscheck__"],
    )
    def test_methods_of_metaclasses_are_not_called(self, method: str) -> None:
        """Nor are the methods of a class's class called."""
        body: dict[str, Any] = {method: refuse}
        if method == "__eq__":
            body["__hash__"] = lambda cls: hash(str)  # so that it is asked
        meta = type("Meta", (type,), body)
        rude = type.__call__(meta, "Rude", (), {})

        for given in (object.__new__(rude), rude, [object.__new__(rude)]):
            found = settled(given)
            assert Foreign is type(found[0] if isinstance(found, list) else found)

    def test_keys_of_a_call(self) -> None:
        """`ci.scope("s", **{key: 1})` takes keys that are subclasses of str."""
        key = type("Key", (str,), {"__len__": refuse})("label")
        with testing.capture() as recorded, ci.scope("s", **{key: 1}):
            pass

        assert {"label": 1} == recorded.spans[0].attrs
        assert str is type(next(iter(settle({key: 1}))))

    def test_dead_weak_proxies_do_no_harm(self) -> None:
        """A weak reference whose object is gone raises whatever is done with it."""

        class Thing:
            pass

        dead = weakref.proxy(Thing())
        with testing.capture() as recorded:
            for number in range(10):
                with ci.scope("s", index=number, value=dead if number == 5 else number):
                    pass

        assert list(range(10)) == [span.index for span in recorded.spans]
        assert {"value": "<ProxyType>"} == recorded.spans[5].attrs


def rude_key() -> Any:
    """Can be a key, and nothing else."""
    rude = type("Rude", (), {**dict.fromkeys(METHODS, refuse), "__hash__": lambda self: 7})
    return rude()


def test_changed_by_another_thread() -> None:
    """A container that other threads change all the time is recorded as it was at some moment."""
    table: dict[int, int] = {}
    items: list[int] = []
    done = threading.Event()

    def change() -> None:
        number = 0
        while not done.is_set():
            number += 1
            table[number % 500] = number
            table.pop((number + 250) % 500, None)
            items.append(number)
            if len(items) > 500:
                items.clear()

    threads = [threading.Thread(target=change) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with testing.capture() as recorded:
            for _ in range(300):
                with ci.scope("s", table=table, items=items):
                    pass
    finally:
        done.set()
        for thread in threads:
            thread.join()

    assert 300 == len(recorded.spans)
    assert {"dict", "list", "str"} >= {
        type(value).__name__ for span in recorded.spans for value in span.attrs.values()
    }
    assert {"<dict>", "<list>"} >= {
        value for span in recorded.spans for value in span.attrs.values() if type(value) is str
    }


def test_ctrl_c_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C that comes while attributes are copied is not swallowed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attributes.Copier, "_sequence", interrupt)
    with pytest.raises(KeyboardInterrupt):
        settle({"key": [1]})


def test_scopes_keep_the_limits() -> None:
    """A scope with too many attributes, or one with a long name, is cut as any other."""
    with testing.capture() as captured:
        with ci.scope("many", **{f"key{number}": number for number in range(10**4)}):
            pass
        with ci.scope("long", **{"k" * 10**5: 1}):
            pass
    many, long = captured.spans

    assert (MAX_ITEMS + 1, "9000 more") == (len(many.attrs), many.attrs["..."])
    assert {"k" * MAX_KEY: 1} == long.attrs


def test_a_signal_handler_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal handler raises while attributes are copied is the program's, not swallowed."""

    def limit(*_: object) -> None:
        raise TimeoutError

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(attributes.Copier, "_sequence", interrupt)
    monkeypatch.setattr(guard, "strict", False)
    before = signal.signal(signal.SIGALRM, limit)
    try:
        for attrs in ({"key": [1]}, {"key": ValueError([1])}):
            with pytest.raises(TimeoutError):
                settle(attrs)
        with pytest.raises(TimeoutError):
            attributes.describe_error(ValueError, ValueError([1]), 100)
        with pytest.raises(TimeoutError), guard.quiet("test"):
            signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_preview_counts_nothing(counts: Any) -> None:
    """What the black box sees of an open span is counted when the span closes."""
    attributes.preview({"a": list(range(10**4)), "b": b"raw"})

    assert (0, 0) == counts()
