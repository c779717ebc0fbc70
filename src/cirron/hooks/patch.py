"""The only module that sets attributes of foreign classes and modules, or uses the import system.

`undo` restores what was changed here, unless other code has replaced it since: removing ours from
under that would break it.
"""

from __future__ import annotations

import importlib.abc
import sys
from _thread import get_ident
from typing import TYPE_CHECKING, Any

from cirron import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_ABSENT = object()


class Patches:
    """Attributes that were replaced, with their old values."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, new: Any, old: Any = None) -> None:
        """Replaces an attribute of a class or a module. `old`: restored instead of the present."""
        if old is None:
            old = owner.__dict__.get(name, _ABSENT)
        setattr(owner, name, new)
        self._done.append((owner, name, old, new))

    def undo(self) -> None:
        """Restores everything, last first."""
        while self._done:
            owner, name, old, new = self._done.pop()
            if owner.__dict__.get(name) is not new:
                continue  # other code has wrapped ours
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls back when a module has been imported, at once if it already is."""

    def __init__(self) -> None:
        self._wanted: dict[str, Callable[[], None]] = {}
        self._searches: set[tuple[int, str]] = set()  # in progress: thread, module

    def when_imported(self, module: str, then: Callable[[], None]) -> None:
        """Registers a callback for one module."""
        if module in sys.modules:
            then()
            return
        self._wanted[module] = then
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def undo(self) -> None:
        """Stops watching."""
        self._wanted.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders return, with a callback added to its loader.

        Not only imports call this: `importlib.util.find_spec` tells whether a module is installed.
        """
        if fullname not in self._wanted or (search := (get_ident(), fullname)) in self._searches:
            return None
        self._searches.add(search)
        try:
            # The other finders may call this one, as does the list: it finds nothing meanwhile.
            finds = [getattr(finder, "find_spec", None) for finder in sys.meta_path]
            specs = (find(fullname, path, target) for find in finds if find is not None)
            spec: ModuleSpec | None = next((one for one in specs if one is not None), None)
        finally:
            self._searches.discard(search)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, lambda: self._was_imported(fullname))
        return spec

    def _was_imported(self, module: str) -> None:
        # Comet puts a finder of its own first, and that finder asks no others for the frameworks.
        sys.meta_path[:] = sorted(sys.meta_path, key=lambda one: not isinstance(one, ImportWatch))
        then = self._wanted.pop(module, None)
        if then is not None:
            with guard.quiet(f"hooks for {module}"):
                then()


class _Then(importlib.abc.Loader):
    """A module's own loader, with a callback after the module has run.

    It may be one that has only `load_module`, such as that of MLflow's autologging.
    """

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        module: ModuleType | None = None if create is None else create(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module must show its own loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        if hasattr(self._loader, "exec_module"):
            self._loader.exec_module(module)
        else:
            self._loader.load_module(module.__name__)
        self._then()
