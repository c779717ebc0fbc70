"""The files of the page, read once at the start: requests never open files."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

FIXED = "assets/"  # names with a hash of the content
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
MISSING = "This copy of cirron has no page: run `make page`, or install a wheel.\n"
USED = (
    "This link has been used, or is no longer valid. Start `cirron serve` again for a new one,"
    " or create one with `cirron keys link`.\n"
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
