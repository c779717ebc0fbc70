"""Receives batches and blobs: `POST /api/traces`, `PUT /api/traces/blobs/<key>`.

A batch is acknowledged when a durable object with its id exists. There is no other state, so any
number of processes can receive. Under too much load the answer is 429 or 503 with `Retry-After`;
clients keep what was not acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import threading
import zlib
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from cirron.record import clock
from cirron.server import validation
from cirron.server.responses import Refusal, answer, at_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from starlette.requests import Request
    from starlette.responses import Response

    from cirron.server.depot import Depot

# Batches of cirron's own client have at most 12 MB, before gzip.
MAX_BODY_BYTES = 16 * 2**20
MAX_BATCH_BYTES = 24 * 2**20
MAX_BLOB_BYTES = 4 * 2**30
MAX_READ_BYTES = 256 * 2**20  # a blob in object storage is sent from memory
# Bodies that are read at once; other requests wait with their bodies unread. Blobs are counted
# separately: they are written to disk block by block, and a large one must not hold batches up.
MAX_BODIES = 8
MAX_BLOBS = 4
MAX_WAIT_S = 30.0
BLOCK_BYTES = 2**20
# Time limit for one block. A limit for the whole body would have to grow with the announced length:
# four blobs of 4 GiB that never arrive would block all others for a day.
BLOCK_S = 30.0
# How much may wait for the compactor, and how much free space a disk must keep.
MAX_INBOX_BYTES = 2**30
MIN_FREE_BYTES = 256 * 2**20
RETRY_S = 2
LONG_RETRY_S = 30

# Keys are hashed and never opened. cirron's clients send no others.
BLOB_KEY = re.compile(r"(?!.*(?:^|/)\.)[\w.=+-]{1,128}(?:/[\w.=+-]{1,128}){0,7}", re.ASCII)


class Intake:
    """The receiving part of one process."""

    def __init__(
        self,
        depot: Depot,
        max_inbox_bytes: int = MAX_INBOX_BYTES,
        on_batch: Callable[[], object] | None = None,
    ) -> None:
        self._depot = depot
        self._max_inbox_bytes = max_inbox_bytes
        self._on_batch = on_batch
        self._bodies = asyncio.Semaphore(MAX_BODIES)
        self._blobs = asyncio.Semaphore(MAX_BLOBS)
        self._checking = threading.Lock()  # one at a time: a hostile batch takes a lot of memory
        self._measured_ns = 0
        self._waiting_bytes = 0

    # -- batches ----------------------------------------------------------------------------

    async def batch(self, request: Request) -> Response:
        """`POST /api/traces`."""
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip"):
            raise Refusal(415, "Content-Encoding must be gzip, or absent")
        refuse_length(request, MAX_BODY_BYTES)
        await to_thread.run_sync(self._refuse_when_full)
        async with turn(self._bodies):
            body = bytearray()
            async for block in blocks(request, MAX_BODY_BYTES):
                body += block
            given = request.headers.get("x-cirron-batch-id")
            found = await to_thread.run_sync(self._keep, body, encoding == "gzip", given)
        return answer(found)

    def _keep(self, body: bytearray, is_gzip: bool, given: str | None) -> dict[str, Any]:
        payload = unzip(body) if is_gzip else bytes(body)
        with self._checking:
            batch_id = validation.batch_id(payload)
        if given is not None and given != batch_id:
            raise Refusal(400, "X-Cirron-Batch-Id differs from the batch_id in the body")
        with storing():
            is_new = self._depot.add(f"inbox/{batch_id}.json", [payload])
        if is_new:
            self._waiting_bytes += len(payload)
            if self._on_batch is not None:
                self._on_batch()
        return {"batch_id": batch_id, "is_new": is_new}

    def _refuse_when_full(self) -> None:
        """Raises if too much waits, in all processes together; measured once a second."""
        if clock.now() - self._measured_ns > 1_000_000_000:
            self._measured_ns = clock.now()
            with storing():
                self._waiting_bytes = sum(self._depot.waiting().values())
        if self._waiting_bytes > self._max_inbox_bytes:
            raise Refusal(429, "too many batches are waiting to be stored", RETRY_S)
        with storing():
            free = self._depot.free_bytes()
        if free is not None and free < MIN_FREE_BYTES:
            raise Refusal(503, "the server's disk is full", LONG_RETRY_S)

    # -- blobs ------------------------------------------------------------------------------

    async def put_blob(self, request: Request) -> Response:
        """`PUT /api/traces/blobs/<key>`."""
        name = name_of(request)
        refuse_length(request, MAX_BLOB_BYTES)
        await to_thread.run_sync(self._refuse_when_full)
        async with turn(self._blobs):
            digest = hashlib.sha256()
            with storing(), self._depot.temporary() as path:
                with open(path, "xb") as file:

                    def write(block: bytes) -> None:
                        digest.update(block)
                        file.write(block)

                    async for block in blocks(request, MAX_BLOB_BYTES):
                        await to_thread.run_sync(write, block)
                await to_thread.run_sync(self._link, name, digest.hexdigest(), path)
        return answer({"sha256": digest.hexdigest()})

    def _link(self, name: str, sha256: str, path: Path) -> None:
        mine = sha256.encode()
        known = self._depot.read(name)
        if known in (None, mine):
            self._depot.objects.add(f"blobs/{sha256}", path)  # the same content may be there
            known = mine if self._depot.add(name, [mine]) else self._depot.read(name)
        if known != mine:
            raise Refusal(409, "this key already has other content, which is kept")

    async def get_blob(self, request: Request) -> Response:
        """`GET /api/traces/blobs/<key>`."""
        return await to_thread.run_sync(self._blob, name_of(request))

    def _blob(self, name: str) -> Response:
        from starlette.responses import FileResponse, Response

        sha256 = self._depot.read(name)
        if sha256 is None:
            raise Refusal(404, "no such blob")
        found = f"blobs/{sha256.decode()}"
        kind = "application/octet-stream"
        headers = {"Content-Disposition": "attachment"}
        if self._depot.folder is not None:
            path = self._depot.folder / found
            if not path.exists():
                raise Refusal(404, "the blob was deleted from the store")
            return FileResponse(path, media_type=kind, headers=headers)
        if sum(self._depot.objects.sizes(found).values()) > MAX_READ_BYTES:
            raise Refusal(413, f"the blob is too large; fetch {found} from the object storage")
        return Response(self._depot.objects.read(found), media_type=kind, headers=headers)


def name_of(request: Request) -> str:
    """The object that maps the key in the address to a blob."""
    key = request.path_params["key"]
    if not BLOB_KEY.fullmatch(key):
        raise Refusal(400, "a blob key has only letters, digits, '_', '-', '=', '+', '.' and '/'")
    return f"names/{hashlib.sha256(key.encode()).hexdigest()}"


def unzip(body: bytearray) -> bytes:
    """The content of a gzip body, within the size limit."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        payload = unpacker.decompress(body, MAX_BATCH_BYTES + 1)
    except zlib.error:
        raise Refusal(400, "the body is not gzip, but Content-Encoding says so") from None
    if len(payload) > MAX_BATCH_BYTES:
        raise Refusal(413, f"the batch is larger than {MAX_BATCH_BYTES:,} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise Refusal(400, "the body must be one complete gzip member")
    return payload


def refuse_length(request: Request, limit: int) -> None:
    """Raises if the announced length of the body is too large."""
    text = request.headers.get("content-length", "0")
    if not text.isdecimal() or len(text) > 18:
        raise Refusal(400, "Content-Length must be a number")
    if int(text) > limit:
        raise Refusal(413, f"a body has at most {limit:,} bytes")


async def blocks(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body in blocks. Raises if it is too large, too slow or cut off."""
    from starlette.requests import ClientDisconnect

    stream = request.stream()
    size = 0
    block = bytearray()
    began_ns = clock.now()
    while True:
        try:
            left_s = BLOCK_S - (clock.now() - began_ns) / 1e9
            chunk = await asyncio.wait_for(anext(stream), max(left_s, 0.0))
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise Refusal(408, "the body took too long") from None
        except ClientDisconnect:
            raise Refusal(400, "the body was cut off") from None
        size += len(chunk)
        if size > limit:
            raise Refusal(413, f"a body has at most {limit:,} bytes")
        block += chunk
        if len(block) >= BLOCK_BYTES:
            yield bytes(block)
            block.clear()
            began_ns = clock.now()
    yield bytes(block)


@contextlib.asynccontextmanager
async def turn(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """Waits for a free place; raises 429 after `MAX_WAIT_S`."""
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            await places.acquire()
    except TimeoutError:
        raise Refusal(429, "too many uploads at once", RETRY_S) from None
    try:
        yield
    finally:
        places.release()


def storing() -> AbstractContextManager[None]:
    """Turns errors of the store into 503."""
    return at_store("the store cannot be written; try again later", LONG_RETRY_S)
