"""`run.show()`: the page in a notebook cell, from a server in this process.

The server uses a free port on the loopback address and ends with the process. The cell shows a
frame with a link that works once; each rendering gets a new one.
"""

from __future__ import annotations

import atexit
import tempfile
import threading
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

from cirron import errors
from cirron.server.process import Options, Server

if TYPE_CHECKING:
    from cirron.runs.opened import Run

START_S = 30.0


class Shown:
    """The page of a run: a frame in a notebook, and a `link` anywhere else."""

    def __init__(self, run: Run, height: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cirron-")
        self._height = height
        self._at = f"#/run/{quote(run.id, safe='')}"
        self._server = Server(
            Options(
                folders=[str(one) for one in run.where],
                store=self._folder.name,
                role="page",
                is_framed=True,
            )
        )
        self._thread = threading.Thread(target=self._server.run, name="cirron-page", daemon=True)
        self._thread.start()
        # DuckDB must not run while the interpreter shuts down.
        atexit.register(self.close)
        if not self._server.is_ready.wait(START_S):
            raise errors.SettingError("the page's server could not be started on 127.0.0.1")

    @property
    def link(self) -> str:
        """An address that logs in one browser on this machine."""
        return self._server.link() + self._at

    def close(self) -> None:
        """Ends the server. Open frames keep what they show."""
        atexit.unregister(self.close)
        self._server.should_exit = True
        self._thread.join(START_S)
        self._folder.cleanup()

    def __repr__(self) -> str:
        return f"<the page of a run, served at {self._server.address}; open its .link in a browser>"

    def _repr_html_(self) -> str:
        return (
            f'<iframe src="{escape(self.link)}" style="width:100%;height:{self._height}px;'
            'border:0" referrerpolicy="no-referrer"></iframe>'
        )
