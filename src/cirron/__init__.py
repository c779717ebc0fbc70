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
    )
    from cirron.hooks.sklearn import wrap
    from cirron.serving import inference
    from cirron.session import (
        Cirron,
        Flushed,
        Profiler,
        flush,
        health,
        profile,
        shutdown,
        trace,
        watch,
    )
    from cirron.ship.sinks.base import Outcome

__all__ = [
    "Cirron",
    "CirronError",
    "Flushed",
    "InputError",
    "MissingDependencyError",
    "Outcome",
    "Profiler",
    "ScopeReusedError",
    "SettingError",
    "__version__",
    "batches",
    "env",
    "epochs",
    "flush",
    "health",
    "inference",
    "mark",
    "profile",
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
    "Outcome": "cirron.ship.sinks.base",
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
