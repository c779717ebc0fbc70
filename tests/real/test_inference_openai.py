"""`@ci.inference` round the real `openai` client, which talks to a server on 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

import cirron as ci
from cirron.serving import Stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from tests.real.conftest import Traced

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = ("Hello", " to", " you", " all")
USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
TEXT = "".join(WORDS)
TOKENS = {"prompt_tokens": 7, "completion_tokens": 4}
TIMES = {"time_to_first_token_s", "tokens_per_second"}


# -- as much of the API as the tests need ----------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] == "broken":
            self._answer(400, {"error": {"message": "no such model"}})
        elif self.path.endswith("/responses"):
            self._stream(self._events())
        elif body.get("stream"):
            asked = (body.get("stream_options") or {}).get("include_usage", False)
            self._stream(self._chunks(body["model"], asked))
        else:
            message = {"role": "assistant", "content": "".join(WORDS)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self._answer(200, self._object("chat.completion", [choice], usage=USAGE))

    def _object(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        made = {"id": "c1", "object": kind, "created": 1, "model": "small"}
        return {**made, "choices": choices, **more}

    def _chunks(self, model: str, with_usage: bool) -> Iterator[Any]:
        def chunk(delta: dict[str, Any]) -> Any:
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            return self._object("chat.completion.chunk", [choice])

        yield chunk({"role": "assistant", "content": ""})
        for word in WORDS:
            yield chunk({"content": word})
            if model == "held":
                self.server.goes_on.wait(30)
        if with_usage:
            yield self._object("chat.completion.chunk", [], usage=USAGE)

    def _events(self) -> Iterator[Any]:
        response = {"id": "r1", "object": "response", "created_at": 1, "model": "small"}
        yield {"type": "response.created", "sequence_number": 0, "response": response}
        for number, word in enumerate(WORDS):
            yield {
                "type": "response.output_text.delta",
                "sequence_number": number + 1,
                "item_id": "m1",
                "output_index": 0,
                "content_index": 0,
                "delta": word,
            }
        usage = {"input_tokens": 7, "output_tokens": 4, "total_tokens": 11}
        yield {
            "type": "response.completed",
            "sequence_number": 9,
            "response": {**response, "usage": usage},
        }

    def _answer(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, items: Iterator[Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):  # a client may go away
            for item in items:
                self.wfile.write(f"data: {json.dumps(item)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Streams of the model "held" stop after each word until `goes_on` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.goes_on = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.goes_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


# -- tests -----------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def chat(client: Any, **more: Any) -> Any:
    messages = [{"role": "user", "content": "Say hello"}]
    return client.chat.completions.create(**{"model": "small", "messages": messages, **more})


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def content(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def request() -> dict[str, Any]:
    """The only request."""
    (session,) = ci.trace(format="dict")["roots"]
    (node,) = session["children"]
    found: dict[str, Any] = node
    assert "request" == found["name"]
    return found


def marks(node: dict[str, Any]) -> dict[str, Any]:
    return {mark["name"]: mark["value"] for mark in node["marks"]}


def test_an_answer(client: openai.OpenAI, traced: Traced) -> None:
    """The tokens of a completion are marked, and the answer is the client's own."""

    @ci.inference
    def answer() -> ChatCompletion:
        completion: ChatCompletion = chat(client)
        return completion

    found = answer()
    assert (TEXT, openai.types.chat.ChatCompletion) == (
        found.choices[0].message.content,
        type(found),
    )
    assert TOKENS == marks(request())


def test_an_async_answer(server: Server, traced: Traced) -> None:
    """The same with the async client; many at once stay apart."""

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:

            @ci.inference
            async def answer(number: int) -> int:
                with ci.scope("call", index=number):
                    await chat(client)
                return number

            assert list(range(20)) == await asyncio.gather(*map(answer, range(20)))
            await ci.inference(lambda: chat(client))()

    asyncio.run(main())
    (session,) = ci.trace(format="dict")["roots"]
    *many, last = session["children"]
    assert set(range(20)) == {node["children"][0]["index"] for node in many}
    assert TOKENS == marks(last)


def test_a_stream_passed_on(client: openai.OpenAI, traced: Traced) -> None:
    """A generator that passes the chunks on has the tokens of the last chunk, and both times."""

    @ci.inference
    def answer() -> Iterator[ChatCompletionChunk]:
        yield from chat(client, **STREAMED)

    assert TEXT == content(list(answer()))
    found = marks(request())
    assert TOKENS == {name: found[name] for name in TOKENS}
    assert TIMES == set(found) - set(TOKENS)


def test_a_stream_of_text(client: openai.OpenAI, traced: Traced) -> None:
    """A generator of the texts alone has both times."""

    @ci.inference
    def answer() -> Iterator[str]:
        for chunk in chat(client, stream=True):
            if chunk.choices:
                yield chunk.choices[0].delta.content

    assert TEXT == "".join(answer())
    assert TIMES == set(marks(request()))


def test_a_stream_returned(client: openai.OpenAI, traced: Traced) -> None:
    """A function that returns the client's stream is a request until that has ended."""

    @ci.inference(config={"capture_outputs": True})
    def answer() -> openai.Stream[ChatCompletionChunk]:
        stream: openai.Stream[ChatCompletionChunk] = chat(client, **STREAMED)
        return stream

    stream = answer()
    assert isinstance(stream, openai.Stream)
    assert request()["open"]
    with stream:
        assert TEXT == content(list(stream))
    node = request()
    assert (False, TEXT) == (node["open"], node["attrs"]["output"])
    assert {*TIMES, *TOKENS} == set(marks(node))


def test_an_async_stream(server: Server, traced: Traced) -> None:
    """The async client's stream, returned by one function and passed on by another."""

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:

            @ci.inference
            async def returned() -> openai.AsyncStream[ChatCompletionChunk]:
                stream: openai.AsyncStream[ChatCompletionChunk] = await chat(client, **STREAMED)
                return stream

            @ci.inference
            async def passed_on() -> AsyncIterator[ChatCompletionChunk]:
                async for chunk in await chat(client, **STREAMED):
                    yield chunk

            assert TEXT == content([chunk async for chunk in await returned()])
            assert TEXT == content([chunk async for chunk in passed_on()])

    asyncio.run(main())
    (session,) = ci.trace(format="dict")["roots"]
    assert [{*TIMES, *TOKENS}] * 2 == [set(marks(node)) for node in session["children"]]


def test_a_streamed_response(client: openai.OpenAI, traced: Traced) -> None:
    """The newer API of responses: its deltas are tokens, its last event has the usage."""

    @ci.inference
    def answer() -> Any:
        return client.responses.create(model="small", input="Say hello", stream=True)

    text = [event.delta for event in answer() if event.type == "response.output_text.delta"]
    assert TEXT == "".join(text)
    found = marks(request())
    assert TOKENS == {name: found[name] for name in TOKENS}
    assert TIMES == set(found) - set(TOKENS)


@pytest.mark.parametrize("how", ["passed on", "returned"])
@pytest.mark.parametrize("by", ["close", "with", "drop"])
def test_a_stream_left_half_way(
    how: str, by: str, client: openai.OpenAI, server: Server, traced: Traced
) -> None:
    """A stream that is left while the server still talks closes its request, held or not."""

    @ci.inference
    def passed_on() -> Iterator[ChatCompletionChunk]:
        with chat(client, model="held", stream=True) as chunks:
            yield from chunks

    @ci.inference
    def returned() -> Any:
        return chat(client, model="held", stream=True)

    stream: Any = passed_on() if how == "passed on" else returned()
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert request()["open"]
    if by == "close":
        stream.close()
    elif by == "with":
        with stream if how == "returned" else contextlib.closing(stream):
            pass
    else:
        del stream, chunk
        gc.collect()
    node = request()
    assert (False, True) == (node["open"], node["attrs"]["abandoned"])
    assert {"time_to_first_token_s"} == set(marks(node))


def test_a_stream_that_is_closed(client: openai.OpenAI, traced: Traced) -> None:
    """A closed stream is as it is without us: of its own type, and as useless."""

    def answer() -> Any:
        return chat(client, model="held", stream=True)

    def leave(stream: Any) -> tuple[Any, ...]:
        next(stream)
        stream.close()
        stream.close()
        try:
            rest: Any = list(stream)
        except Exception as error:  # noqa: BLE001  whatever the client makes of it
            rest = repr(error)
        return type(stream), stream.response.is_closed, rest

    plain = leave(answer())
    assert (openai.Stream, True) == plain[:2]
    assert plain == leave(ci.inference(answer)())


def test_a_stream_closed_after_its_end(client: openai.OpenAI, traced: Traced) -> None:
    """It was not left half-way."""
    stream = ci.inference(lambda: chat(client, stream=True))()
    assert TEXT == content(list(stream))
    stream.close()

    assert "abandoned" not in request()["attrs"]


@pytest.mark.parametrize("by", ["close", "aclose", "with"])
def test_an_async_stream_left_half_way(by: str, server: Server, traced: Traced) -> None:
    """The async client's stream does the same."""

    @ci.inference
    async def answer(client: openai.AsyncOpenAI) -> Any:
        return await chat(client, model="held", stream=True)

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:
            stream = await answer(client)
            await anext(stream)
            assert request()["open"]
            assert inspect.iscoroutinefunction(stream.close)
            if by == "with":
                async with stream:
                    pass
            else:
                await (stream.close if by == "close" else stream.aclose)()
            assert (False, True) == (request()["open"], request()["attrs"]["abandoned"])

    asyncio.run(main())


def test_events_of_a_chat(client: openai.OpenAI, traced: Traced) -> None:
    """Of the client's own events those with a text count, each once: not the chunks beside them."""
    stream = Stream()

    @ci.inference(config={"capture_outputs": True})
    def answer() -> Iterator[Any]:
        messages: Any = [{"role": "user", "content": "Say hello"}]
        options: Any = {"stream_options": {"include_usage": True}}
        with client.chat.completions.stream(model="small", messages=messages, **options) as events:
            yield from events

    for event in answer():
        stream.take(event)
    node = request()

    assert len(WORDS) == stream.tokens
    assert TEXT == node["attrs"]["output"]
    assert TOKENS == {name: marks(node)[name] for name in TOKENS}
    assert TIMES == set(marks(node)) - set(TOKENS)


def test_an_error(client: openai.OpenAI, traced: Traced) -> None:
    """An error of the client is on the request, and is the one that the caller gets."""

    @ci.inference
    def answer() -> Any:
        return chat(client, model="broken")

    with pytest.raises(openai.BadRequestError, match="no such model"):
        answer()
    assert request()["attrs"]["error"].startswith("BadRequestError: ")


def test_the_example(server: Server) -> None:
    """The example prints the stream, and its request has both times."""
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "inference_llm_stream.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENAI_BASE_URL": server.url},
        timeout=60,
        check=False,
    )

    assert (0, "") == (ended.returncode, ended.stderr)
    assert ended.stdout.startswith(f"{TEXT}\n")
    assert all(f"{name}=" in ended.stdout for name in TIMES)
