"""Marks and attributes: every value that may come, and what becomes of it."""

from __future__ import annotations

import datetime
import enum
import fractions
import json
import math
import threading
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import cirron as ci
from cirron import testing, wire
from cirron.record import attrs as attributes
from cirron.record import value as values

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 10.0


@pytest.fixture
def recorded() -> Iterator[testing.Captured]:
    with testing.capture() as captured:
        yield captured


class Phase(str, enum.Enum):  # noqa: UP042  the older spelling, whose str() is its name
    WARM = "warm-up"


class Level(enum.IntEnum):
    HIGH = 3


class DeviceScalar:
    """A value that a device computes: `.item()` waits for it."""

    def __init__(self, value: Any = 0.5) -> None:
        self.value = value
        self.is_done = threading.Event()
        self.asked_by: list[int] = []

    def item(self) -> Any:
        self.asked_by.append(threading.get_ident())
        assert self.is_done.wait(PATIENCE_S)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class TestValues:
    @pytest.mark.parametrize(
        ("given", "value_type", "expected"),
        [
            (0.5, "float", 0.5),
            (-0.0, "float", -0.0),
            (5e-324, "float", 5e-324),
            (3, "int", 3),
            (0, "int", 0),
            (2**63, "int", 2**63),
            (-(2**63), "int", -(2**63)),
            (True, "bool", True),
            (False, "bool", False),
            ("text", "string", "text"),
            ("", "string", ""),
            ("zeile\nü", "string", "zeile\nü"),
            (Phase.WARM, "string", "warm-up"),
            (Level.HIGH, "int", 3),
            (fractions.Fraction(1, 4), "float", 0.25),
            (Decimal("0.125"), "float", 0.125),
            (np.float64(0.5), "float", 0.5),
            (np.float32(0.5), "float", 0.5),
            (np.float16(0.5), "float", 0.5),
            (np.int8(-3), "int", -3),
            (np.uint64(2**64 - 1), "int", 2**64 - 1),
            (np.bool_(True), "bool", True),
            (np.str_("text"), "string", "text"),
            (np.array(0.5), "float", 0.5),
            (np.array([[7]]), "int", 7),
            (torch.tensor(0.5), "float", 0.5),
            (torch.tensor([3]), "int", 3),
            (torch.tensor(True), "bool", True),
            (torch.tensor(0.5, dtype=torch.bfloat16), "float", 0.5),
            (torch.tensor(0.5, requires_grad=True), "float", 0.5),
            (torch.nn.Parameter(torch.tensor(0.5)), "float", 0.5),
            (jnp.float32(0.5), "float", 0.5),
            (jnp.asarray(3), "int", 3),
            (jnp.asarray(True), "bool", True),
            (jnp.asarray(0.5, dtype=jnp.bfloat16), "float", 0.5),
        ],
        ids=lambda given: repr(given).partition(" at 0x")[0],
    )
    def test_every_scalar_is_stored_with_its_type(
        self, given: Any, value_type: str, expected: Any, recorded: testing.Captured
    ) -> None:
        """Every kind of scalar is stored as the plain value that it is, with its type."""
        ci.mark("m", given)
        (mark,) = recorded.marks

        assert (value_type, expected) == (mark.value_type, mark.value)
        assert type(expected) is type(mark.value)
        assert mark.value_nonfinite is None

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (math.nan, "nan"),
            (math.inf, "inf"),
            (-math.inf, "-inf"),
            (np.float32("nan"), "nan"),
            (torch.tensor(math.inf), "inf"),
            (Decimal("NaN"), "nan"),
            (10**400, "inf"),
            (-(10**400), "-inf"),
            (fractions.Fraction(10**400), "inf"),
            (fractions.Fraction(-(10**400)), "-inf"),
        ],
        ids=lambda given: repr(given)[:12],
    )
    def test_what_is_not_finite(
        self, given: Any, expected: str, recorded: testing.Captured
    ) -> None:
        """NaN and infinities are null, with their name beside it: strict JSON."""
        ci.mark("m", given)
        (mark,) = recorded.marks

        assert ("float", None, expected) == (mark.value_type, mark.value, mark.value_nonfinite)

    def test_integers_that_are_too_large(self, recorded: testing.Captured) -> None:
        """An integer of over 64 bits, which JSON readers break, is the nearest float."""
        ci.mark("m", 2**64)
        (mark,) = recorded.marks

        assert ("float", 2.0**64) == (mark.value_type, mark.value)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("x" * 256, "x" * 256),
            ("x" * 257, "x" * 256),
            ("é" * 200, "é" * 128),
            ("x" + "é" * 200, "x" + "é" * 127),
            ("€" * 100, "€" * 85),
            ("😀" * 100, "😀" * 64),
        ],
        ids=["fits", "ascii", "two-bytes", "between", "three-bytes", "four-bytes"],
    )
    def test_long_text_is_cut_at_256_bytes(
        self, given: str, expected: str, recorded: testing.Captured
    ) -> None:
        """Text is cut at 256 bytes, between characters."""
        ci.mark("m", given)

        assert expected == recorded.marks[0].value

    def test_the_value_is_that_of_the_moment(self, recorded: testing.Captured) -> None:
        """What is changed in place after the mark does not change the record."""
        loss = torch.tensor(1.0)
        array = np.array(1.0)
        ci.mark("torch", loss)
        ci.mark("numpy", array)
        loss += 1
        array += 1

        assert [1.0, 1.0] == [mark.value for mark in recorded.marks]

    def test_the_graph_is_left_alone(self, recorded: testing.Captured) -> None:
        """Marking a loss changes nothing for its backward pass."""
        weight = torch.tensor(2.0, requires_grad=True)
        loss = weight * 3
        ci.mark("loss", loss)
        loss.backward()

        assert weight.grad is not None
        assert (6.0, 3.0) == (recorded.marks[0].value, weight.grad.item())

    @pytest.mark.parametrize(
        "given",
        [
            None,
            [1.0],
            {"a": 1},
            object(),
            b"bytes",
            1 + 2j,
            np.array([1, 2]),
            np.complex64(1),
            np.datetime64("2024-01-01"),
            torch.zeros(2, 2),
            torch.zeros(0),
            jnp.zeros(3),
            Decimal("sNaN"),
            datetime.timedelta(1),
        ],
        ids=lambda given: repr(given).partition(" at 0x")[0],
    )
    def test_what_is_not_a_scalar(self, given: Any, recorded: testing.Captured) -> None:
        """Anything else is a TypeError that names the mark and says what is allowed."""
        with pytest.raises(
            TypeError,
            match=r"ci\.mark\('m', \.\.\.\) takes one float, int, bool or str, or a scalar with"
            rf" \.item\(\) .*; got {type(given).__name__}",
        ):
            ci.mark("m", given)
        assert [] == recorded.marks

    def test_the_shape_is_in_the_error(self, recorded: testing.Captured) -> None:
        """A tensor that is not reduced is shown with its shape and what to do."""
        with pytest.raises(TypeError, match=r"got Tensor of shape \(2, 3\)\. Reduce it first"):
            ci.mark("loss", torch.zeros(2, 3))

    @pytest.mark.parametrize("kind", ["points", "", None, 1])
    def test_an_unknown_kind(self, kind: Any, recorded: testing.Captured) -> None:
        """A kind that does not exist is a ValueError with the two that do."""
        with pytest.raises(ValueError, match=r"is not valid; use one of 'point', 'summary'"):
            ci.mark("m", 1, kind=kind)

    @pytest.mark.parametrize("name", [None, 3, b"loss", ("loss",)])
    def test_names_are_strings(self, name: Any, recorded: testing.Captured) -> None:
        """A name that is not a string is a TypeError that shows it."""
        with pytest.raises(TypeError, match=r"ci\.mark\(\) needs a name that is a string; got"):
            ci.mark(name, 1)

    def test_names_may_be_enums(self, recorded: testing.Captured) -> None:
        """A name that is a subclass of str is its text."""
        ci.mark(Phase.WARM, 1)

        assert "warm-up" == recorded.marks[0].name


class TestPlace:
    def test_the_innermost_open_scope(self, recorded: testing.Captured) -> None:
        """A mark belongs to the innermost open scope, which lists it."""
        with ci.scope("outer"):
            ci.mark("a", 1)
            with ci.scope("inner"):
                ci.mark("b", 2)
            ci.mark("c", 3)
        a, b, c = recorded.marks
        inner, outer = recorded.spans

        assert [outer.id, inner.id, outer.id] == [a.span_id, b.span_id, c.span_id]
        assert ([a.id, c.id], [b.id]) == (outer.mark_ids, inner.mark_ids)

    def test_outside_of_everything(self, recorded: testing.Captured) -> None:
        """With nothing open and no session a mark is on "root"."""
        ci.mark("m", 1)

        assert "root" == recorded.marks[0].span_id

    def test_on_the_session(self) -> None:
        """With nothing open but the session, a mark is the session's."""
        ci.profile(output="none")
        ci.mark("m", 1)
        (root,) = ci.trace(format="dict")["roots"]

        assert [{"name": "m", "value": 1, "kind": "point"}] == root["marks"]

    def test_kinds_and_time(self, recorded: testing.Captured) -> None:
        """A mark has its kind, point by default, and the moment when it was made."""
        ci.mark("a", 1)
        ci.mark("b", 2, "summary")
        a, b = recorded.marks

        assert ("point", "summary") == (a.kind, b.kind)
        assert a.ts_ns < b.ts_ns

    def test_thousands_on_one_span(self, recorded: testing.Captured) -> None:
        """A span with very many marks lists the newest and says so; every mark is there."""
        with ci.scope("long"):
            for i in range(2_500):
                ci.mark("i", i)
        (span,) = recorded.spans
        marks = recorded.marks

        assert (2_500, 1_000) == (len(marks), len(span.mark_ids))
        assert [mark.id for mark in marks[-1_000:]] == span.mark_ids
        assert {span.id} == {mark.span_id for mark in marks}
        assert {"mark_ids": "the newest 1000 only"} == span.attrs


class TestDevices:
    def test_mark_does_not_wait(self) -> None:
        """A value that a device still computes is asked for on another thread."""
        ci.profile(output="none", flush_interval=0.01)
        scalar = DeviceScalar()
        with ci.scope("step"):
            ci.mark("loss", scalar)  # would hang here
        scalar.is_done.set()
        ci.flush()
        (root,) = ci.trace(format="dict")["roots"]

        assert [("loss", 0.5)] == [(m["name"], m["value"]) for m in root["children"][0]["marks"]]
        assert [threading.get_ident()] != scalar.asked_by
        assert 1 == len(scalar.asked_by)

    def test_flush_waits_for_it(self, tmp_path: Any) -> None:
        """`ci.flush()` returns when the value is on disk, and the span lists the mark."""
        ci.profile(flush_interval=3600)
        scalar = DeviceScalar(7)
        with ci.scope("step"):
            ci.mark("n", scalar)
        threading.Timer(0.05, scalar.is_done.set).start()
        ci.flush()
        batches = [wire.decode_batch(p.read_bytes()) for p in tmp_path.glob(".cirron/spool/*.json")]
        marks = [mark for batch in batches for mark in batch.marks]
        spans = [span for batch in batches for span in batch.spans if span.name == "step"]

        assert [("int", 7)] == [(mark.value_type, mark.value) for mark in marks]
        assert [marks[0].id] == spans[0].mark_ids

    def test_what_comes_late_costs_no_memory(self) -> None:
        """A value that comes after its span's end leaves nothing behind in the collector."""
        with testing.capture() as recorded:
            for _ in range(10):
                scalar = DeviceScalar()
                with ci.scope("step"):
                    ci.mark("loss", scalar)
                recorded._collector.drain()
                scalar.is_done.set()
            spans, marks = recorded.spans, recorded.marks

        collector = recorded._collector
        assert (10, {}, {}, {}) == (
            len(marks),
            collector.mark_ids,
            collector.latest,
            collector.marked_at,
        )
        assert [[mark.id] for mark in marks] == [span.mark_ids for span in spans]

    def test_a_value_that_cannot_be_had(self) -> None:
        """A device that fails costs that mark alone, which is counted."""
        ci.profile(output="none")
        broken = DeviceScalar(RuntimeError("device lost"))
        broken.is_done.set()
        ci.mark("bad", broken)
        ci.mark("good", 1)
        ci.flush()
        (root,) = ci.trace(format="dict")["roots"]

        assert ["good"] == [mark["name"] for mark in root["marks"]]
        assert 1 == ci.health()["mark_drop_count"]

    def test_what_item_gives_may_be_no_scalar(self) -> None:
        """A foreign `.item()` that gives nonsense is counted as lost."""
        ci.profile(output="none")
        odd = DeviceScalar([1, 2])
        odd.is_done.set()
        ci.mark("bad", odd)
        ci.flush()

        assert 1 == ci.health()["mark_drop_count"]

    def test_two_threads_may_ask(self) -> None:
        """A value that two threads wait for is had by both, and is not lost by the second."""
        deferred = values.Deferred(np.float64(0.5))
        deferred.resolve()
        deferred.resolve()

        assert (0.5, True, False) == (deferred.value, deferred.is_ready, deferred.is_lost)
        assert deferred.source is None

    def test_a_device_that_never_answers(self) -> None:
        """What has no value at the end is counted as lost."""
        with testing.capture() as recorded:
            ci.mark("never", DeviceScalar())
            recorded._collector.step()
            recorded._collector.give_up()

        assert 1 == recorded._collector.lost_values

    def test_inside_of_jit(self, recorded: testing.Captured) -> None:
        """Inside a jitted function there is no value: the mark is lost, the function works."""

        @jax.jit
        def step(x: Any) -> Any:
            ci.mark("traced", x)
            return x * 2

        assert 6.0 == float(step(jnp.float32(3.0)))
        ci.mark("after", step(jnp.float32(4.0)))
        assert [("after", 8.0)] == [(mark.name, mark.value) for mark in recorded.marks]
        assert 1 == recorded._collector.lost_values


class Rude:
    """An object that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def cyclic() -> list[Any]:
    items: list[Any] = [1]
    items.append(items)
    return items


class TestAttributes:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (1, 1),
            (0.5, 0.5),
            (True, True),
            ("text", "text"),
            (None, None),
            ([1, "a", None], [1, "a", None]),
            ((1, 2), [1, 2]),
            ({"a": {"b": 1}}, {"a": {"b": 1}}),
            ({1: "a"}, {"1": "a"}),
            (math.nan, "nan"),
            ([math.inf], ["inf"]),
            (np.float32(0.5), 0.5),
            (np.int64(3), 3),
            (np.bool_(True), True),
            (np.float64("nan"), "nan"),
            (np.array(7), 7),
            (np.arange(3), [0, 1, 2]),
            (np.eye(2), [[1.0, 0.0], [0.0, 1.0]]),
            (2**64 - 1, 2**64 - 1),
            (-(2**63), -(2**63)),
            (Phase.WARM, "warm-up"),
            (Level.HIGH, 3),
            ("x" * 1000, "x" * 1000),
        ],
        ids=lambda given: repr(given)[:20],
    )
    def test_what_json_holds(self, given: Any, expected: Any, recorded: testing.Captured) -> None:
        """What JSON can hold is stored as it is, in scopes and in marks."""
        with ci.scope("s", key=given):
            ci.mark("m", 1, key=given)

        assert {"key": expected} == recorded.spans[0].attrs == recorded.marks[0].attrs
        assert 0 == recorded._collector.coerced

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (Rude(), "<Rude>"),
            ({1}, "{1}"),
            (10**30, "1" + "0" * 30),
            (-(2**63) - 1, "-9223372036854775809"),
            (10**5000, "<int of 16610 bits>"),
            (1 + 2j, "(1+2j)"),
            (b"raw", "b'raw'"),
            (np.zeros(10**6), "ndarray(shape=(1000000,), dtype=float64)"),
            (torch.arange(3), "Tensor(shape=(3,), dtype=torch.int64, cpu)"),
            (Decimal("1.5"), "1.5"),
            (int, "<class 'int'>"),
        ],
        ids=lambda given: type(given).__name__,
    )
    def test_what_json_does_not_hold(
        self, given: Any, expected: str, recorded: testing.Captured
    ) -> None:
        """Anything else is stored as text, of which there is not too much, and counted."""
        with ci.scope("s", key=given):
            pass

        assert {"key": expected} == recorded.spans[0].attrs
        assert 1 == recorded._collector.coerced

    def test_what_is_too_much(self, recorded: testing.Captured) -> None:
        """Of what is too long the beginning is stored, and how much more there was; counted."""
        cut = attributes.cut
        with ci.scope("s", items=list(range(10_000))):
            pass
        with ci.scope("s", table={i: i for i in range(10_000)}):
            pass
        (items,), (table,) = (span.attrs.values() for span in recorded.spans)

        assert [*range(len(items) - 1), f"... {10_001 - len(items)} more"] == items
        assert f"{10_001 - len(table)} more" == table.pop("...")
        assert {str(i): i for i in range(len(table))} == table
        assert (True, True, 2) == (len(items) > 900, len(table) > 900, attributes.cut - cut)

    def test_long_text_of_an_object(self, recorded: testing.Captured) -> None:
        """The text of an object is cut at 256 bytes."""

        class Wordy:
            def __str__(self) -> str:
                return "w" * 10_000

        with ci.scope("s", key=Wordy()):
            pass

        assert 256 == len(recorded.spans[0].attrs["key"])

    def test_cycles_end(self, recorded: testing.Captured) -> None:
        """A list that holds itself comes to an end."""
        with ci.scope("s", key=cyclic()):
            pass
        text = json.dumps(recorded.spans[0].attrs)

        assert text.startswith('{"key": [1, [1, [1, ')
        assert len(text) < 200
        assert '"[...]"' in text

    def test_an_open_span_is_not_counted_again_and_again(self, recorded: testing.Captured) -> None:
        """Looking at an open span counts nothing; its end does, once."""
        with ci.scope("s", key=object(), large=10**30):
            recorded.dict()
            recorded.dict()
        recorded.dict()

        assert 2 == recorded._collector.coerced

    def test_the_text_of_an_object_is_asked_for_once(self, recorded: testing.Captured) -> None:
        """While a span is open its objects are shown by their classes; then their text is asked."""
        asked: list[None] = []

        class Config:
            def __str__(self) -> str:
                asked.append(None)
                return "lr=0.1"

        with ci.scope("s", key=Config()):
            (span,) = recorded.tree().roots
            opened = span.attrs, len(asked)
        recorded.tree()
        closed = recorded.spans[0].attrs, len(asked)

        assert ({"key": "<Config>"}, 0) == opened
        assert ({"key": "lr=0.1"}, 1) == closed

    def test_strict_json_on_disk(self, tmp_path: Any) -> None:
        """Whatever is recorded, the files are strict JSON."""

        def refuse(token: str) -> None:
            raise AssertionError(token)

        ci.profile()
        for given in (math.nan, [math.inf], {"a": -math.inf}, np.float32("nan"), Rude(), cyclic()):
            with ci.scope("s", key=given):
                ci.mark("m", math.nan, key=given)
        ci.shutdown()
        files = list(tmp_path.glob(".cirron/**/*.json"))

        assert len(files) >= 2
        for path in files:
            json.loads(path.read_text("utf-8"), parse_constant=refuse)
