"""Opening files that anybody may have put into a run's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cirron.runs import untrusted


class TestUntrusted:
    """Opening files that anybody may have put there."""

    def reason(self, path: Path, limit_bytes: int = 100) -> str:
        with pytest.raises(untrusted.UnreadableError) as caught:
            untrusted.read_file(path, limit_bytes)
        return str(caught.value)

    def test_a_regular_file_is_read_up_to_the_limit(self, tmp_path: Path) -> None:
        """A regular file is read whole, up to the limit."""
        path = tmp_path / "file"
        path.write_bytes(b"x" * 100)

        assert b"x" * 100 == untrusted.read_file(path, 100)
        assert "is too large and was not read: 100 bytes; the limit is 99" == self.reason(path, 99)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        """A missing file is Python's own error, since it may just have been merged or sent."""
        with pytest.raises(FileNotFoundError):
            untrusted.read_file(tmp_path / "file", 100)

    def test_the_reason_names_what_is_there_instead(self, tmp_path: Path) -> None:
        """The reason says what is there in place of a file."""
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "link").symlink_to("fifo")
        (tmp_path / "nowhere").symlink_to("nothing")

        assert "is a folder, not a regular file" == self.reason(tmp_path)
        assert "is a FIFO, not a regular file" == self.reason(tmp_path / "fifo")
        assert "is a device, not a regular file" == self.reason(Path("/dev/zero"))
        for link in ("link", "nowhere"):
            assert "is a symbolic link, which is not followed" == self.reason(tmp_path / link)

    @pytest.mark.parametrize("size", [0, 5, 15])
    def test_a_file_that_changes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
    ) -> None:
        """A file that another process cuts or extends meanwhile is not taken for a whole one."""
        path = tmp_path / "file"
        path.write_bytes(b"x" * 10)
        fdopen = os.fdopen

        class Changed:
            def __init__(self, file: Any) -> None:
                self.file = file
                self.fileno = file.fileno

            def __enter__(self) -> Changed:
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

            def read(self, count: int) -> bytes:
                os.truncate(path, size)
                content: bytes = self.file.read(count)
                return content

        monkeypatch.setattr(os, "fdopen", lambda *given: Changed(fdopen(*given)))

        assert "changed while it was being read" == self.reason(path)

    def test_a_file_that_does_not_fit_into_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Running out of memory is the file's problem, not the end."""
        (tmp_path / "file").touch()

        def fail(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(os, "fdopen", fail)

        assert "is too large for the memory of this machine" == self.reason(tmp_path / "file")

    def test_a_listing_keeps_the_newest_names(self, tmp_path: Path) -> None:
        """The newest names come first; past the limit the others are left out."""
        for name in ("1.json", "3.json", "2.json", "4.tmp"):
            (tmp_path / name).touch()

        assert ["3.json", "2.json"] == untrusted.list_files(tmp_path, ".json", 2)
        assert ["3.json", "2.json", "1.json"] == untrusted.list_files(tmp_path, ".json", 100)

    def test_a_name_that_is_not_unicode(self) -> None:
        """Any name becomes text that can be encoded, and that tells the bytes."""
        assert "ü\\xff" == untrusted.shown(os.fsdecode("ü".encode() + b"\xff"))
