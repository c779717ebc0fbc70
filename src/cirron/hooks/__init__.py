"""Frameworks that cirron knows, as tables: who exists, who outranks whom, and which file hooks it.

A framework that is higher up makes the `epoch` and `step` spans while it runs; the ones below it
make only their own. Nothing here imports a framework: a hook is loaded when the program has
imported what it hooks.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from cirron import errors, guard

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


# Of those, the ones that are hooked: the module whose import it waits for, the file, the class.
HOOKS = {
    "transformers": ("transformers.trainer", "cirron.hooks.transformers", "TransformersHook"),
    "lightning": ("lightning.pytorch", "cirron.hooks.lightning", "LightningHook"),
    "pytorch_lightning": ("pytorch_lightning", "cirron.hooks.lightning", "PytorchLightningHook"),
    "keras": ("keras", "cirron.hooks.keras", "KerasHook"),
    "torch": ("torch", "cirron.hooks.torch", "TorchHook"),
    "jax": ("jax", "cirron.hooks.jax", "JaxHook"),
}

# Those that train through another: asking for TensorFlow means Keras on it.
THROUGH = {"tensorflow": "keras"}

# The oldest release that the hooks are tested with. An older one is not hooked, and told so.
MINIMUM = {
    "transformers": (4, 57),
    "lightning": (2, 5),
    "pytorch_lightning": (2, 5),
    "keras": (3, 12),
    "torch": (2, 4),
    "jax": (0, 6),
}


class Snapshots(Protocol):
    """Who takes them: `Taker`."""

    def expect(self, model: Any) -> None:
        """Says that one of this model will be taken, so that memory for it can be made ready."""

    def keep_gradients(self, *models: Any) -> None:
        """Keeps those of the watched models, which the loop may clear before one is taken."""

    def take(self, span: Span, *models: Any) -> None:
        """Takes one of the watched models and of these, at the end of an epoch."""


class Hook(Protocol):
    """A framework's hooks. `install` may be called again; `uninstall` leaves no trace."""

    name: str

    def install(self) -> None: ...

    def uninstall(self) -> None: ...


class Hooks:
    """The hooks of a session."""

    def __init__(
        self,
        settings: Settings,
        frameworks: tuple[str, ...] | None,
        snapshots: Snapshots,
    ) -> None:
        self._settings = settings
        self._snapshots = snapshots
        self._wanted = PRECEDENCE if frameworks is None else frameworks
        self._installed: list[Hook] = []
        self._watch: Any = None
        self._loggers: Any = None

    @property
    def installed(self) -> list[str]:
        """The frameworks that are hooked now."""
        return [hook.name for hook in self._installed]

    @property
    def imported(self) -> str | None:
        """The highest framework of which the program has imported what trains, so far."""
        found = (name for name in self._wanted if HOOKS.get(name, (name,))[0] in sys.modules)
        return next(found, None)

    def install(self) -> None:
        """Hooks the frameworks that are wanted, each as soon as the program has imported it."""
        from cirron.hooks.patch import ImportWatch

        self._watch = ImportWatch()
        through = {THROUGH.get(name, name) for name in self._wanted}
        for name, (module, *_) in HOOKS.items():
            if name in through:
                self._watch.when_imported(module, lambda name=name: self._add(name))
        if self._settings.loggers:
            from cirron.hooks.loggers import LoggersHook

            self._loggers = LoggersHook(self)
            self._loggers.install()

    def uninstall(self) -> None:
        """Puts everything back as it was."""
        if self._watch is not None:
            self._watch.undo()
        if self._loggers is not None:
            self._loggers.uninstall()
        while self._installed:
            with guard.quiet("hooks"):
                self._installed.pop().uninstall()

    def _add(self, name: str) -> None:
        _, file, kind = HOOKS[name]
        with guard.quiet("hooks"):
            found = version(name)
            if found and found < MINIMUM.get(name, ()):
                wanted = ".".join(map(str, MINIMUM[name]))
                guard.warn(
                    "%s %s is not hooked: it is older than %s, the first release that is",
                    name,
                    ".".join(map(str, found)),
                    wanted,
                )
                return
            hook: Hook = getattr(importlib.import_module(file), kind)(
                self._settings, self._snapshots
            )
            hook.install()
            self._installed.append(hook)


def check(frameworks: Any) -> tuple[str, ...] | None:
    """The frameworks that were asked for, checked; None means whatever the program imports."""
    if frameworks is None:
        return None
    if isinstance(frameworks, str) or not isinstance(frameworks, (list, tuple, set, frozenset)):
        raise errors.out_of_range(
            "frameworks", frameworks, "it must be a list of names, such as ['torch']"
        )
    for name in frameworks:
        if name not in PRECEDENCE:
            raise errors.one_of("frameworks", name, PRECEDENCE)
        # The package: its parts would be imported.
        if (name in HOOKS or name in THROUGH) and not is_installed(name):
            raise errors.SettingError(
                f"frameworks={frameworks!r}: {name} is not installed. Install it, or leave it out"
            )
    return tuple(name for name in PRECEDENCE if name in frameworks)


def is_installed(module: str) -> bool:
    """Whether an import would find it; nothing is imported."""
    try:
        return module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):  # from a finder that forbids it, a module that is half there
        return False


def version(module: str) -> tuple[int, ...] | None:
    """The release of a module that is imported, as far as it is a number; None: it does not say."""
    text = getattr(sys.modules.get(module), "__version__", None)
    if not isinstance(text, str):
        return None
    return tuple(int(part) for part in takewhile(str.isdecimal, text.split(".")))
