"""`cirron serve`: receives batches over HTTP, and shows runs in the browser."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from cirron import settings, system
from cirron.cli import output
from cirron.record import clock
from cirron.view import text

if TYPE_CHECKING:
    from cirron.server.process import Server

PORT = 8321


@click.command()
@click.argument("folders", metavar="[DIR]...", nargs=-1)
@click.option("--store", metavar="URL", help="Serve this store instead of folders.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=PORT,
    show_default=True,
    help="The port; 0 picks a free one.",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option(
    "--role",
    type=click.Choice(["all", "ingest", "page"]),
    default="all",
    show_default=True,
    help="Only receive batches, only show runs, or both.",
)
@click.option(
    "--max-inbox-mb",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Reject batches while more than this waits to be stored.",
)
@click.option(
    "--allow-host", "hosts", multiple=True, help="A host name that the server is reached by."
)
@click.option(
    "--trust-proxy", "proxies", multiple=True, help="Address of a proxy that authenticates users."
)
@click.option("--user-header", help="The header in which that proxy names the user.")
@click.option(
    "--certificate", metavar="FILE", help="TLS certificate, for https://; needs --private-key."
)
@click.option("--private-key", metavar="FILE", help="The key of the certificate.")
def serve(
    folders: tuple[str, ...],
    store: str | None,
    host: str,
    port: int,
    no_browser: bool,
    role: str,
    max_inbox_mb: int,
    hosts: tuple[str, ...],
    proxies: tuple[str, ...],
    user_header: str | None,
    certificate: str | None,
    private_key: str | None,
) -> None:
    """Show the runs in DIR live in the browser, and receive records from programs over HTTP.

    The first line of output is the address to open. It works once.
    """
    if folders and store:
        raise click.UsageError("give folders or --store, not both")
    if bool(proxies) != bool(user_header):
        raise click.UsageError("--trust-proxy and --user-header go together: give both")
    if private_key and not certificate:
        raise click.UsageError("--private-key needs a --certificate: give both")
    for one in folders:
        if "://" not in one and not os.path.isdir(one):
            raise click.UsageError(
                f"{one!r} is not a folder: name a folder that programs run in, or create it first"
            )
    from cirron.server.process import MAX_CONNECTIONS, Options, Server

    # Shells allow 1,024: fewer than a thousand ranks and their files need.
    system.raise_open_files(2 * MAX_CONNECTIONS)
    is_browser = not no_browser and text.is_terminal(sys.stdout)
    server = Server(
        Options(
            folders=folders or (() if store else (output.default_folder(),)),
            store=store,
            role=role,  # type: ignore[arg-type]  # one of the choices
            host=host,
            port=port,
            api_key=settings.resolve({}).api_key,
            max_inbox_bytes=max_inbox_mb * 2**20,
            hosts=hosts,
            proxies=proxies,
            user_header=user_header,
            certificate=certificate,
            private_key=private_key,
            on_ready=lambda one: announce(one, is_browser=is_browser),
        )
    )
    try:
        server.config.load()
    except OSError as error:  # only the certificate and its key come from the user
        raise click.ClickException(
            f"--certificate {certificate}, --private-key {private_key or certificate}:"
            f" {error.strerror or error}"
        ) from None
    try:
        server.run()
    except KeyboardInterrupt:  # Ctrl-C; uvicorn raises it after everything is closed
        return
    except SystemExit:
        raise click.ClickException(
            f"cannot listen on {host}:{port}; choose a free port: cirron serve --port 0"
        ) from None


def announce(server: Server, *, is_browser: bool) -> None:
    """Prints the address to open, and how programs send."""
    output.echo(server.link())
    if server.api_key is not None:
        given = settings.resolve({}).api_key
        shown = server.api_key if given is None else "(as in this shell)"
        output.echo(
            "Programs on this machine send with"
            f" CIRRON_API_ENDPOINT={server.address} CIRRON_API_KEY={shown}"
        )
    if server.read_only is not None:
        output.echo(f"Nothing is received: {text.plain(server.read_only, 300)} is read-only")
    if is_browser and server.options.role != "ingest":
        open_browser(server)


def open_browser(server: Server) -> None:
    """Opens a separate link through a file: other users can see the arguments of a browser."""
    import webbrowser

    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) is webbrowser.GenericBrowser:  # in the terminal
        return
    path = server.depot.scratch / f"{clock.random_id()}.html"
    path.write_text(f'<meta http-equiv="refresh" content="0; url={server.link()}">')
    browser.open(path.as_uri())
