"""`cirron run`: profiles a program without changing its code.

The program is a child of this process and inherits its standard streams. Signals that arrive here
are passed on to it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from cirron import autostart, errors, settings, system
from cirron.record import clock
from cirron.view import text

# A terminal sends Ctrl-C to the program itself.
FORWARDED = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
MAX_PROBLEM = 500
BY_SIGNAL = 128  # the convention of shells, as are the codes below


class AbsentError(click.ClickException):
    """The command does not exist."""

    exit_code = 127


class NotExecutableError(click.ClickException):
    """The command cannot be executed."""

    exit_code = 126


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["--help"],  # with -h, click would find it inside of -mhello
    }
)
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
    if command[0] == "-h":
        click.echo(ctx.get_help())
        return
    if command[0].startswith("-c"):
        raise click.UsageError("code is run by Python: cirron run python -c '...'", ctx)
    if command[0].startswith("-") and not command[0].startswith("-m"):
        raise click.UsageError(
            f"cirron run has no option {command[0]!r}; options of the program go after its name:"
            " cirron run train.py --lr 0.1",
            ctx,
        )
    started_ns = clock.wall()
    code = execute(as_python(list(command)))
    if text.is_terminal(sys.stderr):
        try:
            said = result(started_ns)
        except (errors.CirronError, OSError) as error:  # must not change the program's exit code
            said = text.plain(str(error), MAX_PROBLEM)
        click.echo(text.encodable(f"cirron: {said}", sys.stderr), err=True)
    ctx.exit(code)


def as_python(command: list[str]) -> list[str]:
    """The command, with this Python in front of a script or a module."""
    first = command[0]
    if first.startswith("-m"):
        if command == ["-m"]:
            raise click.UsageError("no module given. Try: cirron run -m package.train")
        check_module(first[2:] or command[1])
    elif not (first.endswith(".py") and Path(first).is_file()):
        return command
    return [sys.executable, *command]


def check_module(name: str) -> None:
    """Raises an error if Python cannot find a module; running it would leave an empty run."""
    sys.path.append(os.getcwd())  # `python -m` searches it, too
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except ValueError:  # not a valid name
        found = None
    finally:
        sys.path.pop()
    if found is None:
        raise click.ClickException(f"there is no module {name!r}: check what follows -m")


def execute(command: list[str]) -> int:
    """Runs a command; returns its exit code, or 128 plus the number of the signal that ended it."""
    environ = autostart.environment(os.environ, clock.random_id())
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: Any) -> None:
        if child is not None and child.poll() is None:
            child.send_signal(number)

    def interrupt(number: int, frame: Any) -> None:
        if not system.is_in_foreground():  # else the terminal has sent it to the program already
            forward(number, frame)

    handlers = {getattr(signal, name): forward for name in FORWARDED if hasattr(signal, name)}
    handlers[signal.SIGINT] = interrupt
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) != signal.SIG_IGN  # after nohup, the program ignores it too
    }
    try:
        # `close_fds`: the program inherits descriptors, such as bash's `<(...)`.
        child = subprocess.Popen(command, env=environ, close_fds=False)  # noqa: S603  the user's
        code = child.wait()
    except OSError as error:
        raise failure(command[0], error) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else BY_SIGNAL - code


def failure(name: str, error: OSError) -> click.ClickException:
    """The error for a command that could not be started."""
    if os.path.isdir(name):
        return NotExecutableError(f"{name!r} is a folder: name the script to run")
    if isinstance(error, FileNotFoundError):
        problem = "is" if os.path.exists(name) else "does not exist: it is"
        return AbsentError(f"{name!r} {problem} neither a Python script (.py) nor a command")
    return NotExecutableError(f"{name!r} cannot be executed: {error.strerror or error}")


def result(started_ns: int) -> str:
    """The runs that have started since, and how to see them."""
    from cirron.runs import blackboxes

    values = settings.resolve({})
    folder = Path(values.output_dir)
    boxes, _ = blackboxes.read(folder / "blackbox")
    ids = {box.session.run_id for box in boxes if box.session.clock.wall_ns >= started_ns}
    if not ids and (off := settings.why_off(values)):
        return text.plain("; ".join(off), MAX_PROBLEM)
    if not ids:
        return (
            f"nothing was recorded in {text.plain(str(folder))}. Is the folder writable, and cirron"
            " installed in the program's Python? See: cirron doctor"
        )
    names = ", ".join(text.plain(one) for one in sorted(ids))
    where = "" if folder == Path(".cirron") else f" {text.plain(str(folder))}"
    return f"run {names}; see it with: cirron show{where}"
