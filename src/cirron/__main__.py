"""`python -m cirron`: the command line, where the `cirron` script is not on the path."""

from __future__ import annotations

from cirron.cli import main

if __name__ == "__main__":
    main(prog_name="python -m cirron")
