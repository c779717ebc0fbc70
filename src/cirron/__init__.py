"""Cirron: one line, and a training run leaves a tree of what it did.

>>> import cirron as ci
>>> ci.profile()

The public list and nothing else. The recording functions are bound directly; what needs more than
the standard library is loaded on first use, so that `import cirron` costs next to nothing.
"""

from cirron._version import __version__
from cirron.record.hot import batches, epochs, mark, scope

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cirron.environment import env
    from cirron.errors import (
        CirronError,
        InputError,
        MissingDependencyError,
        ScopeReusedError,
        SettingError,
        UnknownRunError,
    )
    from cirron.hooks.sklearn import wrap
    from cirron.runs.opened import open  # noqa: A004  ci.open, as ci.profile
    from cirron.serving import inference
    from cirron.session import (
        Cirron,
        Flushed,
        Profiler,
        flush,
        health,
        profile,
        report,
        shutdown,
        trace,
        watch,
    )
    from cirron.ship.sinks.base import Outcome, Sealed

__all__ = [
    "Cirron",
    "CirronError",
    "Flushed",
    "InputError",
    "MissingDependencyError",
    "Outcome",
    "Profiler",
    "ScopeReusedError",
    "Sealed",
    "SettingError",
    "UnknownRunError",
    "__version__",
    "batches",
    "env",
    "epochs",
    "flush",
    "health",
    "inference",
    "mark",
    "open",
    "profile",
    "report",
    "scope",
    "shutdown",
    "trace",
    "watch",
    "wrap",
]

# Where a name is that is neither an error nor the session's.
_HOMES = {
    "env": "cirron.environment",
    "inference": "cirron.serving",
    "open": "cirron.runs.opened",
    "Outcome": "cirron.ship.sinks.base",
    "Sealed": "cirron.ship.sinks.base",
    "wrap": "cirron.hooks.sklearn",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'cirron' has no attribute {name!r}")
    from importlib import import_module

    home = "cirron.errors" if name.endswith("Error") else "cirron.session"
    value = getattr(import_module(_HOMES.get(name, home)), name)
    globals()[name] = value  # from now on the public name is the thing itself
    return value


def __dir__() -> list[str]:
    return __all__
