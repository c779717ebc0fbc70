"""API keys: their scopes and rate limits.

A key is `ck_<id>_<secret>`. `keys/<id>.json` in the depot has a hash of the secret; the secret has
256 random bits, so a plain hash is enough. Deleting that object revokes the key in every process
within `FRESH_S`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
import threading
from typing import TYPE_CHECKING, Literal

import msgspec

from cirron import errors
from cirron.record import clock

if TYPE_CHECKING:
    from cirron.server.depot import Depot

Scope = Literal["write", "read"]
SCOPES: tuple[Scope, ...] = ("write", "read")
# Default requests per second. A thousand ranks may share a key and send a batch per second each.
RATES: dict[Scope, int] = {"write": 5_000, "read": 500}
GUESSES = 10  # wrong keys per second from one address
MAX_ADDRESSES = 10_000
FRESH_S = 2.0
MISSED_S = 0.2  # for an id that is not known: the key may be new

KEY = re.compile(r"ck_([0-9a-f]{12})_([\w-]{43})", re.ASCII)
ID = re.compile(r"[0-9a-f]{12}")


class Key(msgspec.Struct, kw_only=True, frozen=True):
    """A key as it is stored, without its secret."""

    id: str
    name: str
    scopes: list[Scope]
    hash: str
    created_ns: int
    rate: int


def hashed(secret: str) -> str:
    """The stored form of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create(depot: Depot, name: str, scopes: list[Scope], rate: int | None = None) -> str:
    """Creates a key and returns it. It cannot be shown again."""
    if not name or len(name) > 100 or not name.isprintable():
        raise errors.out_of_range("name", name, "it must be 1 to 100 printable characters")
    secret = secrets.token_urlsafe(32)
    key = Key(
        id=secrets.token_hex(6),
        name=name,
        scopes=scopes,
        hash=hashed(secret),
        created_ns=clock.wall(),
        rate=max(RATES[one] for one in scopes) if rate is None else rate,
    )
    if not depot.add(f"keys/{key.id}.json", [msgspec.json.encode(key)]):
        raise errors.SettingError("the key could not be stored; try again")
    return f"ck_{key.id}_{secret}"


def every(depot: Depot) -> list[Key]:
    """All keys, oldest first."""
    found = []
    for name in depot.objects.list("keys/"):
        content = depot.read(name)
        if content is not None:  # it may just have been revoked
            with contextlib.suppress(msgspec.MsgspecError):  # not a key: ignored
                found.append(msgspec.json.decode(content, type=Key))
    return sorted(found, key=lambda one: one.created_ns)


def revoke(depot: Depot, key_id: str) -> None:
    """Revokes a key. Sessions that it logged in end with it."""
    if not ID.fullmatch(key_id) or depot.read(f"keys/{key_id}.json") is None:
        raise errors.one_of("key", key_id, [one.id for one in every(depot)])
    depot.objects.remove(f"keys/{key_id}.json")


class Bucket:
    """A token bucket: `rate` per second, and as many at once."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._left = float(rate)
        self._at_ns = clock.now()

    def take(self) -> bool:
        now_ns = clock.now()
        self._left += (now_ns - self._at_ns) / 1e9 * self._rate
        self._left = min(self._left, float(self._rate))
        self._at_ns = now_ns
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Keys:
    """The keys that a process accepts: those in the depot, and its own."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self._lock = threading.Lock()
        self._known: dict[str, Key] = {}
        self._own: dict[str, Key] = {}
        self._read_ns: int | None = None
        self._buckets: dict[str, Bucket] = {}
        self._guesses: dict[str, Bucket] = {}

    def add_own(self, secret: str | None, scope: Scope) -> Key:
        """Adds a key that ends with the process. Without a secret, only sessions can use it."""
        secret = secrets.token_urlsafe(32) if secret is None else secret
        key = Key(
            id=f"own-{secrets.token_hex(6)}",
            name="this process",
            scopes=[scope],
            hash=hashed(secret),
            created_ns=clock.wall(),
            rate=RATES[scope],
        )
        self._own[key.id] = key
        return key

    def find(self, text: str) -> Key | None:
        """The key with this text, or None; in constant time."""
        match = KEY.fullmatch(text)
        if match is not None:
            key = self.by_id(match[1])
            expected = "" if key is None else key.hash
            if hmac.compare_digest(expected, hashed(match[2])):
                return key
        given = hashed(text)
        found = [one for one in self._own.values() if hmac.compare_digest(one.hash, given)]
        return found[0] if found else None

    def by_id(self, key_id: str) -> Key | None:
        """The key with this id, if it is still valid."""
        if key_id in self._own:
            return self._own[key_id]
        with self._lock:
            fresh_s = FRESH_S if key_id in self._known else MISSED_S
            if self._read_ns is None or clock.now() - self._read_ns > fresh_s * 1e9:
                self._known = {one.id: one for one in every(self._depot)}
                self._read_ns = clock.now()
            return self._known.get(key_id)

    def may(self, key: Key) -> bool:
        """Counts a request. False if the key is used too often."""
        with self._lock:
            return self._buckets.setdefault(key.id, Bucket(key.rate)).take()

    def may_guess(self, address: str) -> bool:
        """Counts a wrong key. False if too many came from this address."""
        with self._lock:
            if len(self._guesses) > MAX_ADDRESSES:
                self._guesses.clear()
            return self._guesses.setdefault(address, Bucket(GUESSES)).take()
