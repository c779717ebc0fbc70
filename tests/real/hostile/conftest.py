"""For all hostile tests: modules that scripts import, a disk that is full, and one that hangs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent


@pytest.fixture
def importable() -> dict[str, str]:
    """The environment in which a script can import the modules beside these tests."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(HERE), *([before] if before else [])])}


class SmallDisk:
    """A folder that is a disk of its own, of 2 MB."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Writes until nothing fits any more."""
        with open(self._filler, "wb", buffering=0) as file:
            while True:
                try:
                    file.write(b"x" * 4096)
                except OSError:
                    return

    def free(self) -> None:
        self._filler.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk that a test can fill and free."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"needs a small disk, and mounting one is refused: {mounted.stderr.strip()}")
    yield SmallDisk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


class HangingDisk:
    """Makes all calls of a script that touch its `.cirron` hang, while it is told to."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._control = folder / "hang"
        self._stuck = folder / "hang.stuck"
        self._log = folder / "calls"
        self.environ = {
            "LD_PRELOAD": str(library),
            "HANG_MARK": ".cirron",
            "HANG_CONTROL": str(self._control),
            "HANG_LOG": str(self._log),
        }

    def hang(self) -> None:
        self._control.touch()

    def is_stuck(self) -> bool:
        """Whether a call hangs, or has."""
        return self._stuck.exists()

    def release(self) -> None:
        self._control.unlink(missing_ok=True)
        self._stuck.unlink(missing_ok=True)

    def calls(self) -> list[str]:
        """What the main threads of the scripts called there: pid, name of the call, path."""
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture(scope="session")
def hang_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, to build a disk that hangs")
    library = tmp_path_factory.mktemp("hang") / "hang.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "hang.c"), "-ldl"],
        check=True,
    )
    return library


@pytest.fixture
def hanging_disk(hang_library: Path, tmp_path: Path) -> Iterator[HangingDisk]:
    """A disk that hangs when told to, and goes on at the end of the test."""
    disk = HangingDisk(hang_library, tmp_path)
    yield disk
    disk.release()
