"""The text of objects that only their own methods can describe: asked once, waited for a moment."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import testing
from cirron.ship import texts
from cirron.ship.texts import Texts

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 10.0


class Named:
    """Says what it is told to, and notes each call."""

    def __init__(self, text: str = "named") -> None:
        self.text = text
        self.threads: list[str] = []

    def __str__(self) -> str:
        self.threads.append(threading.current_thread().name)
        return self.text


class Blocking:
    """Its text comes when it is let go."""

    def __init__(self) -> None:
        self.calls = 0
        self.go_on = threading.Event()

    def __str__(self) -> str:
        self.calls += 1
        self.go_on.wait(PATIENCE_S)
        return "late"


@pytest.fixture
def made() -> Iterator[Texts]:
    found = Texts()
    yield found
    found.stop()


def test_on_a_thread_of_its_own(made: Texts) -> None:
    """A text is asked for on a thread of ours, not on the one that waits for it."""
    value = Named()

    assert ("named", "named") == (made.of(value), made.of(value))
    assert ["cirron-texts"] * 2 == value.threads


def test_each_object_gets_its_own_text(made: Texts) -> None:
    """Each object gets its own text, whatever came before."""
    assert [str(number) for number in range(500)] == [
        made.of(Named(str(number))) for number in range(500)
    ]


@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
)
def test_an_object_without_text_is_named_by_its_class(
    error: type[BaseException], made: Texts
) -> None:
    """An object whose text cannot be had is named by its class; the next one is asked again."""

    class Rude:
        def __str__(self) -> str:
            raise error

    assert ["<Rude>", "named", "<Rude>"] == [made.of(Rude()), made.of(Named()), made.of(Rude())]


def test_not_a_text(made: Texts) -> None:
    """What is not a str, or is a subclass that raises, is nobody's problem."""

    class Number:
        def __str__(self) -> str:
            return 7  # type: ignore[return-value]

    class Text(str):
        __slots__ = ()

        def __len__(self) -> int:
            raise SystemExit

        encode = __str__ = __len__  # type: ignore[assignment]

    class OfText:
        def __str__(self) -> str:
            return Text("text")

    assert ("<Number>", "text") == (made.of(Number()), made.of(OfText()))
    assert str is type(made.of(OfText()))


def test_text_is_cut_at_256_bytes(made: Texts) -> None:
    """A text is cut at 256 bytes, between characters."""
    assert ("x" * 256, "ü" * 128) == (made.of(Named("x" * 10**6)), made.of(Named("ü" * 10**6)))


class TestBlocking:
    def test_waited_for_a_moment(self, made: Texts) -> None:
        """An object whose text does not come is named by its class."""
        value = Blocking()
        began = time.monotonic()
        text = made.of(value)
        took_s = time.monotonic() - began
        value.go_on.set()

        assert ("<Blocking>", True) == (text, texts.WAIT_S <= took_s < 2)

    def test_its_class_is_remembered(self, made: Texts) -> None:
        """No other object of that class is asked; those of other classes are."""
        first, second = Blocking(), Blocking()
        made.of(first)
        began = time.monotonic()
        for _ in range(100):
            assert "<Blocking>" == made.of(second)
        took_s = time.monotonic() - began
        other = made.of(Named())
        first.go_on.set()

        assert (1, 0, "named", True) == (first.calls, second.calls, other, took_s < texts.WAIT_S)

    def test_its_text_is_not_taken_for_another(self, made: Texts) -> None:
        """A text that comes too late belongs to nobody else."""
        value = Blocking()
        made.of(value)
        value.go_on.set()

        assert [str(number) for number in range(50)] == [
            made.of(Named(str(number))) for number in range(50)
        ]

    def test_after_a_few_nobody_is_asked(self, made: Texts) -> None:
        """However many classes block, few threads are lost to them."""
        values = [type(f"Blocking{number}", (Blocking,), {})() for number in range(10)]
        before = set(threading.enumerate())
        found = [made.of(value) for value in values]
        lost = len(set(threading.enumerate()) - before)
        named = made.of(Named())
        for value in values:
            value.go_on.set()

        assert [f"<Blocking{number}>" for number in range(10)] == found
        assert (3, 3, "<Named>") == (sum(value.calls for value in values), lost, named)

    def test_a_class_with_a_hash_of_its_own(self, made: Texts) -> None:
        """A metaclass is not asked anything when a class is remembered."""

        class Meta(type):
            def __hash__(cls) -> int:
                raise SystemExit

            def __eq__(cls, other: object) -> bool:
                raise SystemExit

        class OfMeta(Blocking, metaclass=Meta):
            pass

        value = OfMeta()
        found = made.of(value), made.of(value)
        value.go_on.set()

        assert (("<OfMeta>", "<OfMeta>"), 1) == (found, value.calls)


def test_the_thread_ends() -> None:
    """No thread is left over, and an object is not kept alive."""
    before = set(threading.enumerate())
    made = Texts()
    made.of(Named())
    threads = set(threading.enumerate()) - before
    made.stop()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert not any(thread.is_alive() for thread in threads)
    assert "named" == made.of(Named())  # a session that goes on has a new one
    made.stop()


def test_no_more_threads(made: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter, when no thread can be started, an object is named."""

    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    assert ["<Named>"] * 3 == [made.of(Named()) for _ in range(3)]


class TestRecorded:
    def test_called_once(self) -> None:
        """However often a span is looked at, its object is asked for its text once at most."""
        value = Named()
        with testing.capture() as recorded, ci.scope("s", value=value):
            for _ in range(3):
                recorded.dict()
        recorded.dict()
        recorded.dict()

        assert {"value": "named"} == recorded.spans[0].attrs
        assert 1 == len(value.threads)

    def test_called_once_in_a_session(self) -> None:
        """Nor do the black box, `ci.trace()` and a flush ask again."""
        value = Named()
        ci.profile()
        with ci.scope("s", value=value):
            for _ in range(3):
                ci.flush()
                ci.trace(format="dict")
        ci.flush()
        ci.trace(format="dict")

        assert 1 == len(value.threads)
        assert 1 == ci.health()["attrs_as_text_count"]

    def test_one_that_blocks(self) -> None:
        """While a text does not come, `ci.flush()`, `ci.trace()` and `ci.health()` answer."""
        value = Blocking()
        ci.profile()
        began = time.monotonic()
        with ci.scope("s", value=value):
            ci.health()
            ci.trace(format="dict")
        flushed = ci.flush()
        ci.health()
        took_s = time.monotonic() - began
        value.go_on.set()
        root = ci.trace(format="dict")["roots"][0]

        assert (True, True) == (flushed.ok, took_s < 3)
        assert {"value": "<Blocking>"} == root["children"][0]["attrs"]
