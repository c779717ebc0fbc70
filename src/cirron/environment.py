"""`ci.env`: a variable of the environment, else of the nearest `.env` file.

The file is read anew when it has changed, and the process's environment is never written to.
"""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

from cirron import errors, guard

LINE = re.compile(
    r"""
    [^\S\n]* (?:export[^\S\n]+)? (?P<name>[^\s=\#'"]+) [^\S\n]* =
    (?:
        [^\S\n]* (?: '(?P<single>[^']*)' | "(?P<double>(?:[^"\\]|\\.)*)" )
        [^\S\n]* (?:\#[^\n]*)?
      | (?! [^\S\n]*['"] ) (?P<plain>[^\n]*)
    )
    (?:\n|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
BLANK = re.compile(r"[^\S\n]*(?:\#[^\n]*)?(?:\n|\Z)")
ANY = re.compile(r"[^\n]*(?:\n|\Z)")
COMMENT = re.compile(r"\s\#.*")  # after a value without quotes: `#fff` is no comment
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "$": "$"}


def env(name: str, default: Any = None) -> Any:
    """A variable of the environment, or of the nearest `.env` file, or the default.

    A value that starts with `{` or `[` is read as JSON; every other one is the text, and so is one
    that is no JSON where the default is a text.

    >>> ci.env("LIMITS", {"tokens": 256})["tokens"]
    256
    """
    if not isinstance(name, str):
        raise errors.InputError(f"ci.env() needs the name of a variable; got {name!r}")
    value, where = os.environ.get(name), "the environment"
    if value is None:
        path = find()
        value, where = (None, "") if path is None else (variables(path).get(name), str(path))
    if value is None:
        return default
    if not value.startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:  # the value may be a secret: it is not shown
        if isinstance(default, str):  # a text is what is wanted: a prompt that starts with [INST]
            return value
        raise errors.SettingError(
            f"{name}, from {where}, starts with {value[0]!r} and is not JSON: {error}."
            f" Write JSON, such as {name}='[1, 2]', or begin the text with another character"
        ) from None


def find() -> Path | None:
    """The nearest `.env` file: in the working directory, or in a folder above."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was deleted
        return None
    paths = (folder / ".env" for folder in (here, *here.parents))
    return next((path for path in paths if os.path.isfile(path)), None)


def variables(path: Path) -> dict[str, str]:
    """The variables of a file; {} if it cannot be read."""
    try:
        found = path.stat()
        return read(path, found.st_mtime_ns, found.st_size)
    except OSError as error:
        tell(f"{path} could not be read: {error.strerror}")
        return {}


@functools.lru_cache(maxsize=16)
def read(path: Path, modified_ns: int, size_bytes: int) -> dict[str, str]:
    """The variables of this version of a file. Cached, so what is wrong with it is said once."""
    content = path.read_bytes()
    is_wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # as PowerShell's `>` writes it
    text = content.decode("utf-16" if is_wide else "utf-8-sig", "replace")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        line = LINE.match(text, at)
        if line is not None:
            found[line["name"]] = value_of(line)
        elif not BLANK.match(text, at):
            number = text.count("\n", 0, at) + 1
            tell(f"{path}, line {number}, is not NAME=value, and is ignored")
        end = line or ANY.match(text, at)
        assert end is not None
        at = end.end()
    return found


def value_of(line: re.Match[str]) -> str:
    single, double = line["single"], line["double"]
    if single is not None:
        return single
    if double is not None:
        return ESCAPE.sub(lambda escape: ESCAPED.get(escape[1], escape[0]), double)
    return COMMENT.sub("", line["plain"]).strip()


@functools.lru_cache(maxsize=64)
def tell(message: str) -> None:
    """Warns once of the same thing."""
    guard.warn("%s", message)
