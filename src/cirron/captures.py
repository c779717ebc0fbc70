"""Keeps cirron's CUDA calls out of CUDA graphs that another thread captures.

While a thread captures a graph, a driver call from any other thread (an allocation, an event query)
usually fails and ends the capture. Cirron's threads declare their calls as independent of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def exchange_mode() -> Any:
    """The driver's function, or one that does nothing without CUDA."""
    try:
        library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
        return ctypes.PyDLL(library).cuThreadExchangeStreamCaptureMode
    except (AttributeError, OSError):
        return lambda mode: None


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """Allows driver calls of this thread while another thread captures a graph."""
    mode = ctypes.c_int(RELAXED)
    reference = ctypes.byref(mode)
    exchange_mode()(reference)  # `mode` now has the previous mode
    try:
        yield
    finally:
        exchange_mode()(reference)
