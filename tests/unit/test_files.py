"""Files of ours: made anew, never through a link, private; and what differs between systems."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests import spools

from cirron import files, system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = f"{7:020d}-{7:032x}.json"
OTHER = f"{8:020d}-{8:032x}.json"


def make(root: Path, access: str = "private") -> files.Folder:
    return files.Folder(root / ".cirron" / "spool", files.BATCH, access)


def mode(path: Path) -> str:
    return f"{path.lstat().st_mode & 0o7777:o}"


@contextlib.contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


class TestModes:
    @pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
    @pytest.mark.parametrize(
        ("access", "folder_mode", "file_mode"),
        [("private", "700", "600"), ("group", "750", "640"), ("all", "755", "644")],
    )
    def test_whatever_the_umask(
        self, access: str, folder_mode: str, file_mode: str, mask: int, tmp_path: Path
    ) -> None:
        """Folders and files have the modes that the setting says, whatever the umask."""
        folder = make(tmp_path, access)
        with umask(mask):
            folder.put(NAME, [b"{}"])

        assert (folder_mode, folder_mode) == (mode(folder.path.parent), mode(folder.path))
        assert (file_mode, file_mode) == (
            mode(folder.path / NAME),
            mode(folder.path.parent / files.MADE),
        )

    def test_a_folder_that_was_there(self, tmp_path: Path) -> None:
        """A folder that somebody else made keeps its mode."""
        folder = make(tmp_path, "all")
        folder.path.mkdir(parents=True)
        os.chmod(folder.path, 0o700)
        folder.make()

        assert "700" == mode(folder.path)

    def test_folders_above_are_left_to_the_umask(self, tmp_path: Path) -> None:
        """Folders above `.cirron` are the user's, and made as any program makes them."""
        with umask(0o022):
            make(tmp_path / "a" / "b").make()

        assert ("755", "755", "700") == (
            mode(tmp_path / "a"),
            mode(tmp_path / "a" / "b"),
            mode(tmp_path / "a" / "b" / ".cirron"),
        )


class TestOurs:
    """Whose a folder is: only from ours are files removed that another process wrote."""

    def test_a_new_folder(self, tmp_path: Path) -> None:
        """A folder that we made is ours, and says so."""
        folder = make(tmp_path)
        before = folder.is_ours
        folder.make()

        assert (False, True) == (before, folder.is_ours)
        assert b"made by cirron" in (folder.path.parent / files.MADE).read_bytes()

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        """A folder that holds nothing becomes ours."""
        folder = make(tmp_path)
        folder.path.mkdir(parents=True)
        folder.make()

        assert folder.is_ours

    @pytest.mark.parametrize("found", ["notes.txt", NAME])
    def test_a_folder_of_somebody_else(self, found: str, tmp_path: Path) -> None:
        """A folder that holds something is not ours, and gets no mark."""
        folder = make(tmp_path)
        folder.path.mkdir(parents=True)
        (folder.path / found).write_text("mine")
        folder.make()

        assert not folder.is_ours
        assert [found] == os.listdir(folder.path)

    @pytest.mark.parametrize("is_empty", [False, True])
    def test_a_link_is_refused(self, is_empty: bool, tmp_path: Path) -> None:
        """A folder behind a link is never ours: it is refused, and what is in there stays."""
        (tmp_path / "precious").mkdir()
        if not is_empty:
            (tmp_path / "precious" / "notes.txt").write_text("mine")
        folder = make(tmp_path)
        folder.path.parent.mkdir()
        folder.path.symlink_to(tmp_path / "precious")
        with pytest.raises(OSError, match="it is a symbolic link, which is not followed"):
            folder.make()

        assert not folder.is_ours
        assert ["notes.txt"] * (not is_empty) == os.listdir(tmp_path / "precious")
        assert ["spool"] == os.listdir(folder.path.parent)

    def test_a_link_above(self, tmp_path: Path) -> None:
        """`.cirron` itself may be a link, to a larger disk, say."""
        (tmp_path / "disk").mkdir()
        folder = make(tmp_path)
        folder.path.parent.symlink_to(tmp_path / "disk")
        folder.put(NAME, [b"{}"])

        assert folder.is_ours
        assert {files.MADE, "spool"} == set(os.listdir(tmp_path / "disk"))

    def test_a_link_put_in_its_place(self, tmp_path: Path) -> None:
        """A folder that is replaced by a link is not ours from the next look on."""
        folder = make(tmp_path)
        folder.put(NAME, [b"{}"])
        folder.path.rename(tmp_path / "elsewhere")
        folder.path.symlink_to(tmp_path / "elsewhere")
        folder.find()
        as_link = folder.is_ours
        folder.path.unlink()
        (tmp_path / "elsewhere").rename(folder.path)
        folder.find()

        assert (False, True) == (as_link, folder.is_ours)

    def test_a_folder_with_another_name(self, tmp_path: Path) -> None:
        """A folder is ours by its own name: what is listed beside it makes no other one ours."""
        make(tmp_path).make()
        other = files.Folder(tmp_path / ".cirron" / "pool", files.BATCH)
        other.path.mkdir()
        (other.path / NAME).write_text("mine")
        other.make()

        assert not other.is_ours

    @pytest.mark.parametrize("what", ["link", "folder", "fifo", "device", "another user's"])
    def test_a_list_that_cannot_be_written(
        self, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the list cannot be kept, files are written all the same; the folder is not ours."""
        folder = make(tmp_path)
        folder.path.parent.mkdir()
        (folder.path.parent / NAME).write_text("mine")
        made = folder.path.parent / files.MADE
        if what == "another user's":
            open_any = os.open

            def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
                if path == made:
                    raise PermissionError(13, "Permission denied", str(path))
                return open_any(path, flags, mode)

            monkeypatch.setattr(os, "open", refuse)
        else:
            plant(made, what)
        folder.put(NAME, [b"{}"])

        assert (b"{}", False) == (folder.read(NAME), folder.is_ours)
        assert "mine" == (folder.path.parent / NAME).read_text()

    def test_a_list_on_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A disk that has no room for the list is an error; with room, the folder becomes ours."""

        def fail(file: int, text: bytes) -> int:
            raise OSError(28, "No space left on device")

        folder = make(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)
            with pytest.raises(OSError, match="No space left"):
                folder.make()
        assert not folder.is_ours

        folder.make()
        assert folder.is_ours

    @pytest.mark.parametrize("padding", ["x" * files.MADE_BYTES, "\xff"])
    def test_a_list_of_somebody_else(self, padding: str, tmp_path: Path) -> None:
        """A list that is too large to be ours is not believed; odd bytes in it harm nothing."""
        folder = make(tmp_path)
        folder.make()
        with open(folder.path.parent / files.MADE, "a", encoding="latin-1") as file:
            file.write(padding)
        folder.find()

        assert (len(padding) == 1) is folder.is_ours

    def test_the_next_run_finds_the_marker(self, tmp_path: Path) -> None:
        """The next run finds the mark."""
        make(tmp_path).put(NAME, [b"{}"])
        folder = make(tmp_path)
        folder.make()

        assert folder.is_ours

    def test_two_at_the_same_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another process that makes the folder at the same time is no error."""
        folder, other = make(tmp_path), make(tmp_path)
        make_one = files.Folder._make

        def slowly(self: files.Folder, path: Path) -> bool:
            made = make_one(self, path)
            if self is folder and path == self.path:
                other.make()
            return made

        monkeypatch.setattr(files.Folder, "_make", slowly)
        folder.make()

        assert (True, True) == (folder.is_ours, other.is_ours)
        assert [] == os.listdir(folder.path)

    @pytest.mark.parametrize("what", [".cirron", ".cirron/spool"])
    def test_a_folder_that_is_removed(self, what: str, tmp_path: Path) -> None:
        """A folder that is removed meanwhile is made anew, is ours, and is listed once."""
        folder = make(tmp_path)
        folder.put(NAME, [b"{}"])
        shutil.rmtree(tmp_path / what)
        folder.put(OTHER, [b"{}"])

        assert (True, {OTHER}) == (folder.is_ours, set(os.listdir(folder.path)))
        assert 1 == len((tmp_path / ".cirron" / files.MADE).read_text().splitlines())


class TestPut:
    def test_whole_or_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file has its name only when all of it is written."""
        folder = make(tmp_path)
        folder.make()
        seen: list[set[str]] = []
        write_all = system.write_all

        def watch(file: int, pieces: list[bytes]) -> None:
            write_all(file, pieces)
            seen.append(set(os.listdir(folder.path)))

        monkeypatch.setattr(system, "write_all", watch)
        folder.put(NAME, [b"a", b"b"])

        assert [{NAME + ".tmp"}] == seen
        assert {NAME} == set(os.listdir(folder.path))
        assert b"ab" == folder.read(NAME)

    def test_existing_files_are_replaced(self, tmp_path: Path) -> None:
        """A file that is there is replaced, also one that may not be written to."""
        folder = make(tmp_path)
        folder.put(NAME, [b"old"])
        os.chmod(folder.path / NAME, 0o400)
        folder.put(NAME, [b"new"])

        assert b"new" == folder.read(NAME)

    def test_left_by_a_process_that_was_killed(self, tmp_path: Path) -> None:
        """A half-written file of the same name is in nobody's way."""
        folder = make(tmp_path)
        folder.make()
        (folder.path / f"{NAME}.tmp").write_text("half")
        folder.put(NAME, [b"whole"])

        assert b"whole" == folder.read(NAME)
        assert {NAME} == set(os.listdir(folder.path))

    @pytest.mark.parametrize("suffix", ["", ".tmp"])
    @pytest.mark.parametrize("target", ["precious", "not there"])
    def test_a_planted_link(self, target: str, suffix: str, tmp_path: Path) -> None:
        """A link in the way is replaced; what it points to is not touched, nor made."""
        (tmp_path / "precious").write_text("mine")
        folder = make(tmp_path)
        folder.make()
        (folder.path / (NAME + suffix)).symlink_to(tmp_path / target)
        folder.put(NAME, [b"ours"])

        assert ("mine", False) == (
            (tmp_path / "precious").read_text(),
            (tmp_path / "not there").exists(),
        )
        assert (b"ours", False) == (folder.read(NAME), (folder.path / NAME).is_symlink())

    def test_a_planted_hard_link(self, tmp_path: Path) -> None:
        """A hard link in the way is replaced; the file that it names is not written to."""
        (tmp_path / "precious").write_text("mine")
        folder = make(tmp_path)
        folder.make()
        os.link(tmp_path / "precious", folder.path / f"{NAME}.tmp")
        folder.put(NAME, [b"ours"])

        assert "mine" == (tmp_path / "precious").read_text()

    def test_a_planted_fifo(self, tmp_path: Path) -> None:
        """A FIFO in the way is replaced, not waited for."""
        folder = make(tmp_path)
        folder.make()
        os.mkfifo(folder.path / f"{NAME}.tmp")
        os.mkfifo(folder.path / NAME)
        folder.put(NAME, [b"ours"])

        assert b"ours" == folder.read(NAME)

    def test_a_planted_link_to_nowhere_as_the_folder(self, tmp_path: Path) -> None:
        """A folder that is a link to nothing is an error; nothing is made where it points."""
        folder = make(tmp_path)
        folder.path.parent.mkdir()
        folder.path.symlink_to(tmp_path / "elsewhere")

        with pytest.raises(OSError, match="symbolic link"):
            folder.put(NAME, [b"ours"])
        assert not (tmp_path / "elsewhere").exists()

    def test_a_working_directory_that_is_gone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a working directory that was deleted, a file of ours is an error, as any."""
        (tmp_path / "gone").mkdir()
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()

        with pytest.raises(FileNotFoundError):
            make(Path()).put(NAME, [b"ours"])

    @pytest.mark.parametrize("what", [".cirron", ".cirron/spool"])
    def test_not_a_directory(self, what: str, tmp_path: Path) -> None:
        """A file where the folder should be is an error that says so, and stays."""
        folder = make(tmp_path)
        (tmp_path / what).parent.mkdir(exist_ok=True)
        (tmp_path / what).write_text("mine")

        with pytest.raises(NotADirectoryError):
            folder.put(NAME, [b"ours"])
        assert "mine" == (tmp_path / what).read_text()

    def test_a_link_to_nowhere_above(self, tmp_path: Path) -> None:
        """A `.cirron` on a disk that is not there is an error, and nothing is made in its place."""
        folder = make(tmp_path)
        folder.path.parent.symlink_to(tmp_path / "not mounted")

        with pytest.raises(FileNotFoundError):
            folder.put(NAME, [b"ours"])
        assert not (tmp_path / "not mounted").exists()

    def test_a_directory_in_its_place(self, tmp_path: Path) -> None:
        """A directory that has the file's name is an error, and nothing is left beside it."""
        folder = make(tmp_path)
        (folder.path / NAME).mkdir(parents=True)

        with pytest.raises(IsADirectoryError):
            folder.put(NAME, [b"ours"])
        assert [NAME] == os.listdir(folder.path)

    def test_a_failed_write_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A write that fails half-way leaves the old file, and no half of the new one."""
        folder = make(tmp_path)
        folder.put(NAME, [b"old"])

        def fail(file: int, pieces: list[bytes]) -> None:
            os.write(file, b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(system, "write_all", fail)
        with pytest.raises(OSError, match="No space left"):
            folder.put(NAME, [b"new"])

        assert {NAME} == set(os.listdir(folder.path))
        assert b"old" == folder.read(NAME)

    def test_no_descriptor_is_left_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether a write succeeds or fails, its descriptor is closed."""
        folder = make(tmp_path)
        folder.put(NAME, [b"old"])
        before = len(os.listdir("/proc/self/fd"))
        folder.put(NAME, [b"new"])
        monkeypatch.setattr(system, "write_all", lambda *_: os.close(-1))
        with contextlib.suppress(OSError):
            folder.put(NAME, [b"new"])

        assert before == len(os.listdir("/proc/self/fd"))

    @pytest.mark.parametrize("durable", [True, False])
    def test_a_replacement_is_synced_before_it_is_renamed(
        self, durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What replaces other files is on the disk itself before it has its name."""
        folder = make(tmp_path)
        synced: list[set[str]] = []
        monkeypatch.setattr(os, "fsync", lambda _: synced.append(set(os.listdir(folder.path))))
        folder.put(NAME, [b"ours"], durable=durable)

        assert [{f"{NAME}.tmp"}] * durable == synced


class TestEntries:
    def test_only_files_of_ours(self, tmp_path: Path) -> None:
        """Only regular files whose names have the exact form of ours are listed."""
        folder = make(tmp_path)
        folder.put(NAME, [b"123"])
        os.utime(folder.path / NAME, ns=(5, 5))
        (folder.path / "notes.json").write_text("mine")
        (folder.path / f"x{OTHER}").write_text("mine")
        (folder.path / f"{OTHER}x").write_text("mine")
        (folder.path / f"{OTHER}\n").write_text("mine")
        (folder.path / OTHER.upper()).write_text("mine")
        (folder.path / f"{OTHER}.tmp").write_text("half")
        (folder.path / f"{9:020d}-{9:032x}.json").symlink_to(folder.path / NAME)
        (folder.path / f"{10:020d}-{10:032x}.json").mkdir()
        os.mkfifo(folder.path / f"{11:020d}-{11:032x}.json")

        assert [(NAME, 3, 5)] == list(folder.entries())
        assert [f"{OTHER}.tmp"] == [entry.name for entry in folder.entries(files.TMP)]

    def test_files_removed_during_a_listing_are_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file that another process removes while we look is left out."""
        folder = make(tmp_path)
        folder.put(NAME, [b"1"])
        folder.put(OTHER, [b"2"])
        found = sorted(os.scandir(folder.path), key=lambda entry: entry.name)
        folder.remove(NAME)
        monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext(found))

        assert [OTHER] == [entry.name for entry in folder.entries()]

    def test_remove_says_whether_the_file_existed(self, tmp_path: Path) -> None:
        """Removing says whether the file was there; a link is removed, not what it points to."""
        folder = make(tmp_path)
        folder.put(NAME, [b"1"])
        (folder.path / OTHER).symlink_to(folder.path / NAME)

        assert (True, False) == (folder.remove(OTHER), folder.remove(OTHER))
        assert b"1" == folder.read(NAME)

    @pytest.mark.parametrize("is_windows", [False, True])
    def test_a_link_put_in_place_of_the_folder(
        self, is_windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Through a link that replaced the folder after it was found, nothing is removed."""
        if is_windows:
            monkeypatch.delattr(os, "O_DIRECTORY")
        folder = make(tmp_path)
        folder.put(NAME, [b"1"])
        assert folder.is_ours
        folder.path.rename(tmp_path / "precious")
        folder.path.symlink_to(tmp_path / "precious")

        with pytest.raises(OSError, match=folder.path.name):
            list(folder.entries())
        with pytest.raises(OSError, match=folder.path.name):
            folder.remove(NAME)
        assert (tmp_path / "precious" / NAME).exists()

    @pytest.mark.parametrize("what", ["link", "folder", "fifo"])
    def test_read_only_what_is_regular(self, what: str, tmp_path: Path) -> None:
        """What is not a regular file is not read, nor waited for."""
        folder = make(tmp_path)
        folder.put(NAME, [b"1"])
        plant(folder.path / OTHER, what)

        with pytest.raises(OSError, match=OTHER):
            folder.read(OTHER)


def plant(path: Path, what: str) -> None:
    """Makes what is not a regular file."""
    if what == "link":
        path.symlink_to(path.parent / NAME)
    elif what == "folder":
        path.mkdir()
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)


class TestOpen:
    @pytest.mark.parametrize("what", ["link", "folder", "fifo", "device"])
    def test_create_is_for_new_files(self, what: str, tmp_path: Path) -> None:
        """Where anything is, nothing is made."""
        plant(tmp_path / "there", what)

        with pytest.raises(FileExistsError):
            system.create(tmp_path / "there", 0o600)

    @pytest.mark.parametrize("what", ["link", "folder", "fifo", "device"])
    def test_only_regular_files_are_opened(self, what: str, tmp_path: Path) -> None:
        """A link, a folder, a FIFO or a device is refused at once, and nothing stays open."""
        plant(tmp_path / "there", what)
        (tmp_path / NAME).write_text("content")
        before = len(os.listdir("/proc/self/fd"))

        with pytest.raises(OSError, match="there"):
            system.open_regular(tmp_path / "there")
        assert before == len(os.listdir("/proc/self/fd"))

    def test_open_regular_without_o_nofollow(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A system that cannot refuse links when it opens a file is asked before."""
        monkeypatch.delattr(os, "O_NOFOLLOW")
        monkeypatch.setattr(system, "SAFE", 0)
        (tmp_path / NAME).write_text("content")
        plant(tmp_path / "there", "link")

        with pytest.raises(OSError, match="is a symbolic link"):
            system.open_regular(tmp_path / "there")
        os.close(system.open_regular(tmp_path / NAME))

    def test_child_processes_do_not_inherit_files(self, tmp_path: Path) -> None:
        """A program that is started has none of our files open."""
        file = system.create(tmp_path / "file", 0o600)
        try:
            assert not os.get_inheritable(file)
        finally:
            os.close(file)


class TestWriteAll:
    @pytest.fixture(params=["writev", "write"], autouse=True)
    def way(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        """With `os.writev`, and on a system that has none."""
        if request.param == "write":
            monkeypatch.delattr(os, "writev")
        way: str = request.param
        return way

    @pytest.mark.parametrize("pieces", [[], [b""], [b"", b"a", b"", b"b", b""]])
    def test_empty_pieces_are_written(self, pieces: list[bytes], tmp_path: Path) -> None:
        """No pieces, and pieces without bytes, are written too."""
        with opened(tmp_path / "file") as file:
            system.write_all(file, pieces)

        assert b"".join(pieces) == (tmp_path / "file").read_bytes()

    def test_many_pieces_are_written_whole(self, tmp_path: Path) -> None:
        """More pieces than one call of the system takes are written whole."""
        pieces = [str(n).encode() for n in range(5_000)]
        with opened(tmp_path / "file") as file:
            system.write_all(file, pieces)

        assert b"".join(pieces) == (tmp_path / "file").read_bytes()

    @pytest.mark.parametrize("step", [1, 3, 7])
    def test_short_writes_lose_nothing(
        self, step: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A system that writes a few bytes at a time loses none."""
        write: Callable[[int, bytes], int] = os.write

        def few(file: int, given: Any) -> int:
            return write(file, b"".join(given if way == "writev" else [given])[:step])

        monkeypatch.setattr(os, way, few)
        with opened(tmp_path / "file") as file:
            system.write_all(file, [b"hello", b"", b",", b"world"])

        assert b"hello,world" == (tmp_path / "file").read_bytes()


class TestSystem:
    def test_a_lock_has_one_owner(self, tmp_path: Path) -> None:
        """A file is locked by one opener at a time, until it closes it."""
        with opened(tmp_path / "file") as second:
            with opened(tmp_path / "file") as first:
                assert (True, False) == (system.lock(first), system.lock(second))
            assert system.lock(second)

    def test_without_locks_the_owner_is_unknown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where there are no locks, nobody can tell."""
        monkeypatch.setattr(system, "HAS_FCNTL", False)
        with opened(tmp_path / "file") as file:
            assert system.lock(file) is None

    def test_a_pipe_reports_its_fill_level(self) -> None:
        """A pipe tells how much waits in it, and how much it holds."""
        read, write = os.pipe()
        try:
            system.widen_pipe(write, 2**17)
            empty = system.pipe_level(write)
            os.write(write, b"x" * 100)
            filled = system.pipe_level(write)
        finally:
            os.close(read)
            os.close(write)

        assert ((0, 2**17), (100, 2**17)) == (empty, filled)

    def test_not_a_pipe(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file has no level, nor has a closed descriptor, nor a pipe where nobody can tell."""
        with opened(tmp_path / "file") as file:
            system.widen_pipe(file, 2**17)
            assert system.pipe_level(file) is None
        system.widen_pipe(file, 2**17)
        assert system.pipe_level(file) is None

        monkeypatch.delattr(system, "fcntl")
        read, write = os.pipe()
        system.widen_pipe(write, 2**17)
        assert system.pipe_level(write) is None
        os.close(read)
        os.close(write)

    def test_zombies_and_reused_ids_are_not_alive(self) -> None:
        """A process is alive until its end; what waits to be collected is dead, as a reused id."""
        started = system.process_start(os.getpid())
        child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.read()  # until its end, which is the child's
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        as_zombie = system.is_alive(child.pid)
        child.communicate()

        assert (True, True) == (system.is_alive(os.getpid()), system.is_alive(os.getpid(), started))
        assert (False, False) == (as_zombie, system.is_alive(child.pid))
        assert not system.is_alive(os.getpid(), "1")
        assert (started, None) == (system.process_start(os.getpid()), system.process_start(2**30))

    def test_is_alive_without_proc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without /proc a signal tells, where that is safe; elsewhere nobody can tell."""
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        without_proc(monkeypatch)

        assert (True, False) == (system.is_alive(os.getpid()), system.is_alive(child.pid))
        assert (None, None) == (system.process_start(os.getpid()), system.resident_bytes())
        monkeypatch.setattr(os, "name", "nt")
        assert system.is_alive(child.pid) is None

    def test_a_process_of_another_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that we may not send a signal to is alive."""

        def refuse(pid: int, number: int) -> None:
            raise PermissionError

        without_proc(monkeypatch)
        monkeypatch.setattr(os, "kill", refuse)

        assert system.is_alive(1)

    def test_resident_memory_is_known(self) -> None:
        """The resident memory of this process is known."""
        assert 10**6 < (system.resident_bytes() or 0) < 10**11


def without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""

    def refuse(path: str, *_: object) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(system, "open", refuse, raising=False)
    monkeypatch.setattr(os.path, "exists", lambda _: False)


WITHOUT = """
import builtins, io, os, signal, sys

for name in ("fcntl", "termios", "resource", "pwd", "grp"):
    sys.modules[name] = None
for name in (
    "writev", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "fchmod", "register_at_fork", "fork",
    "getuid", "geteuid", "sysconf", "getppid", "sched_getaffinity",
):
    if hasattr(os, name):
        delattr(os, name)
for name in ("pthread_kill", "SIGKILL", "SIGHUP"):
    delattr(signal, name)
real_open, exists = open, os.path.exists

def open_no_proc(file, *args, **kwargs):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(file)
    return real_open(file, *args, **kwargs)

builtins.open = io.open = open_no_proc
os.path.exists = lambda path: not str(path).startswith("/proc") and exists(path)

import cirron as ci

ci.profile(output=["spool", "stdout"], flush_interval=0.05)
with ci.scope("outer", given=object()):
    ci.mark("loss", 0.5)
flushed = ci.flush()
assert flushed.ok and flushed.on_disk >= 2, flushed
assert ci.health()["errors"] == {}, ci.health()
ci.shutdown()
"""


def test_the_core_without_what_other_systems_lack() -> None:
    """Without fcntl, writev, fork, /proc and the like, everything is recorded and stored."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=30, check=False
    )
    assert (0, "") == (ended.returncode, ended.stderr)
    run = spools.read_one(Path(".cirron"))

    assert {"cirron.session", "outer"} == {span.name for span in run.spans}
    assert [0.5] == [mark.value for mark in run.marks]
    assert "outer" in ended.stdout
    (box,) = Path(".cirron/blackbox").glob("*.json")
    assert '"how":"clean"' in box.read_text()
