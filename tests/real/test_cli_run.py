"""`cirron run`: real programs, which must not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import autostart, hooks

if TYPE_CHECKING:
    from cirron.runs.opened import Run

SOURCE = str(Path(ci.__file__).parents[1])
PATIENCE_S = 110.0

TRAINING = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
for epoch in range(2):
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
"""


class Folder:
    """Where programs are run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, body: str) -> None:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(body))

    def start(self, *command: str, **more: Any) -> subprocess.Popen[str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CIRRON_", "SLURM_", "TORCHELASTIC_"))
        }
        environ = kept | {"PYTHONPATH": SOURCE} | more.pop("environ", {})
        return subprocess.Popen(
            [sys.executable, "-m", "cirron", "run", *command],
            cwd=self.path,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def run(self, *command: str, given: str = "", **more: Any) -> tuple[int, str, str]:
        process = self.start(*command, **more)
        out, err = process.communicate(given, timeout=PATIENCE_S)
        return process.returncode, out, err

    @property
    def recorded(self) -> Run:
        """The one run that was recorded."""
        run = ci.open(self.path)
        assert 1 == len(run.runs)
        return run

    @property
    def has_records(self) -> bool:
        return (self.path / ".cirron").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


TELLING = """
import json, sys
print(json.dumps([sys.argv, __name__, sys.path, sys.stdin.read()]))
sys.exit(7)
"""


def test_the_frameworks_are_those_that_are_hooked() -> None:
    """A child is profiled from the import of any framework that we know."""
    assert set(hooks.PRECEDENCE) == autostart.FRAMEWORKS


@pytest.mark.parametrize("command", [["tell.py"], [sys.executable, "tell.py"], ["-m", "tell"]])
def test_a_program_does_not_notice(folder: Folder, command: list[str]) -> None:
    """Arguments, `__main__`, the path, standard streams and exit code are as without us."""
    folder.write("tell.py", TELLING)
    plain = command if command[0] == sys.executable else [sys.executable, *command]
    expected = subprocess.run(
        [*plain, "--lr", "0.1", "--help"],
        cwd=folder.path,
        input="hello",
        env=os.environ | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    found = folder.run(*command, "--lr", "0.1", "--help", given="hello")

    assert (7, expected.stdout, "") == found
    (session,) = folder.recorded.sessions
    assert "exception" == session.state
    assert ["--lr", "0.1", "--help"] == session.program.arguments
    assert session.program.script in ("tell.py", "-m tell")


def test_a_torch_training(folder: Folder) -> None:
    """A training that knows nothing of cirron has its epochs, steps and losses."""
    folder.write("train.py", TRAINING)

    assert (0, "", "") == folder.run("--", "train.py")
    assert [(0, 0), (0, 1), (1, 0), (1, 1)] == [
        (row["epoch"], row["step"]) for row in folder.recorded.steps
    ]
    assert all(row["loss"] is not None for row in folder.recorded.steps)


def test_ranks_of_torchrun(folder: Folder) -> None:
    """Both ranks are recorded, in one run, and the launcher is not."""
    setup = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    folder.write("train.py", setup + TRAINING + "dist.destroy_process_group()\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    code, _, err = folder.run(*launcher, "--nproc-per-node", "2", "train.py")

    assert 0 == code, err
    assert [0, 1] == folder.recorded.ranks
    assert 2 == len(folder.recorded.sessions)


def test_children(folder: Folder) -> None:
    """A child that trains is of the same run; one that imports no framework leaves nothing."""
    folder.write("train.py", TRAINING)
    folder.write(
        "main.py",
        """
        import subprocess, sys
        subprocess.run([sys.executable, "train.py"], check=True)
        subprocess.run([sys.executable, "-c", "print('small')"], check=True)
        """,
    )

    assert (0, "small\n", "") == folder.run("main.py")
    assert {"main.py", "train.py"} == {one.program.script for one in folder.recorded.sessions}
    assert 2 == len(folder.recorded.sessions)


def test_workers_of_pools_and_loaders(folder: Folder) -> None:
    """Those that record nothing leave nothing, and a parent that ends its workers ends no run."""
    folder.write(
        "main.py",
        """
        import multiprocessing, time
        import torch

        def work(runs_model):
            if runs_model:
                torch.nn.Linear(2, 1)(torch.ones(1, 2))
            return multiprocessing.current_process().name

        def wait(told):
            told.put("ready")
            time.sleep(1000)

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            with context.Pool(1) as pool:  # which terminates its worker
                pool.map(work, [True])
            with context.Pool(1) as pool:
                pool.map(work, [False])
            told = context.Queue()
            context.Process(target=wait, args=(told,), daemon=True).start()
            told.get()
            loader = torch.utils.data.DataLoader(
                [torch.ones(2)], num_workers=1, multiprocessing_context=context
            )
            print(len(list(loader)))
        """,
    )

    assert (0, "1\n", "") == folder.run("main.py")
    assert "clean" == folder.recorded.state
    assert 2 == len(folder.recorded.sessions)
    assert 1 == len([row for row in folder.recorded.spans if row["name"] == "forward"])


def test_empty_worker_ended_by_its_parent_while_it_ends_by_itself(folder: Folder) -> None:
    """A worker that records nothing leaves nothing, even if SIGTERM interrupts its end."""
    folder.write(
        "main.py",
        """
        import multiprocessing, os, signal

        def work():
            import torch
            from cirron.ship.flusher import Flusher

            stop = Flusher.stop

            def interrupted(*args):
                Flusher.stop = stop
                is_stopped = stop(*args)
                os.kill(os.getpid(), signal.SIGTERM)
                return is_stopped

            Flusher.stop = interrupted

        if __name__ == "__main__":
            worker = multiprocessing.get_context("spawn").Process(target=work, daemon=True)
            worker.start()
            worker.join()
            print(worker.exitcode)
        """,
    )

    assert (0, "-15\n", "") == folder.run("main.py")
    assert 1 == len(folder.recorded.sessions)


def test_a_program_inherits_descriptors(folder: Folder) -> None:
    """A file that the shell has opened for the program, as `<(...)` of bash, is open in it."""
    read, write = os.pipe()
    os.write(write, b"given")
    os.close(write)
    code = f"import os; print(os.read({read}, 9))"

    assert (0, "b'given'\n", "") == folder.run(sys.executable, "-c", code, pass_fds=[read])
    os.close(read)


def test_a_program_that_replaces_itself(folder: Folder) -> None:
    """A script that calls itself again by exec is one run, which was not killed."""
    folder.write(
        "main.py",
        """
        import os, sys
        import cirron
        if len(sys.argv) > 1:
            sys.exit(7)
        with cirron.scope("before"):
            pass
        try:
            os.execvp("nosuch", ["nosuch"])
        except FileNotFoundError:
            with cirron.scope("still"):
                pass
        os.environ["PATH"] = "/nosuch:" + os.path.dirname(sys.executable)
        os.execvp(os.path.basename(sys.executable), [sys.executable, __file__, "again"])
        """,
    )

    assert (7, "", "") == folder.run("main.py")
    assert ["clean", "exception"] == [one.state for one in folder.recorded.sessions]
    assert {"before", "still"} <= {row["name"] for row in folder.recorded.spans}


def test_a_program_that_profiles_itself(folder: Folder) -> None:
    """What its own `ci.profile()` says counts, in one session, without a warning."""
    folder.write(
        "own.py",
        """
        import cirron as ci
        ci.profile(tags=["mine"], config={"lr": 0.1})
        with ci.scope("work"):
            pass
        """,
    )

    assert (0, "", "") == folder.run("own.py")
    (session,) = folder.recorded.sessions
    assert {"mine": ""} == session.program.tags
    assert ["work"] == [span.name for span in folder.recorded.tree().roots[0].children]


def test_what_was_recorded_before_is_kept(folder: Folder) -> None:
    """A program that calls `ci.profile()` late loses nothing of what was seen until then."""
    folder.write(
        "late.py",
        """
        import cirron as ci
        with ci.scope("before"):
            pass
        ci.profile()
        with ci.scope("after"):
            pass
        """,
    )

    assert (0, "", "") == folder.run("late.py")
    names = {row["name"] for row in folder.recorded.sql("SELECT name FROM spans")}
    assert {"before", "after"} <= names


def test_a_program_that_fails(folder: Folder) -> None:
    """Its traceback and code are its own, and the run says how it ended."""
    folder.write("fail.py", "raise ValueError('no')\n")
    code, _, err = folder.run("fail.py")

    assert (1, True) == (code, err.endswith("ValueError: no\n"))
    assert "exception" == folder.recorded.state


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_that_is_killed(folder: Folder, number: signal.Signals) -> None:
    """The exit code is 128 and the number of the signal, as in a shell."""
    folder.write("die.py", f"import os\nos.kill(os.getpid(), {int(number)})\n")

    assert (128 + number, "", "") == folder.run("die.py")
    assert ("killed" if number == signal.SIGKILL else "signal") == folder.recorded.state


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_program(folder: Folder, number: signal.Signals) -> None:
    """A signal for `cirron run` is the program's to handle."""
    folder.write(
        "wait.py",
        f"""
        import pathlib, signal, sys, time
        def handle(number, frame):
            print("got", number, flush=True)
            sys.exit(5)
        signal.signal({int(number)}, handle)
        pathlib.Path("ready").touch()
        time.sleep(60)
        """,
    )
    process = folder.start("wait.py", start_new_session=True)
    deadline = time.monotonic() + PATIENCE_S
    while not (folder.path / "ready").exists():
        assert time.monotonic() < deadline, "the program did not begin"
        time.sleep(0.01)
    process.send_signal(number)
    out, _ = process.communicate(timeout=PATIENCE_S)

    assert (5, f"got {int(number)}\n") == (process.returncode, out)


def test_commands_that_cannot_run_say_why(folder: Folder) -> None:
    """A command that cannot run has the exit code of a shell, and a helpful message."""
    (folder.path / "text").write_text("no program")
    missing = "Error: 'nosuch' does not exist: it is neither a Python script (.py) nor a command\n"

    assert (127, missing) == folder.run("nosuch")[::2]
    assert (126, f"Error: '{folder.path}' is a folder: name the script to run\n") == folder.run(
        str(folder.path)
    )[::2]
    code, _, said = folder.run("./text")
    assert (126, True) == (code, "'./text' cannot be executed: " in said)
    assert 2 == folder.run()[0]
    for command in (["-m", "nosuch.module"], ["-mnosuch.module"]):
        code, _, said = folder.run(*command)
        missing = "Error: there is no module 'nosuch.module': check what follows -m\n"
        assert (1, missing) == (code, said)
    assert not (folder.path / ".cirron").exists()
    code, _, said = folder.run("--lr", "train.py")
    assert (2, True) == (code, "cirron run has no option '--lr'" in said)


def test_options_of_the_program_and_of_python(folder: Folder) -> None:
    """`-h` after the script is the script's; code for `-c` needs a Python in front of it."""
    folder.write("tell.py", TELLING)
    code, out, _ = folder.run("tell.py", "-h")
    assert (7, True) == (code, '["tell.py", "-h"]' in out)

    code, _, said = folder.run("-c", "print(1)")
    assert (2, True) == (code, "cirron run python -c" in said)


def test_another_sitecustomize(folder: Folder) -> None:
    """One that the program has is imported, and stays the one that is imported."""
    folder.write("other/sitecustomize.py", "print('theirs')\nTHEIRS = True\n")
    folder.write("main.py", "import sitecustomize\nprint(sitecustomize.THEIRS)\n")
    environ = {"PYTHONPATH": os.pathsep.join([str(folder.path / "other"), SOURCE])}

    code, out, err = folder.run("main.py", environ=environ)
    # `python -m cirron` is a Python that imports it, too.
    assert (0, "theirs\ntheirs\nTrue\n", "") == (code, out, err)
    assert "clean" == folder.recorded.state


@pytest.mark.parametrize("options", [["-S"], ["-I"], ["-E"]])
def test_a_python_without_cirron(folder: Folder, options: list[str]) -> None:
    """A Python that does not find us runs as ever."""
    code = "import sys; print(sys.argv)"

    assert (0, "['-c', 'x']\n", "") == folder.run(sys.executable, *options, "-c", code, "x")


def test_bad_settings(folder: Folder) -> None:
    """Settings that are wrong are said, and the program runs."""
    folder.write("main.py", "print('ran')\n")
    code, out, err = folder.run("main.py", environ={"CIRRON_SNAPSHOTS": "some"})

    assert (0, "ran\n") == (code, out)
    assert err.startswith("cirron: this process is not profiled: CIRRON_SNAPSHOTS='some'")
    assert not folder.has_records


def test_switched_off(folder: Folder) -> None:
    """CIRRON_ENABLED=0 counts here, too."""
    folder.write("main.py", "print('ran')\n")

    assert (0, "ran\n", "") == folder.run("main.py", environ={"CIRRON_ENABLED": "0"})
    assert not folder.has_records


def said_on_a_terminal(folder: Folder, **environ: str) -> str:
    """Standard error of `cirron run main.py`, on a terminal."""
    pty = pytest.importorskip("pty")
    folder.write("main.py", "print('ran')\n")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cirron", "run", "main.py"],
        cwd=folder.path,
        env=os.environ | {"PYTHONPATH": SOURCE} | environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    assert 0 == process.wait(PATIENCE_S)
    os.close(theirs)
    said = os.read(ours, 10_000).decode()
    os.close(ours)
    return said


def test_on_a_terminal_the_run_is_named(folder: Folder) -> None:
    """There, and only there, the last line says which run it was."""
    said = said_on_a_terminal(folder)

    assert f"cirron: run {folder.recorded.id}; see it with: cirron show\r\n" == said


def test_on_a_terminal_profiling_that_is_off_is_named(folder: Folder) -> None:
    """Without a record, the last line says what turned profiling off."""
    said = said_on_a_terminal(folder, CIRRON_ENABLED="0")

    assert "cirron: profiling is off: CIRRON_ENABLED=0; unset CIRRON_ENABLED\r\n" == said
