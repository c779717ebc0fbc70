"""Every exception that ciclo raises on purpose.

    CicloError
      ArgumentError (TypeError, ValueError)   an argument that is not valid
        PeriodError                  a period or schedule that is not valid
      CallbackError (TypeError)      a callback of the wrong form, or with a wrong result
      MonitorError (ValueError)      a monitored value is not logged
      CheckpointError                a checkpoint that cannot be written or read, or does not fit
      MissingDependencyError (ImportError)   a package is not installed; names the pip command

An error in the user's own code keeps its type; the loop only adds a note.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import ModuleType
    from typing import Any

__all__ = [
    "ArgumentError",
    "CallbackError",
    "CheckpointError",
    "CicloError",
    "MissingDependencyError",
    "MonitorError",
    "PeriodError",
]

MAX_MESSAGE = 4000  # characters
MAX_SHOWN = 80  # characters of a value
LITERAL = (bool, int, float, str, list, tuple, dict, type(None))  # a value shows its type


class CicloError(Exception):
    """The base of every error that ciclo raises."""


class ArgumentError(CicloError, TypeError, ValueError):
    """An argument is not valid."""


class PeriodError(ArgumentError):
    """A period or a schedule is not valid."""


class CallbackError(CicloError, TypeError):
    """A callback has the wrong form, or returned the wrong thing."""


class MonitorError(CicloError, ValueError):
    """A value that a callback monitors is not logged."""


class CheckpointError(CicloError):
    """A checkpoint cannot be written or read, or does not fit this run."""

    def __init__(self, message: str) -> None:
        # The message may quote an untrusted file: no control characters in the terminal.
        super().__init__(
            "".join(
                one if one == "\n" or one.isprintable() else f"\\u{ord(one):04x}"
                for one in message[:MAX_MESSAGE]
            )
        )


class MissingDependencyError(CicloError, ImportError):
    """Something needs a package that is not installed."""


def warn(message: str) -> None:
    """Logs a warning about a likely mistake."""
    import logging

    logging.getLogger("ciclo").warning("ciclo: %s", message)


def did_you_mean(name: str, names: Iterable[Any]) -> str:
    """The end of an error about an unknown name: similar known names."""
    from difflib import get_close_matches

    near = get_close_matches(name, [one for one in names if isinstance(one, str)], 3)
    near = [one for one in dict.fromkeys(near) if one != name]
    return f". Did you mean {' or '.join(map(repr, near))}?" if near else ""


def check(
    name: str,
    given: Any,
    is_valid: type | Callable[[Any], Any],
    allowed: str,
    error: type[ArgumentError] = ArgumentError,
) -> None:
    """Refuses an argument that is not valid, and says what is.

    is_valid: a type, or a function. It may fail, as `given > 0` does for a string
    """
    try:
        if isinstance(given, is_valid) if isinstance(is_valid, type) else is_valid(given):
            return
    except Exception:  # noqa: BLE001  any error of comparing a value of another type
        pass
    raise error(f"{name}={shown(given)} is not valid; use {allowed}")


def shown(given: Any) -> str:
    """A value in an error: one line, with its type if that is not obvious."""
    text, kind = " ".join(repr(given).split()), type(given)
    text = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
    is_clear = kind in LITERAL or isinstance(given, type) or kind.__name__.lower() in text.lower()
    return text if is_clear else f"{text} ({kind.__name__})"


def refuse_unknown(
    what: str, given: Iterable[str], known: Iterable[str], instead: Mapping[str, str] = {}
) -> None:
    """Raises a TypeError for an unknown option; `instead` has special hints by option."""
    for name in set(given).difference(known):
        hint = instead.get(name) or did_you_mean(name, known) or f"; it has {', '.join(known)}"
        raise TypeError(f"{what}() has no option {name!r}{hint}")


def need(module: str, what: str, package: str | None = None) -> ModuleType:
    """Imports a module on use; the error says which package to install."""
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != top:
            raise  # the package is installed, but one of its dependencies is not
        raise MissingDependencyError(
            f"{what} needs {package or top}, which is not installed: pip install {package or top}"
        ) from None
