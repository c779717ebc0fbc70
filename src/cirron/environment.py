"""`ci.env`: reads an environment variable, else a variable from the nearest trusted `.env` file.

The file is read at each call, so that a change takes effect immediately. The process's environment
is never modified.
"""

from __future__ import annotations

import functools
import json
import os
import re
from typing import TYPE_CHECKING, Any

from cirron import errors, project

if TYPE_CHECKING:
    from pathlib import Path

MAX_LINES = 5  # invalid lines named in a warning

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
COMMENT = re.compile(r"\s\#.*")  # after an unquoted value; `#fff` is not a comment
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "$": "$"}


def env(name: str, default: Any = None) -> Any:
    """Return an environment variable, else its value in the nearest `.env` file, else the default.

    A value that starts with `{` or `[` is parsed as JSON. If it is not valid JSON and the default
    is a string, it is returned as text. Every other value is text.

    >>> ci.env("LIMITS", {"tokens": 256})["tokens"]
    256
    """
    if not isinstance(name, str):
        raise errors.InputError(f"ci.env() needs the name of a variable as a string; got {name!r}")
    value, where = os.environ.get(name), "the environment"
    if value is None:
        value, where = from_file(name)
    if value is None:
        return default
    if not value.startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:  # the value is not shown: it may be a secret
        if isinstance(default, str):  # text is expected, such as a prompt that starts with [INST]
            return value
        raise errors.SettingError(
            f"{name}, from {where}, starts with {value[0]!r} but is not valid JSON: {error}."
            f" Write JSON, such as {name}='[1, 2]', or start the text with another character"
        ) from None


def from_file(name: str) -> tuple[str | None, str]:
    """The variable in the nearest trusted `.env` file, and the path of that file."""
    for file in project.files(".env"):
        if file.fault is None:
            return variables(file.path, file.content).get(name), str(file.path)
        project.tell(f"{file.path} is ignored: {file.fault}")
    return None, ""


@functools.lru_cache(maxsize=16)
def variables(path: Path, content: bytes) -> dict[str, str]:
    """The variables of this version of a file. Cached, so it warns once per version."""
    is_wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))  # as PowerShell's `>` writes it
    text = content.decode("utf-16" if is_wide else "utf-8-sig", "replace")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    found: dict[str, str] = {}
    broken: list[int] = []
    at, number = 0, 1
    while at < len(text):
        line = LINE.match(text, at)
        if line is not None:
            found[line["name"]] = value_of(line)
        elif not BLANK.match(text, at):
            broken.append(number)
        end = line or ANY.match(text, at)
        assert end is not None
        number += text.count("\n", at, end.end())
        at = end.end()
    if broken:
        numbers = ", ".join(map(str, broken[:MAX_LINES]))
        more = f" and {len(broken) - MAX_LINES} more" if len(broken) > MAX_LINES else ""
        is_one = len(broken) == 1
        project.tell(
            f"{path}: line {numbers} is ignored, because it is not NAME=value"
            if is_one
            else f"{path}: lines {numbers}{more} are ignored, because they are not NAME=value"
        )
    return found


def value_of(line: re.Match[str]) -> str:
    single, double = line["single"], line["double"]
    if single is not None:
        return single
    if double is not None:
        return ESCAPE.sub(lambda escape: ESCAPED.get(escape[1], escape[0]), double)
    return COMMENT.sub("", line["plain"]).strip()
