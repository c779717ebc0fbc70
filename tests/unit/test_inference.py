"""`@ci.inference`: a request a call, whatever kind of function it is, and what its answer tells."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import guard, testing
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator


@pytest.fixture
def recorded() -> Iterator[testing.Captured]:
    with testing.capture() as captured:
        yield captured


def marks(recorded: testing.Captured) -> dict[str, Any]:
    """The marks by name; each is made once, and is the request's one value of that name."""
    found = recorded.marks
    assert {"summary"} >= {mark.kind for mark in found}
    assert len(found) == len({mark.name for mark in found})
    return {mark.name: mark.value for mark in found}


def outline(nodes: list[dict[str, Any]]) -> list[Any]:
    """Names, with those of the children."""
    return [
        (node["name"], outline(node["children"])) if node["children"] else node["name"]
        for node in nodes
    ]


def tree(recorded: testing.Captured) -> list[Any]:
    return outline(recorded.dict()["roots"])


def chunk(content: str | None, usage: Any = None, role: str | None = None) -> Any:
    """A chunk as a chat completion streams it."""
    delta = SimpleNamespace(content=content, role=role)
    choices = [] if content is None else [SimpleNamespace(delta=delta)]
    return SimpleNamespace(choices=choices, usage=usage)


class TestKinds:
    """Each kind of function stays what it is, and each call of it is one request."""

    def test_a_function(self, recorded: testing.Captured) -> None:
        """A call is one request, with what it does inside."""

        @ci.inference
        def predict(x: int, *, scale: int = 2) -> int:
            with ci.scope("forward"):
                return x * scale

        assert 6 == predict(3)
        assert 12 == predict(3, scale=4)
        assert [("request", ["forward"])] * 2 == tree(recorded)

    def test_a_coroutine(self, recorded: testing.Captured) -> None:
        """The request of a coroutine lasts until it returns."""

        @ci.inference
        async def predict(x: int) -> int:
            with ci.scope("wait"):
                await asyncio.sleep(0)
            return x

        assert 3 == asyncio.run(predict(3))
        assert [("request", ["wait"])] == tree(recorded)

    def test_a_generator(self, recorded: testing.Captured) -> None:
        """The request of a generator lasts until its end; what is returned is returned."""

        @ci.inference
        def stream() -> Generator[str, None, str]:
            with ci.scope("first"):
                pass
            yield "a"
            with ci.scope("second"):
                pass
            return "end"

        items = stream()
        assert ("a", []) == (next(items), [s for s in recorded.spans if s.name == "request"])
        with pytest.raises(StopIteration) as end:
            next(items)
        assert "end" == end.value.value
        assert [("request", ["first", "second"])] == tree(recorded)

    def test_an_async_generator(self, recorded: testing.Captured) -> None:
        """The request of an async generator lasts until its end."""

        @ci.inference
        async def stream() -> AsyncIterator[str]:
            with ci.scope("first"):
                await asyncio.sleep(0)
            yield "a"
            yield "b"

        async def main() -> list[str]:
            return [item async for item in stream()]

        assert ["a", "b"] == asyncio.run(main())
        assert [("request", ["first"])] == tree(recorded)

    def test_methods_of_all_kinds_can_be_decorated(self, recorded: testing.Captured) -> None:
        """Methods, class methods and static methods, decorated from either side."""

        class Model:
            factor = 3

            @ci.inference
            def predict(self, x: int) -> int:
                return self.factor * x

            @ci.inference
            @classmethod
            def of_class(cls, x: int) -> int:
                return cls.factor * x

            @classmethod
            @ci.inference
            def of_class_below(cls, x: int) -> int:
                return cls.factor * x

            @ci.inference
            @staticmethod
            def of_none(x: int) -> int:
                return x

            @staticmethod
            @ci.inference
            def of_none_below(x: int) -> int:
                return x

        model = Model()
        assert (6, 6, 6) == (model.predict(2), Model.of_class(2), model.of_class_below(2))
        assert (2, 2) == (Model.of_none(2), model.of_none_below(2))
        prefix = f"{type(self).__name__}.test_methods_of_all_kinds_can_be_decorated.<locals>.Model."
        assert ["predict", "of_class", "of_class_below", "of_none", "of_none_below"] == [
            span.attrs["function"].removeprefix(prefix) for span in recorded.spans
        ]

    def test_other_callables(self, recorded: testing.Captured) -> None:
        """A bound method, a partial and an object with `__call__` are decorated as they are."""

        class Model:
            def __call__(self, x: int) -> int:
                return x

            def generate(self, x: int) -> int:
                return 2 * x

        calls: list[Any] = [Model(), Model().generate, functools.partial(pow, 2)]
        assert [3, 6, 8] == [ci.inference(call)(3) for call in calls]
        assert ["request"] * 3 == tree(recorded)

    def test_async_callables(self, recorded: testing.Captured) -> None:
        """An object whose `__call__` is async becomes a coroutine function, as servers look for."""

        class Model:
            async def __call__(self, x: int) -> int:
                with ci.scope("inside"):
                    await asyncio.sleep(0)
                return x

        decorated = ci.inference(Model())
        assert inspect.iscoroutinefunction(decorated)
        assert 3 == asyncio.run(decorated(3))
        assert [("request", ["inside"])] == tree(recorded)

    def test_what_inspect_says(self) -> None:
        """Names, docs, signature and kind are those of the function."""

        def plain(a: int, b: str = "x") -> None:
            """Its doc."""

        async def coroutine() -> None: ...

        def generator() -> Iterator[int]:
            yield 1

        async def async_generator() -> AsyncIterator[int]:
            yield 1

        assert ("plain", "Its doc.", __name__) == (
            ci.inference(plain).__name__,
            ci.inference(plain).__doc__,
            ci.inference(plain).__module__,
        )
        assert inspect.signature(plain) == inspect.signature(ci.inference(plain))
        assert plain is inspect.unwrap(ci.inference(plain))
        for function in (plain, coroutine, generator, async_generator):
            for says in (
                inspect.iscoroutinefunction,
                inspect.isgeneratorfunction,
                inspect.isasyncgenfunction,
                inspect.isfunction,
            ):
                assert says(function) == says(ci.inference(function))

    def test_with_config(self, recorded: testing.Captured) -> None:
        """`@ci.inference(config=...)` and `@ci.inference()` decorate as the bare form does."""

        @ci.inference(config={"model": "small"})
        def first() -> int:
            return 1

        @ci.inference()
        def second() -> int:
            return 2

        assert (1, 2) == (first(), second())
        assert ["first", "second"] == [
            span.attrs["function"].rpartition(".")[2] for span in recorded.spans
        ]

    @pytest.mark.parametrize("given", ["name", 3, dict])
    def test_what_cannot_be_decorated(self, given: Any) -> None:
        """Anything but a function is a TypeError that shows what to write."""
        with pytest.raises(ci.InputError, match=r"Write @ci\.inference or @ci\.inference\(config="):
            ci.inference(given)


class TestRequests:
    def test_each_request_has_its_own_id(self, recorded: testing.Captured) -> None:
        """Each request has an id of its own, that of its span."""

        @ci.inference
        def predict() -> None: ...

        predict()
        predict()
        ids = [span.attrs["request_id"] for span in recorded.spans]
        assert [span.id for span in recorded.spans] == ids
        assert 2 == len(set(ids))

    def test_an_id_that_is_given(self, recorded: testing.Captured) -> None:
        """A text passed as `request_id=` is the request's id, to find it by the server's own."""

        @ci.inference
        def predict(request_id: Any = None) -> None: ...

        predict(request_id="abc")
        predict(request_id=None)
        assert ["abc", recorded.spans[1].id] == [s.attrs["request_id"] for s in recorded.spans]

    def test_under_the_scope_of_the_caller(self, recorded: testing.Captured) -> None:
        """A request is under the scope that is open where it is called, or the request."""

        @ci.inference
        def inner() -> None: ...

        @ci.inference
        def outer() -> None:
            inner()

        outer()
        with ci.scope("warm-up"):
            inner()
        assert [("request", ["request"]), ("warm-up", ["request"])] == tree(recorded)

    def test_under_the_session(self) -> None:
        """With nothing open, a request is under the session; without a profiler it is recorded."""
        predict: Any = ci.inference(lambda: None)
        predict()
        assert ["request"] == outline(ci.trace(format="dict")["roots"])
        ci.profile(output="none")
        predict()
        session = ci.trace(format="dict")["roots"][-1]
        assert [("cirron.session", ["request"])] == outline([session])

    def test_a_thousand_at_once(self, recorded: testing.Captured) -> None:
        """1,000 concurrent requests of one loop keep their trees and values apart."""

        @ci.inference
        async def handle(number: int) -> int:
            ci.mark("number", number)
            for name in ("tokenize", "generate"):
                with ci.scope(name, index=number):
                    for _ in range(3):
                        await asyncio.sleep(0)
                    ci.mark("number", number)
            return number

        async def main() -> list[int]:
            with ci.scope("serve"):
                return await asyncio.gather(*(handle(number) for number in range(1000)))

        assert list(range(1000)) == asyncio.run(main())
        (serve,) = recorded.dict()["roots"]
        requests = serve["children"]
        assert 1000 == len(requests) == len({r["attrs"]["request_id"] for r in requests})
        for request in requests:
            number = request["marks"][0]["value"]
            assert [("tokenize", number, number), ("generate", number, number)] == [
                (child["name"], child["index"], child["marks"][0]["value"])
                for child in request["children"]
            ]

    def test_a_thousand_streams_at_once(self, recorded: testing.Captured) -> None:
        """1,000 concurrent streams of one loop keep their scopes apart."""

        @ci.inference
        async def stream(number: int) -> AsyncIterator[str]:
            for index in range(3):
                with ci.scope("decode", index=number):
                    await asyncio.sleep(0)
                    yield str(index)

        async def read(number: int) -> None:
            assert ["0", "1", "2"] == [item async for item in stream(number)]

        async def main() -> None:
            await asyncio.gather(*(read(number) for number in range(1000)))

        asyncio.run(main())
        requests = recorded.dict()["roots"]
        assert 1000 == len(requests)
        assert all(
            3 == len(request["children"]) and 1 == len({c["index"] for c in request["children"]})
            for request in requests
        )

    def test_requests_of_threads_stay_separate(self, recorded: testing.Captured) -> None:
        """Requests of many threads keep their trees apart."""
        barrier = threading.Barrier(8)

        @ci.inference
        def handle(number: int) -> None:
            barrier.wait()
            with ci.scope("inside", index=number):
                barrier.wait()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(handle, range(8)))
        requests = recorded.dict()["roots"]
        assert [1] * 8 == [len(request["children"]) for request in requests]
        assert set(range(8)) == {request["children"][0]["index"] for request in requests}

    @pytest.mark.parametrize("error", [ValueError("no good"), KeyboardInterrupt(), SystemExit(3)])
    def test_exceptions_reach_the_caller_unchanged(
        self, error: BaseException, recorded: testing.Captured
    ) -> None:
        """An exception is noted on the request, and is the one that the caller gets."""

        @ci.inference
        def plain() -> None:
            raise error

        @ci.inference
        async def coroutine() -> None:
            raise error

        @ci.inference
        def stream() -> Iterator[int]:
            yield 1
            raise error

        for run in (plain, lambda: coroutine().send(None), lambda: list(stream())):
            with pytest.raises(type(error)) as raised:
                run()
            assert error is raised.value
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        assert [text] * 3 == [span.attrs["error"] for span in recorded.spans]

    def test_a_cancelled_request(self, recorded: testing.Captured) -> None:
        """A task that is cancelled ends its request, which says so."""
        began = asyncio.Event()

        @ci.inference
        async def handle() -> None:
            began.set()
            await asyncio.Event().wait()

        async def main() -> None:
            task = asyncio.ensure_future(handle())
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        assert ["CancelledError"] == [span.attrs["error"] for span in recorded.spans]

    def test_wrong_arguments(self, recorded: testing.Captured) -> None:
        """A call with wrong arguments fails as without us."""
        predict: Any = ci.inference(lambda x: x, config={"capture_inputs": True})

        with pytest.raises(TypeError, match="positional argument"):
            predict()

    def test_disabled_inference_records_nothing(self) -> None:
        """While profiling is off, every kind of function works and nothing is recorded."""
        ci.profile(enabled=False)

        @ci.inference
        def stream() -> Generator[Any, Any, str]:
            yield (yield 1)
            return "end"

        @ci.inference
        async def stream_async() -> AsyncGenerator[Any, Any]:
            try:
                yield (yield 1)
            except KeyError:
                yield "caught"

        @ci.inference
        async def coroutine() -> int:
            return 1

        async def main() -> list[Any]:
            items = stream_async()
            got = [await items.asend(None), await items.asend("sent")]
            got += [await items.athrow(KeyError()), await coroutine()]
            await items.aclose()
            return got

        items = stream()
        assert (1, "sent") == (next(items), items.send("sent"))
        with pytest.raises(StopIteration, match="end"):
            next(items)
        assert [1, "sent", "caught", 1] == asyncio.run(main())
        assert 3 == ci.inference(lambda x: x)(3)
        assert (0, 0) == (len(hot.ring), len(hot.opened))

    def test_turned_on_later(self, recorded: testing.Captured) -> None:
        """A function that is decorated while profiling is off is recorded once it is on."""
        before = hot.attach(hot.State(hot.ring, off=True))
        try:
            predict: Any = ci.inference(lambda: None)
            predict()
        finally:
            hot.attach(before)
        predict()
        assert ["request"] == tree(recorded)

    def test_requests_nested_too_deep_still_answer(self, recorded: testing.Captured) -> None:
        """A request that is nested too deep is dropped, with its marks, and still answers."""
        answer = {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}

        @ci.inference
        def stream() -> Iterator[str]:
            yield "a"
            yield "b"

        def nest(depth: int) -> Any:
            if depth == 0:
                return ci.inference(lambda: answer)(), list(stream())
            with ci.scope("x"):
                return nest(depth - 1)

        assert (answer, ["a", "b"]) == nest(64)
        assert (64, 0) == (len(recorded.spans), len(recorded.marks))


class TestStreams:
    """A stream is driven as without us, and its request ends when it does."""

    @pytest.fixture
    def stream(self) -> Any:
        @ci.inference
        def stream() -> Generator[Any, Any, None]:
            try:
                got = yield "a"
                with ci.scope("inside"):
                    try:
                        yield got
                    except KeyError as error:
                        yield error
                yield "last"
            finally:
                ci.mark("closed", 1, kind="summary")

        return stream

    def test_send_and_throw(self, stream: Any, recorded: testing.Captured) -> None:
        """What is sent and thrown in reaches the function."""
        items, error = stream(), KeyError("k")
        assert ["a", "sent", error, "last"] == [
            next(items),
            items.send("sent"),
            items.throw(error),
            next(items),
        ]
        assert [] == list(items)
        assert [("request", ["inside"])] == tree(recorded)

    def test_async_send_and_throw(self, recorded: testing.Captured) -> None:
        """The same for an async generator, and closing it reaches the function too."""
        seen = []

        @ci.inference
        async def stream() -> AsyncGenerator[Any, Any]:
            try:
                got = yield "a"
                try:
                    yield got
                except KeyError as error:
                    yield error
            finally:
                seen.append("closed")

        async def main() -> list[Any]:
            items, error = stream(), KeyError("k")
            got = [await items.asend(None), await items.asend("sent"), await items.athrow(error)]
            await items.aclose()
            return [*got, error]

        first, sent, thrown, error = asyncio.run(main())
        assert ("a", "sent", error, ["closed"]) == (first, sent, thrown, seen)
        assert [True] == [span.attrs["abandoned"] for span in recorded.spans]

    @pytest.mark.parametrize("how", ["break", "close", "drop"])
    def test_left_half_way(self, how: str, stream: Any, recorded: testing.Captured) -> None:
        """A stream that is broken off, closed or dropped ends its request, which says so."""
        items = stream()
        for _ in items:
            break
        assert [] == recorded.spans
        if how == "close":
            items.close()
        del items
        gc.collect()

        (span,) = recorded.spans
        assert (True, False) == (span.attrs["abandoned"], "error" in span.attrs)
        assert 1 == marks(recorded)["closed"]

    @pytest.mark.parametrize("is_last", [True, False])
    def test_async_left_half_way(self, is_last: bool, recorded: testing.Captured) -> None:
        """An async stream that is dropped ends its request, with the loop at the latest."""

        @ci.inference
        async def stream() -> AsyncIterator[str]:
            for word in ("a", "b"):
                await asyncio.sleep(0)
                yield word

        async def main() -> None:
            async for _ in stream():
                break
            while not is_last and not recorded.spans:
                await asyncio.sleep(0)

        asyncio.run(main())
        (span,) = recorded.spans
        # A loop that ends closes what is left in it by a cancellation.
        how = {"error": "CancelledError"} if is_last else {"abandoned": True}
        assert how == {key: span.attrs[key] for key in ("error", "abandoned") if key in span.attrs}

    def test_a_stream_that_is_never_started_is_no_request(
        self, stream: Any, recorded: testing.Captured
    ) -> None:
        """A stream that nobody asks for an item is no request: none of its code ran."""
        stream()
        gc.collect()
        assert ([], 0) == (recorded.spans, len(hot.opened))

    def test_consumers_are_not_inside(self, recorded: testing.Captured) -> None:
        """What is done with an item is not inside the request, but beside it."""

        @ci.inference
        def stream() -> Iterator[str]:
            for word in ("a", "b"):
                with ci.scope("make"):
                    yield word

        with ci.scope("handler"):
            for _ in stream():
                with ci.scope("send"):
                    ci.mark("sent", 1)
        assert [("handler", [("request", ["make", "make"]), "send", "send"])] == tree(recorded)

    def test_streams_that_take_turns(self, recorded: testing.Captured) -> None:
        """Streams of one thread that take turns are beside each other, not inside."""

        @ci.inference
        def stream(number: int) -> Iterator[int]:
            for _ in range(3):
                with ci.scope("make", index=number):
                    yield number

        for _ in zip(stream(0), stream(1), strict=True):
            pass
        assert [("request", ["make"] * 3)] * 2 == tree(recorded)
        for request in recorded.dict()["roots"]:
            assert 1 == len({child["index"] for child in request["children"]})
        assert 0 == hot.depth()

    def test_a_thread_for_each_item(self, recorded: testing.Captured) -> None:
        """A stream whose items are fetched by other threads, as servers do, stays one tree."""

        @ci.inference
        def stream() -> Iterator[int]:
            for index in range(3):
                with ci.scope("make", index=index):
                    yield index

        items = stream()
        with ThreadPoolExecutor(1) as pool, ci.scope("server"):
            for index in range(3):
                context = copy_context()
                assert index == pool.submit(context.run, next, items).result()
            assert [] == pool.submit(copy_context().run, lambda: list(items)).result()
        assert [("server", [("request", ["make"] * 3)])] == tree(recorded)

    def test_the_users_own_context(self, recorded: testing.Captured) -> None:
        """Context variables of the program are seen and set as without us."""
        user: ContextVar[str] = ContextVar("user", default="nobody")

        @ci.inference
        def stream() -> Iterator[str]:
            yield user.get()
            user.set("set inside")
            yield user.get()

        items = stream()
        user.set("caller")
        assert ["caller", "set inside", "set inside"] == [next(items), next(items), user.get()]

    def test_outliving_the_caller(self, recorded: testing.Captured) -> None:
        """A stream that outlives the scope it was begun in is under the next one, all of it."""

        @ci.inference
        def stream() -> Iterator[int]:
            yield 1
            recorded.clock.advance(5)
            yield 2

        with ci.scope("server"):
            with ci.scope("handler"):
                items = stream()
                next(items)
            list(items)
        assert [("server", ["handler", "request"])] == tree(recorded)
        request = next(span for span in recorded.spans if span.name == "request")
        assert request.end_ns is not None
        assert request.end_ns - request.start_ns > 5e9

    def test_open_at_shutdown(self) -> None:
        """A stream that is open when the session ends goes on, unrecorded."""
        ci.profile(output="none")

        @ci.inference
        def stream() -> Iterator[str]:
            yield "a"
            yield "b"

        items = stream()
        assert "a" == next(items)
        ci.shutdown()
        assert ["b"] == list(items)
        (session,) = ci.trace(format="dict")["roots"]
        assert [True] == [child["attrs"]["truncated"] for child in session["children"]]


class TestReturnedStreams:
    """A function that returns a stream, instead of being one, is a request until that has ended."""

    def test_a_generator(self, recorded: testing.Captured) -> None:
        """A generator that is returned belongs to the request, and stays a generator."""

        def words() -> Generator[str, None, str]:
            with ci.scope("inside"):
                yield "a"
            yield "b"
            return "end"

        @ci.inference
        def answer() -> Generator[str, None, str]:
            with ci.scope("prepare"):
                return words()

        with ci.scope("handler"):
            items = answer()
            assert inspect.isgenerator(items)
            with ci.scope("send"):
                assert ["a", "b"] == list(items)
        assert [("handler", [("request", ["prepare", "inside"]), "send"])] == tree(recorded)
        assert {"time_to_first_token_s", "tokens_per_second"} == set(marks(recorded))

    def test_an_async_generator(self, recorded: testing.Captured) -> None:
        """The same for an async one, from a plain or an async function."""

        async def words() -> AsyncIterator[str]:
            yield "a"
            yield "b"

        @ci.inference
        def answer() -> AsyncIterator[str]:
            return words()

        @ci.inference
        async def answer_async() -> AsyncIterator[str]:
            return words()

        async def main() -> None:
            assert ["a", "b"] == [word async for word in answer()]
            assert ["a", "b"] == [word async for word in await answer_async()]

        asyncio.run(main())
        assert ["request", "request"] == tree(recorded)

    def test_a_coroutine(self, recorded: testing.Captured) -> None:
        """A plain function that returns a coroutine is a request until that has returned."""

        async def work() -> dict[str, Any]:
            with ci.scope("inside"):
                await asyncio.sleep(0)
            return {"usage": {"prompt_tokens": 3, "completion_tokens": 5}}

        async def main() -> Any:
            return await ci.inference(lambda: work())()

        assert "usage" in asyncio.run(main())
        assert [("request", ["inside"])] == tree(recorded)
        assert {"prompt_tokens": 3, "completion_tokens": 5} == marks(recorded)

    @pytest.mark.parametrize("name", ["_iterator", "body_iterator", "response"])
    def test_an_object_that_streams(self, name: str, recorded: testing.Captured) -> None:
        """An object that streams from a generator is handed out itself, with the request open."""

        class Response:
            pass

        response = Response()

        @ci.inference
        def answer() -> Response:
            setattr(response, name, (word for word in ("a", "b")))
            return response

        assert response is answer()
        assert [] == recorded.spans
        assert ["a", "b"] == list(getattr(response, name))
        assert ["request"] == tree(recorded)

    @pytest.mark.parametrize("is_begun", [True, False])
    def test_dropping_a_stream_ends_the_request(
        self, is_begun: bool, recorded: testing.Captured
    ) -> None:
        """A stream that is dropped ends the request, also when nobody has asked for an item."""
        closed = []

        def words() -> Iterator[str]:
            try:
                yield "a"
                yield "b"
            finally:
                closed.append(True)

        items = ci.inference(lambda: words())()
        if is_begun:
            next(items)
        del items
        gc.collect()
        assert [True] == [span.attrs["abandoned"] for span in recorded.spans]
        assert [True] * is_begun == closed


class TestMarks:
    @pytest.mark.parametrize(
        "answer",
        [
            {"usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}},
            SimpleNamespace(usage=SimpleNamespace(prompt_tokens=3, completion_tokens=5)),
            SimpleNamespace(usage={"input_tokens": 3, "output_tokens": 5}),
            SimpleNamespace(
                usage=SimpleNamespace(
                    prompt_tokens=None, completion_tokens=None, input_tokens=3, output_tokens=5
                )
            ),
        ],
    )
    def test_usage_becomes_token_marks(self, answer: Any, recorded: testing.Captured) -> None:
        """Tokens are marked where the answer has a `usage`, as attributes or items."""
        assert answer is ci.inference(lambda: answer)()
        assert {"prompt_tokens": 3, "completion_tokens": 5} == marks(recorded)
        assert {recorded.spans[0].id} == {mark.span_id for mark in recorded.marks}

    def test_usage_of_an_embedding(self, recorded: testing.Captured) -> None:
        """A usage without completion tokens marks those of the prompt."""
        ci.inference(lambda: {"usage": {"prompt_tokens": 3, "total_tokens": 3}})()
        assert {"prompt_tokens": 3} == marks(recorded)

    @pytest.mark.parametrize(
        "answer",
        [
            None,
            "text",
            {"usage": None},
            {"usage": "80 %"},
            {"usage": {"prompt_tokens": True, "completion_tokens": "5"}},
            SimpleNamespace(shape=(1, 2), dtype="float32"),
            object(),
            [1, 2],
        ],
    )
    def test_other_answers_are_returned_unchanged(
        self, answer: Any, recorded: testing.Captured
    ) -> None:
        """What has no such shape marks nothing, and is returned as it is."""
        assert answer is ci.inference(lambda: answer)()
        assert ({}, ["request"]) == (marks(recorded), tree(recorded))

    def test_an_answer_that_fails_when_looked_at(self, recorded: testing.Captured) -> None:
        """An answer whose own attributes raise is returned, and no error of ours is counted."""

        class Odd:
            def __getattr__(self, name: str) -> Any:
                raise RuntimeError("do not look")

        odd = Odd()
        assert odd is ci.inference(lambda: odd)()
        assert ({}, {}) == (marks(recorded), dict(guard.errors))

    def test_our_own_mistakes(
        self, monkeypatch: pytest.MonkeyPatch, recorded: testing.Captured
    ) -> None:
        """A mistake of ours while looking at an answer or item is counted; the answer is given."""
        from cirron import serving

        def broken(value: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(serving, "usage_of", broken)
        monkeypatch.setattr(guard, "strict", False)
        assert {1} == ci.inference(lambda: {1})()
        assert [1] == list(ci.inference(lambda: (n for n in [1]))())
        assert {"inference: ZeroDivisionError": 2} == guard.errors
        assert ["request", "request"] == tree(recorded)
        guard.errors.clear()

    def test_generate_marks_input_and_output_lengths(self, recorded: testing.Captured) -> None:
        """Token ids in, token ids out: both lengths are marked."""

        def ids(length: int, dtype: str = "torch.int64") -> Any:
            return SimpleNamespace(shape=(2, length), dtype=dtype)

        @ci.inference
        def generate(*args: Any, **kwargs: Any) -> Any:
            return answer

        for answer in (ids(9), {"sequences": ids(9)}, SimpleNamespace(sequences=ids(9, "int32"))):
            for args, kwargs in (
                ((ids(4),), {}),
                (("model", ids(4)), {}),
                (({"input_ids": ids(4)},), {}),
                ((SimpleNamespace(input_ids=ids(4)),), {}),
                ((), {"input_ids": ids(4)}),
                ((), {"inputs": ids(4)}),
            ):
                with testing.capture() as captured:
                    assert answer is generate(*args, **kwargs)
                assert {"input_length": 4, "output_length": 9} == marks(captured)
        answer = ids(9)
        generate("text")  # no token ids went in
        generate(ids(4, "torch.float32"))
        assert {} == marks(recorded)

    def test_a_stream(self, recorded: testing.Captured) -> None:
        """Time to the first token, and tokens a second from there on; an item counts for one."""
        recorded.clock.tick_ns = 0

        @ci.inference
        def stream() -> Iterator[str]:
            recorded.clock.advance(0.5)
            yield ""  # brings no token
            recorded.clock.advance(0.5)
            for _ in range(5):
                yield "token"
                recorded.clock.advance(0.1)

        list(stream())
        found = marks(recorded)
        assert {"time_to_first_token_s": 1.0, "tokens_per_second": pytest.approx(10)} == found

    def test_chunks_of_a_chat(self, recorded: testing.Captured) -> None:
        """The first chunk with content is the first token; the usage at the end is the count."""
        recorded.clock.tick_ns = 0

        @ci.inference
        def stream() -> Iterator[Any]:
            yield chunk("", role="assistant")
            recorded.clock.advance(2)
            yield chunk("Hello ")
            recorded.clock.advance(1)
            yield chunk("you all")
            yield chunk(None, SimpleNamespace(prompt_tokens=7, completion_tokens=5))

        list(stream())
        assert {
            "time_to_first_token_s": 2.0,
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "tokens_per_second": 4.0,
        } == marks(recorded)

    def test_events_of_a_response(self, recorded: testing.Captured) -> None:
        """Of the events of a streamed response, deltas are tokens and the last has the usage."""
        recorded.clock.tick_ns = 0
        usage = {"input_tokens": 7, "output_tokens": 3}

        @ci.inference
        def stream() -> Iterator[Any]:
            yield {"type": "response.created", "response": {"usage": None}}
            recorded.clock.advance(1)
            yield {"type": "response.output_text.delta", "delta": "Hello"}
            recorded.clock.advance(1)
            yield {"type": "response.output_text.delta", "delta": " you"}
            yield {"type": "response.completed", "response": {"usage": usage}}

        list(stream())
        assert {
            "time_to_first_token_s": 1.0,
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "tokens_per_second": 2.0,
        } == marks(recorded)

    def test_marks_are_the_requests(self, recorded: testing.Captured) -> None:
        """The marks of a stream are on the request, also while a scope inside it is open."""

        @ci.inference
        def stream() -> Iterator[str]:
            with ci.scope("decode"):
                yield "a"
                yield "b"

        list(stream())
        request = next(span for span in recorded.spans if span.name == "request")
        assert {request.id} == {mark.span_id for mark in recorded.marks}

    def test_items_that_have_no_truth(self, recorded: testing.Captured) -> None:
        """Items are never compared or tested: arrays may be streamed."""
        import numpy as np

        @ci.inference
        def stream() -> Iterator[Any]:
            yield np.zeros(3)
            yield np.zeros(3)

        assert 2 == len(list(stream()))
        assert {"time_to_first_token_s", "tokens_per_second"} == set(marks(recorded))

    def test_nothing_is_held_back(self, recorded: testing.Captured) -> None:
        """Each item is out before the function goes on."""
        order = []

        @ci.inference
        def stream() -> Iterator[int]:
            for number in range(3):
                order.append(f"made {number}")
                yield number

        for number in stream():
            order.append(f"got {number}")
        assert ["made 0", "got 0", "made 1", "got 1", "made 2", "got 2"] == order


class TestConfig:
    def test_config_flags_become_an_attribute(self, recorded: testing.Captured) -> None:
        """Keys of the user's own are an attribute of each request."""
        ci.inference(lambda: None, config={"model": "small", "beams": 2})()
        assert {"model": "small", "beams": 2} == recorded.spans[0].attrs["config"]

    def test_nothing_is_captured_unasked(self, recorded: testing.Captured) -> None:
        """Inputs and outputs are not kept unless the config says so."""
        for config in (None, {}, {"model": "small"}, {"capture_inputs": False}):
            ci.inference(lambda prompt: "secret", config=config)("secret")
        assert all("secret" not in str(span.attrs) for span in recorded.spans)

    def test_captured_inputs_are_short(self, recorded: testing.Captured) -> None:
        """Inputs are kept by name: scalars, the beginning of texts, the shapes of arrays."""
        import numpy as np

        class Model:
            @ci.inference(config={"capture_inputs": True})
            def predict(self, prompt: str, *rest: Any, limit: int = 0, **more: Any) -> str:
                return prompt

        Model().predict("x" * 1000, [1, {"a": 1}], None, limit=5, top=0.5)
        assert {
            "prompt": "x" * 256,
            "rest": "([1, {'a': 1}], None)",
            "limit": 5,
            "more": "{'top': 0.5}",
        } == recorded.spans[0].attrs["inputs"]
        ci.inference(lambda x: None, config={"capture_inputs": True})(np.zeros((2, 3)))
        assert {"x": "ndarray [2, 3] float64"} == recorded.spans[1].attrs["inputs"]

    @pytest.mark.parametrize(
        ("answer", "kept"),
        [
            ("text", "text"),
            (None, None),
            (0.5, 0.5),
            ([1, 2], "[1, 2]"),
            ({"choices": [{"message": {"content": "Hello"}}]}, "Hello"),
            ({"choices": [{"text": "Hello"}]}, "Hello"),
        ],
    )
    def test_captured_outputs_are_short(
        self, answer: Any, kept: Any, recorded: testing.Captured
    ) -> None:
        """An answer is kept as an attribute; of a chat, what it says."""
        ci.inference(lambda: answer, config={"capture_outputs": True})()
        assert kept == recorded.spans[0].attrs["output"]

    def test_the_output_of_a_stream(self, recorded: testing.Captured) -> None:
        """The beginning of what a stream says is kept, from texts and from chunks."""

        @ci.inference(config={"capture_outputs": True})
        def stream(make: Any) -> Iterator[Any]:
            for _ in range(100):
                yield make("word ")

        list(stream(str))
        list(stream(chunk))
        assert [("word " * 52)[:256]] * 2 == [span.attrs["output"] for span in recorded.spans]

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("fast", "config='fast' is not valid; it must be a dict"),
            (
                {"capture_input": True},
                "config key='capture_input' is not valid;"
                " use one of 'capture_inputs', 'capture_outputs'",
            ),
            (
                {"capture_inputs": "yes"},
                r"config\['capture_inputs'\]='yes' is not valid; use one of True, False",
            ),
        ],
    )
    def test_a_wrong_config(self, config: Any, message: str) -> None:
        """A config that cannot be meant is an error where the function is decorated."""
        with pytest.raises(ci.SettingError, match=message):
            ci.inference(config=config)


def test_the_scope_decorator_keeps_streams_apart(recorded: testing.Captured) -> None:
    """`@ci.scope` on a generator is the innermost scope only while the generator runs."""

    @ci.scope("stream")
    def stream(number: int) -> Iterator[int]:
        for _ in range(2):
            with ci.scope("make", index=number):
                yield number

    for _ in zip(stream(0), stream(1), strict=True):
        with ci.scope("use"):
            pass
    assert [("stream", ["make"] * 2), ("stream", ["make"] * 2), "use", "use"] == tree(recorded)


def test_nothing_is_imported() -> None:
    """Looking at answers and streams imports no framework, and not the rest of the library."""
    script = """
import sys, cirron as ci
ci.inference(lambda: {"usage": {"prompt_tokens": 1}})()
list(ci.inference(lambda: ({"choices": []} for _ in range(3)))())
names = {name.partition(".")[0] for name in sys.modules}
frameworks = {"torch", "transformers", "numpy", "openai", "httpx", "starlette", "flask"}
print(sorted(names & frameworks), "cirron.session" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert b"[] False" == ended.stdout.strip()


def test_inputs_are_let_go(recorded: testing.Captured) -> None:
    """A stream that is returned does not keep the arguments of the call alive."""

    class Large:
        pass

    @ci.inference
    def answer(large: Large) -> Iterator[str]:
        return (word for word in ("a", "b"))

    large = Large()
    seen = weakref.ref(large)
    items = answer(large)
    del large
    assert ("a", None) == (next(items), seen())
