"""The application: one table of routes, with what each needs.

A route needs a key that may write, a key that may read, or nothing (`PUBLIC`: the files of the page
and the logout). There are no other routes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from cirron import errors
from cirron.runs.engine import QueryError
from cirron.server import assets, events, responses, views
from cirron.server.access import PUBLIC, Access, Needs
from cirron.server.responses import Refusal, answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from starlette.requests import Request

    from cirron.server.ingest import Intake
    from cirron.server.keys import Key
    from cirron.server.served import Served

    Endpoint = Callable[[Request], Awaitable[Response]]

logger = logging.getLogger("cirron.server")

Role = Literal["all", "ingest", "page"]
MAX_VIEWS = 4  # queries that run at once
MAX_WAITING = 32  # queries of one key, running or waiting
READ_S = 20.0  # how long a query waits while the records are read for the first time
MAX_QUERY_BYTES = 16_384  # a name of 1,000 characters, percent-encoded
GZIP_BYTES = 1_024
# A slash in a run's id is `%2F`.
PATH = re.compile(r"/api/(?:(\w+)|runs/([^/]+)(?:/(\w+))?)")


class Entry(NamedTuple):
    """A row of the table of routes."""

    method: str
    path: str
    endpoint: Endpoint
    needs: Needs


class App:
    """The routes of one server process."""

    def __init__(
        self, role: Role, intake: Intake, access: Access, served: Served | None, hub: events.Hub
    ) -> None:
        self._access = access
        self._served = served
        self._hub = hub
        self._page = assets.files()
        self._views = CapacityLimiter(MAX_VIEWS)
        self._waiting: dict[str, int] = {}  # by key
        blobs = "/api/traces/blobs/{key:path}"
        table: list[Entry] = []
        if role in ("all", "ingest"):
            table += [
                Entry("POST", "/api/traces", intake.batch, "write"),
                Entry("PUT", blobs, intake.put_blob, "write"),
            ]
        if role in ("all", "page"):
            table += [
                Entry("GET", blobs, intake.get_blob, "read"),
                Entry("GET", "/api/events", self._events, "read"),
                Entry("POST", "/api/logout", self._logout, PUBLIC),
                Entry("GET", "/api/{rest:path}", self._view, "read"),
                Entry("GET", "/{rest:path}", self._file, PUBLIC),
            ]
        self.table = tuple(table)
        self.asgi = self._access.around(
            Starlette(
                routes=list(self._routes()),
                exception_handlers={HTTPException: responses.refused, Exception: responses.failed},
                lifespan=self._lifespan,
            )
        )

    def _routes(self) -> Iterator[Route]:
        for path in dict.fromkeys(entry.path for entry in self.table):
            entries = {entry.method: entry for entry in self.table if entry.path == path}
            yield Route(path, self._guarded(entries), methods=list(entries))  # and HEAD with GET

    def _guarded(self, entries: dict[str, Entry]) -> Endpoint:
        """The endpoints of a path, behind the check of the key."""

        async def endpoint(request: Request) -> Response:
            entry = entries["GET" if request.method == "HEAD" else request.method]
            if entry.needs != PUBLIC:
                request.state.key = await to_thread.run_sync(
                    self._access.check, request, entry.needs
                )
            return await entry.endpoint(request)

        return endpoint

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        self._hub.start()
        if self._served is not None:
            self._served.start()
        yield
        if self._served is not None:
            await to_thread.run_sync(self._served.stop)

    # -- queries ----------------------------------------------------------------------------

    async def _view(self, request: Request) -> Response:
        """One of the queries in `views`."""
        assert self._served is not None
        view, given = match(request)
        etag = self._etag(view, given)
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"ETag": etag})
        is_gzip = "gzip" in request.headers.get("accept-encoding", "")
        key: Key = request.state.key
        if self._waiting.get(key.id, 0) >= MAX_WAITING:
            raise Refusal(429, "this key has too many queries waiting", 1)
        self._waiting[key.id] = self._waiting.get(key.id, 0) + 1
        try:
            async with self._views:
                if await request.is_disconnected():  # the page no longer wants it: a zoom goes on
                    return Response(status_code=499)
                return await to_thread.run_sync(self._ask, view, given, etag, is_gzip)
        finally:
            self._waiting[key.id] -= 1

    def _etag(self, view: views.View, given: dict[str, str]) -> str:
        assert self._served is not None
        versions = self._served.versions
        version = versions.get(given["run"]) or sum(versions.values())
        asked = repr((view.__name__, sorted(given.items()))).encode()
        return f'"{self._served.boot}-{version}-{hashlib.sha256(asked).hexdigest()[:16]}"'

    def _ask(self, view: views.View, given: dict[str, str], etag: str, is_gzip: bool) -> Response:
        assert self._served is not None
        if not self._served.is_read.wait(READ_S):
            raise Refusal(503, "the records are being read for the first time", 1)
        try:
            content = responses.encode(view(self._served.place, given))
        except (errors.UnknownRunError, KeyError):
            raise Refusal(404, "no such run") from None
        except QueryError as error:
            logger.error("the query %s failed: %s", view.__name__, error)
            raise Refusal(500, "the query failed; the server's log says why") from None
        headers = {"ETag": etag, "Vary": "Accept-Encoding"}
        if is_gzip and len(content) >= GZIP_BYTES:
            import gzip

            content = gzip.compress(content, 1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        return Response(content, 200, headers, responses.JSON)

    # -- events -----------------------------------------------------------------------------

    async def _events(self, request: Request) -> Response:
        """`GET /api/events`."""
        if self._hub.streams >= events.MAX_STREAMS:
            raise Refusal(429, "too many streams", 5)
        text = request.headers.get("last-event-id") or request.query_params.get("cursor") or ""
        if not re.fullmatch(r"[0-9]{0,18}", text):
            raise Refusal(400, "the cursor must be a number")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        key: Key = request.state.key

        async def is_allowed() -> bool:
            return await to_thread.run_sync(self._access.is_valid, key)

        stream = self._hub.stream(int(text) if text else None, is_allowed)
        return StreamingResponse(stream, media_type="text/event-stream")

    # -- the page ---------------------------------------------------------------------------

    async def _file(self, request: Request) -> Response:
        """A file of the page, or else the page itself. A token in the address logs in first."""
        query = parse_qsl(request.url.query, keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if tokens and request.method == "GET":
            return await self._log_in(request, tokens[0], query)
        path = request.path_params["rest"]
        found = self._page.get(path) or self._page.get("index.html")
        if found is None:
            return Response(assets.MISSING, 503, media_type="text/plain")
        is_fixed = path in self._page and path.startswith(assets.FIXED)
        caching = "public, max-age=31536000, immutable" if is_fixed else "no-cache"
        return Response(found.content, 200, {"Cache-Control": caching}, found.kind)

    async def _log_in(self, request: Request, token: str, query: list[tuple[str, str]]) -> Response:
        cookie, may_enter = await to_thread.run_sync(self._access.log_in, request, token)
        if not may_enter:
            return Response(assets.USED, 403, media_type="text/plain")
        # Always a path of this server: `//host` would be another one.
        path = "/" + request.path_params["rest"].lstrip("/\\")
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        response = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
        response.headers["Cache-Control"] = "no-store"
        if cookie is not None:
            self._access.set_cookie(response, cookie)
        return response

    async def _logout(self, request: Request) -> Response:
        """`POST /api/logout`: deletes the cookie."""
        response = answer({})
        self._access.set_cookie(response, "")
        return response


def match(request: Request) -> tuple[views.View, dict[str, str]]:
    """The query that a request names, and its parameters, each decoded once."""
    query = request.scope["query_string"]
    if len(query) > MAX_QUERY_BYTES:
        raise Refusal(414, "the query is too long")
    found = PATH.fullmatch(request.scope["path"])
    name, run, of_run = found.groups("") if found else ("",) * 3
    try:
        given = dict(parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict"))
        given["run"] = unquote(run, errors="strict")
    except UnicodeDecodeError:
        raise Refusal(400, "the address must be UTF-8") from None
    view = views.OF_RUN.get(of_run) if run else views.VIEWS.get(name)
    if view is None:
        raise Refusal(404, "no such query")
    return view, given
