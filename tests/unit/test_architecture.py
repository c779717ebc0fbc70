"""Data flows one way: what each module may import, and who may touch what."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, NamedTuple

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
    (("record.value", "record.readers"), besides("record.value", "record.readers", "guard")),
    (("record.attrs",), besides("record.value", "guard")),
    (("wire", "errors", "_version", "guard", "captures", "system"), ALL),
    (("files",), besides("system")),
    (("project",), besides("guard")),
    (("settings", "environment"), besides("errors", "project")),
    (("ship",), ("session", "runs", "cli", "hooks", "snapshot", "settings", "project")),
    (("ship.threads",), besides("guard", "record.clock")),
    (("runs", "view"), ("session", "ship", "cli", "hooks", "record.hot")),
    # How a run and its parts look in a notebook is the one thing that they ask of a later stage.
    (
        tuple(
            name
            for name in ALL
            if is_in(name, ("runs",))
            and name not in ("runs", "runs.opened", "runs.relation", "runs.tree")
        ),
        ("view",),
    ),
    # The server reads runs and writes a store; a notebook's page is what a run asks of it.
    (("server",), ("session", "ship", "cli", "hooks", "record.hot", "snapshot")),
    (
        tuple(
            name
            for name in ALL
            if name != "runs" and not is_in(name, ("server", "cli", "runs.opened"))
        ),
        ("server",),
    ),
    (("export",), ("session", "ship", "cli", "hooks", "record.hot")),
    (("view",), ("export",)),
    (("hooks",), ("session", "ship", "runs", "view", "settings", "project", "files")),
    (
        tuple(f"session.{name}" for name in ("identity", "lifecycle", "program", "git", "masking")),
        ("session.compose", "ship", "runs", "view"),
    ),
    (("session.compose",), ("runs", "view", "cli")),
    (("snapshot",), ("session", "ship", "runs", "view", "hooks", "settings", "project")),
    (
        ("cli",),
        (
            "session",
            "record.hot",
            *(name for name in ALL if name.startswith("ship.") and name != "ship.backlog"),
        ),
    ),
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
    """The environment is read by settings, by the session that hands it on, and by `ci.env`.

    `cirron run` gives it to the program, where `autostart` finds what it has put there.
    """
    readers = {"settings", "session.compose", "environment", "autostart", "cli.run"}

    assert readers == users_of({"os.environ", "os.getenv"})


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
        "export",
        "files",
        "system",
        "project",  # on the user's thread: pyproject.toml and .env
        "runs.objects",
        "runs.scan",
        "runs.untrusted",
        "server.depot",
        "server.ingest",
        "ship.sinks.http",
        "snapshot.records",
    }

    assert openers == users_of({"open", "io.open", "os.open", "os.fdopen"})
    # Our questions and our page; dumps of PyTorch's, in a folder given.
    own = {"runs.engine", "server.assets", "verdict.why"}
    assert {"snapshot.host", *own} == callers_of({"read_text", "read_bytes", "iterdir", "rglob"})


def test_who_changes_files() -> None:
    """Files are made, replaced and removed by `files`, and by who has a form of file of its own."""
    changes = ("mkdir", "makedirs", "unlink", "remove", "rmdir", "replace", "rename", "chmod")
    found = users_of({f"os.{name}" for name in changes} | {"shutil.rmtree", "shutil.move"})
    methods = callers_of({"unlink", "rmdir", "mkdir", "touch", "write_text", "write_bytes"})

    stores = {"runs.objects", "runs.store", "runs.scan", "runs.place"}
    stores |= {"server.depot", "server.compactor"}
    own = {"export", "files", "snapshot.records", "ship.outbox", "cli.clear", "cli.serve"}
    assert own | stores == found | methods


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


def is_foreign(node: Any, names: set[str]) -> bool:
    """Whether an expression is one of these names, or something that is found in one of them."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        if function in {"getattr", "vars"}:
            return is_foreign(node.args[0], names)
        return function in {"importlib.import_module", "sys.modules.get", "__import__"}
    if isinstance(node, ast.IfExp):
        return is_foreign(node.body, names) or is_foreign(node.orelse, names)
    is_part = isinstance(node, (ast.Attribute, ast.Subscript, ast.NamedExpr))
    return is_part and is_foreign(node.value, names)


def foreign_changes(path: Path) -> list[str]:
    """Where a file sets an attribute of something that it has from a module of others."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes: list[Any] = list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            is_ours = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cirron")
            names |= {
                (alias.asname or alias.name).partition(".")[0]
                for alias in node.names
                if not is_ours and not alias.name.startswith("cirron")
            }
    count = -1
    while count != len(names):  # until no more names are given to what is foreign
        count = len(names)
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                target: Any = node.targets[0] if isinstance(node, ast.Assign) else node.target
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for one, given in pairs:
                    if isinstance(one, ast.Name) and given and is_foreign(given, names):
                        names.add(one.id)
    return [
        f"{path.stem}: {ast.unparse(node)}"
        for node in nodes
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        and (isinstance(node, ast.Attribute) or ast.unparse(node).startswith("vars("))
        and is_foreign(node.value, names)
    ]


def test_who_changes_what_is_foreign() -> None:
    """Of the hooks, only `patch` sets attributes of the modules and classes of others."""
    setters = {"setattr", "delattr", "object.__setattr__", "type.__setattr__"}
    hooks = {name: path for name, path in MODULES.items() if is_in(name, ("hooks",))}

    assert {
        "hooks.patch",
        "hooks.sklearn",  # of classes that it has made, and the class of an estimator
    } == users_of(setters) & hooks.keys()
    changes = [one for path in hooks.values() for one in foreign_changes(path)]
    assert [] == changes


def test_the_check_of_changes_can_fail(tmp_path: Path) -> None:
    """It knows what is foreign by any name, wherever it is imported, and what is not."""
    path = tmp_path / "module.py"
    path.write_text(
        "import sys\n"
        "from torch import nn\n"
        "from cirron.record import hot\n"
        "def install(self, span):\n"
        "    import keras.models as models\n"
        "    kind, name = getattr(models, 'Model'), 'fit'\n"
        "    kind.fit, self.fit = span, kind.fit\n"
        "    nn.Module.__call__ += 1\n"
        "    (module := sys.modules['jax']).jit = None\n"
        "    del module.grad\n"
        "    vars(nn.Module)['forward'] = None\n"
        "    span.name = hot.name = nn.Linear().bias = nn\n"
    )

    assert [
        "module: (module := sys.modules['jax']).jit",
        "module: kind.fit",
        "module: module.grad",
        "module: nn.Module.__call__",
        "module: vars(nn.Module)['forward']",
    ] == sorted(foreign_changes(path))


def test_who_catches_everything() -> None:
    """A broad except is in few places, each of which says what it protects."""
    for name, path in MODULES.items():
        lines = path.read_text("utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.strip().startswith(("except Exception", "except BaseException", "except:")):
                assert "#" in line, f"{name}:{number + 1} does not say what it protects"
