"""`cirron show` on folders that somebody has filled with the worst that they could think of.

Each folder also holds a good run. Whatever else is there, the command ends soon, shows the good
run, names the file that it could not read, and prints nothing that a terminal would act on.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import cirron as ci
from cirron.cli import main
from cirron.runs import folders
from cirron.view.text import escape

if TYPE_CHECKING:
    from collections.abc import Callable

SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS
LIMIT_S = 20.0  # far above what any of them takes, and far below a hang
SOURCE = Path(ci.__file__).parents[1]
HUGE = "9" * 401
GOOD = "a" * 32  # the id of the good run's session, and of its batch
BAD_BATCH = f"{START_NS + 1:020d}-{'b' * 32}.json"
BAD_BOX = f"{'b' * 32}-4343.json"
# C0, DEL, C1, bidi controls, line separators, halves of surrogate pairs: all but the newline.
FORBIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff]"
)
CODES = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202e\u2066\u200f\u061c\u2028\u2029\x85\r\nproblem: no"


def session(name: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name[0] * 32,
        "run_id": name,
        "attempt": 0,
        "host": "somewhere",
        "pid": 4343,
        "rank": None,
        "local_rank": None,
        "world_size": None,
        "clock": {"wall_ns": START_NS, "monotonic_ns": 0, "uncertainty_ns": 0},
    } | more


def span(id: str = "1", parent: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "name": "step",
        "parent_id": parent,
        "index": None,
        "start_ns": START_NS,
        "end_ns": START_NS + 142_000,
        "cpu_ns": None,
        "gpu_ns": None,
        "memory_peak_bytes": None,
        "thread_id": 1,
        "pid": 1,
        "rank": None,
        "attrs": {},
        "mark_ids": [],
    } | more


def mark(id: str = "m", **more: Any) -> dict[str, Any]:
    facts = {"id": id, "span_id": "1", "name": "loss", "value_type": "float", "value": 0.5}
    return facts | {"attrs": {}, "ts_ns": START_NS, "kind": "point"} | more


def batch(who: Any = None, spans: Any = None, marks: Any = (), **more: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "sdk_version": "0",
        "batch_id": "b" * 32,
        "created_ns": START_NS,
        "session": session("bad") if who is None else who,
        "spans": [span()] if spans is None else spans,
        "marks": marks,
        "snapshots": [],
    } | more


def box(**more: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "session": session("bad"),
        "pid": 4343,
        "process_start": None,
        "heartbeat_ns": START_NS + SECOND_NS,
        "interval_s": 1.0,
        "ended": None,
        "open": [span("9", name="open", end_ns=None)],
        "counters": {},
    } | more


def nested(levels: int, inner: Any = 1) -> Any:
    for level in range(levels):
        inner = [inner] if level % 2 else {"a": inner}
    return inner


def encoded(content: Any) -> bytes:
    """JSON; a number that is written as "#..." is put in as it stands."""
    return re.sub(r'"#([^"]*)"', r"\1", json.dumps(content)).encode()


# -- contents of a batch ---------------------------------------------------------------------------
# Each is a batch that cannot be read, and is named; or, in FINE, one that can.

WHOLE = encoded(batch())

BATCHES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "blank": lambda: b" \n" * 1_000,
    "a NUL": lambda: b"\x00",
    "a megabyte of NUL": lambda: bytes(2**20),
    "cut short": lambda: WHOLE[:-20],
    "cut after the header": lambda: WHOLE[: WHOLE.index(b'"spans"')],
    "two in one": lambda: WHOLE + WHOLE,
    "rubbish behind it": lambda: WHOLE + b"\x00\xff",
    "an array": lambda: b"[]",
    "null": lambda: b"null",
    "a string": lambda: b'"batch"',
    "gzip": lambda: gzip.compress(WHOLE),
    "UTF-16": lambda: WHOLE.decode().encode("utf-16"),
    "not UTF-8": lambda: WHOLE.replace(b"step", b"st\xffp"),
    "a NUL in a name": lambda: WHOLE.replace(b"step", b"st\x00p"),
    "half a surrogate pair": lambda: WHOLE.replace(b"step", b"\\ud800"),
    "an encoded surrogate": lambda: WHOLE.replace(b"step", b"\xed\xa0\x80"),
    "index of 401 digits": lambda: encoded(batch(spans=[span(index="#" + HUGE)])),
    "index of 10^30": lambda: encoded(batch(spans=[span(index=10**30)])),
    "index of 10^5000": lambda: encoded(batch(spans=[span(index="#1" + "0" * 5_000)])),
    "start of 401 digits": lambda: encoded(batch(spans=[span(start_ns="#-" + HUGE)])),
    "end of 401 digits": lambda: encoded(batch(spans=[span(end_ns="#" + HUGE)])),
    "memory of 401 digits": lambda: encoded(batch(spans=[span(memory_peak_bytes="#" + HUGE)])),
    "value of 401 digits": lambda: encoded(batch(marks=[mark(value="#" + HUGE)])),
    "value of 1e400": lambda: encoded(batch(marks=[mark(value="#1e400")])),
    "time of 401 digits": lambda: encoded(batch(marks=[mark(ts_ns="#" + HUGE)])),
    "attribute of 401 digits": lambda: encoded(batch(spans=[span(attrs={"x_ns": "#" + HUGE})])),
    "pid of 10^30": lambda: encoded(batch(session("bad", pid=10**30))),
    "clock of 401 digits": lambda: encoded(
        batch(session("bad", clock=dict.fromkeys(session("x")["clock"], "#" + HUGE)))
    ),
    "version of 401 digits": lambda: encoded(batch(schema_version="#" + HUGE)),
    "a newer version": lambda: encoded(batch(schema_version=2**63 - 1)),
    "NaN": lambda: encoded(batch(marks=[mark(value=float("nan"))])),
    "Infinity": lambda: encoded(batch(marks=[mark(value=float("inf"))])),
    "attributes 100 deep": lambda: encoded(batch(spans=[span(attrs={"a": nested(100)})])),
    "attributes 800 deep": lambda: encoded(batch(marks=[mark(attrs={"a": nested(800)})])),
    "100,000 deep": lambda: WHOLE.replace(b'"attrs": {}', b'"attrs": {"a":' + b"[" * 100_000),
    "an unknown key 100,000 deep": lambda: b'{"x":' + b'{"a":' * 100_000,
    "a number for a name": lambda: encoded(batch(spans=[span(name=7)])),
    "a list for attributes": lambda: encoded(batch(spans=[span(attrs=[1])])),
    "an object for spans": lambda: encoded(batch(spans={"1": span()})),
    "a string for a span": lambda: encoded(batch(spans=["step"])),
    "null for an id": lambda: encoded(batch(spans=[span() | {"id": None}])),
    "a string for a time": lambda: encoded(batch(spans=[span(start_ns="now")])),
    "a float for an index": lambda: encoded(batch(spans=[span(index=0.5)])),
    "a list for a value": lambda: encoded(batch(marks=[mark(value=[1])])),
    "a string for a session": lambda: encoded(batch("me")),
    "half a session": lambda: encoded(batch({"id": "b", "run_id": "bad"})),
    "no version": lambda: encoded({k: v for k, v in batch().items() if k != "schema_version"}),
}

FINE: dict[str, Callable[[], bytes]] = {
    "a parent of its own": lambda: encoded(batch(spans=[span("1", "1")])),
    "parents in a circle": lambda: encoded(
        batch(spans=[span(str(n), str((n + 1) % 2_000)) for n in range(2_000)])
    ),
    "leaves on a circle": lambda: encoded(
        batch(
            spans=[span(str(n), "hub") for n in range(2_000)]
            + [span("hub", "top", start_ns=START_NS + 1), span("top", "hub", start_ns=START_NS + 1)]
        )
    ),
    "a chain of 2,000": lambda: encoded(
        batch(spans=[span(str(n), str(n - 1)) for n in range(2_000)])
    ),
    "one id for all": lambda: encoded(batch(spans=[span("1")] * 100, marks=[mark("m")] * 100)),
    "the ends of time": lambda: encoded(
        batch(spans=[span(start_ns=-(2**63), end_ns=2**63 - 1, index=2**64 - 1)])
    ),
    "an end before the start": lambda: encoded(batch(spans=[span(end_ns=-(2**63))])),
    "a clock at the end of time": lambda: encoded(
        batch(session("bad", clock=dict.fromkeys(session("x")["clock"], 2**63 - 1)))
    ),
    "a name of 5 MB": lambda: encoded(batch(spans=[span(name="x" * 5 * 2**20)])),
    "20,000 attributes": lambda: encoded(
        batch(spans=[span(str(n), attrs={f"k{k}_ns": k for k in range(1_000)}) for n in range(21)])
    ),
    "20,000 marks": lambda: encoded(
        batch(marks=[mark(str(n), name=f"m{n}") for n in range(20_000)])
    ),
    "escaped NUL": lambda: WHOLE.replace(b"step", b"\\u0000"),
    "codes in names": lambda: encoded(
        batch(
            session("bad" + CODES, host=CODES, id=CODES),
            [span(name=CODES, attrs={CODES: CODES, "error": CODES, "list": [CODES]})],
            [mark(name=CODES, value=CODES), mark("n", span_id="root", name=CODES, value=CODES)],
        )
    ),
    "markup in names": lambda: encoded(
        batch(spans=[span(name="<script>alert(1)</script>$\\href{javascript:x}{y}$")])
    ),
    "a claim to replace the good run": lambda: encoded(batch(merged=[GOOD])),
    "the good run's session under another run": lambda: encoded(batch(session("bad", id=GOOD))),
    "the good run's session with an older clock": lambda: encoded(
        batch(
            session("good", id=GOOD, clock=dict.fromkeys(session("x")["clock"], -(2**63))),
            [span("2")],
        )
    ),
    "ranks of all kinds": lambda: encoded(batch(session("bad", rank=-5, world_size=2**63 - 1))),
}

# -- contents of a black box -----------------------------------------------------------------------

BOXES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "an array": lambda: b"[1]",
    "cut short": lambda: encoded(box())[:-9],
    "not UTF-8": lambda: encoded(box()).replace(b"somewhere", b"\xff"),
    "no session": lambda: encoded(box(session=None)),
    "a number for a session": lambda: encoded(box(session=7)),
    "a heartbeat of 401 digits": lambda: encoded(box(heartbeat_ns="#" + HUGE)),
    "an interval of 1e400": lambda: encoded(box(interval_s="#1e400")),
    "memory of 401 digits": lambda: encoded(box(memory_rss_bytes="#" + HUGE)),
    "an open index of 10^30": lambda: encoded(box(open=[span(index=10**30, end_ns=None)])),
    "a step of 401 digits": lambda: encoded(box(last_step={"name": "s", "index": "#" + HUGE})),
    "100 deep": lambda: encoded(box(anything=nested(100))),
    "100,000 deep": lambda: b'{"session":' + b"[" * 100_000,
    "a string for the open spans": lambda: encoded(box(open="x")),
    "numbers for open spans": lambda: encoded(box(open=[1, 2])),
    "a list for the end": lambda: encoded(box(ended=[1])),
    "a string for the heartbeat": lambda: encoded(box(heartbeat_ns="now")),
    "numbers for stacks": lambda: encoded(box(stacks=[1], silent_since_ns=1)),
    "a list for counters": lambda: encoded(box(counters=[1])),
    "an odd open span": lambda: encoded(box(open=[{"id": 7}, span("9", end_ns=None)])),
}

FINE_BOXES: dict[str, Callable[[], bytes]] = {
    "nothing but a session": lambda: encoded({"session": session("bad")}),
    "open spans in a circle": lambda: encoded(
        box(open=[span(str(n), str((n + 1) % 2_000), end_ns=None) for n in range(2_000)])
    ),
    "5,000 open spans": lambda: encoded(
        box(open=[span(str(n), str(n - 1), thread_id=n, end_ns=None) for n in range(0, 10_000, 2)])
    ),
    "a process of -1": lambda: encoded(
        box(session=session("bad", pid=-1, host=os.uname().nodename), pid=-1)
    ),
    "a process of 2^63-1": lambda: encoded(
        box(session=session("bad", host=os.uname().nodename), pid=2**63 - 1, process_start="x" * 99)
    ),
    "an interval of 1e308": lambda: encoded(box(interval_s=1e308, heartbeat_ns=-(2**63))),
    "memory of 2^63-1": lambda: encoded(box(memory_rss_bytes=2**63 - 1, silent_since_ns=-(2**63))),
    "codes everywhere": lambda: encoded(
        box(
            session=session("bad", host=CODES),
            ended={"how": "exception", "detail": CODES, "at_ns": 1},
            open=[span("9", name=CODES, end_ns=None, latest={CODES: CODES})],
            last_step={"name": CODES, "index": 1, "end_ns": 1},
            stacks=[{"name": CODES, "frames": [CODES] * 20}] * 20,
            counters={f"drop{CODES}{n}": CODES for n in range(100)},
        )
    ),
    "codes in an end of its own": lambda: encoded(box(ended={"how": CODES, "detail": CODES})),
}

# -- things that are no files ----------------------------------------------------------------------


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may not be longer than 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def make_sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(50 * 10**9)


def link_to_secret(path: Path) -> None:
    secret = path.parents[2] / "secret.json"
    secret.write_bytes(encoded(batch(session("secret"))))
    path.symlink_to(secret)


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.parent / "fifo")
    path.symlink_to("fifo")


THINGS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a full folder": lambda path: (path / "a" / "b").mkdir(parents=True),
    "a socket": make_socket,
    "a sparse file of 50 GB": make_sparse,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/tty": lambda path: path.symlink_to("/dev/tty"),
    "a link to a private file": link_to_secret,
    "a link to a folder": lambda path: path.symlink_to("/proc"),
    "a FIFO": lambda path: os.mkfifo(path),
    "a link to a FIFO": link_to_fifo,
}

# -- file names ------------------------------------------------------------------------------------

NAMES: dict[str, tuple[bytes, str]] = {  # and how each is shown
    "terminal codes": (b"\x1b[31m\x07.json", "\\x1b[31m\\x07.json"),
    "C1": ("\x9b31m\x85.json".encode(), "\\x9b31m\\x85.json"),
    "bidi": ("\u202enosj.\u2066.json".encode(), "\\u202enosj.\\u2066.json"),
    "line separators": ("a\u2028b\u2029.json".encode(), "a\\u2028b\\u2029.json"),
    "a line of its own": (b"x\nproblem: lie.json", "x\\nproblem: lie.json"),
    "not UTF-8": (b"\xff\xfe\xed\xa0\x80.json", "\\xff\\xfe\\xed\\xa0\\x80.json"),
    "255 bytes": (b"\x01" * 250 + b".json", "\\x01" * 250 + ".json"),
    "no name": (b".json", ".json"),
    "a percent sign": (b"%s%n{0}.json", "%s%n{0}.json"),
}


class Folder:
    """A project's folder with a good run in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spool = path / ".cirron" / "spool"
        self.boxes = path / ".cirron" / "blackbox"
        for folder in (self.spool, self.boxes):
            folder.mkdir(parents=True)
        good = session("good", id=GOOD, pid=2**30)
        content = batch(good, [span("1", name="good_epoch", index=3)], batch_id=GOOD)
        self.put(self.spool / f"{START_NS:020d}-{GOOD}.json", content)
        ended = {"how": "clean", "detail": None, "at_ns": START_NS + SECOND_NS}
        content = box(session=good, pid=good["pid"], open=[], ended=ended)
        self.put(self.boxes / f"{GOOD}-{good['pid']}.json", content)

    def put(self, path: Path, content: Any) -> None:
        path.write_bytes(content if isinstance(content, bytes) else encoded(content))

    def show(self, *arguments: str) -> str:
        """What is printed, which is safe, soon there, and without a traceback."""
        started = time.monotonic()
        result = CliRunner().invoke(main, ["show", str(self.path), "--all", *arguments])
        assert LIMIT_S > time.monotonic() - started
        assert isinstance(result.exception, (SystemExit, type(None))), repr(result.exception)
        assert result.exit_code in (0, 1), result.output
        assert not FORBIDDEN.search(result.output)
        return result.output

    def check(self, named: str | None = None) -> str:
        """The good run is there in both forms, and so is the name of what could not be read."""
        text = self.show()
        found = json.loads(self.show("--format", "json"))
        problems = found["problems"]

        assert "run good" in text.splitlines()
        assert re.search(r"^ *good_epoch\[3\] - 142us$", text, re.MULTILINE)
        (good,) = (run for run in found["runs"] if run["run_id"] == "good")
        assert "good_epoch" in [root["name"] for s in good["sessions"] for root in s["roots"]]
        if named is None:
            assert [] == problems, problems
            assert "problem" not in [line.partition(":")[0] for line in text.splitlines()]
        else:
            assert any(line.startswith(f"problem: {named}: ") for line in text.splitlines()), text
            assert any(escape(problem).startswith(f"{named}: ") for problem in problems)
        return text


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "project")


class TestContents:
    @pytest.mark.parametrize("case", BATCHES)
    def test_a_batch_that_cannot_be_read_is_named(self, folder: Folder, case: str) -> None:
        """A batch with this content is left out, with its name and the reason."""
        folder.put(folder.spool / BAD_BATCH, BATCHES[case]())

        folder.check(BAD_BATCH)

    @pytest.mark.parametrize("case", FINE)
    def test_a_strange_batch_is_shown(self, folder: Folder, case: str) -> None:
        """A batch with this content is read, and takes nothing from the good run."""
        folder.put(folder.spool / BAD_BATCH, FINE[case]())
        text = folder.check()

        assert ("run bad" in text) == ("older clock" not in case)

    @pytest.mark.parametrize("case", BOXES)
    def test_a_black_box_that_cannot_be_read_is_named(self, folder: Folder, case: str) -> None:
        """Of a black box with this content, what cannot be read is left out, and named."""
        folder.put(folder.boxes / BAD_BOX, BOXES[case]())

        folder.check(BAD_BOX)

    @pytest.mark.parametrize("case", FINE_BOXES)
    def test_a_strange_black_box_is_shown(self, folder: Folder, case: str) -> None:
        """A black box with this content is read."""
        folder.put(folder.boxes / BAD_BOX, FINE_BOXES[case]())

        assert "run bad" in folder.check()

    def test_json_has_the_very_strings(self, folder: Folder) -> None:
        """Escaped JSON decodes to what was recorded, to the character."""
        folder.put(folder.spool / BAD_BATCH, FINE["codes in names"]())
        output = folder.show("--format", "json")
        (bad,) = (run for run in json.loads(output)["runs"] if run["run_id"] != "good")
        (root,) = bad["sessions"][0]["roots"]

        assert output.isascii()
        assert ("bad" + CODES, CODES, CODES) == (bad["run_id"], root["name"], root["attrs"][CODES])
        assert CODES == root["marks"][0]["value"]


class TestThings:
    @pytest.mark.parametrize("case", [case for case in THINGS if "FIFO" not in case])
    @pytest.mark.parametrize("place", ["spool", "blackbox"])
    def test_in_place_of_a_file(self, folder: Folder, case: str, place: str) -> None:
        """What is not a regular file of a sensible size is named, and not opened."""
        name = BAD_BATCH if place == "spool" else BAD_BOX
        THINGS[case](folder.path / ".cirron" / place / name)

        assert "secret" not in folder.check(name)

    @pytest.mark.parametrize("case", [case for case in THINGS if not case.endswith("folder")])
    @pytest.mark.parametrize("place", ["spool", "blackbox"])
    def test_in_place_of_a_folder(self, folder: Folder, case: str, place: str) -> None:
        """Without the one folder, the other is shown, and what is in its place is named."""
        path = folder.path / ".cirron" / place
        path.rename(folder.path / "moved")
        THINGS[case](path)
        text = folder.show()

        assert "run good" in text
        assert f"problem: {path}: is a" in text

    @pytest.mark.parametrize("place", ["spool", "blackbox"])
    def test_a_link_in_place_of_a_folder(self, folder: Folder, place: str) -> None:
        """A folder that lies elsewhere is not looked into, and the message says what to do."""
        path = folder.path / ".cirron" / place
        path.rename(folder.path / "moved")
        path.symlink_to(folder.path / "moved")
        text = folder.show()

        assert "run good" in text
        assert f"problem: {path}: is a symbolic link, which is not followed; name the" in text

    @pytest.mark.parametrize("case", THINGS)
    def test_in_place_of_the_folder_of_both(self, tmp_path: Path, case: str) -> None:
        """Where .cirron is something else there is a message and no run."""
        THINGS[case](tmp_path / ".cirron")
        result = CliRunner().invoke(main, ["show", str(tmp_path)])

        assert 3 == result.exit_code
        assert result.output.startswith("Error: no run found in ")
        assert ("its .cirron is not a folder" in result.output) == (not case.endswith("folder"))

    @pytest.mark.parametrize("place", ["batch", "black box", "spool", "blackbox", ".cirron", "."])
    def test_a_fifo_is_not_waited_for(self, folder: Folder, place: str) -> None:
        """A FIFO anywhere: the command ends, and names it."""
        path = {
            "batch": folder.spool / BAD_BATCH,
            "black box": folder.boxes / BAD_BOX,
            "spool": folder.spool,
            "blackbox": folder.boxes,
            ".cirron": folder.path / ".cirron",
            ".": folder.path,
        }[place]
        if path.exists():
            path.rename(folder.path.parent / "moved")
        os.mkfifo(path)
        result = run_show(folder.path)

        if place in (".cirron", "."):
            assert (3, "") == (result.returncode, result.stdout)
            assert "not a folder" in result.stderr
        else:
            assert (0, "") == (result.returncode, result.stderr)
            assert "run good" in result.stdout
            assert f"{path.name}: is a FIFO, not a " in result.stdout

    def test_a_file_that_may_not_be_read(self) -> None:
        """A file of mode 000 is named with the reason, for anybody but root."""
        with tempfile.TemporaryDirectory() as name:
            folder = Folder(Path(name))
            folder.put(folder.spool / BAD_BATCH, batch())
            (folder.spool / BAD_BATCH).chmod(0)
            os.chmod(name, 0o755)
            folder.show()  # everything is imported before the rights to it may be gone
            gc.collect()  # and the temporary files of earlier tests are removed
            was = os.geteuid()
            if was == 0:
                os.seteuid(65534)
            try:
                text = folder.check(BAD_BATCH)
            finally:
                os.seteuid(was)

        assert "Permission denied" in text

    def test_a_hundred_problems_are_not_a_wall(self, folder: Folder) -> None:
        """The text names the first few files, and the JSON names all."""
        for number in range(100):
            folder.put(folder.spool / f"{number:03}.json", b"")
        text = folder.show()

        assert 20 == text.count("\nproblem: ")
        assert "and 80 more problems: --format json lists all" in text.splitlines()
        assert 100 == len(json.loads(folder.show("--format", "json"))["problems"])

    def test_many_tiny_files(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of more files than it is sensible to open, the newest are read, and this is said."""
        monkeypatch.setattr(folders, "MAX_FILES", 100)
        for number in range(300):
            (folder.spool / f"{number:020d}-{'c' * 32}.json").touch()

        assert f"problem: {folder.spool}: holds more than" in folder.check(str(folder.spool))

    def test_many_large_files(self, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of more bytes of black boxes than fit into memory some are read, and this is said.

        Batches are read a part at a time, however many there are.
        """
        monkeypatch.setattr(folders, "MAX_BOXES_BYTES", 100_000)
        for number in range(20):
            folder.put(folder.boxes / f"{'c' * 32}-{number}.json", bytes(20_000))
            folder.put(folder.spool / f"{number:020d}-{'c' * 32}.json", bytes(20_000))
        text = folder.show()

        assert f"problem: {folder.boxes}: holds more than" in text
        assert "run good" in text


class TestNames:
    @pytest.mark.parametrize("case", NAMES)
    @pytest.mark.parametrize("place", ["spool", "blackbox"])
    def test_a_name_is_shown_escaped(self, folder: Folder, case: str, place: str) -> None:
        """The name of a broken file is shown in a form that no terminal acts on."""
        name, shown = NAMES[case]
        Path(os.fsdecode(os.fsencode(folder.path / ".cirron" / place) + b"/" + name)).touch()

        folder.check(shown)

    @pytest.mark.parametrize("arguments", [["show"], ["show", "a"], ["show", "--run"], []])
    def test_a_folder_name_in_an_error(self, tmp_path: Path, arguments: list[str]) -> None:
        """A folder that a shell has put on the command line is named without codes."""
        result = CliRunner().invoke(main, [*arguments, f"{tmp_path}/{CODES}\udcff"])

        assert result.exit_code in (2, 3)
        assert not FORBIDDEN.search(result.output)


class TestChanging:
    def test_files_that_change_while_they_are_read(self, folder: Folder) -> None:
        """Files that grow, shrink, vanish and come back never hide the good run."""
        is_done = threading.Event()
        path = folder.spool / BAD_BATCH
        odd = folder.boxes / BAD_BOX

        def change() -> None:
            generator = random.Random(7)
            while not is_done.is_set():
                for target in (path, odd):
                    target.write_bytes(WHOLE * generator.randrange(1, 50))
                    os.truncate(target, generator.randrange(100_000))
                    target.unlink()

        changing = threading.Thread(target=change)
        changing.start()
        try:
            for _ in range(50):
                assert "run good" in folder.show()
        finally:
            is_done.set()
            changing.join()


# -- what the output can encode --------------------------------------------------------------------


def run_show(path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cirron", "show", str(path), "--all"],
        env=os.environ | {"PYTHONPATH": str(SOURCE)} | environ,
        capture_output=True,
        encoding="latin-1",  # takes any bytes
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "latin-1", "C"],
)
def test_a_terminal_without_unicode(folder: Folder, environ: dict[str, str]) -> None:
    """What the terminal's encoding lacks is shown as an escape."""
    folder.put(folder.spool / BAD_BATCH, batch(session("bad"), [span(name="Größe 数")]))
    folder.put(folder.spool / "数.json", b"")
    result = run_show(folder.path, **environ)
    umlauts = "Größe" if environ.get("PYTHONIOENCODING") == "latin-1" else "Gr\\xf6\\xdfe"

    assert (0, "") == (result.returncode, result.stderr)
    assert f"{umlauts} \\u6570 - 142us" in result.stdout
    assert "problem: \\u6570.json: " in result.stdout


# -- mutations of real files -----------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[bytes, bytes]:
    """A batch and a black box that a session has really written."""
    ci.profile(path=str(tmp_path / "real"))
    with ci.scope("epoch", index=0, mode="train", sizes=[1, [2, {"a": None}]]):
        for index in range(20):
            with ci.scope("step", index=index):
                ci.mark("loss", 1 / (index + 1))
        ci.flush()
        (box_path,) = (tmp_path / "real" / "blackbox").glob("*.json")
        box_bytes = box_path.read_bytes()
    ci.shutdown()
    spool = max((tmp_path / "real" / "spool").glob("*.json"), key=lambda path: path.stat().st_size)
    return spool.read_bytes(), box_bytes


NASTY = [
    *(b"\x00", b"\xff", b"\x1b[31m", b'"', b"\\", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":"),
    *(b"null", b"-1", b"0.5", b"true", b"{}", b"[]", b'""', HUGE.encode(), b"1e400", b"NaN"),
    *("\u202e".encode(), b"\\u009b", b"9223372036854775808", b"[" * 200 + b"]" * 200),
]


def mutate(content: bytes, generator: random.Random) -> bytes:
    """The content with a few accidents in it."""
    for _ in range(generator.randrange(1, 4)):
        at = generator.randrange(len(content) + 1)
        until = min(len(content), at + generator.randrange(1, 40))
        kind = generator.randrange(6)
        if kind == 0:  # a byte is another one
            content = content[:at] + generator.randbytes(1) + content[at + 1 :]
        elif kind == 1:  # a piece is gone
            content = content[:at] + content[until:]
        elif kind == 2:  # a piece is there twice
            content = content[:until] + content[at:]
        elif kind == 3:  # the end is gone
            content = content[:at]
        elif kind == 4:  # something is put in
            content = content[:at] + generator.choice(NASTY) + content[at:]
        else:  # a value is another one
            values = list(re.finditer(rb'(?<=:)(\d+|null|"[^"]*")', content))
            if values:
                value = generator.choice(values)
                nasty = generator.choice(NASTY)
                content = content[: value.start()] + nasty + content[value.end() :]
    return content


@pytest.mark.parametrize("kind", ["batch", "black box"])
def test_mutations_of_real_files(folder: Folder, recorded: tuple[bytes, bytes], kind: str) -> None:
    """However a real file is damaged, the good run is shown, and nothing raises."""
    content = recorded[kind == "black box"]
    path = folder.boxes / BAD_BOX if kind == "black box" else folder.spool / BAD_BATCH
    generator = random.Random(12)
    for _ in range(100):
        path.write_bytes(mutate(content, generator))
        text = folder.show()

        assert "run good" in text
        assert "good_epoch[3] - 142us" in text
        json.loads(folder.show("--format", "json"))
