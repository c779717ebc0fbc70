"""CUDA graphs that another thread captures, and how ours stay out of them.

While a thread captures a graph, a call of the driver from any other thread (an allocation, a look
at an event) fails as a rule and ends the capture too. A thread can say that its calls are not the
capture's business; ours do.
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
    """The driver's function; one that does nothing where the driver is not CUDA's."""
    try:
        library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
        return ctypes.PyDLL(library).cuThreadExchangeStreamCaptureMode
    except (AttributeError, OSError):
        return lambda mode: None


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """Within it, this thread's calls of the driver are allowed while another captures a graph."""
    mode = ctypes.c_int(RELAXED)
    reference = ctypes.byref(mode)
    exchange_mode()(reference)  # has the mode before, now
    try:
        yield
    finally:
        exchange_mode()(reference)
