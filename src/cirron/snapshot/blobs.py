"""Raw values on disk. A file has its final name only once it is whole. Runs on the worker."""

from __future__ import annotations

import importlib
import os
import stat
from typing import TYPE_CHECKING, Any

from cirron import files
from cirron.record import clock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FOLDER = "snapshots"

# What a killed process left is removed after this long; until then it may be another one's.
STALE_NS = 3600 * 10**9


def write(folder: Path, key: str, save: Callable[[Path], None], access: str = "private") -> Path:
    """Has `save` write a file, and gives it the name `<folder>/<key>` when it is on the disk."""
    target = folder / key
    part = target.with_name(target.name + ".tmp")
    home = files.Folder(target.parent.parent, files.SPAN, access)
    home.make()
    # Its name is a random id: nobody can have planted anything there.
    home.make_inside(target.parent.name)
    try:
        save(part)
        os.chmod(part, files.MODES[access][1])
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:  # Ctrl-C too: what is half-written does not stay
        part.unlink(missing_ok=True)
        raise
    return target


def save(values: dict[str, Any], path: Path) -> None:
    """Writes NumPy's arrays, or torch's tensors, as safetensors. OSError: the disk refuses them."""
    from safetensors import SafetensorError

    framework = type(next(iter(values.values()))).__module__  # numpy, or torch
    try:
        importlib.import_module(f"safetensors.{framework}").save_file(values, path)
    except SafetensorError as error:  # what it says of a disk, too
        raise OSError(str(error)) from error


def sweep(folder: Path) -> None:
    """Removes what was left half-written; safetensors has files named `.tmp…` while it writes."""
    home = files.Folder(folder / FOLDER, files.SPAN)
    home.find()
    for pattern in ("*/*.tmp", "*/.tmp*") if home.is_ours else ():
        for part in home.path.glob(pattern):
            if not home.is_name(part.parent.name) or part.parent.is_symlink():
                continue
            try:
                status = part.lstat()
                if stat.S_ISREG(status.st_mode) and clock.wall() - status.st_mtime_ns > STALE_NS:
                    part.unlink()
            except OSError:  # another process was faster, or it is another user's
                pass
