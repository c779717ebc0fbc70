"""What a profiled run says at its end, and `ci.report()`: real programs, a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

import cirron as ci

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import Scripts

# A training that waits for its data, for as long as a terminal asks for.
TRAINING = """
    import sys, time
    import torch
    import cirron as ci

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, at):
            time.sleep(0.02)
            return torch.ones(4)

    def train(epochs=2):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(epochs):
            for batch in torch.utils.data.DataLoader(Slow(), batch_size=2):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        print("trained")
"""
BUSY_S = 120.0  # that a script may take
# A busy machine gets the time that it needs, and a short run is long enough.
PATIENT = "from cirron.session import closing; closing.WAIT_S = (30.0, 30.0)"
QUICK = PATIENT + "; closing.MIN_RUN_S = 0.0"


def script(*lines: str) -> str:
    return textwrap.dedent(TRAINING) + "\n".join(lines) + "\n"


def on_terminal(folder: Path, text: str, **environ: str) -> tuple[str, str]:
    """What a script writes to standard output, a pipe, and to standard error, a terminal."""
    path = folder / "script.py"
    path.write_text(text)
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, path],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=its,
        env={**os.environ, **environ},
        text=True,
    )
    os.close(its)
    said = b""
    while True:
        try:
            got = os.read(ours, 65536)
        except OSError:  # Linux says so when the last writer is gone
            break
        if not got:
            break
        said += got
    os.close(ours)
    out = process.communicate()[0]
    assert process.returncode == 0, said
    return out, said.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("end", ["", "ci.shutdown()"])
def test_a_terminal_gets_the_verdict(tmp_path: Path, end: str) -> None:
    """At exit or at a shutdown, the whole report is on standard error, and nothing on stdout."""
    out, said = on_terminal(tmp_path, script(PATIENT, "ci.profile()", "train()", end))

    assert "trained\n" == out
    assert "VERDICT  input-bound" in said
    assert ": clean, " in said
    assert "where the time went" in said


def test_the_end_does_not_wait_for_ever(tmp_path: Path) -> None:
    """If the verdict is not there in time, a line says where it will be."""
    waits = "from cirron.session import closing; closing.WAIT_S = (0.01, 0.01)"
    _, said = on_terminal(tmp_path, script(waits, "ci.profile()", "train()"))

    (line,) = said.splitlines()
    assert line.startswith("cirron: run ")
    assert line.endswith("see how it went with: cirron report")


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    """By the environment and by the call."""
    assert on_terminal(tmp_path, script("ci.profile()", "train()"), CIRRON_REPORT="0")[1] == ""
    assert on_terminal(tmp_path, script("ci.profile(report=False)", "train()"))[1] == ""


def test_elsewhere_it_is_a_line(scripts: Scripts) -> None:
    """One line on standard error, which names the class and the command."""
    ended = scripts.run(script(QUICK, "ci.profile()", "train()"), BUSY_S, CIRRON_REPORT="1")

    (line,) = ended.err.splitlines()
    assert "trained\n" == ended.out
    assert line.startswith("cirron: input-bound: ")
    assert "; see: cirron report " in line


@pytest.mark.parametrize(
    "lines",
    [
        ("ci.profile()", "train(0)"),  # too few steps
        ("ci.profile(output='none')", "train()"),
        ("import os, signal", "ci.profile()", "train()", "os.kill(os.getpid(), signal.SIGTERM)"),
        ("ci.profile()", "train()", "raise KeyboardInterrupt"),
    ],
    ids=["few steps", "no output", "signal", "interrupt"],
)
def test_when_nothing_is_said(scripts: Scripts, lines: tuple[str, ...]) -> None:
    """Nothing to say, nobody to say it to, or somebody who wants it to be over."""
    ended = scripts.run(script(QUICK, *lines), BUSY_S, CIRRON_REPORT="1")

    assert "cirron" not in "\n".join(
        line for line in ended.err.splitlines() if not line.startswith((" ", "Traceback"))
    )


def test_an_error_is_pointed_to(scripts: Scripts) -> None:
    """After a traceback, a line says how to see where it was."""
    ended = scripts.run(
        script(QUICK, "ci.profile()", "train()", "1 / 0"), BUSY_S, CIRRON_REPORT="1"
    )

    assert "ZeroDivisionError" in ended.err
    assert ended.err.splitlines()[-1].endswith("cirron why")


def test_other_processes_are_silent(scripts: Scripts) -> None:
    """Forked and spawned children, loader workers and ranks but the first say nothing."""
    body = script(
        QUICK,
        "ci.profile()",
        "import multiprocessing",
        "if __name__ == '__main__':",
        "    train()",
        "    child = multiprocessing.get_context('fork').Process(target=train)",
        "    child.start(); child.join()",
        "    ci.shutdown()",
    )
    ended = scripts.run(body, BUSY_S, CIRRON_REPORT="1")
    other_rank = scripts.run(body, BUSY_S, CIRRON_REPORT="1", RANK="1", WORLD_SIZE="2")

    assert 1 == len(ended.err.splitlines()), ended.err
    assert "" == other_rank.err


def test_report_in_the_process(scripts: Scripts) -> None:
    """`ci.report()` prints the verdict so far and returns it; also with nothing on disk."""
    body = script(
        "ci.profile(output='spool')",
        "train()",
        "found = ci.report()",
        "assert found.verdict.kind == 'input-bound', found.verdict",
        "assert found.run['steps'] > 20",
    )
    on_disk = scripts.run(body, BUSY_S)
    in_memory = scripts.run(body.replace("'spool'", "'none'"), BUSY_S)

    for ended in (on_disk, in_memory):
        assert (0, "") == (ended.status, ended.err)
        assert "VERDICT  input-bound" in ended.out


def test_report_with_nothing_to_judge(capsys: pytest.CaptureFixture[str]) -> None:
    """It says why, and does not raise."""
    before = ci.report()
    ci.profile(enabled=False)
    off = ci.report()
    ci.shutdown()
    ci.profile()
    ci.shutdown()
    after = ci.report()

    assert ["not-enough-data"] * 3 == [one.verdict.kind for one in (before, off, after)]
    assert "ci.profile() was not called" in capsys.readouterr().out
    assert "call ci.profile() first" in off.verdict.advice
    assert "not-enough-data" in after._repr_html_()


def test_the_next_command_is_one_that_works() -> None:
    """Without a run there is none, and no command can read what is only in memory."""
    nothing = ci.report()
    ci.profile(output="none")
    in_memory = ci.report()

    assert repr(nothing).startswith("VERDICT  not-enough-data: ")
    assert "next:" not in repr(nothing)
    assert repr(in_memory).endswith("\nnext: ci.trace()")
    assert in_memory.as_dict()["run"]["is_in_memory"]
