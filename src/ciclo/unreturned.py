"""Finds a callback that makes logs and forgets to return them, before it runs.

Only what is clear is reported: every return gives None, and the logs are used for `logs.add_...`
alone. Logs that are passed on, stored or returned anywhere are left alone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLS = ("CACHE", "PRECALL", "PUSH_NULL", "CALL")  # between what is called and what is done with it


def makes_logs_for_nobody(function: Callable[..., Any]) -> bool:
    """Whether the function fills `ciclo.logs()` and drops them."""
    import functools
    import inspect

    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function) or "add" not in " ".join(function.__code__.co_names):
        return False  # the second is quick, and tells of most functions that they fill no logs
    code = list(_simple(function))
    made = set(_stored(function, code))
    if not made or _returns_something(code):
        return False
    filled = set()
    for (op, name), (_, after) in zip(code, [*code[1:], ("", None)], strict=True):
        if op.startswith("LOAD_FAST") and name in made:
            if not str(after).startswith("add"):
                return False
            filled.add(name)
    return bool(filled)


def _simple(function: Any) -> Iterator[tuple[str, Any]]:
    """Instructions as pairs; those that do two things at once (Python 3.13) as two."""
    import dis

    for one in dis.get_instructions(function):
        if isinstance(one.argval, tuple) and one.opname.count("_FAST") == 2:
            first, second, _ = one.opname.split("_FAST")
            yield f"{first}_FAST", one.argval[0]
            yield f"{second.removeprefix('_')}_FAST", one.argval[1]
        elif one.opname != "CACHE":
            yield one.opname, one.argval


def _returns_something(code: list[tuple[str, Any]]) -> bool:
    before: tuple[str, Any] = ("", None)
    for op, value in code:
        if op == "RETURN_CONST" and value is not None:
            return True
        if op == "RETURN_VALUE" and before != ("LOAD_CONST", None):
            return True
        before = (op, value)
    return False


def _stored(function: Any, code: list[tuple[str, Any]]) -> Iterator[str]:
    """The local names that hold what `ciclo.logs()` returned."""
    from ciclo.logs import Logs, logs

    for place, (op, value) in enumerate(code):
        if op != "LOAD_GLOBAL":
            continue
        found = function.__globals__.get(value)
        rest = code[place + 1 :]
        if found is sys.modules["ciclo"] and rest and rest[0][1] in ("logs", "Logs"):
            rest = rest[1:]
        elif found is not logs and found is not Logs:
            continue
        while rest and rest[0][0] in CALLS:
            rest = rest[1:]
        if rest and rest[0][0] == "STORE_FAST":
            yield rest[0][1]
