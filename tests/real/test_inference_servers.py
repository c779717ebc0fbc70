"""`@ci.inference` in real servers: FastAPI and Starlette under uvicorn, Flask under werkzeug."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flask
import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Header
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.responses import StreamingResponse as StarletteStreamingResponse
from starlette.routing import Route
from werkzeug.serving import make_server

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from starlette.requests import Request
    from tests.real.conftest import Scripts, Traced

HOST = "127.0.0.1"
EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def serving(app: Any, scripts: Scripts) -> Iterator[httpx.Client]:
    """A client of an ASGI app that a real uvicorn serves."""
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        scripts.wait_until(lambda: server.started, "the server")
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=20) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def serving_flask(app: flask.Flask) -> Iterator[httpx.Client]:
    """A client of a Flask app, a thread a request."""
    server = make_server(HOST, 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://{HOST}:{server.port}", timeout=20) as client:
            yield client
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def requests() -> list[dict[str, Any]]:
    """The requests under the session, as they are now."""
    (session,) = ci.trace(format="dict")["roots"]
    return [node for node in session["children"] if node["name"] == "request"]


def mark_names(node: dict[str, Any]) -> set[str]:
    return {mark["name"] for mark in node["marks"]}


@pytest.fixture
def closed(scripts: Scripts) -> Callable[[], dict[str, Any]]:
    """Waits until the only request is closed, and returns it."""

    def found() -> dict[str, Any]:
        def one() -> dict[str, Any] | None:
            gc.collect()
            nodes = requests()
            return nodes[0] if nodes and not nodes[0]["open"] else None

        node: dict[str, Any] = scripts.wait_until(one, "the request to close")
        return node

    return found


class TestFastAPI:
    @pytest.fixture
    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/async/{number}")
        @ci.inference
        async def coroutine(number: int, request_id: str | None = Header(None)) -> dict[str, Any]:
            with ci.scope("forward", index=number):
                await asyncio.sleep(0)
            return {"number": number, "usage": {"prompt_tokens": number, "completion_tokens": 2}}

        @app.get("/sync/{number}")
        @ci.inference
        def plain(number: int) -> dict[str, Any]:
            with ci.scope("forward", index=number):
                return {"number": number}

        @app.get("/fails")
        @ci.inference
        async def fails() -> None:
            raise ValueError("no good")

        @app.get("/stream")
        @ci.inference
        async def stream() -> StreamingResponse:
            async def words() -> AsyncIterator[str]:
                for word in ("a", "b", "c"):
                    with ci.scope("decode"):
                        await asyncio.sleep(0)
                        yield word

            return StreamingResponse(words())

        return app

    def test_parameters(self, app: FastAPI, traced: Traced) -> None:
        """FastAPI sees the function's own parameters, checks them, and gets its answer."""
        with TestClient(app) as client:
            assert {"number": 3} == client.get("/sync/3").json()
            assert 422 == client.get("/sync/x").status_code
            assert 3 == client.get("/async/3", headers={"request-id": "abc"}).json()["number"]
        assert "request(forward[3]) request(forward[3])" == traced()
        assert "abc" == requests()[1]["attrs"]["request_id"]
        assert {"prompt_tokens", "completion_tokens"} == mark_names(requests()[1])

    @pytest.mark.parametrize("path", ["async", "sync"])
    def test_many_at_once(self, path: str, app: FastAPI, traced: Traced, scripts: Scripts) -> None:
        """Requests that a real server answers at once, in a loop or in threads, stay apart."""
        with serving(app, scripts) as client, ThreadPoolExecutor(16) as pool:
            numbers = list(
                pool.map(lambda n: client.get(f"/{path}/{n}").json()["number"], range(64))
            )
        assert list(range(64)) == numbers
        nodes = requests()
        assert 64 == len(nodes) == len({node["attrs"]["request_id"] for node in nodes})
        assert list(range(64)) == sorted(node["children"][0]["index"] for node in nodes)
        assert [1] * 64 == [len(node["children"]) for node in nodes]

    def test_an_exception(self, app: FastAPI, traced: Traced) -> None:
        """An exception is on the request, and FastAPI gets it."""
        with TestClient(app, raise_server_exceptions=False) as client:
            assert 500 == client.get("/fails").status_code
        assert "ValueError: no good" == requests()[0]["attrs"]["error"]

    def test_a_stream(self, app: FastAPI, traced: Traced, scripts: Scripts) -> None:
        """An endpoint that returns a stream is a request until the last word is out."""
        with serving(app, scripts) as client:
            assert "abc" == client.get("/stream").text
        assert "request(decode decode decode)" == traced()
        assert {"time_to_first_token_s", "tokens_per_second"} == mark_names(requests()[0])


class TestStarlette:
    @pytest.fixture
    def goes_on(self) -> threading.Event:
        return threading.Event()

    @pytest.fixture
    def app(self, goes_on: threading.Event) -> Starlette:
        @ci.inference
        async def words() -> AsyncIterator[str]:
            yield "first "
            while not goes_on.is_set():
                await asyncio.sleep(0.005)
                yield "more "

        @ci.inference
        def words_sync() -> Iterator[str]:
            yield "first "
            while not goes_on.wait(0.005):
                yield "more "

        async def stream(request: Request) -> StarletteStreamingResponse:
            return StarletteStreamingResponse(words())

        async def stream_sync(request: Request) -> StarletteStreamingResponse:
            return StarletteStreamingResponse(words_sync())

        @ci.inference
        async def returned(request: Request) -> StarletteStreamingResponse:
            return StarletteStreamingResponse(word async for word in words.__wrapped__())  # type: ignore[attr-defined]

        @ci.inference
        async def answer(request: Request) -> JSONResponse:
            return JSONResponse({"path": request.url.path})

        class Endpoint:
            async def __call__(self, text: str) -> str:
                return text.upper()

        model = ci.inference(Endpoint())

        async def upper(request: Request) -> PlainTextResponse:
            return PlainTextResponse(await model(request.path_params["text"]))

        return Starlette(
            routes=[
                Route("/answer", answer),
                Route("/upper/{text}", upper),
                Route("/stream", stream),
                Route("/stream_sync", stream_sync),
                Route("/returned", returned),
            ]
        )

    def test_answers(self, app: Starlette, traced: Traced, scripts: Scripts) -> None:
        """Functions and callable objects answer as without us, each call a request."""
        with serving(app, scripts) as client:
            assert {"path": "/answer"} == client.get("/answer").json()
            assert "HELLO" == client.get("/upper/hello").text
        assert "request request" == traced()

    @pytest.mark.parametrize("path", ["/stream", "/stream_sync", "/returned"])
    def test_a_stream(
        self,
        path: str,
        app: Starlette,
        goes_on: threading.Event,
        traced: Traced,
        scripts: Scripts,
    ) -> None:
        """The first word is with the client while the function is still at work."""
        with serving(app, scripts) as client, client.stream("GET", path) as response:
            text = response.iter_text()
            assert next(text).startswith("first ")
            assert [True] == [node["open"] for node in requests()]
            goes_on.set()
            assert set("".join(text).split()) <= {"more"}
        assert "request" == traced()
        assert "time_to_first_token_s" in mark_names(requests()[0])

    @pytest.mark.parametrize("path", ["/stream", "/stream_sync", "/returned"])
    def test_a_client_that_goes_away(
        self,
        path: str,
        app: Starlette,
        goes_on: threading.Event,
        traced: Traced,
        scripts: Scripts,
        closed: Callable[[], dict[str, Any]],
    ) -> None:
        """When the client disconnects, the request closes, and says that it was not finished."""
        with serving(app, scripts) as client:
            with client.stream("GET", path) as response:
                next(response.iter_text())
            node = closed()
            goes_on.set()
        assert {"abandoned", "error"} & set(node["attrs"])
        assert "time_to_first_token_s" in mark_names(node)


class TestFlask:
    @pytest.fixture
    def app(self) -> flask.Flask:
        app = flask.Flask(__name__)

        @app.get("/classify/<int:number>")
        @ci.inference
        def classify(number: int) -> dict[str, Any]:
            with ci.scope("forward", index=number):
                return {"number": number, "usage": {"prompt_tokens": number}}

        @app.get("/returned")
        @ci.inference
        def returned() -> flask.Response:
            words = (word for word in ("a", "b", "c"))
            return flask.Response(flask.stream_with_context(words))

        @app.get("/bare")
        @ci.inference
        def bare() -> Iterator[str]:
            return (word for word in ("a", "b", "c"))

        @app.get("/endless")
        @ci.inference
        def endless() -> flask.Response:
            def words() -> Iterator[str]:
                while True:
                    yield "word " * 1000

            return flask.Response(words())

        return app

    def test_threads(self, app: flask.Flask, traced: Traced) -> None:
        """Requests in threads of their own stay apart."""
        with serving_flask(app) as client, ThreadPoolExecutor(16) as pool:
            got = list(pool.map(lambda n: client.get(f"/classify/{n}").json(), range(64)))
        assert list(range(64)) == [answer["number"] for answer in got]
        nodes = requests()
        assert [1] * 64 == [len(node["children"]) for node in nodes]
        assert all(node["children"][0]["index"] == node["marks"][0]["value"] for node in nodes)

    @pytest.mark.parametrize("path", ["/returned", "/bare"])
    def test_streams(self, path: str, app: flask.Flask, traced: Traced) -> None:
        """A view that returns a stream is a request until its end."""
        with serving_flask(app) as client:
            assert "abc" == client.get(path).text
        assert "request" == traced()
        assert {"time_to_first_token_s", "tokens_per_second"} == mark_names(requests()[0])

    def test_a_client_that_goes_away(
        self, app: flask.Flask, traced: Traced, closed: Callable[[], dict[str, Any]]
    ) -> None:
        """When the client disconnects, the request closes as abandoned."""
        with serving_flask(app) as client:
            with client.stream("GET", "/endless") as response:
                next(response.iter_text())
            node = closed()
        assert True is node["attrs"]["abandoned"]


def test_the_example() -> None:
    """Both endpoints of the example answer, and are requests with what they do inside."""
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "inference_fastapi.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (0, "") == (ended.returncode, ended.stderr)
    assert "{'label': 'short'}\none word after another" in ended.stdout
    assert all(name in ended.stdout for name in ("tokenize", "forward", "tokens_per_second="))
