"""`cirron ls`, `sql`, `tensors` and `tail`: what they say to people and to programs."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner, Result

import cirron as ci
from cirron import wire
from cirron.cli import COMMANDS, ls, main, tail, tensors
from cirron.view import text

if TYPE_CHECKING:
    from pathlib import Path

SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS
CODES = "\x1b[2J\u202e[red]bold[/red]\n"


def session(id: str, start_ns: int = START_NS, **more: Any) -> wire.Session:
    facts: dict[str, Any] = {"run_id": id * 4, "attempt": 0, "host": "node7", "rank": None}
    facts |= {"local_rank": None, "world_size": None, "clock": wire.Clock(start_ns, 0, 10)}
    return wire.Session(id=id, pid=4242, **(facts | more))


def span(id: str, name: str, parent: str | None = None, **more: Any) -> wire.Span:
    facts: dict[str, Any] = {"index": None, "start_ns": START_NS, "end_ns": START_NS + 142_000}
    facts |= {"cpu_ns": None, "gpu_ns": None, "memory_peak_bytes": None, "thread_id": 1, "pid": 1}
    facts |= {"rank": None, "attrs": {}, "mark_ids": []}
    return wire.Span(id=id, name=name, parent_id=parent, **(facts | more))


def mark(id: str, span_id: str, name: str, value: Any, **attrs: Any) -> wire.Mark:
    kind = "string" if isinstance(value, str) else "float"
    return wire.Mark(id, span_id, name, kind, value, attrs, START_NS + 1, "point")


def snapshot(epoch: int, name: str, norm: float | None, **attrs: Any) -> wire.Snapshot:
    histogram = wire.Histogram([0.0, 0.5, 1.0], [3, 6])
    stats = wire.Stats(0.5, 0.1, 0.0, 1.0, norm, histogram)
    return wire.Snapshot(
        id=f"{name}{epoch}",
        span_id=f"e{epoch}",
        tensor_name=name,
        shape=[2, 3],
        dtype="float32",
        mode="stats",
        stats=stats,
        blob_uri=None,
        ts_ns=START_NS + epoch,
        attrs=attrs,
    )


def write(root: Path, who: wire.Session, **records: Any) -> None:
    batch_id = f"{who.id}{who.clock.wall_ns}"
    batch = wire.Batch(
        schema_version=1,
        sdk_version="0",
        batch_id=batch_id,
        created_ns=START_NS,
        session=who,
        **({"spans": [], "marks": []} | records),
    )
    path = root / ".cirron" / "spool" / f"{START_NS:020d}-{batch_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(wire.encode(batch))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def lines(*arguments: object) -> list[str]:
    result = call(*arguments)
    assert 0 == result.exit_code, result.output
    return result.output.splitlines()


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A run of one epoch with two steps, and one mark outside of them."""
    spans = [
        span("e0", "epoch", index=0),
        span("1", "step", "e0", index=0),
        span("2", "step", "e0", index=1, end_ns=START_NS + 200_000),
        span("3", "data_load", "2", end_ns=START_NS + 100_000),
    ]
    marks = [mark("m", "1", "loss", 0.5), mark("n", "e0", CODES, CODES)]
    write(tmp_path, session("a"), spans=spans, marks=marks)
    return tmp_path


class TestLs:
    def test_newest_first(self, tmp_path: Path) -> None:
        """A row a run: its name in short, how it stands, when, how long, and what ran."""
        program = wire.Program(script="train.py", tags={"baseline": ""})
        old = session("old", program=program, run_id="01d" + "0" * 29)
        write(tmp_path, old, spans=[span("1", "epoch")])
        late = session("new", START_NS + SECOND_NS, rank=1, attempt=2, run_id="e" * 32)
        write(tmp_path, late, spans=[span("2", "epoch")])
        head, *rows = lines("ls", tmp_path)

        assert list(ls.COLUMNS) == head.split()
        assert ["eeeeeeee", "01d00000"] == [row.split()[0] for row in rows]
        assert ["train.py", "baseline"] == rows[1].split()[-2:]

    def test_names_are_as_long_as_they_must_be(self) -> None:
        """Of two runs with the same start each has one character more than they share."""
        found = ls.prefixes(["a" * 12 + "1" * 20, "a" * 12 + "2" * 20, "b" * 32])

        assert ["a" * 12 + "1", "a" * 12 + "2", "b" * 8] == sorted(found.values())

    def test_chosen_names_are_not_cut(self) -> None:
        """The id of a launcher, or one that the user set, says which run it is only as a whole."""
        ids = ["torchelastic-nightly", "torchrun-node7-4242-991", "slurm-77", "c" * 32]

        assert [*ids[:3], "c" * 8] == list(ls.prefixes(ids).values())

    @pytest.mark.parametrize("command", ["report", "why", "tail", "tensors", "show"])
    def test_a_folder_in_place_of_a_run(self, steps: Path, command: str) -> None:
        """A command about a run takes its folder as well: the newest run in it."""
        found = call(command, steps)

        assert found.output == call(command, "--dir", steps).output
        assert "no run here" not in found.output

    @pytest.mark.parametrize(
        "command", ["show", "report", "why", "tail", "sql query", "export --format json -o x"]
    )
    def test_neither_a_folder_nor_a_run(self, steps: Path, command: str) -> None:
        """A misspelt folder is not taken for the id of a run."""
        for given in ([steps / "nope"], ["nope", "--dir", steps]):
            found = call(*command.split(), *given)

            assert 3 == found.exit_code
            assert f"Error: '{given[0]}' is neither a folder nor a run: no run " in found.output

    def test_the_start_of_several_ids(self, tmp_path: Path) -> None:
        """It is the start of runs' ids, so the error only asks for more of it."""
        write(tmp_path, session("a", run_id="run-a"), spans=[span("1", "epoch")])
        write(tmp_path, session("b", run_id="run-b"), spans=[span("2", "epoch")])
        found = call("report", "run-", "--dir", tmp_path)

        assert found.output.startswith("Error: several runs have an id that starts with 'run-'; ")

    @pytest.mark.parametrize("pair", [("nope", "."), (".", "nope")])
    def test_diff_of_neither_a_folder_nor_a_run(
        self, steps: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]
    ) -> None:
        """The error names the argument that is wrong."""
        monkeypatch.chdir(steps)
        found = call("diff", *pair)

        assert 3 == found.exit_code
        assert "Error: 'nope' is neither a folder nor a run: no run here has" in found.output

    def test_json(self, steps: Path) -> None:
        """Programs get what is known of each run."""
        found = json.loads(call("ls", steps, "--json").output)

        assert (1, ["aaaa"]) == (found["schema"], [run["run_id"] for run in found["runs"]])

    def test_nothing_there(self, tmp_path: Path) -> None:
        """No run is exit code 3, for every command that looks for one."""
        for command in (["ls", tmp_path], ["sql", "SELECT 1", "--dir", tmp_path]):
            assert 3 == call(*command).exit_code
        assert 3 == call("tail", "--dir", tmp_path).exit_code


class TestSql:
    QUERY = "SELECT name, index, end_ns - start_ns AS wall_ns FROM spans WHERE name = 'step'"

    def test_as_text(self, steps: Path) -> None:
        """Rows under the names of their columns; a duration by the end of its name."""
        found = lines("sql", self.QUERY + " ORDER BY 2", "--dir", steps)

        assert ["name  index  wall_ns", "step  0      142us", "step  1      200us"] == found

    def test_for_programs(self, steps: Path) -> None:
        """JSON and CSV have the values themselves."""
        query = self.QUERY + " ORDER BY 2"
        as_json = json.loads(call("sql", query, "aa", "--json", "--dir", steps).output)
        as_csv = call("sql", query, "--csv", "--dir", steps).output

        assert [["step", 0, 142_000], ["step", 1, 200_000]] == as_json["rows"]
        assert [["name", "index", "wall_ns"], ["step", "0", "142000"]] == [
            *csv.reader(io.StringIO(as_csv))
        ][:2]

    def test_wrong_sql(self, steps: Path) -> None:
        """What DuckDB says of a wrong query is the message."""
        result = call("sql", "SELECT nope FROM spans", "--dir", steps)

        assert (1, True) == (result.exit_code, '"nope" not found' in result.output)
        assert 2 == call("sql", "SELECT 1", "--json", "--csv", "--dir", steps).exit_code

    @pytest.mark.parametrize("query", ["", ";", "/* only a comment */"])
    def test_an_empty_query(self, steps: Path, query: str) -> None:
        """A query without a statement is an error, not an empty answer."""
        result = call("sql", query, "--dir", steps)

        assert (1, "Error: the query is empty\n") == (result.exit_code, result.output)

    def test_times_with_a_time_zone(self, steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """DuckDB's own conversion needs pytz, which cirron does not install."""
        monkeypatch.setitem(sys.modules, "pytz", None)
        query = 'SELECT 1 AS "a""b", to_timestamp(start_ns / 1e9) AS at, [now()] AS l FROM spans'
        found = json.loads(call("sql", query, "--json", "--dir", steps).output)

        assert ['a"b', "at", "l"] == found["columns"]
        assert "2023-11-14T" == found["rows"][0][1][:11]

    @pytest.mark.parametrize("name", ["span", "connection", "nothing", "sql"])
    def test_a_table_that_is_not_there(self, steps: Path, name: str) -> None:
        """The error names those that are, also where a variable of ours has that name."""
        found = call("sql", f"SELECT * FROM {name}", "--dir", steps)

        assert 1 == found.exit_code
        assert "The tables are spans, marks, snapshots, sessions, training_steps." in found.output

    def test_codes_drive_no_terminal(self, steps: Path) -> None:
        """What files say is escaped, also in the names of columns."""
        query = f'SELECT name, text, 1 AS "{CODES.strip()}" FROM marks'
        for more in ([], ["--json"]):
            result = call("sql", query, "--dir", steps, *more)

            assert all(line.isprintable() for line in result.output.split("\n"))


class TestTensors:
    def write(self, root: Path) -> None:
        snapshots = [
            *(snapshot(epoch, "a.weight", float(epoch + 1)) for epoch in range(3)),
            *(snapshot(epoch, "b.weight", 2.0) for epoch in range(3)),
            *(snapshot(epoch, "b.weight.grad", 10.0**epoch) for epoch in range(3)),
        ]
        health = mark(
            "h", "e2", "training_health", "exploding", problem="exploding",
            tensors=["b.weight.grad"], sinces=[2],
        )  # fmt: skip
        spans = [span(f"e{epoch}", "epoch", index=epoch) for epoch in range(3)]
        write(root, session("a"), spans=spans, marks=[health], snapshots=snapshots)

    def test_sick_ones_come_first(self, tmp_path: Path) -> None:
        """The exploding gradient is above the healthy weight, each with its curve and change."""
        self.write(tmp_path)
        head, first, second = lines("tensors", "--dir", tmp_path)

        assert head.startswith("tensor ")
        assert ("b.weight", True) == (first.split()[0], "exploding since 2" in first)
        assert ("a.weight", "50%") == (second.split()[0], second.split()[-1])
        assert "▁▅█ 3" in second

    def test_a_terminal_without_bars(self, tmp_path: Path) -> None:
        """On an ASCII terminal a curve is drawn with other characters, not with escapes."""
        self.write(tmp_path)
        result = CliRunner(charset="ascii").invoke(main, ["tensors", "--dir", str(tmp_path)])

        assert (True, False) == ("_=# 3" in result.output, "\\u2581" in result.output)

    def test_one_by_name(self, tmp_path: Path) -> None:
        """A tensor is found without naming the run: its epochs, and both histograms."""
        self.write(tmp_path)
        found = lines("tensors", "b.weight", "--dir", tmp_path)

        assert found == lines("tensors", "aaaa", "b.weight.grad", "--dir", tmp_path)
        assert "b.weight: [2,3] float32, exploding since 2" == found[0]
        assert "b.weight at epoch 2" in found[6]
        assert "b.weight.grad at epoch 2" in found[6]
        assert 2 == sum(line.count("#" * tensors.BAR_WIDTH) for line in found)

    def test_neither_run_nor_tensor(self, tmp_path: Path) -> None:
        """A name that is nothing here is exit code 3, and so is a run without snapshots."""
        self.write(tmp_path)

        alone = call("tensors", "nope", "--dir", tmp_path)
        assert (3, True) == (alone.exit_code, "neither a run nor a tensor" in alone.output)
        named = call("tensors", "aaaa", "nope", "--dir", tmp_path)
        assert (3, True) == (named.exit_code, "'nope' is not a tensor of run aaaa" in named.output)

    def test_json(self, tmp_path: Path) -> None:
        """Programs get each epoch of each tensor."""
        self.write(tmp_path)
        first = json.loads(call("tensors", "--json", "--dir", tmp_path).output)["tensors"][0]

        assert ("b.weight", "exploding since 2", 3) == (
            first["name"],
            first["problem"],
            len(first["epochs"]),
        )

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ([], ""),
            ([1.0, 1.0], "▁▁"),
            ([0.0, float("nan"), None, 1.0], "▁! █"),
            ([float(n) for n in range(1_000)], "▁▁▂▂▂▃▃▄▄▄▅▅▅▆▆▇▇▇██"),
            ([-1e308, 1e308], "▁█"),
        ],
    )
    def test_a_curve(self, values: list[float | None], expected: str) -> None:
        """A curve has a bar a value, up to its width; what is no number is marked."""
        assert expected == tensors.spark(values)


class TestTail:
    def test_a_run_that_has_ended(self, steps: Path) -> None:
        """The last of what it did, then how it stands; and that is all."""
        found = lines("tail", "--dir", steps)

        assert "epoch[0] > step[0] - 142us {loss=0.5}" in found
        assert "epoch[0] > step[1] - 200us, data 100us" in found
        assert "pid 4242: unknown" == found[-1]
        assert all(line.isprintable() for line in found)

    def test_a_fast_loop_is_no_wall(self, tmp_path: Path) -> None:
        """Of very many steps the last are told, and how many were before."""
        spans = [span(f"{n}", "step", index=n, end_ns=START_NS + n) for n in range(1, 101)]
        write(tmp_path, session("a"), spans=spans)
        found = lines("tail", "--dir", tmp_path)

        assert "... 90 steps" == found[0]
        assert 12 == len(found)

    def test_each_row_is_printed_once(self, tmp_path: Path) -> None:
        """The next look fetches only what is new in each session, although one has long ended."""
        late = [span(f"l{n}", "step", index=n, end_ns=START_NS + 100 + n) for n in range(3)]
        write(tmp_path, session("a"), spans=[span("1", "step", index=0, end_ns=START_NS + 1)])
        write(tmp_path, session("b", START_NS + 1, run_id="aaaa"), spans=late)
        seen, run = tail.Seen(), ci.open(tmp_path)
        first = [event["event"] for event in seen.look(run)]
        write(
            tmp_path,
            session("b", START_NS + 2, run_id="aaaa"),
            spans=[span("n", "step", index=3, end_ns=START_NS + 200)],
        )
        again = list(seen.look(ci.open(tmp_path)))

        assert ["step"] * 4 + ["state"] * 2 == first
        assert [("step", 3)] == [(event["event"], event["step"]) for event in again]

    def test_json_lines(self, steps: Path) -> None:
        """For programs each line is an object."""
        found = [json.loads(line) for line in lines("tail", "--json", "--dir", steps)]

        assert {"step", "mark", "state"} == {one["event"] for one in found}
        assert {1} == {one["schema"] for one in found}

    def test_an_interval_that_is_not_a_number(self, steps: Path) -> None:
        """NaN is in every range, and no clock can wait for it."""
        result = call("tail", "--interval", "nan", "--dir", steps)

        assert (2, True) == (result.exit_code, "is not a number of seconds" in result.output)


class TestTerminal:
    @pytest.mark.parametrize(("typed", "meant"), [("shwo", "show"), ("repotr", "report")])
    def test_a_misspelt_command(self, typed: str, meant: str) -> None:
        """The error names the command that was probably meant."""
        result = call(typed)

        assert (2, True) == (result.exit_code, f"Did you mean '{meant}'?" in result.output)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_short_help(self, name: str) -> None:
        """`-h` works for every command."""
        assert call(name, "--help").output == call(name, "-h").output

    def test_a_table_on_a_terminal(self, steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """There it is rich's; what looks like markup or a code in a name is text."""
        monkeypatch.setattr(text, "is_terminal", lambda stream: stream is sys.stdout)
        found = call("sql", "SELECT name, text FROM marks WHERE text IS NOT NULL", "--dir", steps)

        assert 0 == found.exit_code, found.output
        assert "─" in found.output
        assert r"\x1b[2J\u202e[red]bold[/red]\n" in found.output

    def test_a_table_that_is_too_wide(self, steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a narrow terminal no word and no number is split: its rows are lines."""
        monkeypatch.setattr(text, "is_terminal", lambda stream: stream is sys.stdout)
        monkeypatch.setenv("COLUMNS", "40")
        found = call("ls", steps)

        assert "─" not in found.output
        assert "started" in found.output.splitlines()[0]

    def test_the_choices_of_an_option(self) -> None:
        """A format that is missing is asked for with those that there are, one on a line."""
        found = call("export")

        assert 2 == found.exit_code
        assert "\n  parquet,\n" in found.output

    def test_help_is_quick(self) -> None:
        """`cirron --help` imports neither DuckDB nor rich."""
        code = (
            "import sys\nfrom cirron.cli import main\ntry:\n    main(['--help'])\n"
            "except SystemExit:\n    pass\n"
            "assert not {'duckdb', 'rich', 'urllib3'} & set(sys.modules)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        assert (0, "") == (result.returncode, result.stderr)
        assert all(name in result.stdout for name in COMMANDS)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_has_help(self, name: str) -> None:
        """Each command, and each of its options, says what it is for."""
        command = main.get_command(click.Context(main), name)
        assert command is not None

        assert command.help
        assert [] == [
            option.name
            for option in command.params
            if option.param_type_name == "option" and not getattr(option, "help", None)
        ]
