"""Every setting, in one table, and where its value comes from. The only reader of the environment.

A value comes from the call, else the environment, else `[tool.cirron]` in the nearest
`pyproject.toml`, else the default. A bad one raises, and names what is allowed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from cirron import errors, guard

if TYPE_CHECKING:
    from collections.abc import Callable

SNAPSHOTS = ("stats", "sampled", "full")
OUTPUTS = ("spool", "log", "stdout", "none")


class Setting(NamedTuple):
    """One row: what it is called, how it is checked, and what it is when nobody says."""

    name: str
    check: Callable[[str, Any], Any]  # (what to call it in an error, given) -> value
    default: Any
    doc: str

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"CIRRON_{self.name.upper()}"


def key(what: str, given: Any) -> str:
    """A key that can go into a header. The error does not show it."""
    stripped = given.strip() if isinstance(given, str) else ""
    if stripped and stripped.isascii() and stripped.isprintable():
        return stripped
    raise errors.SettingError(
        f"{what} is empty or holds characters that no key has; copy it again"
        " into CIRRON_API_KEY, or ci.Cirron(api_key=...)"
    )


def address(what: str, given: Any) -> str:
    try:
        parts = urlsplit(given) if isinstance(given, str) else urlsplit("")
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return str(given).rstrip("/")
    except ValueError:  # a port that is no number, a broken IPv6 address
        pass
    raise errors.out_of_range(what, given, "it must be an address such as https://api.cirron.com")


def folder(what: str, given: Any) -> str:
    if isinstance(given, (str, os.PathLike)):
        path = os.fspath(given)
        if isinstance(path, str) and path and "\0" not in path:
            return os.path.expanduser(path)
    raise errors.out_of_range(what, given, "it must be the path of a folder")


def snapshots(what: str, given: Any) -> str:
    if given in SNAPSHOTS:
        return str(given)
    raise errors.one_of(what, given, SNAPSHOTS)


def fraction(what: str, given: Any) -> float:
    value = number(given)
    if value is not None and 0 <= value <= 1:
        return value
    raise errors.out_of_range(what, given, "it must be a number from 0 to 1")


def seconds(what: str, given: Any) -> float:
    value = number(given)
    if value is not None and 0 < value <= 3600:
        return value
    raise errors.out_of_range(what, given, "it must be a number of seconds above 0, 3600 at most")


def count(what: str, given: Any) -> int:
    value = number(given)
    if value is not None and value >= 1 and value == int(value):
        return int(value)
    raise errors.out_of_range(what, given, "it must be a whole number above 0")


def switch(what: str, given: Any) -> bool:
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given.lower() in ("0", "1", "true", "false", "on", "off"):
        return given.lower() in ("1", "true", "on")
    raise errors.one_of(what, given, (True, False))


def outputs(what: str, given: Any) -> tuple[str, ...]:
    names = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not names:
        raise errors.out_of_range(
            what, given, f"use one of {', '.join(map(repr, OUTPUTS))} or a list"
        )
    for name in names:
        if name not in OUTPUTS:
            raise errors.one_of(what, given, OUTPUTS)
    if "none" in names and len(names) > 1:
        raise errors.out_of_range(what, given, "'none' stands alone")
    return tuple(dict.fromkeys(names))


def number(given: Any) -> float | None:
    """The number, from a number or from text; None for anything else, NaN included."""
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        return None
    try:
        value = float(given)
    except (ValueError, OverflowError):
        return None
    return value if value - value == 0 else None


TABLE = (
    Setting("enabled", switch, True, "False: record nothing, at next to no cost"),
    Setting("api_key", key, None, "send batches to the platform with this key"),
    Setting("api_endpoint", address, "https://api.cirron.com", "where the platform is"),
    Setting("output_dir", folder, "./.cirron", "the folder for spool, black box and snapshots"),
    Setting("output", outputs, ("spool",), "local sinks: spool, log, stdout, none, or several"),
    Setting("snapshots", snapshots, "stats", "weight and gradient capture: stats, sampled, full"),
    Setting("sample_rate", fraction, 0.01, "fraction of epochs whose raw tensors are kept"),
    Setting("steps_per_epoch", count, 1000, "optimizer steps of an epoch that nothing else bounds"),
    Setting("flush_interval", seconds, 1.0, "seconds between flushes"),
    Setting("spool_max_bytes", count, 1_000_000_000, "past this the oldest spool files go"),
    Setting("max_pending_records", count, 1_000_000, "records that may wait for the flusher"),
    Setting("silence_after", seconds, 60.0, "seconds of silence in a scope before stacks are kept"),
    Setting("exit_timeout", seconds, 5.0, "seconds that the end of the process may take"),
)
TABLE = (
    *TABLE,
    Setting("access", lambda what, given: str(given), "private", "who may read what is written"),
    Setting("allow_insecure", switch, False, "a key over plain http"),
)
BY_NAME: Mapping[str, Setting] = MappingProxyType({setting.name: setting for setting in TABLE})


class Settings:
    """The values in force, one attribute a setting."""

    enabled: bool
    api_key: str | None
    api_endpoint: str
    output_dir: str
    output: tuple[str, ...]
    snapshots: str
    sample_rate: float
    steps_per_epoch: int
    flush_interval: float
    spool_max_bytes: int
    max_pending_records: int
    silence_after: float
    exit_timeout: float
    access: str
    allow_insecure: bool

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)


def check(given: Mapping[str, Any], **called: str) -> dict[str, Any]:
    """The arguments that were given, checked; those that are None are left out.

    `called` says what an argument is called where it was given, if not as the setting.
    """
    return {
        name: BY_NAME[name].check(called.get(name, name), value)
        for name, value in given.items()
        if value is not None
    }


def resolve(arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """All settings, each from the best place that has it. `arguments` went through `check`."""
    environ = os.environ if environ is None else environ
    try:
        project = from_project(Path.cwd())
    except FileNotFoundError:  # the working directory was deleted
        project = {}
    values = {}
    for setting in TABLE:
        name = setting.name
        if name in arguments:
            values[name] = arguments[name]
        elif environ.get(setting.variable):
            values[name] = setting.check(setting.variable, environ[setting.variable])
        elif name in project:
            values[name] = project[name]
        else:
            values[name] = setting.default
    # A switch in the environment turns a run off whatever the code says: that is what it is for.
    if environ.get("CIRRON_ENABLED") and not switch("CIRRON_ENABLED", environ["CIRRON_ENABLED"]):
        values["enabled"] = False
    return Settings(values)


def from_project(start: Path) -> Mapping[str, Any]:
    """The nearest `[tool.cirron]` in a `pyproject.toml` here or above, checked; or nothing."""
    for parent in (start, *start.parents):
        path = parent / "pyproject.toml"
        if os.path.isfile(path):  # Path.is_file() raises in a folder that we may not search
            table = read_project(path)
            if table is not None:
                return table
    return {}


def read_project(path: Path) -> Mapping[str, Any] | None:
    """The `[tool.cirron]` of a file, if it has one; an unreadable file is only warned about.

    A relative `output_dir` is in the file's folder, wherever below it the program is started.
    """
    import tomllib

    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        guard.warn("%s could not be read, so its [tool.cirron] is ignored: %s", path, error)
        return None
    tool = content.get("tool")
    table: Any = tool.get("cirron") if isinstance(tool, dict) else None
    if table is None:
        return None
    if not isinstance(table, dict):
        raise errors.out_of_range(f"{path}: [tool.cirron]", table, "it must be a table of settings")
    for name in table:
        if name not in BY_NAME:
            raise errors.one_of(f"{path}: [tool.cirron] key", name, BY_NAME)
    checked = {
        name: BY_NAME[name].check(f"{path}: [tool.cirron] {name}", value)
        for name, value in table.items()
    }
    if "output_dir" in checked:
        checked["output_dir"] = str(path.parent / checked["output_dir"])
    return checked


def flags(explicit: Any, environ: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """The user's feature flags: `config=` over the platform's `CIRRON_CONFIG`."""
    environ = os.environ if environ is None else environ
    if explicit is not None and not isinstance(explicit, Mapping):
        raise errors.out_of_range("config", explicit, "it must be a dict of feature flags")
    platform: Any = {}
    if given := environ.get("CIRRON_CONFIG"):
        try:
            platform = json.loads(given)
        except ValueError:
            platform = None
        if not isinstance(platform, dict):
            raise errors.out_of_range("CIRRON_CONFIG", given, "it must be a JSON object")
    return MappingProxyType({**platform, **(explicit or {})})
