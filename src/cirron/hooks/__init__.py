"""The supported frameworks as tables: their names, their precedence, and the file of each hook.

While a framework runs, it makes the `epoch` and `step` spans, and those with lower precedence make
only their own. Nothing here imports a framework: a hook is loaded once the program has imported the
module that it hooks.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from cirron import errors, guard
from cirron.hooks.patch import ImportWatch

if TYPE_CHECKING:
    from cirron.record.hot import Span
    from cirron.settings import Settings

# Highest first. XGBoost and LightGBM import scikit-learn.
PRECEDENCE = (
    "transformers",
    "lightning",
    "pytorch_lightning",
    "keras",
    "tensorflow",
    "torch",
    "jax",
    "xgboost",
    "lightgbm",
    "sklearn",
)


# The hooks: the module that triggers the installation, the file and the class of the hook, and the
# oldest supported release. An older one is not hooked, with a warning.
HOOKS = {
    "transformers": ("transformers.trainer", ".transformers", "TransformersHook", (4, 57)),
    "lightning": ("lightning.pytorch", ".lightning", "LightningHook", (2, 5)),
    "pytorch_lightning": ("pytorch_lightning", ".lightning", "PytorchLightningHook", (2, 5)),
    "keras": ("keras", ".keras", "KerasHook", (3, 12)),
    "torch": ("torch", ".torch", "TorchHook", (2, 4)),
    "jax": ("jax", ".jax", "JaxHook", (0, 6)),
}

# TensorFlow is hooked through Keras.
THROUGH = {"tensorflow": "keras"}


class Snapshots(Protocol):
    """Takes snapshots. Implemented by `snapshot.taker.Taker`."""

    is_watching: bool  # whether the program has asked for snapshots of a model

    def expect(self, model: Any) -> None:
        """Announces a snapshot of this model, so that memory for it can be prepared."""

    def keep_gradients(self, *, is_last: bool) -> None:
        """An optimizer has stepped. If that may be the last step before the next snapshot, copies
        the gradients, because the loop may clear them.
        """

    def take(self, span: Span, *models: Any) -> None:
        """Takes a snapshot of the watched models and of these, at the end of an epoch."""


class Hook(Protocol):
    """The hooks of a framework. `install` may be called again; `uninstall` restores everything."""

    name: str

    def install(self) -> None: ...

    def uninstall(self) -> None: ...


class Hooks:
    """The hooks of a session."""

    def __init__(
        self, settings: Settings, frameworks: tuple[str, ...] | None, snapshots: Snapshots
    ) -> None:
        self._settings = settings
        self._snapshots = snapshots
        self._wanted = PRECEDENCE if frameworks is None else frameworks
        self._installed: list[Hook] = []
        self._watch = ImportWatch()
        self._loggers: Any = None

    @property
    def installed(self) -> list[str]:
        """The frameworks that are hooked now."""
        return [hook.name for hook in self._installed]

    @property
    def imported(self) -> str | None:
        """The framework with the highest precedence that the program has imported so far."""
        found = (name for name in self._wanted if HOOKS.get(name, (name,))[0] in sys.modules)
        return next(found, None)

    def install(self) -> None:
        """Hooks each wanted framework as soon as the program has imported it."""
        through = {THROUGH.get(name, name) for name in self._wanted}
        for name, (module, *_) in HOOKS.items():
            if name in through:
                self._watch.when_imported(module, partial(self._add, name))
        if self._settings.loggers:
            from cirron.hooks.loggers import LoggersHook

            self._loggers = LoggersHook(self._settings, self._snapshots, self)
            self._loggers.install()

    def uninstall(self) -> None:
        """Removes all hooks."""
        self._watch.undo()
        if self._loggers is not None:
            self._loggers.uninstall()
        while self._installed:
            with guard.quiet("hooks"):
                self._installed.pop().uninstall()

    def _add(self, name: str) -> None:
        _, file, kind, oldest = HOOKS[name]
        with guard.quiet("hooks"):
            found = version(name)
            if found and found < oldest:
                given, wanted = (".".join(map(str, release)) for release in (found, oldest))
                guard.warn("%s %s is not hooked: cirron supports %s and newer", name, given, wanted)
                return
            hook_type = getattr(importlib.import_module(file, __name__), kind)
            hook: Hook = hook_type(self._settings, self._snapshots)
            hook.install()
            self._installed.append(hook)


def check(frameworks: Any) -> tuple[str, ...] | None:
    """Checks the `frameworks=` setting; None means every framework that the program imports."""
    if frameworks is None:
        return None
    if not isinstance(frameworks, (list, tuple, set, frozenset)):
        raise errors.out_of_range(
            "frameworks", frameworks, "it must be a list of names, such as ['torch']"
        )
    for name in frameworks:
        if name not in PRECEDENCE:
            raise errors.one_of("frameworks", name, PRECEDENCE)
        # Look for the package only: finding a submodule would import the package.
        if (name in HOOKS or name in THROUGH) and not is_installed(name):
            raise errors.SettingError(
                f"frameworks={frameworks!r}: {name} is not installed. Install it, or leave it out"
            )
    return tuple(name for name in PRECEDENCE if name in frameworks)


def is_installed(module: str) -> bool:
    """Whether an import would find the module. Imports nothing."""
    try:
        return module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):  # a finder that blocks it, or a partly imported module
        return False


def version(module: str) -> tuple[int, ...] | None:
    """The numeric part of an imported module's version, or None if it has none."""
    text = getattr(sys.modules.get(module), "__version__", None)
    if not isinstance(text, str):
        return None
    return tuple(int(part) for part in takewhile(str.isdecimal, text.split(".")))
