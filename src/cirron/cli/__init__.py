"""The command line: `cirron`. One file a command; this one puts them together.

Every error leaves through here as a message, without codes that a terminal would act on: it may
name files and arguments, which a shell may have expanded in somebody else's folder.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Any

import click

from cirron import errors
from cirron._version import __version__
from cirron.cli import show
from cirron.view import text

if TYPE_CHECKING:
    from collections.abc import Iterator


class Commands(click.Group):
    """A group whose commands end in a message, never in a traceback."""

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
    except click.ClickException as error:
        message = error.format_message()
        if message == _safe(message):
            raise
        if isinstance(error, click.UsageError):
            raise click.UsageError(_safe(message), error.ctx) from None
        raise click.ClickException(_safe(message)) from None
    except errors.CirronError as error:
        raise click.ClickException(_safe(str(error))) from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # `cirron show | head`: click leaves quietly
            raise
        what = "standard output" if error.filename is None else str(error.filename)
        raise click.ClickException(_safe(f"{what}: {error.strerror or error}")) from None


def _safe(message: str) -> str:
    return "\n".join(text.escape(line) for line in message.split("\n"))


@click.group(name="cirron", cls=Commands)
@click.version_option(__version__, prog_name="cirron")
def main() -> None:
    """Shows what training runs did."""


main.add_command(show.show)
