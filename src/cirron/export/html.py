"""A run as one HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron import export
from cirron.view import html

if TYPE_CHECKING:
    from cirron.runs.opened import Run


def write(run: Run, path: str) -> None:
    """Writes one `.html` file."""
    page = html.page(run)
    with export.new_file(path) as file:
        file.write(page.encode())
