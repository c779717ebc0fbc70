"""`cirron keys`: manages the keys that allow writing to or reading from a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cirron import errors
from cirron.cli import output
from cirron.view import tables, text

if TYPE_CHECKING:
    from cirron.server.depot import Depot

store_option = click.option("--store", metavar="URL", help="The store that is served.")


def depot(folder: str | None, store: str | None, *, make: bool = False) -> Depot:
    """The data of the server for this folder or store."""
    from cirron.server.depot import Depot
    from cirron.server.process import depot_of

    found = Depot(store or depot_of(output.default_folder(folder), make=make))
    is_given = store is not None or folder is not None
    if is_given and not make and not (found.objects.list("secret") or found.objects.list("keys/")):
        raise errors.SettingError(
            f"{found.where!r} has no keys, and no server has used it: name the store that is"
            " served with --store, or its folder with --dir"
        )
    return found


@click.group()
def keys() -> None:
    """Create, list and revoke the keys of a server."""


@keys.command()
@click.argument("name")
@click.option("--scope", type=click.Choice(["write", "read"]), default="write", show_default=True)
@click.option("--rate", type=click.IntRange(1), help="Maximum requests per second.")
@output.in_folder
@store_option
def create(name: str, scope: Any, rate: int | None, folder: str | None, store: str | None) -> None:
    """Create a key and print it. It is not shown again."""
    from cirron.server import keys as server_keys

    output.echo(server_keys.create(depot(folder, store, make=True), name, [scope], rate))


@keys.command(name="list")
@output.in_folder
@store_option
@output.as_json
def list_(folder: str | None, store: str | None, is_json: bool) -> None:
    """List the keys, without their secrets."""
    from cirron.server import keys as server_keys

    found = server_keys.every(depot(folder, store))
    if is_json:
        names = ("id", "name", "scopes", "created_ns", "rate")
        output.echo({"keys": [{n: getattr(one, n) for n in names} for one in found]})
        return
    rows = [
        (
            one.id,
            text.plain(one.name),
            ", ".join(one.scopes),
            str(one.rate),
            tables.moment(one.created_ns, "%Y-%m-%d %H:%M"),
        )
        for one in found
    ]
    output.table(("id", "name", "scope", "rate", "created"), rows)


@keys.command()
@click.argument("key_id")
@output.in_folder
@store_option
def revoke(key_id: str, folder: str | None, store: str | None) -> None:
    """Revoke a key by its id, and log out everyone who logged in with it."""
    from cirron.server import keys as server_keys

    server_keys.revoke(depot(folder, store), key_id)


@keys.command()
@click.argument("key_id")
@click.argument("address")
@output.in_folder
@store_option
def link(key_id: str, address: str, folder: str | None, store: str | None) -> None:
    """Print a link that logs in a browser once.

    KEY_ID is a key with the scope read; ADDRESS is the server's, such as https://runs.example.
    """
    from cirron import settings
    from cirron.server import keys as server_keys
    from cirron.server import login

    kept = depot(folder, store)
    readers = [one.id for one in server_keys.every(kept) if "read" in one.scopes]
    if key_id not in readers:
        raise errors.one_of("key", key_id, readers)
    where = settings.address("ADDRESS", address)
    output.echo(f"{where}/?token={login.new_link(kept, key_id)}")
