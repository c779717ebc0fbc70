"""Scopes and loops: what the user's thread records."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import sys
import threading
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.spools import read_one

import cirron as ci
from cirron import guard, testing
from cirron.record import hot
from cirron.scheduling import Used

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator
    from pathlib import Path
    from types import FrameType


@pytest.fixture
def recorded() -> Iterator[testing.Captured]:
    with testing.capture() as captured:
        yield captured


Outline = list[Any]


def outline(nodes: list[dict[str, Any]]) -> Outline:
    """Names of spans, with the index where there is one, and what is under them."""
    rows: Outline = []
    for node in nodes:
        name = node["name"] if node["index"] is None else f"{node['name']}[{node['index']}]"
        rows.append((name, outline(node["children"])) if node["children"] else name)
    return rows


def tree(recorded: testing.Captured) -> Outline:
    return outline(recorded.dict()["roots"])


def in_thread(function: Callable[[], Any]) -> Any:
    """What the function returns when it is called on another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


class TestScope:
    def test_scopes_nest(self, recorded: testing.Captured) -> None:
        """A scope is under the one that is open round it, and siblings are in order."""
        with ci.scope("outer"):
            with ci.scope("first"):
                pass
            with ci.scope("second"), ci.scope("inner"):
                pass

        assert [("outer", ["first", ("second", ["inner"])])] == tree(recorded)

    def test_a_child_never_leaves_its_parent(self, recorded: testing.Captured) -> None:
        """A child begins after its parent and ends before it."""
        with ci.scope("outer"), ci.scope("inner"):
            pass
        inner, outer = recorded.spans

        assert outer.id == inner.parent_id
        assert inner.end_ns is not None
        assert outer.end_ns is not None
        assert outer.start_ns < inner.start_ns < inner.end_ns < outer.end_ns

    def test_attributes_and_index(self, recorded: testing.Captured) -> None:
        """Attributes and index of the call are those of the span."""
        with ci.scope("postprocess", index=7, variant="beam-search"):
            pass
        (span,) = recorded.spans

        assert (7, {"variant": "beam-search"}) == (span.index, span.attrs)

    def test_the_open_scope_is_yielded(self, recorded: testing.Captured) -> None:
        """`with ... as` gives the scope, which takes more attributes and knows its id."""
        with ci.scope("load", size=1) as scope:
            scope.set(size=2, hit=True)
        (span,) = recorded.spans

        assert {"size": 2, "hit": True} == span.attrs
        assert span.id == scope.id

    def test_repr_shows_name_index_and_state(self, recorded: testing.Captured) -> None:
        """A scope shows its name, its index and how far it is."""
        scope = ci.scope("load", index=3)

        assert "<cirron scope load[3], not entered>" == repr(scope)
        assert "" == scope.id
        with scope:
            assert "<cirron scope load[3], open>" == repr(scope)
        assert "<cirron scope load[3], closed>" == repr(scope)

    def test_threads_and_process_are_noted(self, recorded: testing.Captured) -> None:
        """A span has the id of the thread that opened it."""

        def record() -> int:
            with ci.scope("there"):
                return threading.get_ident()

        there = in_thread(record)
        with ci.scope("here"):
            pass

        assert {"there": there, "here": threading.get_ident()} == {
            span.name: span.thread_id for span in recorded.spans
        }

    def test_a_scope_cannot_be_entered_twice(self, recorded: testing.Captured) -> None:
        """Entering one scope object again is an error that says what to do."""
        scope = ci.scope("once")
        with scope:
            pass

        with pytest.raises(
            ci.ScopeReusedError, match=r"'once' was already entered; call ci\.scope"
        ):
            scope.__enter__()
        assert ["once"] == tree(recorded)

    @pytest.mark.parametrize("name", [None, 3, b"x", ["x"]])
    def test_names_are_strings(self, name: Any, recorded: testing.Captured) -> None:
        """A name that is not a string is a TypeError that shows it."""
        with pytest.raises(TypeError, match=r"ci\.scope\(\) needs a name that is a string; got"):
            ci.scope(name)

    def test_subclasses_of_str_are_names(self, recorded: testing.Captured) -> None:
        """A name may be a subclass of str, which costs no other record."""
        numpy = pytest.importorskip("numpy")
        with ci.scope("before"):
            pass
        with ci.scope(numpy.str_("named"), label=numpy.str_("text")):
            pass

        assert ["before", "named"] == tree(recorded)
        assert {"label": "text"} == recorded.spans[1].attrs

    @pytest.mark.parametrize("kind", [str, type("Name", (str,), {"__len__": lambda self: 1})])
    def test_long_names_are_cut(self, kind: type[str], recorded: testing.Captured) -> None:
        """Of a name that is longer than 1,000 characters the beginning is kept, and counted."""
        before = hot.names_cut
        with ci.scope(kind("x" * 1_000)), ci.scope(kind("y" * 10**6)):
            ci.mark(kind("z" * 1_001), 1.0)

        assert ["y" * 1_000, "x" * 1_000] == [span.name for span in recorded.spans]
        assert ["z" * 1_000] == [mark.name for mark in recorded.marks]
        assert 2 == hot.names_cut - before

    @pytest.mark.parametrize("index", ["0", 1.5, [1]])
    def test_an_index_is_an_integer(self, index: Any, recorded: testing.Captured) -> None:
        """An index that is no integer is a TypeError that says where other values go."""
        with pytest.raises(
            TypeError, match=r"needs an index that is an integer or None; got .*key="
        ):
            ci.scope("x", index=index)

    def test_integers_of_other_libraries_are_indices(self, recorded: testing.Captured) -> None:
        """A NumPy integer is a good index."""
        numpy = pytest.importorskip("numpy")
        with ci.scope("x", index=numpy.int64(5)):
            pass

        assert ["x[5]"] == tree(recorded)

    def test_an_absurd_index_costs_no_other_record(self, recorded: testing.Captured) -> None:
        """An index that no format holds is cut, and its neighbours are kept."""
        with ci.scope("x", index=10**5000):
            pass
        with ci.scope("y"):
            pass

        assert [("x", 2**63 - 1), ("y", None)] == [(s.name, s.index) for s in recorded.spans]

    @pytest.mark.parametrize("gauge", ["cpu_ns", "gpu_ns", "memory_peak_bytes"])
    def test_measurements_have_fields_of_their_own(
        self, gauge: str, recorded: testing.Captured
    ) -> None:
        """An attribute that the format has a number for is that field; any other value stays."""
        with ci.scope("measured", **{gauge: 5}):
            pass
        with ci.scope("odd", **{gauge: "five"}):  # type: ignore[arg-type]
            pass
        measured, odd = recorded.spans

        assert (5, {}) == (getattr(measured, gauge), measured.attrs)
        assert (None, {gauge: "five"}) == (getattr(odd, gauge), odd.attrs)

    def test_lone_surrogates_are_mended(self, recorded: testing.Captured) -> None:
        """Text that UTF-8 cannot hold is mended, wherever it is, and nothing is lost."""
        with ci.scope("bad\ud800", path="\udcff"):
            ci.mark("m\ud800", "v\ud800")
            assert [("bad?", [])] == [(n["name"], n["children"]) for n in recorded_json(recorded)]

        assert ("bad?", {"path": "?"}) == (recorded.spans[0].name, recorded.spans[0].attrs)
        assert ("m?", "v?") == (recorded.marks[0].name, recorded.marks[0].value)


def recorded_json(recorded: testing.Captured) -> Any:
    """The roots of the tree as they come out of JSON."""
    import json

    from cirron.runs import tree as trees

    return json.loads(trees.to_json(recorded.tree()))["roots"]


class TestErrors:
    def test_an_exception_goes_through_and_is_noted(self, recorded: testing.Captured) -> None:
        """A scope never swallows an exception, and its span says how it ended."""
        with (
            pytest.raises(ValueError, match="no good"),
            ci.scope("outer"),
            ci.scope("inner"),
        ):
            raise ValueError("no good")

        assert [{"error": "ValueError: no good"}] * 2 == [span.attrs for span in recorded.spans]

    def test_the_scope_after_is_in_its_place(self, recorded: testing.Captured) -> None:
        """After an exception the next scope is where it would have been."""
        with ci.scope("outer"):
            with pytest.raises(KeyError), ci.scope("fails"):
                raise KeyError
            with ci.scope("after"):
                pass

        assert [("outer", ["fails", "after"])] == tree(recorded)
        assert {"error": "KeyError"} == recorded.spans[0].attrs

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
    def test_interrupts_are_noted(
        self, kind: type[BaseException], recorded: testing.Captured
    ) -> None:
        """Ctrl-C, exits and cancellation go through as well."""
        with pytest.raises(kind), ci.scope("x"):
            raise kind

        assert {"error": kind.__name__} == recorded.spans[0].attrs

    def test_an_exception_that_cannot_be_shown(self, recorded: testing.Captured) -> None:
        """An exception whose own __str__ fails is noted by its type."""

        class MuteError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("cannot say")

        with pytest.raises(MuteError), ci.scope("x"):
            raise MuteError

        assert {"error": "MuteError"} == recorded.spans[0].attrs

    def test_a_long_message_is_cut(self, recorded: testing.Captured) -> None:
        """The text of an error is cut at 256 bytes."""
        with pytest.raises(ValueError, match="xxx"), ci.scope("x"):
            raise ValueError("x" * 10_000)

        assert 256 == len(recorded.spans[0].attrs["error"])


class TestDecorator:
    def test_decorated_functions_record_each_call(self, recorded: testing.Captured) -> None:
        """Each call of a decorated function has a span; result, name and docstring stay."""

        @ci.scope("work", variant="fast")
        def add(a: int, b: int = 1) -> int:
            """Adds."""
            return a + b

        assert (3, 7) == (add(2), add(3, b=4))
        assert ("add", "Adds.") == (add.__name__, add.__doc__)
        assert [("work", {"variant": "fast"})] * 2 == [(s.name, s.attrs) for s in recorded.spans]

    def test_a_decorated_function_may_recurse(self, recorded: testing.Captured) -> None:
        """A decorated function may call itself."""

        @ci.scope("fact")
        def fact(n: int) -> int:
            return 1 if n == 0 else n * fact(n - 1)

        assert 6 == fact(3)
        assert [("fact", [("fact", [("fact", ["fact"])])])] == tree(recorded)

    def test_an_exception_in_a_function(self, recorded: testing.Captured) -> None:
        """An exception comes out of the decorated function as it was."""

        @ci.scope("work")
        def fail() -> None:
            raise ValueError("no good")

        with pytest.raises(ValueError, match="no good"):
            fail()
        assert {"error": "ValueError: no good"} == recorded.spans[0].attrs

    def test_decorated_methods_get_self(self, recorded: testing.Captured) -> None:
        """A decorated method gets its self."""

        class Model:
            scale = 3

            @ci.scope("forward")
            def forward(self, x: int) -> int:
                return x * self.scale

        assert 6 == Model().forward(2)
        assert ["forward"] == tree(recorded)

    def test_a_coroutine_span_lasts_until_it_returns(self, recorded: testing.Captured) -> None:
        """The span of a coroutine lasts until it returns, not until it is made."""

        @ci.scope("outer")
        async def outer() -> str:
            await asyncio.sleep(0)
            with ci.scope("inner"):
                await asyncio.sleep(0)
            return "done"

        assert "done" == asyncio.run(outer())
        assert [("outer", ["inner"])] == tree(recorded)
        assert asyncio.iscoroutinefunction(outer)

    def test_a_generator_span_lasts_until_its_end(self, recorded: testing.Captured) -> None:
        """The span of a generator lasts until its end; send and return values go through."""

        @ci.scope("stream")
        def stream() -> Generator[int, int, str]:
            got = yield 1
            yield got * 2
            return "end"

        def drive() -> Generator[int, int, None]:
            results.append((yield from stream()))

        results: list[str] = []
        driver = drive()
        assert 1 == next(driver)
        assert 10 == driver.send(5)
        assert [] == recorded.spans
        with pytest.raises(StopIteration):
            next(driver)
        assert (["end"], ["stream"]) == (results, tree(recorded))

    def test_a_generator_that_is_closed(self, recorded: testing.Captured) -> None:
        """Closing a generator early ends its span, and is no error."""

        @ci.scope("stream")
        def stream() -> Iterator[int]:
            yield 1
            yield 2

        for _ in stream():
            break

        assert [("stream", {})] == [(span.name, span.attrs) for span in recorded.spans]

    def test_an_async_generator_span_lasts_until_its_end(self, recorded: testing.Captured) -> None:
        """The span of an async generator lasts until it is exhausted."""

        @ci.scope("stream")
        async def stream(n: int) -> AsyncIterator[int]:
            for i in range(n):
                await asyncio.sleep(0)
                yield i

        async def main() -> list[int]:
            return [item async for item in stream(3)]

        assert [0, 1, 2] == asyncio.run(main())
        assert ["stream"] == tree(recorded)

    def test_an_async_generator_is_driven_as_without_us(self, recorded: testing.Captured) -> None:
        """What is sent and thrown in reaches the function, and so does closing it."""
        seen: list[Any] = []

        @ci.scope("stream")
        async def stream() -> AsyncIterator[Any]:
            try:
                seen.append((yield 1))
                try:
                    yield 2
                except KeyError:
                    yield 3
                yield 4
            finally:
                seen.append("closed")

        async def main() -> list[Any]:
            items: Any = stream()
            got = [await items.asend(None), await items.asend("hello")]
            got.append(await items.athrow(KeyError()))
            await items.aclose()
            return got

        assert [1, 2, 3] == asyncio.run(main())
        assert ["hello", "closed"] == seen
        assert [{}] == [span.attrs for span in recorded.spans]

    def test_an_exception_in_an_async_generator(self, recorded: testing.Captured) -> None:
        """An exception of an async generator goes through and is noted."""

        @ci.scope("stream")
        async def stream() -> AsyncIterator[int]:
            yield 1
            raise ValueError("no good")

        async def main() -> None:
            async for _ in stream():
                pass

        with pytest.raises(ValueError, match="no good"):
            asyncio.run(main())
        assert {"error": "ValueError: no good"} == recorded.spans[0].attrs


class TestDepth:
    def nest(self, count: int, done: Callable[[], None] = lambda: None) -> None:
        if count == 0:
            return done()
        with ci.scope("x", index=count):
            self.nest(count - 1, done)
        return None

    def test_64_deep(self, recorded: testing.Captured) -> None:
        """64 scopes inside each other are recorded; deeper ones are dropped and leave no mark."""
        before = hot.too_deep
        self.nest(70, lambda: ci.mark("deep", 1))

        assert (64, 6) == (len(recorded.spans), hot.too_deep - before)
        assert recorded.spans[0].id == recorded.marks[0].span_id  # the innermost that was kept
        with ci.scope("after"):
            pass
        assert recorded.spans[-1].parent_id is None

    def test_the_session_is_one_of_the_64(self) -> None:
        """With a profiler the root counts: 63 scopes fit under it."""
        ci.profile(output="none")
        self.nest(64)

        assert 64 == ci.trace(format="dict")["span_count"]
        assert (1, 1) == (ci.health()["scope_drop_count"], ci.health()["scope_depth"])

    def test_dropped_scopes_warn_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """However many are dropped, one warning says so."""
        monkeypatch.setattr(hot, "too_deep", 0)
        with testing.capture(), caplog.at_level(logging.WARNING, "cirron"):
            self.nest(66)
            self.nest(66)

        assert [
            "cirron: scope 'x' is nested deeper than 64 levels: it was dropped,"
            " as all deeper ones will be"
        ] == [record.getMessage() for record in caplog.records]

    def test_a_logging_handler_that_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A handler that fails at cirron's warning is counted, and the scope is not affected."""

        class Strict(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise RuntimeError("no warnings here")

        monkeypatch.setattr(hot, "too_deep", 0)
        monkeypatch.setattr(guard, "errors", Counter())
        handler = Strict()
        logging.getLogger("cirron").addHandler(handler)
        try:
            self.nest(66)
        finally:
            logging.getLogger("cirron").removeHandler(handler)

        assert {"warning: RuntimeError": 1} == guard.errors

    def test_a_new_profiler_counts_from_0(self) -> None:
        """What an earlier profiler dropped is not this one's."""
        self.nest(70)
        ci.profile(output="none")

        assert 0 == ci.health()["scope_drop_count"]

    def test_an_exception_from_too_deep(self, recorded: testing.Captured) -> None:
        """An exception from below the limit passes all scopes, and the next one is at the top."""

        def fail() -> None:
            raise ValueError("deep")

        with pytest.raises(ValueError, match="deep"):
            self.nest(80, fail)
        with ci.scope("after"):
            pass

        assert (65, None) == (len(recorded.spans), recorded.spans[-1].parent_id)


class TestOrder:
    def test_closing_out_of_order(self, recorded: testing.Captured) -> None:
        """A scope that closes before those inside it loses none, and the next is in place."""
        with ci.scope("top"):
            outer, inner = ci.scope("outer"), ci.scope("inner")
            outer.__enter__()
            inner.__enter__()
            outer.__exit__(None, None, None)
            with ci.scope("next"):
                pass
            inner.__exit__(None, None, None)
            with ci.scope("last"):
                pass

        assert [("top", [("outer", ["inner"]), "next", "last"])] == tree(recorded)

    def test_interleaved_generators(self, recorded: testing.Captured) -> None:
        """Generators that take turns each have their spans, and none is left open."""

        def stream(name: str) -> Iterator[str]:
            for i in range(3):
                with ci.scope(name, index=i):
                    yield name

        for _ in zip(stream("a"), stream("b"), strict=True):
            pass
        with ci.scope("after"):
            pass

        counts = Counter(span.name for span in recorded.spans)
        assert {"a": 3, "b": 3, "after": 1} == counts
        assert 0 == hot.depth()
        assert recorded.spans[-1].parent_id is None

    def test_a_generator_collected_in_another_thread(self, recorded: testing.Captured) -> None:
        """A generator that another thread drops ends its span and leaves that thread's alone."""

        def stream() -> Iterator[int]:
            with ci.scope("stream"):
                yield 1

        holder = [stream()]
        next(holder[0])

        def drop() -> None:
            with ci.scope("outer"):
                holder.clear()
                gc.collect()
                with ci.scope("inner"):
                    pass

        in_thread(drop)
        with ci.scope("after"):
            pass

        assert ["stream", ("outer", ["inner"]), "after"] == tree(recorded)

    def test_a_scope_that_is_never_left(self, recorded: testing.Captured) -> None:
        """A scope that is entered by hand and forgotten is shown as open."""
        scope = ci.scope("forgotten")
        scope.__enter__()
        (node,) = recorded.dict()["roots"]

        assert ("forgotten", True) == (node["name"], node["open"])
        scope.__exit__(None, None, None)


class TestContexts:
    def test_threads_are_apart(self, recorded: testing.Captured) -> None:
        """A scope that is open on one thread is not the parent of another thread's."""
        ready, done = threading.Event(), threading.Event()

        def other() -> None:
            with ci.scope("other"):
                ready.set()
                done.wait(10)

        thread = threading.Thread(target=other)
        with ci.scope("main"):
            thread.start()
            ready.wait(10)
            with ci.scope("inner"):
                pass
        done.set()
        thread.join()

        assert [("main", ["inner"]), "other"] == tree(recorded)

    def test_tasks_are_apart(self, recorded: testing.Captured) -> None:
        """200 tasks at once each have their own current scope."""

        async def work(n: int) -> None:
            with ci.scope("task", index=n):
                await asyncio.sleep(0)
                with ci.scope("inner", index=n):
                    await asyncio.sleep(0)
                    ci.mark("n", n)
                    await asyncio.sleep(0)

        async def main() -> None:
            with ci.scope("all"):
                await asyncio.gather(*(work(n) for n in range(200)))

        asyncio.run(main())
        (root,) = recorded.dict()["roots"]

        assert 200 == len(root["children"])
        for task in root["children"]:
            (inner,) = task["children"]
            assert task["index"] == inner["index"] == inner["marks"][0]["value"]

    def test_a_task_that_outlives_its_parent(self, recorded: testing.Captured) -> None:
        """A task that goes on after its parent's end records under what is still open."""

        async def late(started: asyncio.Event, go: asyncio.Event) -> None:
            started.set()
            await go.wait()
            with ci.scope("late"):
                pass

        async def main() -> None:
            started, go = asyncio.Event(), asyncio.Event()
            with ci.scope("outer"):
                with ci.scope("short"):
                    task = asyncio.create_task(late(started, go))
                    await started.wait()
                go.set()
                await task

        asyncio.run(main())

        assert [("outer", ["short", "late"])] == tree(recorded)

    def test_to_thread_keeps_the_parent(self, recorded: testing.Captured) -> None:
        """Work that asyncio hands to a thread is under its caller, with its own thread's id."""

        def work() -> int:
            with ci.scope("work"):
                return threading.get_ident()

        async def main() -> int:
            with ci.scope("caller"):
                return await asyncio.to_thread(work)

        thread = asyncio.run(main())

        assert [("caller", ["work"])] == tree(recorded)
        assert (thread, threading.get_ident()) == tuple(span.thread_id for span in recorded.spans)

    def test_copied_contexts(self, recorded: testing.Captured) -> None:
        """A copied context has the current scope of its origin, whose own it does not change."""
        with ci.scope("outer"):
            context = contextvars.copy_context()
            inner = ci.scope("inner")
            context.run(inner.__enter__)
            with ci.scope("sibling"):
                pass
            context.run(inner.__exit__, None, None, None)

        assert [("outer", ["inner", "sibling"])] == tree(recorded)

    def test_closing_in_a_copied_context(self, recorded: testing.Captured) -> None:
        """A scope may be closed in another context than it was opened in."""
        scope = ci.scope("moved")
        scope.__enter__()
        context = contextvars.copy_context()
        context.run(scope.__exit__, None, None, None)
        with ci.scope("after"):
            pass

        assert ["moved", "after"] == tree(recorded)


@pytest.mark.parametrize(("wrapper", "name"), [(ci.epochs, "epoch"), (ci.batches, "batch")])
class TestLoops:
    def test_values_pass_through(self, wrapper: Any, name: str, recorded: testing.Captured) -> None:
        """Exactly the iterable's own values come out, one span each, numbered from 0."""
        items = [object(), None, (1, 2)]

        assert all(a is b for a, b in zip(items, wrapper(items), strict=True))
        assert [f"{name}[0]", f"{name}[1]", f"{name}[2]"] == tree(recorded)

    def test_an_empty_iterable(self, wrapper: Any, name: str, recorded: testing.Captured) -> None:
        """Nothing comes out of nothing, and nothing is recorded."""
        assert [] == list(wrapper([]))
        assert [] == tree(recorded)

    def test_break_closes_the_scope(
        self, wrapper: Any, name: str, recorded: testing.Captured
    ) -> None:
        """`break` closes the current scope before the next statement."""
        for item in wrapper(range(20)):
            if item == 1:
                break
        with ci.scope("after"):
            pass

        assert [f"{name}[0]", f"{name}[1]", "after"] == tree(recorded)

    def test_break_while_the_loop_is_held(
        self, wrapper: Any, name: str, recorded: testing.Captured
    ) -> None:
        """`break` closes the scope also when a variable holds the wrapper; the rest is there."""
        held = wrapper(range(3))
        for _ in held:
            break
        with ci.scope("between"):
            pass

        assert [1, 2] == list(held)
        assert [f"{name}[0]", "between", f"{name}[1]", f"{name}[2]"] == tree(recorded)

    def test_continue_starts_the_next_scope(
        self, wrapper: Any, name: str, recorded: testing.Captured
    ) -> None:
        """`continue` goes on with the next scope."""
        for item in wrapper(range(3)):
            if item == 1:
                continue
            with ci.scope("work"):
                pass

        assert [(f"{name}[0]", ["work"]), f"{name}[1]", (f"{name}[2]", ["work"])] == tree(recorded)

    def test_an_exception(self, wrapper: Any, name: str, recorded: testing.Captured) -> None:
        """An exception in the body closes the scope and goes on."""

        def train() -> None:
            for _ in wrapper(range(3)):
                raise ValueError("no good")

        with pytest.raises(ValueError, match="no good") as caught:
            train()
        del caught
        with ci.scope("after"):
            pass

        assert [f"{name}[0]", "after"] == tree(recorded)

    def test_a_dropped_iterator_closes_its_scope(
        self, wrapper: Any, name: str, recorded: testing.Captured
    ) -> None:
        """An iterator that is dropped half-way closes its scope."""
        iterator = iter(wrapper(range(3)))
        next(iterator)
        assert 1 == hot.depth()
        del iterator
        gc.collect()

        assert ([f"{name}[0]"], 0) == (tree(recorded), hot.depth())
        assert not recorded.dict()["roots"][0]["open"]

    def test_a_held_iterator(self, wrapper: Any, name: str, recorded: testing.Captured) -> None:
        """While somebody holds the iterator the scope is open, and is shown as such."""
        iterator = iter(wrapper(range(3)))
        next(iterator)

        assert recorded.dict()["roots"][0]["open"]
        iterator.close()
        assert not recorded.dict()["roots"][0]["open"]

    def test_next_works_on_the_wrapper(
        self, wrapper: Any, name: str, recorded: testing.Captured
    ) -> None:
        """The wrapper is an iterator: `next` works on it, and a loop takes what is left."""
        loop = wrapper(range(4))

        assert (0, 1) == (next(loop), next(loop))
        assert [2, 3] == list(loop)
        assert "none" == next(loop, "none")
        assert [f"{name}[{n}]" for n in range(4)] == tree(recorded)

    def test_the_wrapper_has_the_length_of_the_iterable(
        self, wrapper: Any, name: str, recorded: testing.Captured
    ) -> None:
        """It has a length where the iterable has one, which is what progress bars ask for."""
        assert 20 == len(wrapper(range(20)))
        with pytest.raises(TypeError, match="no len"):
            len(wrapper(iter(())))

    def test_the_wrapper_is_always_true(
        self, wrapper: Any, name: str, recorded: testing.Captured
    ) -> None:
        """As any iterator it is true, also where there is no length."""
        assert wrapper(iter(()))
        assert wrapper([])

    def test_a_progress_bar(self, wrapper: Any, name: str, recorded: testing.Captured) -> None:
        """Inside a progress bar that lives on, `break` still closes the scope."""

        class Bar:
            def __init__(self, iterable: Any) -> None:
                self.iterable = iterable
                self.total = len(iterable)

            def __iter__(self) -> Iterator[Any]:
                yield from self.iterable

        bar = Bar(wrapper(range(5)))
        for _ in bar:
            break
        with ci.scope("after"):
            pass

        assert (5, [f"{name}[0]", "after"]) == (bar.total, tree(recorded))

    def test_an_iterable_that_raises(
        self, wrapper: Any, name: str, recorded: testing.Captured
    ) -> None:
        """An exception of the iterable comes out as it was, between scopes."""

        def source() -> Iterator[int]:
            yield 1
            raise OSError("no data")

        with pytest.raises(OSError, match="no data"):
            list(wrapper(source()))
        assert ([f"{name}[0]"], {}) == (tree(recorded), recorded.spans[0].attrs)

    def test_something_that_is_not_iterable(
        self, wrapper: Any, name: str, recorded: testing.Captured
    ) -> None:
        """What cannot be iterated is a TypeError at once, not at the first item."""
        with pytest.raises(
            TypeError,
            match=r"needs something to loop over; got 5 \(int\)\. Write ci\.\w+\(range\(5\)\)",
        ):
            wrapper(5)

    def test_items_are_fetched_on_demand(
        self, wrapper: Any, name: str, recorded: testing.Captured
    ) -> None:
        """An item is asked for when the loop wants it, never before."""
        asked: list[int] = []

        def source() -> Iterator[int]:
            for i in range(3):
                asked.append(i)
                yield i

        iterator = iter(wrapper(source()))
        assert [] == asked
        next(iterator)
        assert [0] == asked
        iterator.close()

    def test_loops_work_when_disabled(self, wrapper: Any, name: str) -> None:
        """Off, a loop gives the same values, length and errors."""
        ci.profile(enabled=False)
        loop = wrapper(range(3))

        assert (3, True, 0, [1, 2]) == (len(loop), bool(loop), next(loop), list(loop))
        with pytest.raises(
            TypeError,
            match=r"needs something to loop over; got 5 \(int\)\. Write ci\.\w+\(range\(5\)\)",
        ):
            wrapper(5)
        assert 0 == ci.trace(format="dict")["span_count"]


class RecordAnywhere:
    """Records at each call that the hot path makes, as a signal handler might."""

    def __init__(self) -> None:
        self.count = 0
        self._is_here = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code.co_filename == hot.__file__ and not self._is_here:
            self._is_here = True
            with ci.scope("handler"):
                ci.mark("count", self.count)
            self.count += 1
            self._is_here = False


def test_a_signal_handler_may_record_at_any_moment(recorded: testing.Captured) -> None:
    """What interrupts the hot path can record there: nothing fails, and no record is an orphan."""
    handler = RecordAnywhere()
    sys.setprofile(handler)
    try:
        for _ in ci.epochs(range(2)):
            for _ in ci.batches(range(2)):
                with ci.scope("inner", a=1):
                    ci.mark("loss", 0.5)
        step = hot.begin("step", 0, None, hot.Step)
        hot.within(step, "forward", None, hot.OwnSpan, 0, lambda: None, (), {})
        for index in (1, 2, 3):
            step = hot.follow(step, index)
        hot.end_phase(hot.begin_phase(step, "backward"))
        inserted = hot.insert(hot.innermost(), "evaluation", None, start=hot.now())
        hot.suspend(inserted)
        hot.release(inserted)
        hot.close(step)
    finally:
        sys.setprofile(None)

    names = Counter(span.name for span in recorded.spans)
    assert handler.count == names.pop("handler") == len(recorded.marks) - 4
    assert {"epoch": 2, "batch": 4, "inner": 4, "step": 4, "forward": 1, "backward": 1} == {
        name: count for name, count in names.items() if name != "evaluation"
    }
    ids = {None, *(span.id for span in recorded.spans)}
    assert ids >= {span.parent_id for span in recorded.spans}
    assert {"root", *ids} >= {mark.span_id for mark in recorded.marks}


def test_what_another_task_does_in_a_step_stays_in_it(recorded: testing.Captured) -> None:
    """A scope of another context ends in a later step, and is in the one that it began in."""
    step = hot.begin("step", 0, None, hot.Step)
    for index in (1, 2):
        step = hot.follow(step, index)
    context = contextvars.copy_context()
    scope = ci.scope("saving")
    context.run(scope.__enter__)
    for index in (3, 4):
        step = hot.follow(step, index)
    context.run(scope.__exit__, None, None, None)
    hot.close(step)

    wanted = ["step[0]", "step[1]", ("step[2]", ["saving"]), "step[3]", "step[4]"]
    assert wanted == tree(recorded)


def test_the_names_of_marks_are_those_of_one_step(recorded: testing.Captured) -> None:
    """A logger's value is not taken for one that the program has marked in the step before."""
    hot.keep_names(True)
    try:
        step = hot.begin("step", 0, None, hot.Step)
        for index in (1, 2, 3):
            ci.mark("loss", 0.5)
            assert {"loss"} == set(step.marked)
            step = hot.follow(step, index)
            assert not getattr(step, "marked", None)
        hot.close(step)
    finally:
        hot.keep_names(False)

    assert 3 == len({mark.span_id for mark in recorded.marks})


def test_nested_loops(recorded: testing.Captured) -> None:
    """Batches are under their epoch and are numbered anew in each."""
    for _ in ci.epochs(range(2)):
        for _ in ci.batches("ab"):
            with ci.scope("forward"):
                pass

    batches = [("batch[0]", ["forward"]), ("batch[1]", ["forward"])]
    assert [("epoch[0]", batches), ("epoch[1]", batches)] == tree(recorded)


def test_a_loop_in_async_code(recorded: testing.Captured) -> None:
    """A loop that awaits in its body keeps its scope through it."""

    async def train(name: str) -> None:
        for _ in ci.epochs(range(2)):
            await asyncio.sleep(0)
            with ci.scope(name):
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(train("a"), train("b"))

    asyncio.run(main())

    def epochs(name: str) -> Outline:
        return [("epoch[0]", [name]), ("epoch[1]", [name])]

    assert sorted(epochs("a") + epochs("b")) == sorted(tree(recorded))


@pytest.mark.parametrize(("limit_ns", "began", "noted"), [(0, 3, 3), (10**18, 1, 0)])
def test_what_long_epochs_use_is_measured(
    monkeypatch: pytest.MonkeyPatch, limit_ns: int, began: int, noted: int
) -> None:
    """Epochs have their CPU time. In a loop of short ones, only the first begins to be measured."""
    begun = []

    def measure() -> Used:
        begun.append(Used())
        return begun[-1]

    with testing.capture() as captured:
        monkeypatch.setattr(hot, "MEASURED_NS", limit_ns)
        monkeypatch.setattr(hot, "measure", measure)
        for _ in ci.epochs(range(3)):
            pass

    assert (began, noted) == (len(begun), sum(one.cpu_ns is not None for one in captured.spans))


def test_a_session_measures_long_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `ci.profile()`, they have CPU time and memory on the disk."""
    monkeypatch.setattr(hot, "MEASURED_NS", 0)
    ci.profile(path=str(tmp_path))
    for _ in ci.epochs(range(2)):
        pass
    ci.shutdown()
    epochs = [span for span in read_one(tmp_path).spans if span.name == "epoch"]

    assert 2 == len(epochs)
    assert all(one.cpu_ns and one.memory_peak_bytes for one in epochs)


class TestOff:
    def test_nothing_is_recorded(self) -> None:
        """Off, everything works and leaves nothing."""
        ci.profile(enabled=False)
        with ci.scope("outer", index=1, a=1) as scope:
            scope.set(b=2)
            ci.mark("loss", 0.5)
        for _ in ci.epochs(range(3)):
            pass

        assert ("", "<cirron scope, profiling is off>") == (scope.id, repr(scope))
        assert {"roots": [], "span_count": 0} == ci.trace(format="dict")
        assert ci.health()["enabled"] is False

    def test_exceptions_go_through(self) -> None:
        """Off, a scope swallows nothing either."""
        ci.profile(enabled=False)

        with pytest.raises(ValueError, match="no good"), ci.scope("x"):
            raise ValueError("no good")

    def test_decorators_work_when_disabled(self) -> None:
        """Decorated functions of any kind work while off, whenever they were decorated."""

        @ci.scope("before")
        def before(x: int) -> int:
            return x + 1

        ci.profile(enabled=False)

        @ci.scope("after")
        async def after(x: int) -> int:
            return x + 2

        assert (2, 3) == (before(1), asyncio.run(after(1)))
        assert 0 == ci.trace(format="dict")["span_count"]

    def test_memory_does_not_grow(self) -> None:
        """Off, a million calls keep nothing."""

        def work() -> None:
            for i in ci.batches(range(10_000)):
                with ci.scope("x", index=i, a=i):
                    ci.mark("loss", i, note=i)

        ci.profile(enabled=False)
        work()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            work()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()

        assert grown < 10_000

    def test_a_scope_that_was_open(self) -> None:
        """A scope that was open when profiling was turned off is not shown as open for ever."""
        with ci.scope("open"):
            ci.profile(enabled=False)

        assert 0 == ci.trace(format="dict")["span_count"]

    def test_a_loop_that_is_turned_off(self) -> None:
        """A loop that began before profiling was turned off goes on without spans."""
        seen = []
        for item in ci.epochs(range(3)):
            seen.append(item)
            if item == 0:
                ci.profile(enabled=False)

        assert [0, 1, 2] == seen
        assert 0 == ci.trace(format="dict")["span_count"]


def test_a_scope_that_is_open_when_profiling_starts() -> None:
    """It is recorded as usual when it ends, and is not left over as open."""
    with ci.scope("early"):
        ci.profile(output="none")
        with ci.scope("inside"):
            pass
    nodes = {
        node["name"]: node["open"]
        for root in ci.trace(format="dict")["roots"]
        for node in [root, *root["children"]]
    }

    assert {"early": False, "cirron.session": True, "inside": False} == nodes
    ci.shutdown()
    ci.profile(output="none")
    assert ["cirron.session"] == outline(ci.trace(format="dict")["roots"])


class TestPhases:
    """A phase of a step is no span until it is looked at, and is found where one would be."""

    @pytest.fixture
    def step(self, recorded: testing.Captured) -> Iterator[hot.Step]:
        step = hot.begin("step", 0, None, hot.Step)
        assert isinstance(step, hot.Step)
        yield step
        hot.close(step)

    @staticmethod
    def within(step: hot.Step, function: Callable[[], Any]) -> Any:
        return hot.within(step, "forward", None, hot.OwnSpan, 0, function, (), {})

    def test_what_is_recorded_in_it(self, recorded: testing.Captured, step: hot.Step) -> None:
        """Scopes, marks and other spans are under the phase, and under the step behind it."""

        def work() -> str:
            with ci.scope("attention"):
                ci.mark("in_scope", 1)
            ci.mark("in_phase", 2)
            hot.close(hot.begin("compile"))
            return "result"

        assert "result" == self.within(step, work)
        ci.mark("in_step", 3)
        hot.close(step)
        (found,) = recorded.dict()["roots"]
        (forward,) = found["children"]

        assert [("step[0]", [("forward", ["attention", "compile"])])] == tree(recorded)
        assert (["in_phase"], ["in_step"]) == tuple(
            [mark["name"] for mark in one["marks"]] for one in (forward, found)
        )

    def test_what_another_thread_records(self, recorded: testing.Captured, step: hot.Step) -> None:
        """A thread that goes on in a copy of the context is under the step: its work is its own."""
        context = contextvars.copy_context()

        def other() -> None:
            with ci.scope("other"):
                pass

        self.within(step, lambda: in_thread(lambda: context.run(other)))
        hot.close(step)

        assert [("step[0]", ["forward", "other"])] == sorted_children(tree(recorded))

    def test_while_it_is_open(self, recorded: testing.Captured, step: hot.Step) -> None:
        """It is among what is open, with what is open in it, for its own thread and for others."""

        def look() -> tuple[Outline, Outline]:
            with ci.scope("attention"):
                return tree(recorded), in_thread(lambda: tree(recorded))

        expected = [("step[0]", [("forward", ["attention"])])]

        assert (expected, expected) == self.within(step, look)

    def test_a_scope_that_is_left_open_in_it(
        self, recorded: testing.Captured, step: hot.Step
    ) -> None:
        """It ends where it ends; what follows is under the step again."""
        left: list[hot.Span] = []
        self.within(step, lambda: left.append(ci.scope("left").__enter__()))
        assert hot.current() is step
        self.within(step, lambda: None)
        left[0].__exit__(None, None, None)
        hot.close(step)

        assert ["forward", "forward"] == [
            one.name for one in recorded.spans if one.name == "forward"
        ]
        assert hot.current() is not step

    def test_an_error(self, recorded: testing.Captured, step: hot.Step) -> None:
        """It passes, is noted on the phase, and the step goes on."""
        with pytest.raises(ZeroDivisionError):
            self.within(step, lambda: 1 / 0)
        self.within(step, lambda: None)

        assert ["ZeroDivisionError: division by zero", None] == [
            (one.attrs or {}).get("error") for one in recorded.spans
        ]
        assert hot.current() is step

    def test_a_shutdown_in_it(self) -> None:
        """Phase and step are recorded up to the shutdown, once, and say so."""
        ci.profile(output="none", frameworks=[])
        step = hot.begin("step", 0, None, hot.Step)
        assert isinstance(step, hot.Step)
        self.within(step, ci.shutdown)
        (root,) = ci.trace(format="dict")["roots"]
        (found,) = root["children"]
        (forward,) = found["children"]

        assert ({"truncated": True}, {"truncated": True}) == (found["attrs"], forward["attrs"])


def sorted_children(nodes: Outline) -> Outline:
    return [(name, sorted(below)) for name, below in nodes]


def test_a_scope_that_is_open_when_profiling_ends() -> None:
    """It is recorded up to the shutdown, says so, and leaving it afterwards does nothing."""
    ci.profile(output="none")
    with ci.scope("cut"):
        ci.shutdown()
    (root,) = ci.trace(format="dict")["roots"]

    assert [("cut", {"truncated": True}, False)] == [
        (node["name"], node["attrs"], node["open"]) for node in root["children"]
    ]


def test_what_was_cut_is_in_health() -> None:
    """What a session cut, names and attributes, is in `ci.health()`; not what was cut before it."""
    with ci.scope("x" * 2_000, items=list(range(2_000))):
        pass
    ci.profile(output="none")
    with ci.scope("x" * 2_000, items=list(range(2_000)), text="y" * 20_000):
        pass
    ci.flush()
    health = ci.health()

    assert (1, 2, 0) == (
        health["names_cut_count"],
        health["attrs_cut_count"],
        health["record_error_count"],
    )


def test_without_a_profiler_memory_is_bounded() -> None:
    """Records that nobody profiles are kept up to a bound, the newest ones."""
    for i in range(hot.IDLE_RING + 10):
        ci.mark("i", i)

    assert hot.IDLE_RING == len(hot.ring)
    assert hot.IDLE_RING + 9 == hot.ring[-1][3]
    hot.ring.clear()
