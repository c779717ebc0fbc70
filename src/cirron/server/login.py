"""How a browser logs in: it exchanges a link that works once for a cookie.

The token is in the address of one request, which redirects to the same page without it. The cookie
names a key, is signed, and is valid as long as the key. Page processes share the signing secret and
the links through their depot.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import TYPE_CHECKING

import msgspec

from cirron.record import clock
from cirron.server.keys import hashed

if TYPE_CHECKING:
    from cirron.server.depot import Depot
    from cirron.server.keys import Key, Keys

SESSION_S = 30 * 86_400
LINK_S = 86_400
TOKEN = re.compile(r"[\w-]{43}", re.ASCII)
COOKIE = re.compile(r"([\w-]{1,40})\.([0-9]{1,20})\.([0-9a-f]{64})", re.ASCII)


class Link(msgspec.Struct, kw_only=True, frozen=True):
    """A link, stored under the hash of its token."""

    key_id: str
    expires_ns: int


def new_link(depot: Depot, key_id: str) -> str:
    """The token of a new link. It logs in the first browser that opens it."""
    token = secrets.token_urlsafe(32)
    link = Link(key_id=key_id, expires_ns=clock.wall() + LINK_S * 1_000_000_000)
    depot.add(f"links/{hashed(token)}.json", [msgspec.json.encode(link)])
    return token


class Login:
    """Exchanges links for cookies, and finds the key of a cookie."""

    def __init__(self, depot: Depot, keys: Keys) -> None:
        self._depot = depot
        self._keys = keys
        depot.add("secret", [secrets.token_bytes(32)])  # or another process did
        self._secret = depot.objects.read("secret")

    def exchange(self, token: str) -> str | None:
        """The cookie for a token, which is then used up. None if the token is not valid."""
        if not TOKEN.fullmatch(token):
            return None
        name = f"links/{hashed(token)}"
        content = self._depot.read(f"{name}.json")
        # Of two requests at once, only one creates this object.
        if content is None or not self._depot.add(f"{name}.used", [b""]):
            return None
        self._depot.objects.remove(f"{name}.json")
        link = msgspec.json.decode(content, type=Link)
        if link.expires_ns < clock.wall() or self._keys.by_id(link.key_id) is None:
            return None
        return self._signed(link.key_id, clock.wall() + SESSION_S * 1_000_000_000)

    def _signed(self, key_id: str, expires_ns: int) -> str:
        text = f"{key_id}.{expires_ns}"
        return f"{text}.{hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()}"

    def key_of(self, cookie: str) -> Key | None:
        """The key that a cookie stands for, if both are still valid."""
        match = COOKIE.fullmatch(cookie)
        if match is None:
            return None
        expected = self._signed(match[1], int(match[2]))
        if not hmac.compare_digest(expected, cookie) or int(match[2]) < clock.wall():
            return None
        return self._keys.by_id(match[1])
