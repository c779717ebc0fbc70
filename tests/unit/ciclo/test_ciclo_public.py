"""The public list, the house rules of the package, and its documentation."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import ciclo

SOURCE = Path(ciclo.__file__).parent
ROOT = Path(__file__).parents[3]
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")
}
PAGES = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("ciclo*.md"))


def imported(path: Path) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_the_list_is_what_is_there() -> None:
    """Each name of the list is there, and nothing public is missing from it."""
    assert set(ciclo.__all__) <= set(dir(ciclo))
    for name in ciclo.__all__:
        assert getattr(ciclo, name) is not None
    modules = {name.partition(".")[0] for name in MODULES} | {"LAZY", "SUBMODULES", "TYPE_CHECKING"}
    public = {name for name in vars(ciclo) if not name.startswith("_")} - modules

    assert public <= set(ciclo.__all__)
    with pytest.raises(AttributeError, match="module 'ciclo' has no attribute 'nothing'"):
        _ = ciclo.nothing  # type: ignore[attr-defined]


def test_cirron_is_behind_the_seam() -> None:
    """Only `_seam` imports cirron, and cirron never imports ciclo."""
    assert {"_seam"} == {name for name, path in MODULES.items() if "cirron" in imported(path)}
    cirron = SOURCE.parent / "cirron"
    assert [] == [path for path in cirron.rglob("*.py") if "ciclo" in imported(path)]


@pytest.mark.parametrize("framework", ["jax", "torch", "numpy", "flax", "equinox"])
def test_frameworks_are_in_their_rooms(framework: str) -> None:
    """Only `torch/` imports torch, only `jax/` JAX and what goes with it; the rest is plain."""
    room = "torch" if framework == "torch" else "jax"
    users = {name.partition(".")[0] for name, p in MODULES.items() if framework in imported(p)}

    assert {room} == users


def test_who_reads_a_clock() -> None:
    """Only `elapsed` does."""
    assert {"elapsed"} == {name for name, path in MODULES.items() if "time" in imported(path)}


def test_who_catches_everything() -> None:
    """A broad except says what it protects."""
    for name, path in MODULES.items():
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if line.strip().startswith(("except Exception", "except BaseException", "except:")):
                after = path.read_text("utf-8").splitlines()[number : number + 3]
                assert "#" in line or any("raise" in text for text in after), f"{name}:{number}"


@pytest.mark.parametrize("name", [name for name in ciclo.__all__ if name != "__version__"])
def test_every_public_name_is_documented(name: str) -> None:
    """Each is on a page; each callable says what it does."""
    assert f"`{name}" in PAGES or f"ciclo.{name}" in PAGES
    value = getattr(ciclo, name)
    if callable(value):
        assert inspect.getdoc(value)
