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
    from cirron.errors import (
        CirronError,
        InputError,
        MissingDependencyError,
        ScopeReusedError,
        SettingError,
    )
    from cirron.session import Cirron, Profiler, flush, health, profile, shutdown, trace

__all__ = [
    "Cirron",
    "CirronError",
    "InputError",
    "MissingDependencyError",
    "Profiler",
    "ScopeReusedError",
    "SettingError",
    "__version__",
    "batches",
    "epochs",
    "flush",
    "health",
    "mark",
    "profile",
    "scope",
    "shutdown",
    "trace",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'cirron' has no attribute {name!r}")
    from cirron import errors, session

    value = getattr(errors if name.endswith("Error") else session, name)
    globals()[name] = value  # from now on the public name is the thing itself
    return value


def __dir__() -> list[str]:
    return __all__
