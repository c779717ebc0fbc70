"""`cirron doctor`: the installation, the settings and their sources, and problems."""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import click

from cirron import errors, hooks, settings
from cirron._version import __version__
from cirron.cli import output
from cirron.view import text

NEEDED = ("click", "duckdb", "msgspec", "rich", "starlette", "urllib3", "uvicorn")
# Optional packages, and what needs them.
EXTRAS = {
    "numpy": "ci.watch()",
    "safetensors": "reading raw values of snapshots",
    "pandas": ".df()",
    "pyarrow": ".arrow()",
    "polars": ".pl()",
    "obstore": "stores in object storage",
    "opentelemetry-proto": "cirron export otlp",
    "perfetto": "cirron export perfetto",
    "tensorboardX": "cirron export tensorboard",
}


class Problem(NamedTuple):
    """A problem and its fix."""

    what: str
    mend: str


@click.command()
@click.option("--network", is_flag=True, help="Ask the endpoint whether it accepts batches.")
@output.as_json
@click.pass_context
def doctor(ctx: click.Context, network: bool, is_json: bool) -> None:
    """Check the installed packages, and the settings and where they come from.

    Exits with 1 if there is a problem. Nothing is sent without --network.
    """
    problems: list[Problem] = []
    content: dict[str, Any] = {
        "cirron": __version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": {name: _version(name) for name in (*NEEDED, *EXTRAS)},
        "frameworks": frameworks(problems),
        "settings": {},
    }
    try:
        values = settings.resolve({})
        content["settings"] = effective(values, problems)
    except errors.SettingError as error:
        problems.append(Problem(str(error), "correct it, or unset the variable"))
        values = None
    problems += [
        Problem(f"{name} is not installed", f"pip install {name}")
        for name in NEEDED
        if content["packages"][name] is None
    ]
    check_variables(problems)
    if values is not None:
        if off := settings.why_off(values):
            problems.append(Problem(*off))
        check_folder(values, problems)
    if network:
        content["endpoint"] = "not asked" if values is None else check_endpoint(values, problems)
    if is_json:
        output.echo(content | {"problems": [one._asdict() for one in problems]})
    else:
        show(content, problems)
    ctx.exit(1 if problems else 0)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def frameworks(problems: list[Problem]) -> dict[str, str]:
    """The installed frameworks and their versions. Nothing is imported."""
    found = {}
    for name in hooks.PRECEDENCE:
        package = {"sklearn": "scikit-learn"}.get(name, name)
        if not hooks.is_installed(name):
            continue
        release = _version(package) or _version(f"{package}-cpu")
        found[name] = release or "?"
        oldest = hooks.HOOKS[name][-1] if name in hooks.HOOKS else ()
        numbers = tuple(int(one) for one in (release or "").split(".")[:2] if one.isdecimal())
        if numbers and numbers < oldest:
            wanted = ".".join(map(str, oldest))
            problems.append(
                Problem(
                    f"{name} {release} is older than {wanted}, so cirron does not hook it",
                    f'pip install -U "{package}>={wanted}"',
                )
            )
    return found


def effective(values: settings.Settings, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Each setting with its value and where it comes from. The key itself is not shown."""
    table = settings.from_project()
    found = {}
    for setting in settings.TABLE:
        value = getattr(values, setting.name)
        source = "default"
        if settings.is_in_environment(setting):
            source = setting.variable
        elif table is not None and setting.name in table.values:
            source = str(table.file.path)
        if setting.name == "api_key" and value is not None:
            value = "***"
        found[setting.name] = {"value": value, "from": source}
    if table is not None:
        problems += [
            Problem(f"{table.file.path}: {fault}", "correct that line, or remove it")
            for fault in table.faults.values()
        ]
    return found


def check_variables(problems: list[Problem]) -> None:
    """Finds misspelled environment variables."""
    for name, similar in settings.unknown_variables().items():
        hint = f"; did you mean {similar}?" if similar else ""
        problems.append(Problem(f"{name} has no effect{hint}", f"unset {name}"))


def check_folder(values: settings.Settings, problems: list[Problem]) -> None:
    """Checks whether a program started here could write its records."""
    try:
        folder = Path(values.output_dir).absolute()
    except OSError:  # no working directory
        return
    above = folder
    while not above.exists() and above != above.parent:
        above = above.parent
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError:
        problems.append(
            Problem(f"{folder} is not writable", "export CIRRON_OUTPUT_DIR=/path/to/your/folder")
        )
    for name in ("spool", "blackbox"):
        if os.path.islink(folder / name):
            problems.append(
                Problem(f"{folder / name} is a symbolic link, which is not followed", "remove it")
            )


def check_endpoint(values: settings.Settings, problems: list[Problem]) -> str:
    from cirron.ship import backlog

    with output.status("asking the endpoint"):
        trouble = backlog.reach(values.api_endpoint, values.api_key)
    if trouble is None:
        return "answers"
    reason, mend = trouble
    problems.append(Problem(f"{values.api_endpoint} does not accept batches: {reason}", mend))
    return reason


def show(content: dict[str, Any], problems: list[Problem]) -> None:
    output.echo(f"cirron {content['cirron']}, Python {content['python']}")
    for title, found in (("packages", content["packages"]), ("frameworks", content["frameworks"])):
        listed = ", ".join(f"{name} {release}" for name, release in found.items() if release)
        output.echo(f"{title}: {text.plain(listed or 'none', 500)}")
    absent = [name for name in EXTRAS if content["packages"][name] is None]
    for name in absent:
        output.echo(f"not installed: {name}, for {EXTRAS[name]}")
    if content["settings"]:
        output.echo()
        rows = [
            [name, text.plain(written(one["value"])), text.plain(one["from"])]
            for name, one in content["settings"].items()
        ]
        output.table(("setting", "value", "from"), rows)
        output.echo()
    if "endpoint" in content:
        output.echo(f"endpoint: {text.plain(content['endpoint'], 300)}")
    for one in problems:
        output.echo(f"problem: {text.plain(one.what, 500)}")
        output.echo(f"  fix: {text.plain(one.mend, 300)}")
    if not problems:
        output.echo("no problems found")


def written(value: Any) -> str:
    """The value of a setting as the environment would have it."""
    if isinstance(value, dict):
        value = [f"{name}={given}" if given else name for name, given in value.items()]
    if isinstance(value, (list, tuple)):
        value = ",".join(value) or None
    return "-" if value is None else str(value)
