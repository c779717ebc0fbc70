"""`cirron run`: a program, profiled, with no line of its code changed.

The program is a child of this process, with its own standard streams; what it says on the way out
is all that is added. Signals that come here go on to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from cirron import autostart, errors, settings, system
from cirron.cli import output
from cirron.record import clock
from cirron.view import text

# What is sent to a process to tell it something. Ctrl-C in a terminal goes to the program anyway.
FORWARDED = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
MAX_PROBLEM = 500
BY_SIGNAL = 128  # as shells have it, and the codes below


class AbsentError(click.ClickException):
    """There is no such command."""

    exit_code = 127


class NotExecutableError(click.ClickException):
    """It cannot be run."""

    exit_code = 126


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", metavar="COMMAND...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Run COMMAND with profiling on, its child processes and ranks included.

    COMMAND is a script (train.py ...), a module (-m package ...) or any command, such as python
    train.py or torchrun train.py. The program behaves as it does without cirron run, and its exit
    code is passed on. Settings come from the environment and pyproject.toml; if the program calls
    ci.profile() itself, the settings of that call count.
    """
    if not command:
        raise click.UsageError("no command given. Try: cirron run train.py", ctx)
    started_ns = clock.wall()
    code = execute(as_python(list(command)))
    if output.is_terminal(sys.stderr):
        try:
            said = result(started_ns)
        except (errors.CirronError, OSError) as error:  # the program's exit code is the program's
            said = text.plain(str(error), MAX_PROBLEM)
        click.echo(text.encodable(f"cirron: {said}", sys.stderr), err=True)
    ctx.exit(code)


def as_python(command: list[str]) -> list[str]:
    """The command, with this Python in front of a script or a module."""
    first = command[0]
    is_script = first.endswith(".py") and Path(first).is_file()
    return [sys.executable, *command] if is_script or first.startswith("-m") else command


def execute(command: list[str]) -> int:
    """Runs a command to its end; its exit code, 128 and the number of the signal that ended it."""
    environ = autostart.environment(os.environ, clock.random_id())
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: Any) -> None:
        if child is not None and child.poll() is None:
            child.send_signal(number)

    def interrupt(number: int, frame: Any) -> None:
        if not system.is_in_foreground():  # else the terminal has told the program itself
            forward(number, frame)

    handlers = {getattr(signal, name): forward for name in FORWARDED if hasattr(signal, name)}
    handlers[signal.SIGINT] = interrupt
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) != signal.SIG_IGN  # nohup: the program inherits it
    }
    try:
        child = subprocess.Popen(command, env=environ)  # noqa: S603  what the user asked for
        code = child.wait()
    except OSError as error:
        kind = AbsentError if isinstance(error, FileNotFoundError) else NotExecutableError
        raise kind(f"{command[0]}: {error.strerror or error}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else BY_SIGNAL - code


def result(started_ns: int) -> str:
    """Which runs have begun since, and how to see them."""
    from cirron.runs import blackboxes

    folder = Path(settings.resolve({}).output_dir)
    boxes, _ = blackboxes.read(folder / "blackbox")
    ids = {box.session.run_id for box in boxes if box.session.clock.wall_ns >= started_ns}
    if not ids:
        return (
            f"nothing was recorded in {text.plain(str(folder))}: has its Python cirron installed?"
            " See: cirron doctor"
        )
    names = ", ".join(text.plain(one) for one in sorted(ids))
    where = "" if folder == Path(".cirron") else f" {text.plain(str(folder))}"
    return f"run {names}; see it with: cirron show{where}"
