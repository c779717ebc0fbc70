"""`cirron show`, against real files."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from cirron import _version, system, wire
from cirron.cli import main
from cirron.cli import show as command

SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS
HEARTBEAT_NS = START_NS + 60 * SECOND_NS


def clock_of(ns: int) -> str:
    return command.moment(ns, START_NS)


def session(id: str = "s", pid: int = 4242, start_ns: int = START_NS, **more: Any) -> wire.Session:
    facts: dict[str, Any] = {
        "run_id": f"run-{id}",
        "attempt": 0,
        "host": platform.node(),
        "rank": None,
        "local_rank": None,
        "world_size": None,
        "clock": wire.Clock(start_ns, 0, 10),
    }
    return wire.Session(id=id, pid=pid, **(facts | more))


def span(id: str, name: str, parent: str | None = None, **more: Any) -> wire.Span:
    facts: dict[str, Any] = {"index": None, "start_ns": START_NS, "end_ns": START_NS + 142_000}
    facts |= {"cpu_ns": None, "gpu_ns": None, "memory_peak_bytes": None, "thread_id": 1, "pid": 1}
    facts |= {"rank": None, "attrs": {}, "mark_ids": []}
    return wire.Span(id=id, name=name, parent_id=parent, **(facts | more))


def write(root: Path, who: wire.Session | None, spans: list[wire.Span], *marks: wire.Mark) -> Path:
    batch_id = f"{who.id if who else 'x'}{len(spans)}"
    batch = wire.Batch(
        schema_version=1,
        sdk_version="0",
        batch_id=batch_id,
        created_ns=START_NS,
        session=who,
        spans=spans,
        marks=list(marks),
    )
    path = root / ".cirron" / "spool" / f"{START_NS:020d}-{batch_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(wire.encode(batch))
    return path


def write_box(root: Path, who: wire.Session, **more: Any) -> None:
    content: dict[str, Any] = {
        "schema_version": 1,
        "session": who,
        "pid": who.pid,
        "process_start": None,
        "heartbeat_ns": HEARTBEAT_NS,
        "interval_s": 1.0,
        "ended": None,
        "open": [],
    }
    path = root / ".cirron" / "blackbox" / f"{who.id}-{who.pid}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(wire.encode(content | more))


def show(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["show", *map(str, arguments)])


def lines(*arguments: object) -> list[str]:
    result = show(*arguments)
    assert 0 == result.exit_code, result.output
    return result.output.splitlines()


@pytest.fixture
def dead_pid() -> int:
    """The id of a process that has been."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_clean_run(tmp_path: Path) -> None:
    """The whole text for a small run that ended well."""
    who = session("a", rank=3, world_size=8, attempt=1, host="node7")
    write(
        tmp_path,
        who,
        [span("1", "cirron.session"), span("2", "epoch", "1", index=0)],
        wire.Mark("m", "2", "epoch_loss", "float", 0.52341, {}, START_NS, "summary"),
    )
    write_box(
        tmp_path,
        who,
        ended={"how": "clean", "detail": None, "at_ns": HEARTBEAT_NS},
        counters={"mark_drop_count": 3, "record_drop_count": 0, "records_flushed": 9},
    )

    assert [
        "run run-a",
        "",
        "rank 3 of 8, attempt 1, host node7, pid 4242, clean",
        f"started {command.moment(START_NS)}, 1m 0s long, 2 spans, 1 mark",
        "lost: mark_drop_count=3",
        "cirron.session - 142us",
        "  epoch[0] - 142us {epoch_loss=0.5234}",
    ] == lines(tmp_path)


class TestStory:
    def open_spans(self) -> list[dict[str, Any]]:
        def entry(id: str, name: str, parent: str | None, index: int | None, at_s: int) -> Any:
            start_ns = START_NS + at_s * SECOND_NS
            return {"id": id, "name": name, "parent_id": parent, "index": index} | {
                "start_ns": start_ns,
                "thread_id": 1,
            }

        return [
            entry("1", "cirron.session", None, None, 0),
            entry("2", "epoch", "1", 3, 1),
            entry("3", "step", "2", 812, 18),
            entry("4", "backward", "3", None, 19),
            entry("5", "worker", "1", None, 50) | {"thread_id": 2},
        ]

    def test_a_killed_process_shows_where_it_was(self, tmp_path: Path, dead_pid: int) -> None:
        """Of a killed process: since when it is silent, where it was, for how long, which step."""
        write_box(
            tmp_path,
            session(pid=dead_pid),
            open=self.open_spans(),
            last_step={"name": "step", "index": 811, "start_ns": 0, "end_ns": 1, "id": "x"},
            memory_rss_bytes=3 * 2**30,
        )
        found = lines(tmp_path)

        assert (
            f"killed: no sign of life since {clock_of(HEARTBEAT_NS)}; it was in"
            " epoch[3] > step[812] > backward, 41.00s in; last step: step[811]; memory 3.0 GiB"
        ) in found
        assert "  also in worker, 10.00s in" in found
        assert "      step[812] - 42.00s (open)" in [f"  {line}" for line in found]

    def test_a_forked_process_was_there_until_its_own_end(
        self, tmp_path: Path, dead_pid: int
    ) -> None:
        """A child that died early was not in its span for as long as its parent lived."""
        spans = self.open_spans()
        write_box(tmp_path, session(pid=dead_pid), open=spans[:3])
        child = wire.changed(session(pid=dead_pid + 1), clock=wire.Clock(START_NS + 1, 0, 10))
        early = {"heartbeat_ns": START_NS + 52 * SECOND_NS}
        write_box(tmp_path, child, open=[spans[4]], **early)

        assert "  also in worker, 2.00s in" in lines(tmp_path)

    def test_judged_by_silence(self, tmp_path: Path) -> None:
        """Of a process on another host it is said that the silent heartbeat is the only witness."""
        write_box(tmp_path, session(host="node9"))

        assert (
            f"killed: no sign of life since {clock_of(HEARTBEAT_NS)};"
            " no more is known, since it ran on node9"
        ) in lines(tmp_path)

    def test_a_running_process_shows_where_it_is(self, tmp_path: Path) -> None:
        """Of a running process: where it is now."""
        who = session(pid=os.getpid())
        start = system.process_start(os.getpid())
        write_box(tmp_path, who, process_start=start, open=self.open_spans()[:2])
        (story,) = [line for line in lines(tmp_path) if line.startswith("running: ")]

        assert re.match(r"running: as of .* ago; it is in epoch\[3\], ", story)

    def test_an_exception_is_shown_with_its_time(self, tmp_path: Path) -> None:
        """Of a process that ended in an exception: which, and when."""
        ended = {"how": "exception", "detail": "ValueError: bad\nvalue", "at_ns": HEARTBEAT_NS}
        write_box(tmp_path, session(), ended=ended)

        assert f"exception: ValueError: bad\\nvalue at {clock_of(HEARTBEAT_NS)}" in lines(tmp_path)

    def test_silence_and_stacks(self, tmp_path: Path, dead_pid: int) -> None:
        """Of a process that hung: for how long nothing came, and where its threads were."""
        write_box(
            tmp_path,
            session(pid=dead_pid),
            silent_since_ns=HEARTBEAT_NS - 30 * SECOND_NS,
            stacks=[
                {"thread_id": 1, "name": "MainThread", "frames": [f"a.py:{n}" for n in range(20)]}
            ],
        )
        found = lines(tmp_path)
        first = found.index(
            f"silent: nothing was recorded for 30.00s up to {clock_of(HEARTBEAT_NS)}"
        )

        assert ["  thread MainThread:", "    ... 8 outer calls", "    a.py:8"] == (
            found[first + 1 : first + 4]
        )

    def test_a_span_that_closed_since_is_not_where_it_was(
        self, tmp_path: Path, dead_pid: int
    ) -> None:
        """What a batch says ended is not open, even if the black box is older."""
        who = session(pid=dead_pid)
        write(tmp_path, who, [span("4", "backward", "3"), span("3", "step", "2", index=812)])
        write_box(tmp_path, who, open=self.open_spans()[:4])

        assert any("it was in epoch[3], 59.00s in" in line for line in lines(tmp_path))


class TestRuns:
    def two_runs(self, root: Path) -> None:
        write(root, session("old"), [span("1", "first")])
        write(root, session("new", start_ns=START_NS + 5), [span("2", "second")])

    def test_the_latest_is_shown_and_the_others_are_counted(self, tmp_path: Path) -> None:
        """The latest run is shown; the last line says what else there is and how to see it."""
        self.two_runs(tmp_path)
        found = lines(tmp_path)

        assert "run run-new" == found[0]
        assert "second - 142us" in found
        assert [
            "1 other run in this folder: cirron show --all, or --run ID",
            f"  run-old: {command.moment(START_NS)}",
        ] == found[-2:]

    def test_all_lists_runs_oldest_first(self, tmp_path: Path) -> None:
        """All runs come oldest first, and no others are left to mention."""
        self.two_runs(tmp_path)
        found = lines(tmp_path, "--all")

        assert ["run run-old", "run run-new"] == [one for one in found if one.startswith("run ")]
        assert "other run" not in found[-1]

    def test_a_run_is_found_by_the_start_of_its_id(self, tmp_path: Path) -> None:
        """A run is found by its id or by the start of it."""
        self.two_runs(tmp_path)

        assert "run run-old" == lines(tmp_path, "--run", "run-old")[0]
        assert "run run-old" == lines(tmp_path, "--run", "run-o")[0]

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            (
                "nope",
                "no run here has an id that starts with 'nope'; choose one of: run-old, run-new",
            ),
            (
                "run-",
                "several runs have an id that starts with 'run-'; choose one of: run-old, run-new",
            ),
        ],
    )
    def test_an_id_that_is_not_there(self, tmp_path: Path, wanted: str, expected: str) -> None:
        """A wrong id is an error that lists the right ones."""
        self.two_runs(tmp_path)
        result = show(tmp_path, "--run", wanted)

        assert (3, f"Error: {expected}\n") == (result.exit_code, result.output)

    def test_all_ranks_of_a_run(self, tmp_path: Path) -> None:
        """Every session of a run is shown, by attempt and rank; one rank can be picked."""
        for rank in (1, 0):
            who = session(f"s{rank}", rank=rank, world_size=2, run_id="job", host="h")
            write(tmp_path, who, [span(f"r{rank}", f"on{rank}")])
        found = lines(tmp_path)

        assert ["rank 0 of 2", "rank 1 of 2"] == [one[:11] for one in found if one[:4] == "rank"]
        assert "on0 - 142us" not in lines(tmp_path, "--rank", 1)
        assert "this run has no rank 7; choose one of: 0, 1" in show(tmp_path, "--rank", 7).output

    def test_a_run_of_many_ranks_fits_on_a_screen(self, tmp_path: Path, dead_pid: int) -> None:
        """One tree, how a rank died, and a row per rank, with that rank first."""
        for rank in range(30):
            who = session(f"s{rank:02}", rank=rank, run_id="job", pid=dead_pid)
            write(tmp_path, who, [span(f"r{rank}", "step")])
        write_box(tmp_path, session("s21", rank=21, run_id="job", pid=dead_pid))
        found = lines(tmp_path)
        table = next(at for at, line in enumerate(found) if line.startswith("rank  attempt"))

        assert 1 == found.count("step - 142us")
        assert ["rank 21"] == [line.split(",")[0] for line in found[:table] if "killed" in line][:1]
        assert "21" == found[table + 1].split()[0]
        assert ["and 10 more processes"] == [line.split(";")[0] for line in found[table + 21 :]]

    def test_batches_without_a_session_are_shown(self, tmp_path: Path) -> None:
        """Batches that do not say who wrote them are shown."""
        write(tmp_path, None, [span("1", "step")])

        assert ["records of other writers", "", "how it ended is unknown"] == lines(tmp_path)[:3]


PROGRAM = wire.Program(
    script="train.py",
    arguments=["--lr", "0.1", "--token", "***"],
    folder="/home/me/work",
    python="3.12.1",
    versions={"torch": "2.8.0", "numpy": "2.3.1"},
    gpus=["NVIDIA H200"] * 8 + ["NVIDIA T4"],
    commit="0123456789abcdef" * 2 + "01234567",
    branch="main",
    dirty=True,
    tags={"baseline": "", "team": "vision"},
    config={"lr": 0.1, "model": {"layers": 12, "sizes": [1, 2]}, "api_key": "***"},
)


class TestProgram:
    def test_what_ran_is_at_the_top(self, tmp_path: Path) -> None:
        """A run begins with its command, code, versions, devices, tags and configuration."""
        write(tmp_path, session(program=PROGRAM), [span("1", "epoch")])

        assert [
            "run run-s",
            "ran train.py --lr 0.1 --token *** in /home/me/work",
            "commit 0123456789 on main with changes, Python 3.12.1, torch 2.8.0, numpy 2.3.1,"
            " 8 x NVIDIA H200, NVIDIA T4",
            "tags baseline, team=vision",
            "config lr=0.1, model.layers=12, model.sizes=[1, 2], api_key=***",
            "",
        ] == lines(tmp_path)[:6]

    def test_a_child_says_what_differs(self, tmp_path: Path) -> None:
        """Of the sessions of a run each says only what is not said at the top."""
        write(tmp_path, session("a", program=PROGRAM, run_id="job"), [span("1", "epoch")])
        other = msgspec.structs.replace(PROGRAM, script="eval.py")
        child = session("b", program=other, run_id="job", start_ns=START_NS + 1)
        write(tmp_path, child, [span("2", "a"), span("3", "b")])
        found = lines(tmp_path)

        assert 1 == sum(line.startswith("tags ") for line in found)
        assert ["train.py", "eval.py"] == [
            line.split()[1] for line in found if line.startswith("ran ")
        ]

    def test_ranks_say_it_once(self, tmp_path: Path) -> None:
        """What all ranks ran is said once, as rank 0 knows it, whichever began first."""
        clean = msgspec.structs.replace(PROGRAM, dirty=None)
        for rank, program in ((0, PROGRAM), (1, clean)):
            start_ns = START_NS - rank
            who = session(f"s{rank}", rank=rank, run_id="job", start_ns=start_ns, program=program)
            write(tmp_path, who, [span(f"r{rank}", "step")])
        found = lines(tmp_path)

        assert 1 == sum("0123456789 on main with changes" in line for line in found)
        assert 1 == sum("commit" in line for line in found)

    def test_the_list_of_runs(self, tmp_path: Path) -> None:
        """Each of the newest other runs has a line with what tells it from the others."""
        for number in range(8):
            more: dict[str, Any] = {"program": PROGRAM} if number == 6 else {}
            who = session(f"s{number}", start_ns=START_NS + number * SECOND_NS, **more)
            write(tmp_path, who, [span(f"{number}", "epoch")])
        found = lines(tmp_path)

        assert "7 other runs in this folder: cirron show --all, or --run ID" == found[-7]
        assert (
            f"  run-s6: {command.moment(START_NS + 6 * SECOND_NS)}, train.py --lr 0.1 --token ***,"
            " commit 0123456789 on main with changes, tags baseline, team=vision,"
            " lr=0.1, model.layers=12, model.sizes=[1, 2], api_key=***"
        ) == found[-6]
        assert "  and 2 more" == found[-1]

    def test_the_latest_batch_knows_the_most(self, tmp_path: Path) -> None:
        """A rank, a commit and versions that became known later are those of the session."""
        write(tmp_path, session(rank=None), [span("1", "epoch")])
        write(tmp_path, session(rank=3, program=PROGRAM), [span("2", "a"), span("3", "b")])

        assert "rank 3" == lines(tmp_path)[6][:6]

    def test_codes_in_it_drive_no_terminal(self, tmp_path: Path) -> None:
        """Whatever a file says that ran, it is shown as text."""
        codes = "\x1b[2J\u202e\n"
        program = wire.Program(
            script=codes,
            arguments=[codes],
            folder=codes,
            python=codes,
            versions={codes: codes},
            gpus=[codes],
            commit=codes,
            branch=codes,
            tags={codes: codes},
            config={codes: {codes: codes}},
        )
        write(tmp_path, session("old", program=program), [span("1", "epoch")])
        write(tmp_path, session("new", start_ns=START_NS + 1, program=program), [span("2", "a")])

        assert all(line.isprintable() for line in show(tmp_path).output.split("\n"))

    def test_a_configuration_that_is_too_deep(self, tmp_path: Path) -> None:
        """A configuration nested deeper than anything of ours is left out with its file."""
        deep: dict[str, Any] = {}
        for _ in range(80):
            deep = {"a": deep}
        write(tmp_path, session(program=wire.Program(config=deep)), [span("1", "epoch")])

        assert "more than 64 levels deep" in show(tmp_path).output


class TestOptions:
    def test_a_name_that_no_span_has(self, tmp_path: Path) -> None:
        """The names that there are are said; it counts as nothing found."""
        write(tmp_path, session("a"), [span("1", "cirron.session"), span("2", "epoch", "1")])
        result = show(tmp_path, "--name", "stpe")

        assert 3 == result.exit_code
        assert "no span is called 'stpe'; choose one of: cirron.session, epoch\n" in result.output

    def test_a_run_in_place_of_a_folder(self, tmp_path: Path) -> None:
        """Like other commands, it takes the start of a run's id, and the folder as --dir."""
        write(tmp_path, session("a", run_id="run-a"), [span("1", "epoch")])
        wrong = show("run-b", "--dir", tmp_path)

        assert "run run-a" == lines("run-", "--dir", tmp_path)[0]
        assert (3, True) == (
            wrong.exit_code,
            "'run-b' is neither a folder nor a run: no run here has an id" in wrong.output,
        )

    def test_a_rank_that_is_not_there(self, tmp_path: Path) -> None:
        """A rank that is not there counts as nothing found."""
        write(tmp_path, session("a"), [span("1", "epoch")])

        assert 3 == show(tmp_path, "--rank", 7).exit_code

    def test_name_and_last(self, tmp_path: Path) -> None:
        """The filters of ci.trace() work here too."""
        spans = [
            span("1", "epoch"),
            span("2", "step", "1", index=0),
            span("3", "step", "1", index=1),
        ]
        spans[2].end_ns = START_NS + 200_000
        write(tmp_path, session(), spans)

        assert ["step[0] - 142us", "step[1] - 200us"] == lines(tmp_path, "--name", "step")[4:]
        assert ["step[1] - 200us"] == lines(tmp_path, "--name", "step", "--last", 1)[4:]

    def test_json(self, tmp_path: Path) -> None:
        """The JSON has the sessions of the run with their tree and state, and all problems."""
        write(tmp_path, session(), [span("1", "epoch")])
        result = show(tmp_path, "--format", "json")
        (run,) = json.loads(result.output)["runs"]
        (found,) = run["sessions"]

        assert result.output == show(tmp_path, "--json").output
        assert (1, []) == tuple(json.loads(result.output)[key] for key in ("schema", "problems"))
        assert ("run-s", "unknown", 1, "epoch", "s") == (
            run["run_id"],
            found["state"],
            found["span_count"],
            found["roots"][0]["name"],
            found["session"]["id"],
        )

    def test_where_it_looks_by_default(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without DIR it looks where a program that is started here would write."""
        write(tmp_path / "elsewhere", session(), [span("1", "epoch")])
        monkeypatch.setenv("CIRRON_OUTPUT_DIR", str(tmp_path / "elsewhere" / ".cirron"))
        result = CliRunner().invoke(main, ["show"])

        assert "epoch - 142us" == result.output.splitlines()[-1]

    def test_into_a_pipe_that_closes(self, tmp_path: Path) -> None:
        """`cirron show | head` ends without a word."""
        write(tmp_path, session(), [span(str(n), f"name {n}") for n in range(2_000)])
        result = subprocess.run(
            ["bash", "-c", f'"{sys.executable}" -m cirron show "{tmp_path}" | head -1'],
            capture_output=True,
            text=True,
            check=False,
        )

        assert ("run run-s\n", "") == (result.stdout, result.stderr)

    def test_version(self) -> None:
        """`cirron --version` says the version."""
        result = CliRunner().invoke(main, ["--version"])

        assert f"cirron, version {_version.__version__}\n" == result.output

    def test_python_dash_m(self, tmp_path: Path) -> None:
        """`python -m cirron` is the same command line."""
        write(tmp_path, session(), [span("1", "epoch")])
        source = str(Path(command.__file__).parents[2])
        result = subprocess.run(
            [sys.executable, "-m", "cirron", "show", str(tmp_path)],
            env=os.environ | {"PYTHONPATH": source},
            capture_output=True,
            text=True,
        )

        assert (0, "", "epoch - 142us") == (
            result.returncode,
            result.stderr,
            result.stdout.splitlines()[-1],
        )

    def test_every_option_has_help(self) -> None:
        """No option is left unexplained."""
        options = [one for one in command.show.params if isinstance(one, click.Option)]

        assert [] == [option.name for option in options if not option.help]


class TestTrouble:
    def test_a_folder_without_a_run_is_exit_code_3(self, tmp_path: Path) -> None:
        """A folder without a run is exit code 3 and a hint, not a traceback."""
        result = show(tmp_path)

        assert 3 == result.exit_code
        assert result.output.startswith("Error: no run found in ")
        assert "Record a run with `cirron run train.py` or ci.profile()" in result.output

    def test_no_records_yet(self, tmp_path: Path) -> None:
        """A run that has just begun has nothing on disk; the message says to wait."""
        (tmp_path / ".cirron" / "spool").mkdir(parents=True)
        result = show(tmp_path)

        assert (3, True) == (result.exit_code, "has no records yet" in result.output)

    def test_unreadable_files_are_named(self, tmp_path: Path) -> None:
        """When no file can be read the first is named with the reason."""
        path = write(tmp_path, session(), [])
        path.write_bytes(b"\x00")
        result = show(tmp_path)

        assert (1, True) == (result.exit_code, f"can be read: {path.name}" in result.output)

    def test_rubbish_beside_a_run(self, tmp_path: Path) -> None:
        """A file that cannot be read is named at the end and is not taken for another run."""
        write(tmp_path, session(), [span("1", "epoch")])
        (tmp_path / ".cirron" / "spool" / "1-x.json").write_bytes(b"rubbish")
        found = lines(tmp_path)

        assert found[-1].startswith("problem: 1-x.json: is not a whole batch")

    def test_rubbish_of_another_run(self, tmp_path: Path) -> None:
        """A broken file of a run that is not shown is named as well, in text and in JSON."""
        write(tmp_path, session("old"), [span("1", "epoch")])
        path = write(tmp_path, session("old"), [span("2", "epoch"), span("3", "epoch")])
        path.write_bytes(path.read_bytes()[:-9])
        write(tmp_path, session("new", start_ns=START_NS + 5), [span("4", "epoch")])
        found = json.loads(show(tmp_path, "--format", "json").output)

        assert f"problem: {path.name}: is not a whole" in show(tmp_path).output
        assert ["run-new"] == [run["run_id"] for run in found["runs"]]
        assert [path.name] == [problem.partition(":")[0] for problem in found["problems"]]

    @pytest.mark.parametrize("arguments", [["a", "b\x1b[2J"], ["--last", "\x9b"], ["--\u202e"]])
    def test_a_wrong_call_drives_no_terminal(self, arguments: list[str]) -> None:
        """Arguments may come from a shell's `*`: codes in them are escaped, the usage stays."""
        for called in (["show"], []):
            result = CliRunner().invoke(main, [*called, *arguments])

            assert 2 == result.exit_code
            assert result.output.startswith("Usage: ")
            assert all(line.isprintable() for line in result.output.split("\n"))

    def test_a_full_disk_behind_stdout(self, tmp_path: Path) -> None:
        """An output that cannot be written is an error in one line."""
        write(tmp_path, session(), [span("1", "epoch")])
        with open("/dev/full", "wb") as full:
            result = subprocess.run(
                [sys.executable, "-m", "cirron", "show", str(tmp_path)],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )

        assert "Error: standard output: No space left on device" == result.stderr.splitlines()[0]
        assert "Traceback" not in result.stderr

    @pytest.mark.parametrize("value", ["0", "-1", "x"])
    def test_a_bad_last(self, tmp_path: Path, value: str) -> None:
        """A bad number is a usage error."""
        assert 2 == show(tmp_path, "--last", value).exit_code

    @pytest.mark.parametrize(
        "strange",
        [
            {"open": "x", "counters": [1], "stacks": [7, {}], "last_step": {}},
            {"ended": "x", "heartbeat_ns": "x", "interval_s": "x", "silent_since_ns": 1},
            {"ended": {"how": "signal", "at_ns": 10**30}, "heartbeat_ns": -1},
            {"open": [{"id": "1", "start_ns": 1, "parent_id": "1", "latest": 7}]},
            {"ended": {"how": ["x"]}, "stacks": {"a": 1}, "silent_since_ns": 1},
            {"stacks": 7, "silent_since_ns": 1, "last_step": {"name": 7, "index": "x"}},
            {"stacks": [{"frames": 7}], "silent_since_ns": 1, "process_start": {}},
        ],
    )
    def test_a_black_box_of_odd_content(
        self, tmp_path: Path, dead_pid: int, strange: dict[str, Any]
    ) -> None:
        """Whatever is in a black box, there is no traceback."""
        for host in (platform.node(), "node9"):
            write_box(tmp_path, session(host, host=host, pid=dead_pid), **strange)
        for form in ("tree", "json"):
            result = show(tmp_path, "--all", "--format", form)

            assert result.exception is None, result.exception
