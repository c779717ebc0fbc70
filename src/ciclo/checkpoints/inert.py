"""Reads a pickle as data: the names it would call, and the arguments. Nothing is called.

This covers what torch writes: the index of `torch.distributed.checkpoint`, and the list of tensors
in a file of `torch.save`. Tuples are not allowed as keys: hashing a deep one overflows the stack.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"} | {
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
}
MADE = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
# Number of values that go into a container; None for all since the last mark.
FILLED: dict[str, int | None] = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}
FILLED |= {"TUPLE": None, "APPENDS": None, "SETITEMS": None}
STORED = "persistent_load"


@dataclass(eq=False)
class Name:
    """A class or function named in a pickle."""

    name: str


@dataclass(eq=False)
class Call:
    """A call in a pickle: the name, the arguments, and the state it would set."""

    name: str
    args: Any
    state: Any = None


class Pairs(list[Any]):
    """The keys and values of a dict."""

    def add(self, keys: list[Any], values: list[Any]) -> None:
        for key in keys:
            if type(key) not in (str, Call):
                raise ValueError(f"it has a {type(key).__name__} for a key")
        self.extend(zip(keys, values, strict=True))


def read(content: bytes) -> tuple[Any, list[Call]]:
    """The content of a pickle and all its calls; a ValueError for unknown instructions."""
    stack: list[Any] = []
    below: list[list[Any]] = []
    memo: dict[int, Any] = {}
    calls: list[Call] = []

    def called(name: Any, args: Any) -> None:
        calls.append(Call(of(name, Name).name, of(args, tuple)))
        stack.append(calls[-1])

    value: Any
    for code, value, _ in pickletools.genops(content):
        match code.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop(), calls
            case name if name in VALUES:
                stack.append(value)
            case name if name in MADE:
                stack.append(MADE[name])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append(Pairs())
            case "MARK":
                below.append(stack)
                stack = []
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case name if name in FILLED:
                if (count := FILLED[name]) is None:
                    items, stack = stack, below.pop()
                else:
                    items = stack[-count:]
                    del stack[-count:]
                if name.startswith("TUPLE"):
                    stack.append(tuple(items))
                elif name.startswith("APPEND"):
                    of(stack[-1], list).extend(items)
                else:
                    of(stack[-1], Pairs).add(items[::2], items[1::2])
            case "GLOBAL":
                stack.append(Name(value.replace(" ", ".")))
            case "STACK_GLOBAL":
                last, module = stack.pop(), stack.pop()
                stack.append(Name(f"{of(module, str)}.{of(last, str)}"))
            case "REDUCE" | "NEWOBJ":
                args, name = stack.pop(), stack.pop()
                called(name, args)
            case "BINPERSID":
                called(Name(STORED), (stack.pop(),))
            case "BUILD":
                state = stack.pop()
                of(stack[-1], Call).state = state
            case other:
                raise ValueError(f"it has the instruction {other}")
    raise ValueError("it has no end")


def of(value: Any, kind: type) -> Any:
    """The value, which must have exactly this type."""
    if type(value) is not kind:
        raise ValueError(f"it has a {type(value).__name__} where a {kind.__name__} should be")
    return value
