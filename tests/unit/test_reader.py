"""Reading runs from disk, also while they are being written."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cirron import errors, system, wire
from cirron.runs import reader, untrusted
from cirron.runs import tree as trees

SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS
NOW_NS = START_NS + 100 * SECOND_NS
HERE = platform.node()


def session(id: str = "s", pid: int = 4242, **more: Any) -> wire.Session:
    facts: dict[str, Any] = {
        "run_id": "run",
        "attempt": 0,
        "host": HERE,
        "rank": None,
        "local_rank": None,
        "world_size": None,
        "clock": wire.Clock(START_NS, 0, 10),
    }
    return wire.Session(id=id, pid=pid, **(facts | more))


def span(id: str, name: str = "step", parent: str | None = None, **more: Any) -> wire.Span:
    facts: dict[str, Any] = {"index": None, "start_ns": START_NS, "end_ns": START_NS + 10, "pid": 1}
    facts |= {"cpu_ns": None, "gpu_ns": None, "memory_peak_bytes": None, "thread_id": 1}
    facts |= {"rank": None, "attrs": {}, "mark_ids": []}
    return wire.Span(id=id, name=name, parent_id=parent, **(facts | more))


def mark(id: str, span_id: str, value: float = 0.5, ts_ns: int = START_NS) -> wire.Mark:
    return wire.Mark(id, span_id, "loss", "float", value, {}, ts_ns, "point")


def encode(
    batch_id: str,
    spans: list[wire.Span],
    marks: list[wire.Mark] | None = None,
    who: wire.Session | None = None,
    merged: list[str] | None = None,
    version: int = 1,
) -> bytes:
    return wire.encode(
        wire.Batch(
            schema_version=version,
            sdk_version="0",
            batch_id=batch_id,
            created_ns=START_NS,
            session=who,
            merged=merged or [],
            spans=spans,
            marks=marks or [],
        )
    )


def name_of(batch_id: str, created_ns: int = START_NS) -> str:
    return f"{created_ns:020d}-{batch_id}.json"


def write(root: Path, batch_id: str, spans: list[wire.Span], *rest: Any, **more: Any) -> Path:
    path = root / "spool" / name_of(batch_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(batch_id, spans, *rest, **more))
    return path


def write_box(root: Path, who: wire.Session, **more: Any) -> None:
    content: dict[str, Any] = {
        "schema_version": 1,
        "session": who,
        "pid": who.pid,
        "process_start": None,
        "heartbeat_ns": START_NS + 50 * SECOND_NS,
        "interval_s": 1.0,
        "ended": None,
        "open": [],
    }
    path = root / "blackbox" / f"{who.id}-{who.pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(wire.encode(content | more))


def open_entry(id: str, name: str, parent: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": id, "name": name, "parent_id": parent, "start_ns": START_NS, **more}


@pytest.fixture
def dead_pid() -> int:
    """The id of a process that has been."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


class TestFind:
    @pytest.mark.parametrize("given", [".", ".cirron", ".cirron/spool", ".cirron/blackbox"])
    def test_all_the_folders_that_people_name(self, tmp_path: Path, given: str) -> None:
        """The project, its .cirron and what is in there all lead to the same records."""
        write(tmp_path / ".cirron", "a", [])
        write_box(tmp_path / ".cirron", session())

        assert tmp_path / ".cirron" == reader.find(tmp_path / given)

    def test_inside_of_the_spool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """ "." works from inside the spool as well."""
        write(tmp_path, "a", [])
        monkeypatch.chdir(tmp_path / "spool")

        assert tmp_path.resolve() == reader.find(".")

    def test_a_folder_of_another_name(self, tmp_path: Path) -> None:
        """ci.profile(path=...) may put the records anywhere."""
        write(tmp_path / "traces", "a", [])

        assert tmp_path / "traces" == reader.find(tmp_path / "traces")

    def test_copied_batches(self, tmp_path: Path) -> None:
        """A folder with nothing but batches, copied from somewhere, can be read."""
        (tmp_path / name_of("a")).write_bytes(encode("a", [span("1")]))

        assert 1 == len(reader.read(reader.find(tmp_path))[0].spans)

    def test_nothing_there(self, tmp_path: Path) -> None:
        """The error says what was looked for and what to type next."""
        (tmp_path / "package.json").write_text("{}")

        with pytest.raises(errors.SettingError, match=r"no \.cirron, spool.*cirron show FOLDER"):
            reader.find(tmp_path)
        with pytest.raises(errors.SettingError, match="there is no such folder"):
            reader.find(tmp_path / "absent")
        with pytest.raises(errors.SettingError, match="it is not a folder"):
            reader.find(tmp_path / "package.json")
        with pytest.raises(errors.SettingError, match="there is no such folder"):
            reader.find(f"{tmp_path}/a\0b")
        (tmp_path / ".cirron").symlink_to(".cirron")
        with pytest.raises(errors.SettingError, match=r"its \.cirron is not a folder"):
            reader.find(tmp_path)

    def test_a_link_to_the_records(self, tmp_path: Path) -> None:
        """A .cirron that is kept on another disk is found through its link."""
        write(tmp_path / "scratch", "a", [span("1")])
        (tmp_path / ".cirron").symlink_to(tmp_path / "scratch")

        assert 1 == len(reader.read(reader.find(tmp_path))[0].spans)


class TestBatches:
    def test_a_session_is_put_together_from_its_batches(self, tmp_path: Path) -> None:
        """Spans and marks of several files, and of a forked process, are one session's tree."""
        write(tmp_path, "a", [span("1", "epoch")], [mark("m", "2")], session())
        write(tmp_path, "b", [span("2", "step", "1")], who=session(pid=9999))
        (run,) = reader.read(tmp_path)

        assert (4242, "run", START_NS) == (
            run.session and run.session.pid,
            run.run_id,
            run.started_ns,
        )
        tree = run.tree()
        assert ["epoch"] == [root.name for root in tree.roots]
        assert ["m"] == [found.id for found in tree.roots[0].children[0].marks]
        assert "unknown" == run.state

    def test_sessions_are_kept_apart(self, tmp_path: Path) -> None:
        """Two ranks in one folder are two sessions, by start."""
        later = wire.Clock(START_NS + 1, 0, 10)
        write(tmp_path, "a", [span("1")], who=session("late", clock=later))
        write(tmp_path, "b", [span("2")], who=session("early"))

        assert ["early", "late"] == [
            run.session and run.session.id for run in reader.read(tmp_path)
        ]

    def test_batches_of_other_writers(self, tmp_path: Path) -> None:
        """A batch without a session, as other tools write it, can be read."""
        write(tmp_path, "a", [span("1")])
        (run,) = reader.read(tmp_path)

        assert (None, None, 1) == (run.session, run.run_id, run.tree().span_count)

    def test_unfinished_files_are_ignored(self, tmp_path: Path) -> None:
        """What is still being written under a .tmp name is not there yet."""
        path = write(tmp_path, "a", [span("1")])
        path.with_suffix(".json.tmp").write_bytes(b"{")

        assert [] == reader.read(tmp_path)[0].problems

    def test_a_merged_batch_replaces_its_parts(self, tmp_path: Path) -> None:
        """Between renaming and deleting both are there; each record counts once."""
        write(tmp_path, "a", [span("1")], who=session())
        write(tmp_path, "m", [span("1"), span("2")], who=session(), merged=["a", "b"])
        (run,) = reader.read(tmp_path)

        assert ["1", "2"] == [found.id for found in run.spans]

    def test_second_copies_are_dropped(self, tmp_path: Path) -> None:
        """A part that outlived its merge by a crash adds nothing."""
        write(tmp_path, "a", [span("1")], [mark("m", "1")], session())
        write(tmp_path, "b", [span("1")], [mark("m", "1")], session())
        (run,) = reader.read(tmp_path)

        assert (1, 1) == (len(run.spans), len(run.marks))

    def test_a_claim_to_replace_others_is_not_believed(self, tmp_path: Path) -> None:
        """A record counts once by its own id, so no file can take another one's records away."""
        write(tmp_path, "a", [span("1")], who=session())
        write(tmp_path, "m", [span("2")], who=session("other"), merged=["a"])

        assert ["1", "2"] == [found.id for run in reader.read(tmp_path) for found in run.spans]

    def test_two_runs_with_one_session_id(self, tmp_path: Path) -> None:
        """A file that repeats a session's id under another run does not draw it into that run."""
        write(tmp_path, "a", [span("1")], who=session())
        write(tmp_path, "b", [span("2")], who=session(run_id="other"))

        assert {("run", 1), ("other", 1)} == {
            (run.run_id, len(run.spans)) for run in reader.read(tmp_path)
        }

    def test_a_merge_while_reading(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Files that vanish between listing and opening are found again where they went."""
        first = write(tmp_path, "a", [span("1")], who=session())
        second = write(tmp_path, "b", [span("2")], who=session())
        read_file = untrusted.read_file
        read: list[str] = []

        def read_then_merge(path: str, limit_bytes: int) -> bytes:
            content = read_file(path, limit_bytes)
            if not read:
                write(tmp_path, "m", [span("1"), span("2")], who=session(), merged=["a", "b"])
                first.unlink()
                second.unlink()
            read.append(path)
            return content

        monkeypatch.setattr(untrusted, "read_file", read_then_merge)
        (run,) = reader.read(tmp_path)

        assert 2 == len(read)
        assert (["1", "2"], []) == (sorted(found.id for found in run.spans), run.problems)

    def test_a_listing_that_missed_a_merge(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A listing that saw a file under neither name is not believed until a second agrees."""
        write(tmp_path, "m", [span("1"), span("2")], who=session(), merged=["a", "b"])
        monkeypatch.setattr(reader, "_list", first_these(reader._list, [[]]))
        (run,) = reader.read(tmp_path)

        assert 2 == len(run.spans)

    def test_a_spool_that_never_rests(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Reading ends even when every listing differs, and says so."""
        write(tmp_path, "a", [span("1")], who=session())
        endless = [[name_of("gone"), name_of(str(n))] for n in range(1_000)]
        monkeypatch.setattr(reader, "_list", first_these(reader._list, endless))
        problems = [problem for run in reader.read(tmp_path) for problem in run.problems]

        assert [True] == ["come and go all the time" in problem for problem in problems]

    def test_a_writer_that_merges_all_the_time(self, tmp_path: Path) -> None:
        """Beside a busy writer every read finds each record that was on disk, exactly once."""
        folder = tmp_path / "spool"
        folder.mkdir()
        on_disk = 0
        is_done = threading.Event()

        def put(batch_id: str, content: bytes) -> None:
            partial = folder / f"{batch_id}.json.tmp"
            partial.write_bytes(content)
            partial.rename(folder / name_of(batch_id))

        def write_all() -> None:
            nonlocal on_disk
            parts: list[str] = []
            spans: list[wire.Span] = []
            for n in range(600):
                spans.append(span(str(n)))
                put(f"{n}", encode(f"{n}", spans[-1:], who=session()))
                parts.append(f"{n}")
                on_disk = n + 1
                if len(parts) == 3:
                    put(f"m{n}", encode(f"m{n}", spans, who=session(), merged=parts))
                    for part in parts:
                        (folder / name_of(part)).unlink()
                    parts = [f"m{n}"]

        def keep_writing() -> None:
            try:
                write_all()
            finally:
                is_done.set()

        writer = threading.Thread(target=keep_writing)
        writer.start()
        reads = 0
        while not is_done.is_set() or not reads:
            expected = on_disk
            runs = reader.read(tmp_path)
            ids = [int(found.id) for run in runs for found in run.spans]
            trouble = [problem for run in runs for problem in run.problems]
            assert trouble or list(range(expected)) == sorted(ids)[:expected]
            assert len(ids) == len(set(ids))
            reads += 1
        writer.join()

        assert 600 == len(reader.read(tmp_path)[0].spans)


class TestProblems:
    def test_a_half_file_is_named(self, tmp_path: Path) -> None:
        """A file cut short by a full disk is named with its session, and the others are read."""
        path = write(tmp_path, "a", [span("1")], who=session())
        write(tmp_path, "b", [span("2")], who=session())
        path.write_bytes(path.read_bytes()[:-20])
        (run,) = reader.read(tmp_path)

        assert ["2"] == [found.id for found in run.spans]
        assert f"{path.name}: is not a whole batch and was left out" in run.problems[0]

    @pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{}", b"[" * 100_000, b"null"])
    def test_rubbish_is_named(self, tmp_path: Path, content: bytes) -> None:
        """A file that is no batch at all is named in a session of its own."""
        path = write(tmp_path, "a", [])
        path.write_bytes(content)
        (run,) = reader.read(tmp_path)

        assert [path.name] == [problem.partition(":")[0] for problem in run.problems]
        assert 0 == run.tree().span_count

    def test_a_newer_version_is_named(self, tmp_path: Path) -> None:
        """Records of a newer format are shown as far as they go, and the reader is told."""
        write(tmp_path, "a", [span("1")], who=session(), version=2)
        (run,) = reader.read(tmp_path)

        assert 1 == len(run.spans)
        assert "is of schema version 2, newer than the 1" in run.problems[0]
        assert "pip install -U cirron" in run.problems[0]

    def test_a_newer_version_that_cannot_be_read(self, tmp_path: Path) -> None:
        """A newer format that does not fit is left out with the reason."""
        path = write(tmp_path, "a", [span("1")], who=session(), version=2)
        path.write_bytes(path.read_bytes().replace(b'"name":"step"', b'"name":7'))
        (run,) = reader.read(tmp_path)

        assert "schema version 2" in run.problems[0]
        assert "it was left out" in run.problems[0]

    def test_a_broken_black_box_is_named(self, tmp_path: Path) -> None:
        """A black box that cannot be read is named with the session in its file name."""
        write(tmp_path, "a", [span("1")], who=session())
        write_box(tmp_path, session())
        (tmp_path / "blackbox" / "s-4242.json").write_bytes(b"{")
        (run,) = reader.read(tmp_path)

        assert "s-4242.json: is not a black box of ours" in run.problems[0]

    def test_an_odd_open_span_is_named_once(self, tmp_path: Path, dead_pid: int) -> None:
        """An open span that cannot be read does not hide the others."""
        write_box(
            tmp_path,
            session(pid=dead_pid),
            open=[open_entry("1", "epoch"), {"id": 7}, {"id": 7}],
        )
        (run,) = reader.read(tmp_path)

        assert ["epoch"] == [root.name for root in run.tree().roots]
        run.tree()
        assert 1 == len(run.problems)

    def test_numbers_of_more_than_64_bits_are_cut(self, tmp_path: Path) -> None:
        """A record with such a number is kept, with what 64 bits hold, and its file is named."""
        path = write(tmp_path, "a", [span("1", index=10**30)], who=session())
        (run,) = reader.read(tmp_path)

        assert [2**63 - 1] == [found.index for found in run.spans]
        assert [f"{path.name}: {reader.CUT}"] == run.problems

    def test_numbers_of_64_bits_are_kept(self, tmp_path: Path) -> None:
        """The numbers that other languages have are no problem."""
        write(tmp_path, "a", [span("1", index=2**64 - 1, start_ns=-(2**63))], who=session())
        (run,) = reader.read(tmp_path)

        assert ([2**64 - 1], []) == ([found.index for found in run.spans], run.problems)

    @pytest.mark.parametrize(("levels", "is_read"), [(64, True), (65, False)])
    def test_nesting_has_a_limit(self, tmp_path: Path, levels: int, is_read: bool) -> None:
        """Attributes nested as deep as no writer of ours does it are refused."""
        value: Any = 1
        for _ in range(levels):
            value = [value]
        write(tmp_path, "a", [span("1", attrs={"a": value})], who=session())
        (run,) = reader.read(tmp_path)

        assert is_read == (len(run.spans) == 1) == (not run.problems)


class TestUntrusted:
    """Opening files that anybody may have put there."""

    def reason(self, path: Path, limit_bytes: int = 100) -> str:
        with pytest.raises(untrusted.UnreadableError) as caught:
            untrusted.read_file(path, limit_bytes)
        return str(caught.value)

    def test_a_file(self, tmp_path: Path) -> None:
        """A regular file is read whole, up to the limit."""
        path = tmp_path / "file"
        path.write_bytes(b"x" * 100)

        assert b"x" * 100 == untrusted.read_file(path, 100)
        assert "is too large and was not read: 100 bytes; the limit is 99" == self.reason(path, 99)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        """A missing file is Python's own error, since it may just have been merged or sent."""
        with pytest.raises(FileNotFoundError):
            untrusted.read_file(tmp_path / "file", 100)

    def test_other_things(self, tmp_path: Path) -> None:
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

    def test_a_listing(self, tmp_path: Path) -> None:
        """The newest names come first; past the limit the others are left out."""
        for name in ("1.json", "3.json", "2.json", "4.tmp"):
            (tmp_path / name).touch()

        assert ["3.json", "2.json"] == untrusted.list_files(tmp_path, ".json", 2)
        assert ["3.json", "2.json", "1.json"] == untrusted.list_files(tmp_path, ".json", 100)

    def test_a_name_that_is_not_unicode(self) -> None:
        """Any name becomes text that can be encoded, and that tells the bytes."""
        assert "ü\\xff" == untrusted.shown(os.fsdecode("ü".encode() + b"\xff"))


class TestState:
    def state(self, root: Path, host: str = HERE, now_ns: int = NOW_NS) -> str:
        (run,) = reader.read(root, now_ns=now_ns, host=host)
        return run.state

    @pytest.mark.parametrize("how", ["clean", "exception", "signal"])
    def test_a_process_that_said_how_it_ended(self, tmp_path: Path, how: str) -> None:
        """What the black box was closed with is the state."""
        write_box(tmp_path, session(), ended={"how": how, "detail": None, "at_ns": NOW_NS})

        assert how == self.state(tmp_path)

    def test_a_way_to_end_that_we_do_not_know(self, tmp_path: Path) -> None:
        """A newer writer's word for its end is not taken for a kill."""
        write_box(tmp_path, session(), ended={"how": "abducted"})

        assert "unknown" == self.state(tmp_path)

    def test_running(self, tmp_path: Path) -> None:
        """A process of this host that is alive runs, and its open spans count up to now."""
        start = system.process_start(os.getpid())
        write_box(tmp_path, session(pid=os.getpid()), process_start=start)
        (run,) = reader.read(tmp_path, now_ns=NOW_NS)

        assert ("running", START_NS + 50 * SECOND_NS, False) == (
            run.state,
            run.now_ns,
            run.is_judged_by_silence,
        )

    def test_a_reused_process_id(self, tmp_path: Path) -> None:
        """Another process with the same id does not make a dead one run."""
        write_box(tmp_path, session(pid=os.getpid()), process_start="1")

        assert "killed" == self.state(tmp_path)

    def test_gone(self, tmp_path: Path, dead_pid: int) -> None:
        """A process that is gone without a word was killed; open spans end at its heartbeat."""
        write_box(tmp_path, session(pid=dead_pid), open=[open_entry("1", "epoch")])
        (run,) = reader.read(tmp_path, now_ns=NOW_NS)
        tree = run.tree()

        assert ("killed", False) == (run.state, run.is_judged_by_silence)
        assert 50 * SECOND_NS == tree.roots[0].wall_ns(tree.now_ns)

    def test_remains_do_not_run(self, tmp_path: Path) -> None:
        """A killed process whose parent has not looked yet still has an id, and is dead."""
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            start = system.process_start(process.pid)
            write_box(tmp_path, session(pid=process.pid), process_start=start)
            assert "running" == self.state(tmp_path)
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

            assert "killed" == self.state(tmp_path)
        finally:
            process.communicate()

    @pytest.mark.parametrize(
        ("interval_s", "silence_s", "expected"),
        [(1.0, 29, "running"), (1.0, 31, "killed"), (10.0, 99, "running"), (10.0, 101, "killed")],
    )
    def test_on_another_host(
        self, tmp_path: Path, interval_s: float, silence_s: int, expected: str
    ) -> None:
        """There the heartbeat decides: silent for 10 intervals, at least 30 s, is dead."""
        write_box(
            tmp_path,
            session(host="elsewhere"),
            interval_s=interval_s,
            heartbeat_ns=NOW_NS - silence_s * SECOND_NS,
        )
        (run,) = reader.read(tmp_path, now_ns=NOW_NS)

        assert (expected, True) == (run.state, run.is_judged_by_silence)

    def test_a_black_box_with_nothing_in_it(self, tmp_path: Path) -> None:
        """Missing keys are no error."""
        path = tmp_path / "blackbox" / "s-1.json"
        path.parent.mkdir()
        path.write_bytes(wire.encode({"session": session(host="elsewhere")}))
        (run,) = reader.read(tmp_path, now_ns=NOW_NS)

        assert ("killed", 0) == (run.state, run.tree().span_count)


class TestOpenSpans:
    def test_they_join_the_tree(self, tmp_path: Path, dead_pid: int) -> None:
        """The path to where the process was is in the tree, with the closed spans in it."""
        write(tmp_path, "a", [span("2", "step", "1")], who=session(pid=dead_pid))
        write_box(tmp_path, session(pid=dead_pid), open=[open_entry("1", "epoch", index=3)])
        (root,) = reader.read(tmp_path)[0].tree().roots

        assert (True, 3, ["step"]) == (
            root.is_open,
            root.index,
            [one.name for one in root.children],
        )

    def test_one_that_closed_since_is_closed(self, tmp_path: Path, dead_pid: int) -> None:
        """A span that is both in the black box and in a batch has ended."""
        write(tmp_path, "a", [span("1", "epoch")], who=session(pid=dead_pid))
        write_box(tmp_path, session(pid=dead_pid), open=[open_entry("1", "epoch")])

        assert not reader.read(tmp_path)[0].tree().roots[0].is_open

    def test_the_latest_values_that_no_batch_has(self, tmp_path: Path, dead_pid: int) -> None:
        """A value that was only in memory when the process died is shown from the black box."""
        marks = [mark("m", "1", 0.9), mark("n", "2", 0.7)]
        write(tmp_path, "a", [], marks, session(pid=dead_pid))
        write_box(
            tmp_path,
            session(pid=dead_pid),
            open=[
                open_entry("1", "epoch", latest={"loss": 0.5, "infinite": None}),
                open_entry("2", "step", "1", latest={"loss": 0.7}),
            ],
        )
        run = reader.read(tmp_path)[0]
        values = {
            node.name: [found.value for found in node.marks]
            for node in trees.walk(run.tree().roots)
        }

        assert {"epoch": [0.9, 0.5], "step": [0.7]} == values
        assert 2 == len(run.marks)

    def test_forked_processes_add_theirs(self, tmp_path: Path, dead_pid: int) -> None:
        """The black box of a forked process is not the session's own."""
        write_box(tmp_path, session(pid=dead_pid), open=[open_entry("1", "epoch")])
        late = session(pid=dead_pid + 1)
        write_box(tmp_path, late, open=[open_entry("2", "worker", "1")], ended={"how": "clean"})
        (run,) = reader.read(tmp_path)

        assert ("killed", 1) == (run.state, len(run.forked))
        assert ["worker"] == [node.name for node in run.tree().roots[0].children]


def first_these(function: Any, first: list[Any]) -> Any:
    """The function, which gives these results first."""
    results = iter(first)

    def call(*arguments: Any) -> Any:
        found = next(results, None)
        return function(*arguments) if found is None else found

    return call
