"""Replacing attributes of others and waiting for their imports, with modules made for the test."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from cirron import guard
from cirron.hooks.patch import ImportWatch, Patches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Base:
    def inherited(self) -> str:
        return "inherited"


class Theirs(Base):
    @staticmethod
    def static() -> str:
        return "static"

    @property
    def known(self) -> str:
        return "known"


def test_everything_is_put_back() -> None:
    """After `undo` the very objects that were there before are there again."""
    before = dict(vars(Theirs))
    patches = Patches()
    for name in ("static", "known", "inherited", "new"):
        patches.set(Theirs, name, name)

    assert "new" == Theirs.new  # type: ignore[attr-defined]

    patches.undo()

    assert before == dict(vars(Theirs))
    assert "inherited" == Theirs().inherited()


def test_an_attribute_that_was_replaced_twice() -> None:
    """What was there first comes back."""
    before = dict(vars(Theirs))
    patches = Patches()
    patches.set(Theirs, "known", 1)
    patches.set(Theirs, "known", 2)
    patches.undo()

    assert before == dict(vars(Theirs))


def test_what_somebody_else_has_changed_is_theirs() -> None:
    """An attribute that was replaced again since is left alone."""
    module: Any = ModuleType("theirs")
    module.one, module.two = "one", "two"
    patches = Patches()
    patches.set(module, "one", "our one")
    patches.set(module, "two", "our two")
    module.one = "another"
    patches.undo()

    assert ("another", "two") == (module.one, module.two)


def test_undo_twice() -> None:
    """A second `undo` does nothing, also to what was set since."""
    module: Any = ModuleType("theirs")
    patches = Patches()
    patches.set(module, "one", 1)
    patches.undo()
    module.one = 1
    patches.undo()

    assert 1 == module.one


# -- imports ---------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that nobody has imported."""
    folder = tmp_path / "made_for_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("done = True\n")
    (folder / "inner.py").write_text("from made_for_a_test import done\n")
    (folder / "broken.py").write_text("raise ZeroDivisionError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "made_for_a_test"
    for name in [name for name in sys.modules if name.startswith("made_for_a_test")]:
        del sys.modules[name]


@pytest.fixture
def watch() -> Iterator[ImportWatch]:
    before = list(sys.meta_path)
    found = ImportWatch()
    yield found
    found.undo()
    assert before == sys.meta_path


def test_a_module_that_is_there(watch: ImportWatch) -> None:
    """The callback comes at once, and nothing is watched."""
    called = []
    watch.when_imported("sys", lambda: called.append("sys"))

    assert ["sys"] == called
    assert watch not in sys.meta_path


def test_a_module_that_comes_later(watch: ImportWatch, package: str) -> None:
    """The callback comes once, after the module has run; the module shows its own loader."""
    called: list[bool] = []
    watch.when_imported(package, lambda: called.append(sys.modules[package].done))
    assert [] == called

    module = importlib.import_module(package)
    importlib.reload(module)

    assert [True] == called
    assert module.__spec__ is not None
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader
    assert type(module.__spec__.loader) is importlib.machinery.SourceFileLoader


def test_a_module_inside_a_package(watch: ImportWatch, package: str) -> None:
    """A submodule is watched without its package, and importing the package is not importing it."""
    called: list[str] = []
    watch.when_imported(f"{package}.inner", lambda: called.append("inner"))
    importlib.import_module(package)
    assert [] == called

    importlib.import_module(f"{package}.inner")

    assert ["inner"] == called


def test_asking_for_a_spec_is_not_importing(watch: ImportWatch, package: str) -> None:
    """`find_spec`, with which people look whether something is installed, takes nothing away."""
    called: list[str] = []
    watch.when_imported(package, lambda: called.append(package))
    assert importlib.util.find_spec(package) is not None
    assert [] == called

    importlib.import_module(package)

    assert [package] == called


def test_a_spec_is_as_useful_as_without_us(watch: ImportWatch, package: str) -> None:
    """What people ask of a spec's loader before the import, the real one answers."""
    watch.when_imported(package, lambda: None)
    spec: Any = importlib.util.find_spec(package)

    assert spec.origin == spec.loader.get_filename(package)
    assert spec.loader.is_package(package)


def test_two_that_watch(package: str) -> None:
    """Two watches, each of which asks the other, both get their call."""
    called: list[int] = []
    watches = [ImportWatch(), ImportWatch()]
    for number, watch in enumerate(watches):
        watch.when_imported(package, partial(called.append, number))
    try:
        importlib.import_module(package)
    finally:
        for watch in watches:
            watch.undo()

    assert [0, 1] == sorted(called)


def test_a_finder_that_goes_first(watch: ImportWatch, package: str, tmp_path: Path) -> None:
    """A watched module may put a finder first that asks no others. Comet's does."""
    (tmp_path / package / "comet.py").write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "class Finder:\n    find_spec = staticmethod(PathFinder.find_spec)\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    called: list[str] = []
    for name in ("comet", "inner"):
        watch.when_imported(f"{package}.{name}", partial(called.append, name))
    comet = importlib.import_module(f"{package}.comet")
    try:
        importlib.import_module(f"{package}.inner")
    finally:
        sys.meta_path.remove(comet.Finder)

    assert ["comet", "inner"] == called


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*exec_module:ImportWarning")
def test_a_loader_of_the_old_kind(watch: ImportWatch, package: str) -> None:
    """A loader that has only `load_module`, such as MLflow's, loads the module."""

    class Loader:
        def __init__(self, loader: Any) -> None:
            self.load_module = loader.load_module

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any, target: Any = None) -> Any:
            spec: Any = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = Loader(spec.loader)
            return spec

    called: list[bool] = []
    sys.meta_path.insert(0, Finder)
    try:
        watch.when_imported(package, lambda: called.append(sys.modules[package].done))
        module = importlib.import_module(package)
    finally:
        sys.meta_path.remove(Finder)

    assert [True] == called
    assert module is sys.modules[package]


def test_a_module_that_fails_to_import(watch: ImportWatch, package: str) -> None:
    """Its own error is what the program sees, and the callback does not come."""
    called: list[str] = []
    watch.when_imported(f"{package}.broken", lambda: called.append("broken"))

    with pytest.raises(ZeroDivisionError):
        importlib.import_module(f"{package}.broken")
    assert [] == called


def test_a_module_that_is_not_there(watch: ImportWatch) -> None:
    """A module that nobody finds is as missing as without us."""
    watch.when_imported("made_for_no_test", lambda: None)

    with pytest.raises(ModuleNotFoundError, match="made_for_no_test"):
        importlib.import_module("made_for_no_test")


def test_a_callback_that_fails(
    watch: ImportWatch, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import works all the same, and the mistake is counted."""
    monkeypatch.setattr(guard, "strict", False)
    watch.when_imported(package, lambda: 1 / 0)  # type: ignore[arg-type]
    module = importlib.import_module(package)

    assert module.done
    assert [f"hooks for {package}: ZeroDivisionError"] == list(guard.errors)


def test_undo_stops_watching(watch: ImportWatch, package: str) -> None:
    """After `undo` an import calls nobody."""
    called: list[str] = []
    watch.when_imported(package, lambda: called.append(package))
    watch.undo()
    importlib.import_module(package)

    assert [] == called
    assert watch not in sys.meta_path


def test_one_watch_waits_for_many_modules(watch: ImportWatch, package: str) -> None:
    """One watch waits for many, and is in the import system once."""
    called: list[str] = []
    for name in (package, f"{package}.inner"):
        watch.when_imported(name, partial(called.append, name))
    assert 1 == sys.meta_path.count(watch)

    importlib.import_module(f"{package}.inner")

    assert [package, f"{package}.inner"] == called
