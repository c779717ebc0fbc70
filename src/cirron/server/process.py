"""Builds and runs a server, for `cirron serve` and for `run.show()`."""

from __future__ import annotations

import errno
import ipaddress
import re
import secrets
import tempfile
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from cirron import errors, files
from cirron.runs import folders
from cirron.runs.place import RECEIVED
from cirron.server import keys, login
from cirron.server.access import Access
from cirron.server.app import App, Role
from cirron.server.compactor import Compactor
from cirron.server.connection import Connection
from cirron.server.depot import Depot
from cirron.server.events import Hub
from cirron.server.ingest import MAX_INBOX_BYTES, Intake
from cirron.server.keys import Key, Keys
from cirron.server.login import Login
from cirron.server.served import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_CONNECTIONS = 4_096  # more get 503
MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75  # clients send every few seconds
END_S = 3
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass
class Options:
    """The settings of a server."""

    folders: Sequence[str] = ()  # to show
    store: str | None = None  # for received batches; None: in the first folder's `.cirron`
    role: Role = "all"
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None  # for programs on this machine; None: a random one
    hosts: Sequence[str] = ()
    proxies: Sequence[str] = ()
    user_header: str | None = None
    certificate: str | None = None
    private_key: str | None = None
    is_framed: bool = False
    max_inbox_bytes: int = MAX_INBOX_BYTES
    on_ready: Callable[[Server], None] = field(default=lambda _: None)


class Server(uvicorn.Server):
    """A server that knows its address, and calls `on_ready` when it accepts requests."""

    def __init__(self, options: Options) -> None:
        self.is_local = is_loopback(options.host)
        self.read_only: str | None = None  # the folder, if it cannot be written
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if options.store is None:
            options = self._with_store(options)
        assert options.store is not None
        self.options = options
        self.depot = Depot(options.store)
        self.keys = Keys(self.depot)
        if not self.is_local and not keys.every(self.depot):
            raise errors.SettingError(
                f"--host {options.host} can be reached from other machines, and there are no keys"
                f" yet; create one: cirron keys create NAME --store {self.depot.where}"
            )
        self.access = Access(
            self.keys,
            Login(self.depot, self.keys),
            hosts=options.hosts,
            proxies=options.proxies,
            user_header=options.user_header,
            is_secure=options.certificate is not None,
            is_framed=options.is_framed,
        )
        self.api_key: str | None = None  # for programs on this machine
        if self.is_local and options.role != "page":
            self.api_key = options.api_key or secrets.token_urlsafe(24)
            if self.keys.find(self.api_key) is None:  # a key of the store can be revoked
                self.keys.add_own(self.api_key, "write")
        self._reader: Key | None = None  # the key behind the links of this process
        self._hub = hub = Hub()
        served = None
        if options.role != "ingest":
            served = Served(options.folders, self.depot, Compactor(self.depot), hub)
        wake = None if served is None else served.wake
        intake = Intake(self.depot, options.max_inbox_bytes, wake)
        app = App(options.role, intake, self.access, served, hub)
        super().__init__(config_of(app.asgi, options))
        self.port = 0
        self.is_ready = threading.Event()

    def _with_store(self, options: Options) -> Options:
        """The options with the store of the first folder.

        A read-only folder is only shown, and only to this machine: its keys could not be revoked.
        The sessions of browsers are then in a temporary store.
        """
        where = depot_of(options.folders[0], make=False)
        try:
            make_depot(where)
        except OSError as error:
            if error.errno not in READ_ONLY or options.role == "ingest" or not self.is_local:
                raise not_writable(where, error) from None
            self.read_only = str(Path(where).parent)
            self._scratch = tempfile.TemporaryDirectory(prefix="cirron-")
            return replace(options, store=self._scratch.name, role="page")
        return replace(options, store=where)

    async def startup(self, sockets: Any = None) -> None:
        """Called by uvicorn. When it returns, requests are accepted."""
        await super().startup(sockets)
        if self.should_exit or not self.servers:
            return
        self.port = self.servers[0].sockets[0].getsockname()[1]
        # Browsers share cookies between the ports of a host, so the name has the port.
        self.access.cookie = f"cirron-{self.port}"
        self.is_ready.set()
        self.options.on_ready(self)

    async def shutdown(self, sockets: Any = None) -> None:
        """Called by uvicorn."""
        self._hub.close()
        await super().shutdown(sockets)

    @property
    def address(self) -> str:
        """The address, without a token."""
        scheme = "http" if self.options.certificate is None else "https"
        host = self.options.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def link(self) -> str:
        """An address that logs in one browser, until this process ends."""
        if self.options.role == "ingest":  # this role has no page
            return self.address
        if self._reader is None:
            self._reader = self.keys.add_own(None, "read")
        return f"{self.address}/?token={login.new_link(self.depot, self._reader.id)}"


def config_of(app: Any, options: Options) -> uvicorn.Config:
    """The settings of uvicorn: no request is logged, and no proxy header is trusted."""
    return uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",  # a line for each bad request would fill the disk
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=END_S,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.private_key,
    )


def depot_of(folder: str, *, make: bool = True) -> str:
    """The path of the depot of a folder; `make` creates it."""
    try:
        found = folders.find(folder)
    except errors.UnknownRunError:
        found = Path(folder) / ".cirron"
    where = str(found / RECEIVED)
    try:
        if make:
            make_depot(where)
    except OSError as error:
        raise not_writable(where, error) from None
    return where


def make_depot(where: str) -> None:
    """Creates the folder of a depot. Raises OSError if it cannot be written."""
    files.Folder(Path(where), re.compile("")).make()
    Depot(where).check_writable()


def not_writable(where: str, error: OSError) -> errors.SettingError:
    return errors.SettingError(
        f"{str(Path(where).parent)!r} cannot be written ({error.strerror}), so a server cannot"
        " keep batches and keys there; choose another place: --store FOLDER. That store is then"
        " served instead of the folder"
    )


def is_loopback(host: str) -> bool:
    """Whether a server at this address can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
