"""Data flows one way: what each module may import, and who may touch what."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

import cirron

SOURCE = Path(cirron.__file__).parent


class Import(NamedTuple):
    """An import of a module of ours."""

    name: str  # below `cirron`, such as "record.hot"
    is_for_types: bool


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(path: Path) -> list[Import]:
    """The modules of ours that a file imports, also inside of functions."""
    found: list[Import] = []

    def visit(node: ast.AST, for_types: bool) -> None:
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            base = node.module or ""
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names = [n if n.removeprefix("cirron.") in MODULES else base for n in inner]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name == "cirron" or name.startswith("cirron."):
                found.append(Import(name.removeprefix("cirron").lstrip("."), for_types))
        for child in ast.iter_child_nodes(node):
            visit(child, for_types or is_type_checking(node))

    visit(ast.parse(path.read_text("utf-8")), False)
    return found


def is_in(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


ALL = tuple(MODULES)


def besides(*allowed: str) -> tuple[str, ...]:
    """All modules but these, and but the packages that they are in."""
    return tuple(name for name in ALL if not any(is_in(one, (name,)) for one in allowed))


# Who must not import whom. Imports for types alone do not count.
EDGES = [
    # A stage knows the stage before it and `wire`, never the one after.
    (("record",), ("ship", "runs", "view", "cli", "session", "hooks", "snapshot", "files")),
    (("record.clock",), ALL),
    (("record.value", "record.readers"), besides("record.value", "record.readers")),
    (("record.attrs",), besides("record.value")),
    (("wire", "errors", "_version", "guard", "captures", "system"), ALL),
    (("files",), besides("system")),
    (("project",), besides("guard")),
    (("settings", "environment"), besides("errors", "project")),
    (("ship",), ("session", "runs", "cli", "hooks", "snapshot", "settings", "project")),
    (("ship.threads",), besides("guard", "record.clock")),
    (("runs", "view"), ("session", "ship", "cli", "hooks", "record.hot")),
    (("runs",), ("view",)),
    (("hooks",), ("session", "ship", "runs", "view", "settings", "project", "files")),
    (
        tuple(f"session.{name}" for name in ("identity", "lifecycle", "program", "git", "masking")),
        ("session.compose", "ship", "runs", "view"),
    ),
    (("session.compose",), ("runs", "view", "cli")),
    (("snapshot",), ("session", "ship", "runs", "view", "hooks", "settings", "project")),
    (("cli",), ("session", "ship", "record.hot")),
]


@pytest.mark.parametrize(("rooms", "forbidden"), EDGES, ids=lambda rooms: rooms[0])
def test_data_flows_one_way(rooms: tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    """No stage imports one that comes after it; `session` alone puts them together."""
    wrong = [
        f"{name} imports {found.name}"
        for name, path in MODULES.items()
        if is_in(name, rooms)
        for found in imports(path)
        if not found.is_for_types and is_in(found.name, forbidden)
    ]

    assert [] == wrong


def test_views_are_for_the_console_alone() -> None:
    """Of the background half, only the console sink knows how a line looks."""
    users = {
        name
        for name, path in MODULES.items()
        if is_in(name, ("ship",))
        for found in imports(path)
        if is_in(found.name, ("view",))
    }

    assert {"ship.sinks.console"} == users


def test_the_check_can_fail(tmp_path: Path) -> None:
    """The reader of imports sees each way of writing one, and which are for types."""
    path = tmp_path / "module.py"
    path.write_text(
        "from cirron import wire\n"
        "import cirron.ship.sinks.spool\n"
        "if TYPE_CHECKING:\n"
        "    from cirron.session import Cirron\n"
        "def later():\n"
        "    from cirron.record import hot\n"
    )

    assert [
        ("wire", False),
        ("ship.sinks.spool", False),
        ("session", True),
        ("record.hot", False),
    ] == imports(path)


def users_of(pattern: set[str]) -> set[str]:
    """The modules that use one of these dotted names, or call one of these functions."""
    return {
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in pattern)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in pattern)
    }


def callers_of(methods: set[str]) -> set[str]:
    """The modules that use a method of one of these names, of whatever object."""
    return {
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in methods
    }


def test_who_reads_the_environment() -> None:
    """The environment is read by settings, by the session that hands it on, and by `ci.env`."""
    assert {"settings", "session.compose", "environment"} == users_of({"os.environ", "os.getenv"})


def test_who_reads_a_clock() -> None:
    """Only the clock module reads time and makes ids; its own CPU time is a thread's to read."""
    clocks = {
        "time.time",
        "time.time_ns",
        "time.monotonic",
        "time.monotonic_ns",
        "time.perf_counter",
        "time.perf_counter_ns",
        "datetime.now",
        "os.urandom",
        "uuid.uuid4",
    }
    cpu_clocks = {
        f"time.{what}_time{unit}" for what in ("process", "thread") for unit in ("", "_ns")
    }

    assert {"record.clock"} == users_of(clocks)
    assert {"record.clock", "ship.flusher", "session.compose"} == users_of(cpu_clocks)


def test_who_opens_files() -> None:
    """Files are opened in few places, and never on the user's thread but for its settings."""
    openers = {
        "files",
        "system",
        "project",  # on the user's thread: pyproject.toml and .env
        "runs.untrusted",
        "ship.outbox",
        "ship.sinks.http",
        "snapshot.blobs",
    }

    assert openers == users_of({"open", "io.open", "os.open", "os.fdopen"})
    assert {"snapshot.host"} == callers_of({"read_text", "read_bytes", "iterdir", "rglob"})


def test_who_changes_files() -> None:
    """Files are made, replaced and removed by `files`, and by who has a form of file of its own."""
    changes = ("mkdir", "makedirs", "unlink", "remove", "rmdir", "replace", "rename", "chmod")
    found = users_of({f"os.{name}" for name in changes} | {"shutil.rmtree", "shutil.move"})
    methods = callers_of({"unlink", "rmdir", "mkdir", "touch", "write_text", "write_bytes"})

    assert {"files", "snapshot.blobs", "ship.outbox"} == found | methods


def test_who_opens_sockets() -> None:
    """Only the connection of the HTTP sink opens a socket."""
    assert {"ship.connection"} == users_of({"socket.socket", "socket.create_connection"})


def test_threads_of_the_background_half_are_real() -> None:
    """In `ship/` only `threads` makes threads and locks and sleeps: gevent replaces all others."""
    made = {f"threading.{name}" for name in ("Thread", "Lock", "RLock", "Event", "Condition")}
    users = users_of({*made, "time.sleep", "queue.Queue", "queue.SimpleQueue"})

    assert {"ship.threads"} == {name for name in users if is_in(name, ("ship",))}


def test_who_changes_the_hot_path() -> None:
    """Only the session and the test kit set where records go."""
    assert {"session", "session.compose", "testing"} == users_of({"hot.attach"})


def test_who_catches_everything() -> None:
    """A broad except is in few places, each of which says what it protects."""
    for name, path in MODULES.items():
        lines = path.read_text("utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.strip().startswith(("except Exception", "except BaseException", "except:")):
                assert "#" in line, f"{name}:{number + 1} does not say what it protects"
