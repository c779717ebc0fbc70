"""Responses: JSON, and errors."""

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
    """An error response, with the seconds after which the client should retry."""

    def __init__(self, status: int, detail: str, retry_s: int | None = None) -> None:
        headers = {} if retry_s is None else {"Retry-After": str(retry_s)}
        super().__init__(status, detail, headers)


@contextlib.contextmanager
def at_store(failed: str, retry_s: int) -> Iterator[None]:
    """Turns a failing disk or object storage into 503 with Retry-After."""
    try:
        yield
    except (OSError, errors.SettingError):
        raise Refusal(503, failed, retry_s) from None


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(encode(content), status, headers, JSON)


def encode(content: Any) -> bytes:
    """JSON that no browser can take for markup."""
    # These characters occur only inside strings.
    return (
        _encoder.encode(content)
        .replace(b"<", b"\\u003c")
        .replace(b">", b"\\u003e")
        .replace(b"&", b"\\u0026")
    )


async def refused(_: Any, error: Exception) -> Response:
    """The response for an expected error."""
    assert isinstance(error, HTTPException)
    return answer({"error": error.detail}, error.status_code, dict(error.headers or {}))


async def failed(_: Any, error: Exception) -> Response:
    """The response for a bug. Details go only to the log."""
    return answer({"error": "internal error"}, 500)
