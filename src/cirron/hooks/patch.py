"""The only file that sets an attribute of somebody else's class, or touches the import system.

Whatever is changed here is put back by `undo`, unless somebody else has changed it since: then it
is theirs, and taking ours from under it would break it.
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
    """Attributes that were replaced, and what they were."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, new: Any) -> None:
        """Replaces an attribute of a class or a module."""
        old = owner.__dict__.get(name, _ABSENT)
        setattr(owner, name, new)
        self._done.append((owner, name, old, new))

    def undo(self) -> None:
        """Puts everything back, last first."""
        while self._done:
            owner, name, old, new = self._done.pop()
            if owner.__dict__.get(name) is not new:
                continue  # somebody has wrapped ours
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls back when a module has been imported: at once, if it has been already."""

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
        """What the others find, with a last step added.

        Not only imports ask: people look for a spec to see whether something is installed.
        """
        search = (get_ident(), fullname)
        if fullname not in self._wanted or search in self._searches:
            return None  # the second: another finder that does as we do has asked us in turn
        self._searches.add(search)
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = (
                    None if finder is self or find is None else find(fullname, path, target)
                )
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Then(spec.loader, lambda: self._was_imported(fullname))
                    return spec
        finally:
            self._searches.discard(search)
        return None

    def _was_imported(self, module: str) -> None:
        then = self._wanted.pop(module, None)
        if then is not None:
            with guard.quiet(f"hooks for {module}"):
                then()


class _Then(importlib.abc.Loader):
    """A module's own loader, with a call after the module has run."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module shows its own loader, as it would without us.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()
