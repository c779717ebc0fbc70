"""Takes batches and blobs: `POST /api/traces`, `PUT /api/traces/blobs/<key>`.

A batch is checked by the reader that reads files, and acknowledged when one durable object named by
its id exists. Nothing else is remembered, so any number of processes may do this. What is too much
is answered with 429 or 503 and `Retry-After`; the client keeps what was not acknowledged.
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
from cirron.server import checked
from cirron.server.answers import Refusal, answer, at_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from starlette.requests import Request
    from starlette.responses import Response

    from cirron.server.depot import Depot

# Our own client's are of 12 MB at most, before gzip.
MAX_BODY_BYTES = 16 * 2**20
MAX_BATCH_BYTES = 24 * 2**20
MAX_BLOB_BYTES = 4 * 2**30
MAX_READ_BYTES = 256 * 2**20  # of a blob in object storage, which is sent from memory
# Bodies that are read at once; who comes later waits with its body unread. Blobs have places of
# their own: they go to the disk block by block, and a large one must not hold batches up.
MAX_BODIES = 8
MAX_BLOBS = 4
MAX_WAIT_S = 30.0
BLOCK_BYTES = 2**20
# A block of a body may take so long. A limit for the whole body would have to grow with the length
# that it announces: four blobs of 4 GiB that never come would keep all others out for a day.
BLOCK_S = 30.0
# What may wait for the compactor, and what a disk must have left.
MAX_INBOX_BYTES = 2**30
MIN_FREE_BYTES = 256 * 2**20
RETRY_S = 2
LONG_RETRY_S = 30

# A name is hashed, never opened; but none of a client of ours looks otherwise.
BLOB_KEY = re.compile(r"(?!.*(?:^|/)\.)[\w.=+-]{1,128}(?:/[\w.=+-]{1,128}){0,7}", re.ASCII)


class Intake:
    """The state of one process: what it is busy with, and how much waits for the compactor."""

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
        self._checking = threading.Lock()  # one at a time: a hostile batch takes much memory
        self._measured_ns = 0
        self._waiting_bytes = 0

    # -- batches ----------------------------------------------------------------------------

    async def batch(self, request: Request) -> Response:
        """`POST /api/traces`."""
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip"):
            raise Refusal(415, "Content-Encoding is gzip, or there is none")
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
            batch_id = checked.batch_id(payload)
        if given is not None and given != batch_id:
            raise Refusal(400, "X-Cirron-Batch-Id is not the batch's own")
        with storing():
            is_new = self._depot.add(f"inbox/{batch_id}.json", [payload])
        if is_new:
            self._waiting_bytes += len(payload)
            if self._on_batch is not None:
                self._on_batch()
        return {"batch_id": batch_id, "is_new": is_new}

    def _refuse_when_full(self) -> None:
        """Looks at most once a second how much waits, whichever process took it."""
        if clock.now() - self._measured_ns > 1_000_000_000:
            self._measured_ns = clock.now()
            with storing():
                self._waiting_bytes = sum(self._depot.objects.sizes("inbox/").values())
        if self._waiting_bytes > self._max_inbox_bytes:
            raise Refusal(429, "too much waits to be stored", RETRY_S)
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
            self._depot.objects.add(f"blobs/{sha256}", path)  # or it is there, the very same
            known = mine if self._depot.add(name, [mine]) else self._depot.read(name)
        if known != mine:
            raise Refusal(409, "there is a blob of this key with other content; it stays as it is")

    async def get_blob(self, request: Request) -> Response:
        """`GET /api/traces/blobs/<key>`."""
        return await to_thread.run_sync(self._blob, name_of(request))

    def _blob(self, name: str) -> Response:
        from starlette.responses import FileResponse, Response

        sha256 = self._depot.read(name)
        if sha256 is None:
            raise Refusal(404, "there is no such blob")
        found = f"blobs/{sha256.decode()}"
        kind = "application/octet-stream"
        headers = {"Content-Disposition": "attachment"}
        if self._depot.folder is not None:
            path = self._depot.folder / found
            if not path.exists():
                raise Refusal(404, "the blob was removed from the store")
            return FileResponse(path, media_type=kind, headers=headers)
        if sum(self._depot.objects.sizes(found).values()) > MAX_READ_BYTES:
            raise Refusal(413, f"the blob is large; fetch {found} from the store")
        return Response(self._depot.objects.read(found), media_type=kind, headers=headers)


def name_of(request: Request) -> str:
    """The object that says which blob is meant."""
    raw = request.scope.get("raw_path") or b""
    key = request.path_params["key"]
    if b"%" in raw or not BLOB_KEY.fullmatch(key):
        raise Refusal(400, "a blob's key is letters, digits, '_', '-', '=', '+', '.' and '/'")
    return f"names/{hashlib.sha256(key.encode()).hexdigest()}"


def unzip(body: bytearray) -> bytes:
    """What was packed, if it is not too much, and is all there is."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        payload = unpacker.decompress(body, MAX_BATCH_BYTES + 1)
    except zlib.error:
        raise Refusal(400, "the body is not gzip, though Content-Encoding says so") from None
    if len(payload) > MAX_BATCH_BYTES:
        raise Refusal(413, f"the batch is larger than {MAX_BATCH_BYTES:,} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise Refusal(400, "the body is not one whole gzip member")
    return payload


def refuse_length(request: Request, limit: int) -> None:
    """Raises for a body that says itself that it is too large."""
    text = request.headers.get("content-length", "0")
    if not text.isdecimal() or len(text) > 18:
        raise Refusal(400, "Content-Length is not a number")
    if int(text) > limit:
        raise Refusal(413, f"a body has at most {limit:,} bytes")


async def blocks(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body in blocks; raises when it is too large, too slow or cut off."""
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
    """A place among those that are being served, or 429 after a while."""
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            await places.acquire()
    except TimeoutError:
        raise Refusal(429, "too many bodies at once", RETRY_S) from None
    try:
        yield
    finally:
        places.release()


def storing() -> AbstractContextManager[None]:
    """Around what writes to the store."""
    return at_store("it could not be stored; try again later", LONG_RETRY_S)
