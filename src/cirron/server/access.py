"""The checks for every request, and whose request it is.

`around` wraps the whole application: it checks Host (DNS rebinding) and Origin (requests that
another site makes a browser send) and sets the security headers. `check` finds the key of a
request. A cookie never allows writing, so no other site can make a browser write.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from cirron import errors
from cirron.server.keys import RATES, Key
from cirron.server.responses import Refusal, answer, at_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from cirron.server.keys import Keys, Scope
    from cirron.server.login import Login

Needs = Literal["write", "read", "public"]
PUBLIC: Literal["public"] = "public"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline';"
    " img-src 'self' data:; font-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors {ancestors}"
)
# The server of a notebook may be framed by any notebook; its cookie is partitioned.
NOTEBOOK = "http://localhost:* http://127.0.0.1:* https: vscode-webview:"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[0-9a-z._-]{1,253})(?::([0-9]{1,5}))?", re.I | re.ASCII)
METHODS = ("GET", "HEAD", "POST", "PUT")
RETRY_S = 5


class Access:
    """The rules of one server process."""

    def __init__(
        self,
        keys: Keys,
        login: Login,
        *,
        hosts: Sequence[str] = (),
        proxies: Sequence[str] = (),
        user_header: str | None = None,
        is_secure: bool = False,
        is_framed: bool = False,
    ) -> None:
        self.keys = keys
        self.login = login
        self.cookie = "cirron"
        self._hosts = {one.lower() for one in hosts} | {"localhost"}
        self._proxies = [network(one) for one in proxies]
        self._user_header = user_header
        self._is_secure = is_secure
        self._is_framed = is_framed
        ancestors = NOTEBOOK if is_framed else "'none'"
        headers = HEADERS | {"Content-Security-Policy": POLICY.format(ancestors=ancestors)}
        if not is_framed:
            headers["X-Frame-Options"] = "DENY"
        self._headers = {name.lower().encode(): one.encode() for name, one in headers.items()}

    # -- every request ----------------------------------------------------------------------

    def around(self, app: Any) -> Any:
        """The application, behind the checks that need no key."""

        async def asgi(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
                return
            if scope["type"] != "http":  # WebSockets are not supported
                await send({"type": "websocket.close", "code": 1008})
                return

            async def sending(message: Any) -> None:
                if message["type"] == "http.response.start":
                    own = {name.lower(): one for name, one in message["headers"]}
                    message["headers"] = list((self._headers | own).items())
                await send(message)

            # Routes see the path as it was sent. What a route uses of it is decoded there, once.
            scope["path"] = scope["raw_path"].decode("ascii")
            refusal = self._refusal(scope)
            await (app if refusal is None else refusal)(scope, receive, sending)

        return asgi

    def _refusal(self, scope: Any) -> Response | None:
        """The error response for a request that fails a check."""
        headers: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value.decode("latin-1"))
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Request smuggling: a proxy in front may disagree about where the body ends.
            return answer(
                {"error": "give Content-Length or Transfer-Encoding, not both"},
                400,
                {"Connection": "close"},
            )
        hosts = headers.get(b"host", [])
        host = HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if host is None or not self._is_ours(host[1].lower()):
            return answer({"error": "unknown Host; a host name needs --allow-host"}, 421)
        origins = headers.get(b"origin", [])
        if len(origins) > 1 or any(not _is_same(one, hosts[0]) for one in origins):
            return answer({"error": "requests from other sites are rejected"}, 403)
        is_foreign = headers.get(b"sec-fetch-site", ["none"])[0] in ("cross-site", "same-site")
        is_api = scope["path"].startswith("/api")
        if is_foreign and (is_api or scope["method"] not in ("GET", "HEAD")):
            return answer({"error": "requests from other sites are rejected"}, 403)
        if scope["method"] not in METHODS:
            return answer({"error": "method not allowed"}, 405, {"Allow": ", ".join(METHODS)})
        return None

    def _is_ours(self, host: str) -> bool:
        """An allowed name, or an IP address: DNS rebinding needs a name."""
        if host in self._hosts:
            return True
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return True

    # -- keys and sessions ------------------------------------------------------------------

    def check(self, request: Request, needs: Scope) -> Key:
        """The key of a request. Raises unless the key has the scope that is needed."""
        with at_store("the keys cannot be read from the store", RETRY_S):
            return self._check(request, needs)

    def _check(self, request: Request, needs: Scope) -> Key:
        given = request.headers.getlist("authorization")
        key = None
        address = request.client.host if request.client else ""
        if given:
            scheme, _, text = given[0].partition(" ")
            if len(given) == 1 and scheme.lower() == "bearer" and len(text) <= 200:
                key = self.keys.find(text.strip())
            if key is None and not self.keys.may_guess(address):
                raise Refusal(429, "too many wrong keys", 1)
        elif needs == "read":
            key = self.session(request) or self._of_proxy(request, address)
        if key is None:
            raise Refusal(401, f"a key with the scope {needs!r} is needed")
        if needs not in key.scopes:
            raise Refusal(403, f"this key lacks the scope {needs!r}")
        if not self.keys.may(key):
            raise Refusal(429, "this key is used too often", 1)
        return key

    def is_valid(self, key: Key) -> bool:
        """Whether a key that was accepted earlier is still valid."""
        return key.id == _PROXY or self.keys.by_id(key.id) is not None

    def log_in(self, request: Request, token: str) -> tuple[str | None, bool]:
        """The cookie for a token, or None; and whether the browser is logged in afterwards."""
        with at_store("the store cannot be written, so logging in is not possible", RETRY_S):
            cookie = self.login.exchange(token)
            return cookie, cookie is not None or self.session(request) is not None

    def session(self, request: Request) -> Key | None:
        """The key that a request's cookie stands for."""
        cookie = request.cookies.get(self.cookie)
        return None if cookie is None else self.login.key_of(cookie)

    def _of_proxy(self, request: Request, address: str) -> Key | None:
        """A key for a user whom a trusted proxy has authenticated."""
        if self._user_header is None or not self._proxies:
            return None
        users = request.headers.getlist(self._user_header)
        try:
            peer = ipaddress.ip_address(address)
        except ValueError:
            return None
        if len(users) != 1 or not users[0] or not any(peer in one for one in self._proxies):
            return None
        return Key(
            id=_PROXY, name=users[0], scopes=["read"], hash="", created_ns=0, rate=RATES["read"]
        )

    def set_cookie(self, response: Response, cookie: str) -> None:
        """Sets the cookie; an empty one deletes it."""
        response.set_cookie(
            self.cookie,
            cookie,
            max_age=None if cookie else 0,
            httponly=True,
            # In a frame of another site, browsers accept only partitioned cookies.
            secure=self._is_secure or self._is_framed,
            samesite="none" if self._is_framed else "strict",
        )
        if self._is_framed:
            response.headers["set-cookie"] += "; Partitioned"


_PROXY = "proxy"


def network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network of trusted proxies."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise errors.SettingError(
            f"--trust-proxy {text!r} is not an address or a network: 10.0.0.7, 10.0.0.0/8"
        ) from None


def _is_same(origin: str, host: str) -> bool:
    """Whether an origin is this server."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
