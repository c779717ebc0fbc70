"""The verdict on this process: `ci.report()`, and the summary when a run ends.

The summary goes to standard error: one screen on a terminal, one line elsewhere. A separate process
with a time limit judges the newest records: a database in this process, at its end, could hang or
crash the program.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cirron import errors, guard, settings, system, wire
from cirron.record import clock
from cirron.view import text

if TYPE_CHECKING:
    from cirron.session.compose import Recorded, Session
    from cirron.verdict.findings import Report

# Fewer steps are too few to judge.
MIN_STEPS = 20
# Shorter runs print nothing.
MIN_RUN_S = 10.0
MIN_RUN_ON_TERMINAL_S = 2.0
# The exit may take a tenth of the run's duration, within these limits.
WAIT_S = (1.0, 2.0)
# The newest records: about 25,000 spans, judged in well under a second.
MAX_BYTES = 8 * 2**20

# The program of the other process. It imports cirron from where this process has it, and nothing
# else of the program. Its temporary files are in a folder that is removed even if it is killed.
JUDGE = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
sys.path.append(sys.argv[2])
from cirron.cli.report import of_batch
sys.stdout.buffer.write(of_batch(sys.stdin.buffer.read(), is_line=sys.argv[3] == "line").encode())
"""


def batch_of(recorded: Recorded, opened: list[wire.Span], max_bytes: int | None = None) -> bytes:
    """The records in memory as one batch; only the newest if there is a limit."""
    chunks: list[tuple[bytes, bytes]] = []
    size = 0
    for chunk in reversed(recorded.memory.chunks()):
        size += sum(map(len, chunk))
        if chunks and max_bytes is not None and size > max_bytes:
            break
        chunks.append(chunk)
    spans = [spans for spans, _ in chunks] + [wire.encode_records(opened)]
    sections = wire.Sections(spans, [marks for _, marks in chunks])
    return b"".join(wire.encode_batch(recorded.header, sections)[0])


def judge(recorded: Recorded | None, opened: list[wire.Span]) -> Report:
    """The verdict so far. Never raises: if there is no verdict, the report says why."""
    from cirron.verdict import nothing

    if recorded is None:
        found = nothing("ci.profile() was not called in this process, or profiling is off")
        advice = "call ci.profile() first; CIRRON_ENABLED=0 and enabled=False turn it off"
        found.verdict = replace(found.verdict, advice=advice)
        return found
    try:
        from cirron.runs.place import Place, of_batch

        if recorded.folder is None:
            found = of_batch(batch_of(recorded, opened)).report()
            found.run["is_in_memory"] = True
            return found
        assert recorded.header.session is not None
        return Place([recorded.folder]).runs[recorded.header.session.run_id].report()
    except (errors.CirronError, OSError) as error:
        return nothing(str(error))
    except Exception as error:  # noqa: BLE001  protects the program
        guard.caught("report", error)
        return nothing(f"an error in cirron: {type(error).__name__}: {error}")


# -- the end of a run ------------------------------------------------------------------------


def speaks(session: Session, how: str) -> bool:
    """Whether this process prints a summary: it is the first of the run, and has trained."""
    values, process = session.settings, sys.modules.get("multiprocessing.process")
    return (
        values.report
        and "none" not in values.output
        and how in ("clean", "exception")
        and session.is_first
        and (session.rank() == 0 or process is None or process.parent_process() is None)
        and session.collector.steps >= MIN_STEPS
        and "ipykernel" not in sys.modules
    )


def say(session: Session, how: str) -> None:
    """Prints the summary to standard error."""
    is_terminal = text.is_terminal(sys.stderr)
    lasted_s = (clock.now() - session.anchor.monotonic_ns) / 1e9
    if lasted_s < (MIN_RUN_ON_TERMINAL_S if is_terminal else MIN_RUN_S):
        return
    recorded = session.recorded
    if how == "exception":  # Python prints the error itself
        _write(_pointer(recorded, "why"))
        return
    form = "screen" if is_terminal else "line"
    found = _ask(recorded, form, min(max(lasted_s / 10, WAIT_S[0]), WAIT_S[1]))
    if not found:
        found = _pointer(recorded, "report")
    _write(f"\n{found}" if is_terminal and "\n" in found else found)


def _pointer(recorded: Recorded, command: str) -> str:
    """The line that names the command to run."""
    assert recorded.header.session is not None
    run = text.plain(recorded.header.session.run_id)
    if recorded.folder is None:
        return f"cirron: run {run} has ended"
    default = Path(settings.BY_NAME["output_dir"].default).absolute()
    where = "" if recorded.folder == default else f" --dir {text.plain(str(recorded.folder), 300)}"
    return f"cirron: run {run}; see how it went with: cirron {command}{where}"


def _ask(recorded: Recorded, form: str, wait_s: float) -> str:
    """The verdict of another process; empty if it takes too long."""
    if not os.path.basename(sys.executable or "").startswith("python"):
        return ""  # Python is embedded in another program, which must not be started
    import subprocess
    import tempfile

    import cirron

    root = Path(cirron.__file__).parent.parent
    # Too slow, or no process could be started.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        with tempfile.TemporaryDirectory(prefix="cirron-", ignore_cleanup_errors=True) as folder:
            done = subprocess.run(  # noqa: S603  our own code
                [sys.executable, "-P", "-c", JUDGE, folder, str(root), form],
                input=batch_of(recorded, [], MAX_BYTES),
                capture_output=True,
                timeout=wait_s,
                check=True,
            )
        return done.stdout.decode()
    return ""


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a file
        level = system.pipe_level(sys.stderr.fileno())
        if level is not None and 2 * level[0] + len(line) > level[1]:
            return  # nobody reads the pipe, so the write would block the exit
    text.print_safely(line, "stderr")
