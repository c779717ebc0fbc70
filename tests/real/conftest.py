"""Real processes for tests: a script is run in a folder of its own, and its files are read back.

A test waits for what the script prints or writes, never for time to pass.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests import spools

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    from cirron import wire

    Traced: TypeAlias = Callable[[], str]

PATIENCE_S = 90.0
POLL_S = 0.005

# Reads lines of Python, runs each, and answers with its value as JSON: the test takes the steps.
DRIVEN = """
import json, sys

answers = 0
for line in sys.stdin:
    try:
        code = compile(line, "<test>", "eval")
    except SyntaxError:
        exec(line)
        value = None
    else:
        value = eval(code)
    answers += 1
    print(f"=>{answers} {json.dumps(value, default=str)}", flush=True)
"""


def wait_until(is_so: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Waits until the condition is true, and returns what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (found := is_so()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:g}s in vain for {what}")
        time.sleep(POLL_S)
    return found


class Ended(NamedTuple):
    """How a script ended, and what it said."""

    status: int
    out: str
    err: str

    @property
    def warnings(self) -> list[str]:
        """The lines of our logger: Python prints a warning that nobody handles on stderr."""
        return [line for line in self.err.splitlines() if line.strip()]


class Script:
    """A script that runs."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, number: int) -> None:
        self.process = process
        self._out = folder / f"out-{number}.txt"
        self._err = folder / f"err-{number}.txt"
        self._answers = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, text: str, timeout_s: float = PATIENCE_S) -> str:
        """Waits until the script has printed this, and returns the line, whole."""

        def line() -> str | None:
            if self.process.poll() is not None and text not in self.out:
                pytest.fail(f"ended with {self.process.returncode} before {text!r}:\n{self.err}")
            lines = self.out.split("\n")[:-1]
            return next((line for line in lines if text in line), None)

        found: str = wait_until(line, f"{text!r} on stdout", timeout_s)
        return found

    def ask(self, code: str) -> Any:
        """Has a driven script run a line, and returns its value."""
        assert self.process.stdin is not None
        self._answers += 1
        self.process.stdin.write(code + "\n")
        self.process.stdin.flush()
        return json.loads(self.wait_for(f"=>{self._answers} ").partition(" ")[2])

    def kill(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = PATIENCE_S) -> Ended:
        """Waits for the end; a driven script ends when its input does."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        status = self.process.wait(timeout_s)
        assert "internal error" not in self.err, self.err  # what `guard` says of our own mistakes
        return Ended(status, self.out, self.err)


class Scripts:
    """Starts scripts in one folder, and reads what they leave there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / ".cirron"
        self.started: list[Script] = []

    def start(self, body: str, *, driven: bool = False, **environ: str) -> Script:
        """Starts a script; `environ` is added to an environment that says nothing of a job."""
        return self._start(body, driven, environ)

    def run(self, body: str, timeout_s: float = PATIENCE_S, **environ: str) -> Ended:
        """Runs a script to its end."""
        return self._start(body, False, environ).end(timeout_s)

    def _start(self, body: str, driven: bool, environ: dict[str, str]) -> Script:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CIRRON_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_"))
            and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        }
        kept["CIRRON_REPORT"] = "0"  # a slow machine must not add a line to what a test compares
        number = len(self.started)
        path = self.folder / "script.py"
        text = textwrap.dedent(body) + (DRIVEN if driven else "")
        if not path.exists() or text != path.read_text():  # another process may just be reading it
            path.write_text(text)
        with (
            open(self.folder / f"out-{number}.txt", "wb") as out,
            open(self.folder / f"err-{number}.txt", "wb") as err,
        ):
            process = subprocess.Popen(
                [sys.executable, "-u", str(path)],
                cwd=self.folder,
                env=kept | environ,
                stdin=subprocess.PIPE if driven else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,  # its own group, so that nothing of it is left over
                # Whoever runs the tests may ignore Ctrl-C, as nohup does; the scripts do not.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        script = Script(process, self.folder, number)
        self.started.append(script)
        return script

    def clean_up(self) -> None:
        for script in self.started:
            try:
                os.killpg(script.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            script.process.wait()
            if script.process.stdin is not None:
                script.process.stdin.close()

    wait_until = staticmethod(wait_until)

    # -- what is on disk --------------------------------------------------------------------

    def sessions(self) -> list[spools.Recorded]:
        """What all sessions have in the spool."""
        return spools.read(self.home)

    def session(self) -> spools.Recorded:
        """What the only session has there."""
        return spools.read_one(self.home)

    def states(self) -> list[str]:
        """How all sessions stand, by start, as `ci.open` says; every file can be read."""
        runs = ci.open(self.home).runs
        assert [] == runs.latest.problems
        sessions = [one for run in runs.values() for one in run.sessions]
        return [one.state for one in sorted(sessions, key=lambda one: one.first_ns)]

    def state(self) -> str:
        """How the only session stands."""
        (state,) = self.states()
        return state

    def spans(self, name: str) -> list[wire.Span]:
        """The only session's spans of that name, by start."""
        found = [span for span in self.session().spans if span.name == name]
        return sorted(found, key=lambda span: span.start_ns)

    def batch_files(self) -> list[Path]:
        """The files in the spool, by name."""
        return sorted((self.home / "spool").glob("*.json"))

    def box(self, pid: int | None = None) -> dict[str, Any]:
        """The only black box, or that of a process."""
        (path,) = (self.home / "blackbox").glob(f"*-{pid or '*'}.json")
        content: dict[str, Any] = json.loads(path.read_bytes())
        return content

    def wait_for_box(self, is_so: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """Waits until the only black box is like this."""

        def found() -> dict[str, Any] | None:
            if not any((self.home / "blackbox").glob("*.json")):
                return None
            box = self.box()
            return box if is_so(box) else None

        box: dict[str, Any] = wait_until(found, f"a black box with {what}")
        return box

    def wait_for_file(self, folder: Path, pattern: str, text: str) -> None:
        """Waits until a file of that name holds this text."""
        wait_until(
            lambda: any(text in path.read_text() for path in folder.glob(pattern)),
            f"{text!r} in {folder / pattern}",
        )

    def show(self) -> str:
        """What `cirron show` prints of the folder."""
        return subprocess.run(
            [sys.executable, "-m", "cirron", "show", str(self.folder)],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        ).stdout


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    """Scripts in an empty folder; none of them outlives the test."""
    found = Scripts(tmp_path)
    yield found
    found.clean_up()


def outline(node: dict[str, Any]) -> str:
    """A span and what is under it on one line: `epoch[0](step[0](data_load forward:train))`.

    A span that failed has a "!", one that is open a "?".
    """
    index = "" if node["index"] is None else f"[{node['index']}]"
    mode = f":{node['attrs']['mode']}" if "mode" in node["attrs"] else ""
    state = "!" if "error" in node["attrs"] else "?" if node["open"] else ""
    return f"{node['name']}{index}{mode}{state}{outlines(node['children'])}"


def outlines(nodes: list[dict[str, Any]]) -> str:
    return f"({' '.join(map(outline, nodes))})" if nodes else ""


@pytest.fixture
def traced() -> Traced:
    """Starts a session; a call of it outlines what the session has recorded so far."""
    ci.profile(output="none")

    def found() -> str:
        (root,) = ci.trace(format="dict")["roots"]
        return outlines(root["children"])[1:-1]

    return found
