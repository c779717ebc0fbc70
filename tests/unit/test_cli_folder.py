"""`cirron clear`, `send`, `compact` and `doctor`, on real files."""

from __future__ import annotations

import importlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

import cirron as ci
from cirron import files, system
from cirron.cli import main
from cirron.runs import opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def call(*arguments: object, **more: Any) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], **more)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with nothing in the environment that says something else."""
    for name in [name for name in os.environ if name.startswith("CIRRON_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(name: str, **settings: Any) -> str:
    """Records a run, and returns its id."""
    ci.profile(**settings)
    with ci.scope(name):
        ci.mark("loss", 0.5)
    run_id: str = ci.health()["run_id"]
    ci.shutdown()
    return run_id


def records(home: Path) -> set[str]:
    """All files but the list of folders and the store's manifests."""
    found = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    return {name for name in found if "manifest" not in name and not name.endswith(files.MADE)}


class TestClear:
    def test_one_run_of_two(self, home: Path) -> None:
        """What is asked for is gone, from the store too; the other run is as it was."""
        gone, kept = record("first"), record("second")
        result = call("clear", "--run", gone[:10], "--yes")

        assert (0, "deleted 2 files of 1 run\n") == (result.exit_code, result.output)
        assert [kept] == list(ci.open().runs)
        assert not any(gone in name for name in records(home))
        assert "second" in call("show").output

    def test_all_of_them(self, home: Path) -> None:
        """Without a choice every run that has ended goes, with all its files."""
        record("first")
        record("second")

        assert 0 == call("clear", "--yes").exit_code
        assert set() == records(home)
        assert 3 == call("ls").exit_code

    def test_each_file_is_read_once(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A folder of a thousand runs is searched once, not once for each run."""
        for number in range(3):
            record(f"run {number}")
        searched: list[Path] = []
        module = importlib.import_module("cirron.cli.clear")
        real = module.run_of

        def run_of(path: Path) -> str | None:
            searched.append(path)
            return real(path)  # type: ignore[no-any-return]

        monkeypatch.setattr(module, "run_of", run_of)

        assert "deleted 6 files of 3 runs\n" == call("clear", "--yes").output
        assert 6 == len(searched) == len(set(searched))

    def test_clear_asks_before_deleting(self, home: Path) -> None:
        """Without a yes nothing is removed."""
        record("first")
        before = records(home)
        result = call("clear", input="n\n")

        assert (1, True) == (result.exit_code, "Delete 1 run for good" in result.output)
        assert before <= records(home)
        assert 0 == call("clear", input="y\n").exit_code

    def test_clear_without_an_answer(self, home: Path) -> None:
        """Where nobody can answer, nothing is deleted, and the error names --yes."""
        record("first")
        before = records(home)
        result = call("clear")

        assert (1, True) == (result.exit_code, "--yes deletes without asking" in result.output)
        assert before <= records(home)

    def test_the_files_of_others(self, home: Path) -> None:
        """What has another name, is a link, or lies in a folder that we did not make, stays."""
        record("first")
        spool = home / ".cirron" / "spool"
        (batch,) = spool.iterdir()
        (spool / "notes.json").write_bytes(batch.read_bytes())
        (home / "elsewhere.json").write_bytes(batch.read_bytes())
        link = spool / f"{'1' * 20}-{'a' * 32}.json"
        link.symlink_to(home / "elsewhere.json")

        assert 0 == call("clear", "--yes").exit_code
        assert {"elsewhere.json", "notes.json", link.name} <= {
            path.name for path in (*home.iterdir(), *spool.iterdir())
        }

    def test_a_copied_spool(self, home: Path) -> None:
        """A folder that somebody else made is not ours to empty."""
        run_id = record("first")
        (home / ".cirron" / files.MADE).unlink()
        before = {name for name in records(home) if "store" not in name}
        result = call("clear", "--run", run_id, "--yes")

        assert (1, True) == (result.exit_code, "cirron did not create" in result.output)
        assert before <= records(home)
        assert [run_id] == list(ci.open().runs)

    def test_clear_deletes_only_runs_older_than_an_age(self, home: Path) -> None:
        """Only what ended so long ago goes; an age has a unit."""
        record("first")

        assert 3 == call("clear", "--older-than", "7d", "--yes").exit_code
        assert 2 == call("clear", "--older-than", "7", "--yes").exit_code
        assert 3 == call("clear", "--older-than", "1m", "--yes").exit_code

    def test_a_run_that_goes_on(self, home: Path) -> None:
        """A running run is never removed."""
        ci.profile()
        with ci.scope("now"):
            pass
        ci.flush()
        run_id = ci.health()["run_id"]

        assert system.is_alive(os.getpid(), None) is not False
        assert (1, 3) == (
            call("clear", "--run", run_id, "--yes").exit_code,
            call("clear", "--yes").exit_code,
        )
        assert [run_id] == list(ci.open().runs)

    def test_clear_deletes_raw_values_of_snapshots(self, home: Path) -> None:
        """The files with raw values of a run's snapshots go with it."""
        torch = pytest.importorskip("torch")
        model = torch.nn.Linear(2, 2)
        ci.profile(snapshots="full")
        ci.watch(model)
        for _ in ci.epochs(range(2)):
            model(torch.ones(1, 2)).sum().backward()
        ci.shutdown()

        assert any(name.endswith(".safetensors") for name in records(home))
        assert 0 == call("clear", "--yes").exit_code
        assert set() == records(home)
        assert [] == list((home / ".cirron" / "snapshots").iterdir())


class Taking(BaseHTTPRequestHandler):
    """Takes batches, or answers with the server's `status`."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append(self.headers["X-Cirron-Batch-Id"])  # type: ignore[attr-defined]
        is_busy = len(self.server.taken) <= self.server.busy  # type: ignore[attr-defined]
        self.send_response(429 if is_busy else self.server.status)  # type: ignore[attr-defined]
        if is_busy:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    found: Any = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    found.taken, found.status, found.busy = [], 200, 0
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def unsent(home: Path, monkeypatch: pytest.MonkeyPatch, server: Any) -> str:
    """A run that could not reach its endpoint; from now on the endpoint is there."""
    monkeypatch.setenv("CIRRON_API_KEY", "secret")
    monkeypatch.setenv("CIRRON_API_ENDPOINT", "http://127.0.0.1:1")
    run_id = record("first")
    monkeypatch.setenv("CIRRON_API_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    return run_id


class TestSend:
    @pytest.mark.usefixtures("unsent")
    def test_what_waits_is_sent_once(self, server: Any) -> None:
        """What a run could not send goes, and nothing is left for a second time."""
        first = json.loads(call("send", "--json").output)
        again = json.loads(call("send", "--json").output)

        assert (1, 0, None) == (first["sent"], first["left"], first["error"])
        assert (0, 0) == (again["sent"], again["left"])
        assert 1 == len(server.taken)

    @pytest.mark.usefixtures("unsent")
    def test_a_key_that_is_not_taken(self, server: Any) -> None:
        """What the server does not take stays, and the command says why and fails."""
        server.status = 401
        result = call("send")

        assert (1, True) == (result.exit_code, "not everything was sent" in result.output)
        server.status = 200
        assert 1 == json.loads(call("send", "--json").output)["sent"]

    @pytest.mark.usefixtures("unsent")
    def test_a_server_that_asks_to_wait(self, server: Any) -> None:
        """Waits as the server asks, as often as it asks, within the time limit."""
        server.busy = 4
        first = call("send", "--timeout", "0.3")
        sent = json.loads(call("send", "--json").output)

        assert (1, True) == (first.exit_code, "HTTP 429" in first.output)
        assert (1, 0) == (sent["sent"], sent["left"])
        assert 5 == len(server.taken)

    def test_send_without_a_key_says_what_to_set(self, home: Path) -> None:
        """Without a key the message says what to set."""
        record("first")

        assert "set CIRRON_API_KEY" in call("send").output


class TestDoctor:
    def test_all_is_well(self, home: Path) -> None:
        """What is installed, each setting with its source, and that there are no problems."""
        (home / "pyproject.toml").write_text('[tool.cirron]\nsnapshots = "sampled"\n')
        result = call("doctor", env={"CIRRON_FLUSH_INTERVAL": "2"})
        rows = [line.split() for line in result.output.splitlines()]

        assert 0 == result.exit_code, result.output
        assert ["flush_interval", "2.0", "CIRRON_FLUSH_INTERVAL"] in rows
        assert ["snapshots", "sampled", str(home / "pyproject.toml")] in rows
        assert ["access", "private", "default"] in rows
        assert ["output", "spool", "default"] in rows
        assert ["tags", "-", "default"] in rows
        assert "no problems found" == result.output.splitlines()[-1]

    def test_the_key_is_not_shown(self, home: Path) -> None:
        """That there is a key is said, the key is not."""
        result = call("doctor", "--json", env={"CIRRON_API_KEY": "secret-key"})

        assert "secret-key" not in result.output
        assert "***" == json.loads(result.output)["settings"]["api_key"]["value"]

    def test_optional_packages_are_listed(self, home: Path) -> None:
        """Each package that an export needs has its version, or a line that it is not installed."""
        known = json.loads(call("doctor", "--json").output)["packages"]

        assert {"opentelemetry-proto", "perfetto", "tensorboardX"} <= known.keys()

    @pytest.mark.parametrize(
        ("environ", "problem"),
        [
            ({"CIRRON_SNAPSHOTS": "some"}, "CIRRON_SNAPSHOTS='some' is not valid"),
            ({"CIRRON_OUTPUT_DIR": "/proc/nothing"}, "/proc/nothing is not writable"),
            ({"CIRRON_ENABLE": "0"}, "CIRRON_ENABLE has no effect; did you mean CIRRON_ENABLED?"),
            ({"CIRRON_ENABLED": "off"}, "profiling is off: CIRRON_ENABLED=off"),
        ],
    )
    def test_what_is_wrong(self, home: Path, environ: dict[str, str], problem: str) -> None:
        """A problem is named with what mends it, and the exit code is 1."""
        result = call("doctor", env=environ)
        said = result.output.splitlines()

        assert 1 == result.exit_code
        assert any(line.startswith(f"problem: {problem}") for line in said), result.output
        assert said[-1].startswith("  fix: ")

    def test_profiling_that_a_file_turned_off(self, home: Path) -> None:
        """The problem names the file, so that one knows where to turn profiling on again."""
        (home / "pyproject.toml").write_text("[tool.cirron]\nenabled = false\n")
        result = call("doctor")

        expected = f"problem: profiling is off: enabled = false in {home / 'pyproject.toml'}"
        assert (1, True) == (result.exit_code, expected in result.output.splitlines())

    def test_doctor_asks_the_endpoint_only_with_network(
        self, home: Path, server: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is asked with --network only, and what it answers is judged."""
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("CIRRON_API_ENDPOINT", address)
        monkeypatch.setenv("CIRRON_API_KEY", "secret")

        assert 0 == call("doctor").exit_code
        assert [] == server.taken
        assert 0 == call("doctor", "--network").exit_code
        server.status = 401
        result = call("doctor", "--network")
        assert (1, True) == (result.exit_code, "fix: export CIRRON_API_KEY" in result.output)


def test_compact_passes_on_folder_and_store(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`compact` hands on the folder and the store, and says what was done."""
    given: list[Any] = []

    def compact(where: str, store: str | None = None) -> dict[str, int]:
        given.append((where, store))
        return {"merged": 9, "removed": 1}

    monkeypatch.setattr(opened, "compact", compact, raising=False)

    assert "merged 9 segments, deleted 1 unused file\n" == call("compact", "a").output
    assert 1 == json.loads(call("compact", "--store", "s3://b", "--json").output)["removed"]
    assert [("a", None), (".", "s3://b")] == given


@pytest.mark.parametrize(
    "command",
    [
        *("show", "ls", "report", "why", "tail", "tensors", "compact", "send", "doctor"),
        *("keys list", "keys revoke x", "sql SELECT", "export chrome out.json", "clear --yes"),
    ],
)
def test_commands_leave_an_empty_folder_empty(home: Path, command: str) -> None:
    """Each says that there is nothing, and makes nothing."""
    result = call(*command.split())

    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.output
    assert [] == list(home.iterdir())


@pytest.mark.parametrize("command", ["list", "revoke x", "link x http://here"])
def test_keys_of_a_place_without_a_server(home: Path, command: str) -> None:
    """A wrong --store or --dir is an error that names the place, not an empty list."""
    for given, place in (("--store", "wrong"), ("--dir", "wrong/.cirron/server")):
        found = call("keys", *command.split(), given, "wrong")

        assert 1 == found.exit_code
        assert found.output.startswith(f"Error: '{place}' has no keys, and no server has used it: ")
    assert [] == list(home.iterdir())


def test_revoked_keys_are_no_longer_listed(home: Path) -> None:
    """Revoking a key says nothing; an id that is unknown is an error that lists those there are."""
    (home / ".cirron").mkdir()
    ids = [call("keys", "create", name).output.split("_")[1] for name in ("one", "two")]

    unknown = call("keys", "revoke", "nosuch")
    revoked = call("keys", "revoke", ids[0])
    again = call("keys", "revoke", ids[0])

    listed = ", ".join(repr(one) for one in ids)
    assert f"Error: key='nosuch' is not valid; use one of {listed}\n" == unknown.output
    assert (0, "") == (revoked.exit_code, revoked.output)
    assert f"Error: key='{ids[0]}' is not valid; use one of '{ids[1]}'\n" == again.output
    assert [ids[1]] == [
        one["id"] for one in json.loads(call("keys", "list", "--json").output)["keys"]
    ]
