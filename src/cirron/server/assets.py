"""The files of the page, as the wheel has them: read once, so that no request leads to a path."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

FIXED = "assets/"  # their names have a hash of what is in them
KINDS = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
    "json": "application/json",
    "woff2": "font/woff2",
}
MISSING = "The page was not built into this cirron: run `make page`, or install a wheel.\n"
USED = (
    "This link was used before, or is no longer valid. Start `cirron serve` again for a new one,"
    " or make one with `cirron keys link`.\n"
)


class File(NamedTuple):
    """A file of the page."""

    content: bytes
    kind: str


def files() -> dict[str, File]:
    """All files, by their paths."""
    found: dict[str, File] = {}

    def visit(folder: Traversable, prefix: str) -> None:
        for one in folder.iterdir():
            if one.is_dir():
                visit(one, f"{prefix}{one.name}/")
            elif (kind := KINDS.get(one.name.rpartition(".")[2])) is not None:
                found[prefix + one.name] = File(one.read_bytes(), kind)

    root = resources.files("cirron.server").joinpath("page")
    if root.is_dir():
        visit(root, "")
    return found
