"""All settings in one table, and where their values come from. Only this module reads the
environment.

A value comes from the call, else the environment, else `[tool.cirron]` in the nearest
`pyproject.toml`, else the default. An invalid value in the call or the environment raises an error
that names the allowed values. An invalid value in a file is ignored with a warning. An API key is
sent only to the endpoint that the user meant.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from cirron import errors, project

if TYPE_CHECKING:
    from collections.abc import Callable

SNAPSHOTS = ("stats", "sampled", "full")
OUTPUTS = ("spool", "log", "stdout", "none")
ACCESS = ("private", "group", "all")
ON, OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")

MAX_FAULTS = 5  # named in the warning about one file

HEADER = re.compile(rb"^[ \t]*\[[ \t]*tool[ \t]*\.[ \t]*cirron[ \t]*\]", re.MULTILINE)
# tomllib takes 36 s for a key of 40,000 parts.
LONG_KEY = re.compile(r"""(?:\.[ \t]*+[\w"'-]++[ \t]*+){100}""")


class Setting(NamedTuple):
    """One row: the name, the check, the default and the description of a setting."""

    name: str
    check: Callable[[str, Any], Any]  # (name for error messages, given) -> value
    default: Any
    doc: str
    is_in_files: bool = True  # whether a pyproject.toml may set it

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"CIRRON_{self.name.upper()}"


def key(what: str, given: Any) -> str:
    """A key that is valid in an HTTP header. The error does not show it."""
    stripped = given.strip() if isinstance(given, str) else ""
    if stripped and stripped.isascii() and stripped.isprintable():
        return stripped
    raise errors.SettingError(
        f"{what} is empty or has characters that are not allowed in a key; copy the key again"
        " into CIRRON_API_KEY, or ci.Cirron(api_key=...)"
    )


def address(what: str, given: Any) -> str:
    """An address without a user name or password, which are not shown in the error either."""
    text = given.strip() if isinstance(given, str) else ""
    try:
        parts = urlsplit(text)
        is_good = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and "@" not in parts.netloc
            # urlsplit() drops line breaks, and other programs read a backslash as a slash.
            and text.isprintable()
            and not {" ", "\\"} & set(text)
        )
    except ValueError:  # a port that is not a number, an invalid IPv6 address
        is_good = False
    if is_good:
        return text.rstrip("/")
    if "@" in text:
        raise errors.SettingError(
            f"{what} contains a user name or password before an '@' (not shown here, and never"
            " sent); use an address such as https://api.cirron.com, and put the key into api_key"
        )
    raise errors.out_of_range(what, given, "it must be an address such as https://api.cirron.com")


def is_encrypted_or_local(endpoint: str) -> bool:
    """Whether a connection to this address cannot be read by others on the network.

    Only exact spellings count as local: the resolver may read others, such as 127.1, 0x7f000001 or
    `localhost.`, differently.
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return True
    import ipaddress

    try:
        host = ipaddress.ip_address(parts.hostname or "")
    except ValueError:  # a name
        return False
    return host in ipaddress.ip_network("127.0.0.0/8") or host == ipaddress.ip_address("::1")


def folder(what: str, given: Any) -> str:
    if isinstance(given, (str, os.PathLike)):
        path = os.fspath(given)
        if isinstance(path, str) and path and "\0" not in path:
            return os.path.expanduser(path)
    raise errors.out_of_range(what, given, "it must be the path of a folder")


def choice(*allowed: str) -> Callable[[str, Any], str]:
    def check(what: str, given: Any) -> str:
        if isinstance(given, str) and given in allowed:
            return str(given)
        raise errors.one_of(what, given, allowed)

    return check


def fraction(what: str, given: Any) -> float:
    value = number(given)
    if value is not None and 0 <= value <= 1:
        return value
    raise errors.out_of_range(what, given, "it must be a number from 0 to 1")


def seconds(what: str, given: Any) -> float:
    value = number(given)
    if value is not None and 0 < value <= 3600:
        return value
    raise errors.out_of_range(what, given, "it must be a number of seconds above 0, at most 3600")


def count(what: str, given: Any) -> int:
    value = number(given)
    if value is not None and value >= 1 and value == int(value):
        return int(value)
    raise errors.out_of_range(what, given, "it must be an integer above 0")


def switch(what: str, given: Any) -> bool:
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given.lower() in ON + OFF:
        return given.lower() in ON
    raise errors.out_of_range(what, given, "use one of True, False; in the environment, 1 or 0")


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
        raise errors.out_of_range(what, given, "'none' cannot be combined with other outputs")
    return tuple(dict.fromkeys(names))


def tags(what: str, given: Any) -> dict[str, str]:
    """Tags by name; a tag without a value has an empty value."""
    if isinstance(given, str):
        given = [part.strip() for part in given.split(",") if part.strip()]
    if isinstance(given, (list, tuple)) and all(isinstance(one, str) for one in given):
        given = dict(one.partition("=")[::2] for one in given)
    if not isinstance(given, Mapping) or not all(
        isinstance(one, str) for pair in given.items() for one in pair
    ):
        rule = "it must be a list or dict of strings, such as ['baseline'] or {'team': 'vision'}"
        raise errors.out_of_range(what, given, rule)
    return dict(given)


def number(given: Any) -> float | None:
    """The number, from a number or a string; None for anything else, including NaN."""
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
    Setting("api_endpoint", address, "https://api.cirron.com", "address of the platform"),
    Setting(
        "allow_insecure",
        switch,
        False,
        "send the key over http:// to other machines too",
        is_in_files=False,
    ),
    Setting("output_dir", folder, "./.cirron", "the folder for spool, black box and snapshots"),
    Setting("access", choice(*ACCESS), "private", "who may read the files: private, group, all"),
    Setting("output", outputs, ("spool",), "local sinks: spool, log, stdout, none, or several"),
    Setting(
        "snapshots",
        choice(*SNAPSHOTS),
        "stats",
        "weight and gradient capture: stats, sampled, full",
    ),
    Setting("sample_rate", fraction, 0.01, "fraction of epochs that save raw tensors"),
    Setting("overhead", fraction, 0.01, "share of a step's time for measuring the device"),
    Setting("loss_marks", switch, True, "mark the value that `backward` is called on as `loss`"),
    Setting("steps_per_epoch", count, 1000, "optimizer steps per epoch if nothing else ends it"),
    Setting("loggers", switch, True, "mark what the program logs to TensorBoard, W&B and others"),
    Setting("flush_interval", seconds, 1.0, "seconds between flushes"),
    Setting("spool_max_bytes", count, 1_000_000_000, "size limit; the oldest files are deleted"),
    Setting("max_pending_records", count, 1_000_000, "limit of records waiting to be flushed"),
    Setting("silence_after", seconds, 60.0, "seconds of silence in a scope until stacks are saved"),
    Setting("exit_timeout", seconds, 5.0, "maximum seconds that the exit of the process may take"),
    Setting("report", switch, True, "print a summary to standard error when the run ends"),
    Setting("tags", tags, {}, "labels for the run: a list, or name=value"),
)
# The environment variables that cirron reads, or sets for child processes.
VARIABLES = (
    *(setting.variable for setting in TABLE),
    *("CIRRON_CONFIG", "CIRRON_RUN_ID", "CIRRON_DEPLOYMENT_ID", "CIRRON_PIPELINE_ID"),
    *("CIRRON_WORKSPACE_ID", "CIRRON_PARENT_RUN", "CIRRON_AUTOSTART"),
)
SIMILAR = 0.85  # how alike two names of variables are if one is a misspelling of the other
BY_NAME: Mapping[str, Setting] = MappingProxyType({setting.name: setting for setting in TABLE})


class Settings:
    """The effective values, one attribute per setting."""

    enabled: bool
    api_key: str | None
    api_endpoint: str
    allow_insecure: bool
    output_dir: str
    access: str
    output: tuple[str, ...]
    snapshots: str
    sample_rate: float
    overhead: float
    loss_marks: bool
    steps_per_epoch: int
    loggers: bool
    flush_interval: float
    spool_max_bytes: int
    max_pending_records: int
    silence_after: float
    exit_timeout: float
    report: bool
    tags: Mapping[str, str]

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)


def check(given: Mapping[str, Any], **called: str) -> dict[str, Any]:
    """The given arguments, checked; arguments that are None are left out.

    `called` maps a setting to the name of its argument, if that is different.
    """
    return {
        name: BY_NAME[name].check(called.get(name, name), value)
        for name, value in given.items()
        if value is not None
    }


class Table(NamedTuple):
    """The content of the `[tool.cirron]` table of a file."""

    file: project.File
    values: Mapping[str, Any]
    faults: Mapping[str, str]  # ignored keys, and why


def resolve(arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """All settings, each from the first source that has it. `arguments` went through `check`."""
    environ = os.environ if environ is None else environ
    table = from_project()
    values: dict[str, Any] = {}
    for setting in TABLE:
        name = setting.name
        if name in arguments:
            values[name] = arguments[name]
        elif environ.get(setting.variable):
            values[name] = setting.check(setting.variable, environ[setting.variable])
    for unknown, similar in unknown_variables(environ).items():
        if similar:  # else it may belong to another program
            project.tell(f"{unknown} has no effect; did you mean {similar}?")
    keep_key_safe(values, table)
    # CIRRON_ENABLED=0 turns profiling off, whatever the code says.
    if environ.get("CIRRON_ENABLED") and not switch("CIRRON_ENABLED", environ["CIRRON_ENABLED"]):
        values["enabled"] = False
    defaults = {setting.name: setting.default for setting in TABLE}
    return Settings({**defaults, **(table.values if table else {}), **values})


def is_in_environment(setting: Setting) -> bool:
    return bool(os.environ.get(setting.variable))


def why_off(values: Settings) -> tuple[str, str] | None:
    """What turned profiling off, and how to undo that; None: it is on."""
    if values.enabled:
        return None
    setting, table = BY_NAME["enabled"], from_project()
    if is_in_environment(setting):
        given = f"{setting.variable}={os.environ[setting.variable]}"
        return f"profiling is off: {given}", f"unset {setting.variable}"
    assert table is not None
    return f"profiling is off: enabled = false in {table.file.path}", "remove that line"


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables that look like settings, but are not; each with what it may mean."""
    environ = os.environ if environ is None else environ
    unknown = {one for one in environ if one.startswith("CIRRON_")}.difference(VARIABLES)
    if not unknown:
        return {}
    import difflib  # slow to import

    return {
        one: next(iter(difflib.get_close_matches(one, VARIABLES, n=1, cutoff=SIMILAR)), "")
        for one in sorted(unknown)
    }


def keep_key_safe(given: dict[str, Any], table: Table | None) -> None:
    """Makes sure that a key is sent only to its own endpoint, and never unencrypted.

    `given` has the values from the call and the environment. A wrong combination there raises an
    error. If a file is involved, the key is dropped, so that nothing is sent. (Sending to the
    default address instead would give a key and records to an endpoint that the file did not name.)
    """
    found: Mapping[str, Any] = {**(table.values if table else {}), **given}
    if found.get("api_key") is None:
        return
    endpoint = found.get("api_endpoint", BY_NAME["api_endpoint"].default)
    is_clear = not is_encrypted_or_local(endpoint) and not given.get("allow_insecure")
    advice = (
        "use https://, or allow it with CIRRON_ALLOW_INSECURE=1 or ci.Cirron(allow_insecure=True)"
    )
    if table is None or {"api_key", "api_endpoint"} <= given.keys():
        if is_clear:
            raise errors.SettingError(
                f"api_endpoint={errors.shown(endpoint)} is not encrypted: others on the network"
                f" could read api_key; {advice}"
            )
        return
    is_named_there = "api_endpoint" not in given
    if is_clear:
        problem = f"would be sent unencrypted to {endpoint}; {advice}"
    elif is_named_there and "api_endpoint" in table.faults:
        problem = "has no endpoint: the api_endpoint in that file is not valid"
    elif (
        is_named_there
        and "api_endpoint" in table.values
        and not (table.file.is_inside or "api_key" not in given)
    ):
        problem = (
            f"was not meant for {endpoint}, which a file outside the project sets; put both"
            " into that file, or set CIRRON_API_ENDPOINT"
        )
    else:
        return
    project.tell(f"{table.file.path}: nothing is sent, because the API key {problem}")
    given["api_key"] = None
    if is_named_there:
        given["api_endpoint"] = BY_NAME["api_endpoint"].default


def from_project() -> Table | None:
    """The nearest `[tool.cirron]` in a trusted `pyproject.toml`, here or in a folder above."""
    for file in project.files("pyproject.toml"):
        if file.fault is None:
            table = read_table(file)
            if table is not None:
                return table
        elif not file.content or HEADER.search(file.content):
            project.tell(
                f"{file.path} is ignored: {file.fault}. You can also set environment variables,"
                " such as CIRRON_OUTPUT_DIR"
            )
    return None


def read_table(file: project.File) -> Table | None:
    """The valid part of a file's `[tool.cirron]`, with a warning about the rest.

    A relative `output_dir` is relative to the file's folder, wherever the program is started.
    """
    if b"cirron" not in file.content:  # most programs then never import a parser
        return None
    import tomllib

    try:
        text = file.content.decode("utf-8")
        if LONG_KEY.search(text):
            raise ValueError("a key has more than 100 parts")
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        project.tell(f"{file.path} could not be read, so its [tool.cirron] is ignored: {error}")
        return None
    tool = content.get("tool")
    given: Any = tool.get("cirron") if isinstance(tool, dict) else None
    if given is None:
        return None
    values: dict[str, Any] = {}
    faults: dict[str, str] = {}
    if not isinstance(given, dict):
        faults[""] = str(
            errors.out_of_range("[tool.cirron]", given, "it must be a table of settings")
        )
        given = {}
    for name, value in given.items():
        try:
            values[name] = in_file(name)("[tool.cirron] " + name, value)
        except errors.SettingError as error:
            faults[name] = str(error)
    if faults:
        more = f"; and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
        text = "; ".join([*faults.values()][:MAX_FAULTS])
        project.tell(f"{file.path} has settings that are ignored: {text}{more}")
    if "output_dir" in values:
        values["output_dir"] = str(file.path.parent / values["output_dir"])
    return Table(file, values, faults)


def in_file(name: str) -> Callable[[str, Any], Any]:
    """The check for a setting in a file; raises if it is unknown or not allowed in a file."""
    setting = BY_NAME.get(name)
    if setting is None:
        known = [setting.name for setting in TABLE if setting.is_in_files]
        raise errors.one_of("[tool.cirron] key", name, known)
    if not setting.is_in_files:
        raise errors.SettingError(
            f"[tool.cirron] {name} is not allowed in a file; set {setting.variable},"
            f" or ci.Cirron({name}=...)"
        )
    return setting.check


def flags(explicit: Any, environ: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """The user's feature flags: `config=` over the platform's `CIRRON_CONFIG`."""
    environ = os.environ if environ is None else environ
    if explicit is not None and not isinstance(explicit, Mapping):
        raise errors.out_of_range("config", explicit, "it must be a dict, such as vars(args)")
    platform: Any = {}
    if given := environ.get("CIRRON_CONFIG"):
        try:
            platform = json.loads(given)
        except (ValueError, RecursionError):
            platform = None
        if not isinstance(platform, dict):
            raise errors.out_of_range("CIRRON_CONFIG", given, "it must be a JSON object")
    return MappingProxyType({**platform, **(explicit or {})})
