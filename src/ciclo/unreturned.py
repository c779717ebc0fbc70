"""Finds a callback that creates logs but does not return them, before it runs.

It reports only clear cases: every return is None, and the logs are used only for `logs.add_...`.
Logs that are passed on, stored or returned anywhere are ignored.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLS = ("CACHE", "PRECALL", "PUSH_NULL", "CALL")  # between a function and the use of its result


def drops_its_logs(function: Callable[..., Any]) -> bool:
    """Whether the function fills `ciclo.logs()` and does not return them."""
    import functools
    import inspect

    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function) or "add" not in " ".join(function.__code__.co_names):
        return False  # a quick check that rules out most functions
    code = list(_simple(function))
    pairs = list(zip([("", None), *code], code, strict=False))
    if any(op == "RETURN_CONST" and value is not None for op, value in code) or any(
        op == "RETURN_VALUE" and before != ("LOAD_CONST", None) for before, (op, _) in pairs
    ):
        return False
    made = set(_stored(function, [one for one in code if one[0] not in CALLS]))
    uses = [
        str(after) for (op, name), (_, after) in pairs if op[:9] == "LOAD_FAST" and name in made
    ]
    return bool(uses) and all(after.startswith("add") for after in uses)


def _simple(function: Any) -> Iterator[tuple[str, Any]]:
    """Instructions as pairs; the combined ones of Python 3.13 are split."""
    import dis

    for one in dis.get_instructions(function):
        if isinstance(one.argval, tuple) and one.opname.count("_FAST") == 2:
            first, second, _ = one.opname.split("_FAST")
            yield f"{first}_FAST", one.argval[0]
            yield f"{second.removeprefix('_')}_FAST", one.argval[1]
        elif one.opname != "CACHE":
            yield one.opname, one.argval


def _stored(function: Any, code: list[tuple[str, Any]]) -> Iterator[str]:
    """The local names that hold what `ciclo.logs()` returned."""
    from ciclo.logs import Logs, logs

    for place, (op, value) in enumerate(code):
        found = function.__globals__.get(value) if op == "LOAD_GLOBAL" else None
        after = code[place + 1 : place + 3]
        if found is sys.modules["ciclo"] and after[0][1] in ("logs", "Logs"):
            after = after[1:]
        elif found is not logs and found is not Logs:
            continue
        if after and after[0][0] == "STORE_FAST":
            yield after[0][1]
