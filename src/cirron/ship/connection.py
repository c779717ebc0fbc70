"""A connection to an endpoint, directly or through a proxy. Every failure becomes a reply.

A request has a deadline as a whole, which another thread enforces with `cut_if_late`: an endpoint
that sends one byte a second delays only the sender's thread, and not for long. Replies do not quote
what a server sent, because that could be the key.

urllib3 does connecting, TLS and proxies. It is imported with this module, at the first request.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from functools import partial
from http.client import HTTPConnection as PlainConnection
from http.client import HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import (  # type: ignore[attr-defined]  # which typeshed leaves out
    getproxies_environment,
    proxy_bypass_environment,
)

from urllib3.connection import HTTPConnection, HTTPSConnection, ProxyConfig
from urllib3.exceptions import HTTPError
from urllib3.util import make_headers, parse_url
from urllib3.util.connection import create_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeAlias

    from urllib3.util import Url

    Body: TypeAlias = bytes | Iterable[bytes]

PORTS = {"http": 80, "https": 443}
CONNECT_S = 5.0
# On top of `request_s`, a request may take as long as sending its body at half a megabit a second.
SLOWEST_BYTES_PER_S = 64 * 1024
# The body of an answer is not used; this much is read so that the connection can be reused.
BODY_BYTES = 64 * 1024

# Plain words for some errors; the first match counts.
WORDS = {
    TimeoutError: "timed out",
    RemoteDisconnected: "it hung up without an answer",
    IncompleteRead: "its answer was cut short",
    HTTPException: "its answer is not HTTP",
}

TUNNEL_REFUSED = re.compile(r"Tunnel connection failed: (\d{3})\b")  # http.client's own words


class Reply(NamedTuple):
    """How a request ended. Status 0: no answer; 407: a proxy refused."""

    status: int
    reason: str
    retry_after: str | None = None


class Response(HTTPResponse):
    """Skips all interim answers, such as 103 Early Hints; http.client skips only 100."""

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]
        return version, 100 if 101 < status < 200 else status, reason


class Connection:
    """A connection that is reused for later requests."""

    def __init__(self, endpoint: str, *, request_s: float, now: Callable[[], int]) -> None:
        parts = urlsplit(endpoint)  # which the settings have checked
        self._scheme, self._host = parts.scheme, parts.hostname or ""
        self._port = parts.port or PORTS[self._scheme]
        self._authority = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/")
        self._request_s, self._now = request_s, now
        self._proxy: Url | None = None
        self._login: dict[str, str] = {}  # for the proxy
        self._via = ""
        self._is_proxy_usable = True
        try:
            self._proxy = find_proxy(self._scheme, self._host, self._port)
            if self._proxy is not None:
                self._via = f" via the proxy {self._proxy.netloc}"
                if self._proxy.auth is not None:
                    self._login = make_headers(proxy_basic_auth=unquote(self._proxy.auth))
        except ValueError:
            self._is_proxy_usable = False
        self._connection: HTTPConnection | None = None
        self._twin: socket.socket | None = None
        self._cut_at_ns: int | None = None
        self._is_cut = self._is_stopped = False

    # -- any thread -------------------------------------------------------------------------

    def cut_if_late(self) -> None:
        """Aborts a request that is past its deadline."""
        cut_at_ns = self._cut_at_ns
        if cut_at_ns is not None and self._now() > cut_at_ns:
            self._cut()

    def stop(self) -> None:
        """Aborts the current request, and all later ones."""
        self._is_stopped = True
        self._cut()

    def _cut(self) -> None:
        self._is_cut = True
        twin = self._twin
        if twin is not None:
            with contextlib.suppress(OSError):
                twin.shutdown(socket.SHUT_RDWR)

    # -- the sender's thread ----------------------------------------------------------------

    def request(self, method: str, path: str, headers: dict[str, str], body: Body) -> Reply:
        """Sends a request and returns how it ended. `headers` have a Content-Length."""
        if not self._is_proxy_usable:
            return Reply(407, "its address is not one such as http://proxy.example.com:3128")
        allowed_s = self._request_s + int(headers["Content-Length"]) / SLOWEST_BYTES_PER_S
        self._is_cut = self._is_stopped
        self._cut_at_ns = self._now() + int(allowed_s * 1e9)
        try:
            return self._exchange(method, self._path + path, headers, body)
        except (OSError, HTTPException, HTTPError, ValueError) as error:
            self.close()
            if self._is_stopped:
                return Reply(0, "no answer before the session ended")
            if self._is_cut:
                return Reply(0, f"no answer within {allowed_s:.0f} s")
            refused = TUNNEL_REFUSED.match(str(error))
            if refused is not None:  # an error of the proxy, not of the endpoint
                return Reply(407 * (refused[1] == "407"), f"HTTP {refused[1]}{self._via}")
            return Reply(0, describe(error) + self._via)
        finally:
            self._cut_at_ns = None

    def close(self) -> None:
        """Closes the connection; the next request opens a new one."""
        connection, self._connection = self._connection, None
        twin, self._twin = self._twin, None
        if connection is not None:
            connection.close()
        if twin is not None:
            twin.close()

    def _exchange(self, method: str, target: str, headers: dict[str, str], body: Body) -> Reply:
        connection = self._connect()
        if self._proxy is not None and self._scheme == "http":
            target = f"http://{self._authority}{target}"
            headers = headers | self._login
        # A server that refuses a body may answer and hang up before it has received all of it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, target, body, headers)
        # Not urllib3's method, which logs what it cannot parse.
        response = PlainConnection.getresponse(connection)
        is_accepted = 200 <= response.status < 300
        if not is_accepted or response.will_close or not self._read_body(response):
            self.close()
        retry_after = response.getheader("Retry-After")
        return Reply(response.status, f"HTTP {response.status}{self._via}", retry_after)

    def _read_body(self, response: HTTPResponse) -> bool:
        """Reads the body. Returns whether the connection can be reused."""
        expected = response.length
        try:
            # Not `read`, for which a chunk of size -1 has no end.
            found = response.readinto(bytearray(BODY_BYTES))
        except (OSError, HTTPException, ValueError) as error:
            if self._is_cut or isinstance(error, TimeoutError):
                return False  # the status is valid, even if the body is slow
            raise
        if expected is not None and found < min(expected, BODY_BYTES):
            raise IncompleteRead(b"")  # sending the batch again does no harm
        return response.isclosed()

    def _connect(self) -> HTTPConnection:
        """The open connection, or a new one."""
        if self._connection is not None and self._connection.is_connected:
            return self._connection
        self.close()
        scheme, host, port = self._scheme, self._host, self._port
        if self._proxy is not None:
            scheme, host = self._proxy.scheme or "", self._proxy.host or ""
            port = self._proxy.port or 0
        kind = HTTPSConnection if "https" in (scheme, self._scheme) else HTTPConnection
        config = ProxyConfig(None, False, None, None)
        connection = kind(host, port, timeout=CONNECT_S, proxy_config=config)
        connection.response_class = Response
        connection._new_conn = partial(self._open, host, port)  # type: ignore[method-assign]
        if self._proxy is not None and self._scheme == "https":
            # The proxy sees only the tunnel and its own login, not the key.
            connection.set_tunnel(self._host, self._port, self._login, scheme)
        self._connection = connection
        connection.connect()
        connection.timeout = self._request_s
        return connection

    def _open(self, host: str, port: int) -> socket.socket:
        """A socket, and a duplicate through which another thread can shut it down at any time."""
        options = HTTPConnection.default_socket_options
        found = create_connection((host, port), CONNECT_S, socket_options=options)
        try:
            self._twin = found.dup()
            if self._is_cut:  # while it was connecting
                raise TimeoutError
        except OSError:
            found.close()
            raise
        return found


def find_proxy(scheme: str, host: str, port: int) -> Url | None:
    """The proxy for an address, from the environment.

    `urllib.request` reads HTTPS_PROXY, HTTP_PROXY (not in a CGI script), ALL_PROXY and NO_PROXY.
    Addresses of this machine need no proxy. Raises ValueError for an invalid proxy address.
    """
    proxies = getproxies_environment()
    given = proxies.get(scheme) or proxies.get("all")
    proxies["no"] = proxies.get("no", "").replace("*.", ".")
    names = (host, f"{host}:{port}", f"[{host}]", f"[{host}]:{port}")
    if (
        not given
        or any(proxy_bypass_environment(name, proxies) for name in names)
        or any(is_within(host, network) for network in ("127.0.0.0/8", "::1"))
        or any(is_within(host, network) for network in proxies["no"].split(","))
        or host.rstrip(".").rpartition(".")[2] == "localhost"
    ):
        return None
    url = parse_url(given if "://" in given else f"http://{given}")
    if url.scheme not in PORTS or not url.host:
        raise ValueError
    return url._replace(port=url.port or PORTS[url.scheme])


def is_within(host: str, network: str) -> bool:
    """Whether an IP address is in a network, such as 10.0.0.0/8."""
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network.strip(), strict=False)
    except ValueError:  # a name
        return False


def describe(error: BaseException) -> str:
    """The kind of an error and the system's text for it, without anything that a server sent."""
    for kind, words in WORDS.items():
        if isinstance(error, kind):
            return words
    said = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
