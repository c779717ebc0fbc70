"""A folder of checkpoints: each is a subfolder that is either complete or does not exist.

A checkpoint is written to a temporary folder, synced, and renamed. With several processes, each
writes its part, and rank 0 renames when all parts are there; they coordinate only through files.
`Writer` is the background thread that writes.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ciclo.checkpoints.manifest import FORMAT, META, Manifest
from ciclo.elapsed import clock, now
from ciclo.errors import CheckpointError, check, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ciclo.processes import Process

PREFIX = "step-"
MAX_WAIT_S = 600.0  # for the parts of other processes
POLL_S = 0.02


class Folder:
    """The folder of a run's checkpoints. Created when the first one is written."""

    def __init__(self, path: str | os.PathLike[str], prefix: str = PREFIX) -> None:
        check("directory", path, os.fspath, 'the path of a folder, as "runs/1"')
        # Absolute, because the program may change its working directory.
        self.path = Path(path).expanduser().absolute()
        self.prefix = prefix
        is_name = re.compile(r"[^./\\\\][^/\\\\]*").fullmatch
        check("prefix", prefix, is_name, 'the start of a name, as "best_"')
        self._place = re.compile(re.escape(prefix) + "([0-9]{8,})")

    def check(self) -> None:
        """Raises at the start of a run if no checkpoint can be written."""
        place = self.path
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise CheckpointError(f"{self.path} cannot hold checkpoints: {place} is a file")
        if not os.access(place, os.W_OK | os.X_OK):
            raise CheckpointError(f"{self.path} cannot hold checkpoints: {place} is not writable")

    def place(self, step: int) -> Path:
        return self.path / f"{self.prefix}{step:08d}"

    def steps(self) -> list[int]:
        """The saved steps, in order."""
        names = os.listdir(self.path) if self.path.is_dir() else []
        found = sorted(int(match[1]) for match in map(self._place.fullmatch, names) if match)
        return [step for step in found if self.place(step).name in names]

    def manifest(self, step: int) -> Manifest:
        """The manifest of a checkpoint; an error if the checkpoint is incomplete."""
        return Manifest(self.place(step))

    def whole(self, steps: Iterable[int]) -> dict[int, Manifest]:
        """The complete checkpoints of these steps."""
        found = {}
        for step in steps:
            with suppress(CheckpointError):
                found[step] = self.manifest(step)
        return found

    def latest(self) -> int | None:
        """The latest complete checkpoint; an error if there are only incomplete ones."""
        newest: CheckpointError | None = None
        for step in reversed(self.steps()):
            try:
                self.manifest(step)
            except CheckpointError as error:
                newest = newest or error
                continue
            if newest is not None:
                warn(f"the latest checkpoint is incomplete, so step {step} is used: {newest}")
            return step
        if newest is not None:
            raise CheckpointError(
                f"{newest}. There is no other; remove it to start again, or use another folder"
            )
        return None

    def clear(self) -> None:
        """Removes the temporary folders of killed processes."""
        for left in (
            self.path.glob(f".{glob.escape(self.prefix)}[0-9]*") if self.path.is_dir() else ()
        ):
            place = self.path / left.stem.removeprefix(".")
            if left.suffix == ".old" and not place.exists():
                left.rename(place)
            else:
                with suppress(OSError):
                    _remove(left)

    def begin(self, step: int, process: Process) -> Path:
        """Creates the temporary folder of a checkpoint."""
        draft = self.path / f".{self.prefix}{step:08d}.tmp"
        if process.count == 1:
            _remove(draft)
        draft.mkdir(parents=True, exist_ok=True)
        return draft

    def commit(self, draft: Path, step: int, about: dict[str, Any], process: Process) -> None:
        """Renames the temporary folder, once all processes have written."""
        if process.rank:
            (draft / f"done-{process.rank}").touch()
            return
        self._wait_for_the_others(draft, process.count)
        files = {
            path.relative_to(draft).as_posix(): path.stat().st_size
            for path in sorted(draft.rglob("*"))
            if path.is_file()
        }
        meta = {"format": FORMAT, "step": step, "date": now(), **about, "files": files}
        (draft / META).write_text(json.dumps(meta, indent=1))
        _sync(draft)
        place = self.place(step)
        if place.exists():
            old = self.path / f".{place.name}.old"
            place.rename(old)
            draft.rename(place)
            _remove(old)
        else:
            draft.rename(place)
        _sync_folder(self.path)

    def remove(self, step: int) -> None:
        gone = self.path / f".{self.prefix}{step:08d}.gone"
        with suppress(FileNotFoundError):
            self.place(step).rename(gone)  # so that an incomplete checkpoint never has its name
            _remove(gone)

    def _wait_for_the_others(self, draft: Path, count: int) -> None:
        deadline = clock() + MAX_WAIT_S
        missing = {f"done-{rank}" for rank in range(1, count)}
        while missing := {name for name in missing if not (draft / name).exists()}:
            if clock() > deadline:
                ranks = ", ".join(sorted(name.removeprefix("done-") for name in missing))
                raise CheckpointError(
                    f"rank {ranks} wrote nothing to {draft} in {MAX_WAIT_S:.0f} s; all processes"
                    " must save the same steps, into a folder that they share"
                )
            threading.Event().wait(POLL_S)


def _remove(path: Path) -> None:
    """Removes a folder and its content, or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Forces files and folders to disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(path: Path) -> None:
    with suppress(OSError):  # some systems cannot open a folder
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


class Writer:
    """Runs one function at a time in a thread; errors are raised by the next call."""

    @classmethod
    def of(cls, folder: Path) -> Writer:
        """The writer of a folder, so that reading waits for writing."""
        return _writers.setdefault(folder, cls())

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_registered = False

    def start(self, work: Callable[[], None]) -> None:
        """Runs a function in the background, after the previous one."""
        self.wait()
        if not self._is_registered:
            self._is_registered = True
            # Python joins the thread at exit, but after it has shut down the thread pools that
            # Orbax uses; functions registered here run before.
            getattr(threading, "_register_atexit", lambda function: None)(self._settle)
        self._thread = threading.Thread(target=self._run, args=(work,), name="ciclo-checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised by `wait`, in the loop's thread
            self._error = error

    def _settle(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Waits for the function; raises its error."""
        self._settle()
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"a checkpoint could not be written: {error}") from error


_writers: WeakValueDictionary[Path, Writer] = WeakValueDictionary()
