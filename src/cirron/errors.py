"""Every exception that cirron raises on purpose.

    CirronError
      SettingError (ValueError)      a setting, argument or option with an invalid value
        UnknownRunError (KeyError)   there are no runs, no run has this id, or several start with it
      InputError (TypeError)         a value of the wrong type given to scope, mark, epochs,
                                     batches; or an argument that does not exist
        ScopeReusedError             a scope entered a second time
      MissingDependencyError (ImportError)   an optional package is missing; has the pip command

They report wrong calls and wrong settings. Recording itself never raises: see `guard.py`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


class CirronError(Exception):
    """Base class of every error that cirron raises."""


class SettingError(CirronError, ValueError):
    """A setting, an argument or an option has a value that is not allowed."""


class UnknownRunError(SettingError, KeyError):
    """There are no runs, no run has this id, or several start with it."""

    __str__ = Exception.__str__  # KeyError would show a repr


class InputError(CirronError, TypeError):
    """A value of the wrong type, or an argument that does not exist, was given to a function."""


class ScopeReusedError(InputError):
    """The same scope object was entered twice."""


class MissingDependencyError(CirronError, ImportError):
    """A feature needs a package that is not installed."""


MAX_SHOWN = 1_000  # characters of a value that a message shows
MAX_NAMES = 10  # of a list that may be long


def shown(given: object) -> str:
    """The value as text for a message, even if it is long or its repr fails."""
    try:
        text = repr(given)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  protects the message: a repr of the user's, a long int
        return f"<{type(given).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def one_of(what: str, given: object, allowed: Iterable[object]) -> SettingError:
    """The error for a value outside a fixed list."""
    names = ", ".join(repr(name) for name in allowed)
    rule = f"use one of {names}" if names else f"there is no {what} yet"
    return SettingError(f"{what}={shown(given)} is not valid; {rule}")


def not_among(what: str, given: str, known: Iterable[str]) -> SettingError:
    """The error for a name that is not in a list, which may be long: it shows the most similar."""
    import difflib  # slow to import

    names = list(known)
    if len(names) <= MAX_NAMES:
        return one_of(what, given, names)
    similar = difflib.get_close_matches(given, names, n=MAX_NAMES, cutoff=0.0)
    error = one_of(what, given, similar)
    return SettingError(f"{error}, or of {len(names) - MAX_NAMES:,} more")


def out_of_range(what: str, given: object, rule: str) -> SettingError:
    """The error for a number (or something that should be one) outside its range."""
    return SettingError(f"{what}={shown(given)} is not valid; {rule}")


def no_argument(where: str, given: str, allowed: Iterable[str], hint: str = "") -> InputError:
    """The error for an argument that a function does not have."""
    import difflib  # slow to import

    names = list(allowed)
    similar = difflib.get_close_matches(given, names, n=1)
    known = f"did you mean {similar[0]}=?" if similar else f"it has {', '.join(names)}"
    return InputError(f"{where}() has no argument {given!r}; {hint or known}")


def not_a_name(where: str, given: object) -> InputError:
    """The error for a scope or mark name that is not a string."""
    if callable(given):
        name = getattr(given, "__name__", "name")
        return InputError(f'{where} needs a name: write @{where}("{name}") above the function')
    return InputError(
        f"{where}() needs a name that is a string; got {shown(given)} ({type(given).__name__})."
        f' Write {where}("name", ...)'
    )


def not_an_index(given: object) -> InputError:
    """The error for a scope index that is not an integer."""
    text = shown(given)
    return InputError(
        f"ci.scope() needs an index that is an integer or None; got {text}"
        f" ({type(given).__name__}). Other values go into attributes: ci.scope(..., key={text})"
    )


def not_a_value(name: str, given: object) -> InputError:
    """The error for a mark value that is not a scalar."""
    takes = (
        f"ci.mark({name!r}, ...) takes one float, int, bool or str, or a scalar with .item()"
        " (NumPy, torch, JAX)"
    )
    try:
        shape = tuple(getattr(given, "shape", None) or ())
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  protects the message from an object whose attributes fail
        shape = ()
    if shape:
        got = f"{type(given).__name__} of shape {shape}"
        return InputError(f"{takes}; got {got}. Reduce it first, as in value.mean()")
    if given is None:
        return InputError(f"{takes}; got NoneType. Mark only values that are not None")
    return InputError(f"{takes}; got {type(given).__name__}. Convert it first, as in str(value)")


def not_iterable(where: str, given: object) -> InputError:
    """The error for a loop over something that is not iterable."""
    hint = f". Write {where}(range({given}))" if isinstance(given, int) else ""
    return InputError(
        f"{where}() needs something to loop over; got {shown(given)} ({type(given).__name__}){hint}"
    )


def need(module: str, what: str, package: str = "") -> Any:
    """Imports an optional module. `package`: its name for pip, if that is another one."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise missing(what, package or module) from None


def missing(what: str, package: str) -> MissingDependencyError:
    """The error for a missing optional package."""
    # Not the name of an extra: pip would look for that of a checkout elsewhere.
    return MissingDependencyError(
        f"{what} needs {package}, which is not installed: pip install {package}"
    )
