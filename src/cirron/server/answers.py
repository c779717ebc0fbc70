"""What a server says: JSON, and why it says no."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cirron import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

JSON = "application/json"
_encoder = msgspec.json.Encoder()


class Refusal(HTTPException):
    """A request that is not served, and when to come again."""

    def __init__(self, status: int, detail: str, retry_s: int | None = None) -> None:
        headers = {} if retry_s is None else {"Retry-After": str(retry_s)}
        super().__init__(status, detail, headers)


@contextlib.contextmanager
def at_store(failed: str, retry_s: int) -> Iterator[None]:
    """A disk or object storage that fails is a reason to come again."""
    try:
        yield
    except (OSError, errors.SettingError):
        raise Refusal(503, failed, retry_s) from None


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Content as JSON."""
    return Response(encode(content), status, headers, JSON)


def encode(content: Any) -> bytes:
    """JSON that is never markup, whoever takes it for that."""
    # In JSON these stand in strings alone.
    return (
        _encoder.encode(content)
        .replace(b"<", b"\\u003c")
        .replace(b">", b"\\u003e")
        .replace(b"&", b"\\u0026")
    )


async def refused(_: Any, error: Exception) -> Response:
    """The answer to a request that is not served."""
    assert isinstance(error, HTTPException)
    return answer({"error": error.detail}, error.status_code, dict(error.headers or {}))


async def failed(_: Any, error: Exception) -> Response:
    """The answer where we made a mistake; what it was is in the log alone."""
    return answer({"error": "internal error"}, 500)
