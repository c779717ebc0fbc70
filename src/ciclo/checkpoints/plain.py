"""Our own format for NumPy arrays, `array.array` and bytes: a JSON header, then raw memory.

The header has the type, shape and size of each, so reading needs no pickle.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import TYPE_CHECKING, Any, BinaryIO

from ciclo.checkpoints.manifest import MAX_BYTES
from ciclo.device_values import library_of
from ciclo.errors import CheckpointError, need

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ciclo.checkpoints.manifest import Manifest

BUFFERS = (array, bytes, bytearray)
MAGIC = b"ciclo\x001"
START_BYTES = len(MAGIC) + 8  # plus the length of the header
DTYPE = re.compile(r"[<>|=]?[A-Za-z]\w*(\[\w+\])?")  # a single type, not a record


def owns(value: Any) -> bool:
    if type(value) in BUFFERS:
        return True
    # Not `object` (pointers) and not records (no dtype name).
    is_numpy = library_of(value) in ("numpy", "ml_dtypes") and hasattr(value, "dtype")
    return (
        is_numpy and hasattr(value, "tobytes") and not (value.dtype.hasobject or value.dtype.names)
    )


def traits(value: Any) -> tuple[Any, ...]:
    is_scalar = hasattr(value, "dtype") and not hasattr(value, "__array_finalize__")
    return (True,) if is_scalar else ()


def is_shared(leaves: list[Any]) -> bool:
    return False


def begin(path: Path, leaves: list[Any], is_copied: bool) -> Callable[[], None]:
    kept = [_memory(leaf, is_copied) for leaf in leaves]

    def write() -> None:
        header = json.dumps([entry for entry, _ in kept]).encode()
        with path.open("wb") as file:
            file.write(MAGIC + len(header).to_bytes(8, "little") + header)
            for _, memory in kept:
                file.write(memory)

    return write


def _memory(leaf: Any, is_copied: bool) -> tuple[list[Any], Any]:
    """The header entry of a leaf, and its bytes."""
    if type(leaf) in (bytes, bytearray):
        return [type(leaf).__name__, None, len(leaf)], bytes(leaf)
    if type(leaf) is array:
        memory = leaf.tobytes()
        return ["array", leaf.typecode, len(memory)], memory
    if not leaf.shape:
        memory = leaf.tobytes()
    else:
        # `copy` is three times faster than `tobytes` for large arrays.
        contiguous = (
            leaf.copy(order="C") if is_copied else need("numpy", "").ascontiguousarray(leaf)
        )
        memory = contiguous.reshape(-1).view("u1").data
    # A registered type such as bfloat16 has no code of its own, so its name is used.
    dtype = leaf.dtype.name if leaf.dtype.kind == "V" else leaf.dtype.str
    return ["numpy", [dtype, list(leaf.shape)], leaf.nbytes], memory


def read(
    manifest: Manifest, name: str, saved: list[str], likes: dict[int, Any], is_trusted: bool
) -> list[Any]:
    with manifest.open(name) as file:
        start = file.read(START_BYTES)
        length = int.from_bytes(start[len(MAGIC) :], "little")
        size = manifest.files[name] - START_BYTES - length
        if not start.startswith(MAGIC) or not 0 <= length <= MAX_BYTES or size < 0:
            raise manifest.damaged(f"{name} is not a file of ciclo")
        header = manifest.parsed(name, file.read(length))
        if [one[2] for one in header if type(one[2]) is not int or one[2] < 0]:
            raise manifest.damaged(f"{name} has an array without a size")
        if sum(one[2] for one in header) != size:
            raise manifest.damaged(f"{name} does not have the size in its header")
        manifest.check_memory(size, name)
        return [_made(kind, form, file, size) for kind, form, size in header]


def _made(kind: str, form: Any, file: BinaryIO, size: int) -> Any:
    memory = bytearray(size)  # so that NumPy arrays over it are writable
    file.readinto(memory)  # type: ignore[attr-defined]
    if kind == "bytes":
        return bytes(memory)
    if kind == "bytearray":
        return memory
    if kind == "array":
        made = array(form)
        made.frombytes(memory)
        return made
    numpy = need("numpy", "a checkpoint with NumPy arrays")
    code, shape = form
    if DTYPE.fullmatch(code) is None or min(shape, default=0) < 0:
        raise CheckpointError(f"an array has an invalid type {code!r} or shape {shape}")
    if code[0] not in "<>|=":
        need("ml_dtypes", f"a checkpoint with arrays of {code}")
    return numpy.frombuffer(memory, numpy.dtype(code)).reshape(shape)


def fitted(leaf: Any, like: Any, is_scalar: bool = False) -> Any:
    if is_scalar:
        return leaf[()]
    if hasattr(leaf, "shape"):
        leaf = leaf.copy()  # aligned memory that does not keep the file's buffer alive
    return leaf
