"""The command line: `cirron`. One file per command; this one puts them together.

A command's file is imported when it is called, so that `cirron --help` is fast. This module prints
every error as a message without terminal control codes: an error may name files and arguments that
a shell expanded in another user's folder.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
from typing import TYPE_CHECKING, Any

import click

from cirron import errors
from cirron._version import __version__
from cirron.view import text

if TYPE_CHECKING:
    from collections.abc import Iterator

# In the order of the help. Exit codes are in docs/cli.md.
COMMANDS = {
    "run": "Run a program with profiling on.",
    "ls": "List the runs in a folder.",
    "show": "Show what a run did, as a tree.",
    "report": "Explain why a run is slow, and what fixing it would save.",
    "diff": "Compare two runs.",
    "why": "Show what a dead or hanging run was doing.",
    "tail": "Follow a run live.",
    "tensors": "Show weights and gradients over the epochs.",
    "sql": "Query a run with SQL.",
    "export": "Export a run for another tool.",
    "serve": "Show runs in the browser, and receive records over HTTP.",
    "keys": "Create, list and revoke the keys of a server.",
    "compact": "Merge the small files of a store.",
    "send": "Send records that could not be sent before.",
    "clear": "Delete runs.",
    "doctor": "Check the installation and the settings.",
}


class NothingFoundError(click.ClickException):
    """No such run, span or tensor was found."""

    exit_code = 3


class Commands(click.Group):
    """A group whose commands end in a message, never in a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found: click.Command = getattr(importlib.import_module(f"cirron.cli.{name}"), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            similar = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {similar[0]!r}?" if similar else ""
            raise click.UsageError(error.message + hint, ctx) from None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _as_message():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _as_message():
            return super().invoke(ctx)


@contextlib.contextmanager
def _as_message() -> Iterator[None]:
    try:
        yield
    except click.NoSuchOption as error:
        if error.option_name != "--run" or error.ctx is None:
            raise
        said = "no such option: --run. Give the id of the run alone, as the usage shows"
        raise click.UsageError(said, error.ctx) from None
    except click.ClickException as error:
        message = error.format_message()
        if message == _safe(message):
            raise
        if isinstance(error, click.UsageError):
            raise click.UsageError(_safe(message), error.ctx) from None
        raise click.ClickException(_safe(message)) from None
    except errors.CirronError as error:
        is_absent = isinstance(error, errors.UnknownRunError)
        kind = NothingFoundError if is_absent else click.ClickException
        raise kind(_safe(str(error))) from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # `cirron show | head`: click exits silently
            raise
        what = "standard output" if error.filename is None else str(error.filename)
        raise click.ClickException(_safe(f"{what}: {error.strerror or error}")) from None


def _safe(message: str) -> str:
    # click prints each choice on a separate line.
    lines = message.replace("\n\t", "\n  ").split("\n")
    return "\n".join(text.escape(line) for line in lines)


@click.group(name="cirron", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cirron")
def main() -> None:
    """Find out why a training run is slow, misbehaving or dead."""
