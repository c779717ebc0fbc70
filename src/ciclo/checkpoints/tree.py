"""Splits a tree of any values into a JSON structure and leaves by format, and rebuilds it.

`freeze` splits a tree. `Plan` rebuilds it like another tree (`like`), with its types, devices and
functions, and reports all differences before anything is changed. Objects that the program refers
to (torch modules and optimizers, NNX modules, random generators, plain objects) are restored in
place.

Plain values and empty containers may differ, because they may change during a run. Arrays may not,
except that 16-bit floats fit where `like` has 32 bits.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import Counter, OrderedDict, deque
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from ciclo.averages import wide
from ciclo.checkpoints import jax, plain, torch
from ciclo.checkpoints.manifest import HOW_TO_TRUST
from ciclo.device_values import describe, library_of
from ciclo.errors import CheckpointError, CicloError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeAlias

    from ciclo.checkpoints.manifest import Manifest
    from ciclo.processes import Process

    Node: TypeAlias = Any  # a JSON value
    Build: TypeAlias = Callable[["Leaves"], Any]
    Leaves: TypeAlias = dict[str, list[Any]]

FORMATS: dict[str, Any] = {"plain": plain, "torch": torch, "jax": jax}
SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS: dict[str, type] = {"dict": dict, "ordered_dict": OrderedDict, "counter": Counter}
NUMBERS = ("int", "float", "complex")  # numbers that JSON cannot represent
# All node types of a structure, apart from lists and plain values.
TAGS = {*SEQUENCES, *MAPPINGS, *NUMBERS, "deque", "leaf", "in_place", "parts", "code", "pickle"}
# The methods that get and set the state of an object that is restored in place.
IN_PLACE = (("state_dict", "load_state_dict"), ("get_state", "set_state"), ("getstate", "setstate"))
# Code, not state: it is taken from `like`. So are functions with `__wrapped__`.
CODE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
)
MAX_DIFFERENCES = 8


class Frozen(NamedTuple):
    """A tree split into parts; `pickled` lists values that only pickle could save."""

    structure: Node
    leaves: Leaves
    pickled: list[str]


class Loose:
    """A part of a tree whose types are unknown until `typed(like)`."""

    def __init__(self, node: Node, leaves: Leaves, is_trusted: bool) -> None:
        self._node = node
        self._leaves = leaves
        self._is_trusted = is_trusted

    def typed(self, like: Any) -> Any:
        plan = Plan(self._node, like, is_trusted=self._is_trusted)
        plan.check("a part of the checkpoint")
        return plan.build(self._leaves)


def typed(value: Any, like: Any) -> Any:
    """The value with the types of `like`, if it was loaded without types."""
    if isinstance(value, Loose):
        return value.typed(like)
    if type(value) in (dict, OrderedDict) and isinstance(like, dict):
        return type(value)((key, typed(one, like.get(key))) for key, one in value.items())
    if type(value) in (list, tuple) and isinstance(like, (list, tuple)):
        likes = [*like, *[None] * (len(value) - len(like))]
        return type(value)(typed(one, other) for one, other in zip(value, likes, strict=False))
    return value


def freeze(tree: Any, name: str) -> Frozen:
    """Splits a tree without copying; `name` is its name in errors."""
    freezer = _Freezer()
    return Frozen(freezer.node(tree, name), freezer.leaves, freezer.pickled)


class _Freezer:
    def __init__(self) -> None:
        self.leaves: Leaves = {}
        self.pickled: list[str] = []
        self._above: set[int] = set()

    def leaf(self, format: str, value: Any, *traits: Any) -> Node:
        kept = self.leaves.setdefault(format, [])
        kept.append(value)
        return {"leaf": [format, len(kept) - 1, describe(value), *traits]}

    def node(self, value: Any, path: str) -> Node:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        if kind is float:
            return value if isfinite(value) else {"float": str(value)}
        if kind is complex:
            return {"complex": [self.node(value.real, path), self.node(value.imag, path)]}
        for format, module in FORMATS.items():
            if module.owns(value):
                return self.leaf(format, value, *module.traits(value))
        if isinstance(value, CODE) or hasattr(value, "__wrapped__"):
            return {"code": str(getattr(value, "__qualname__", repr(value)))}
        if id(value) in self._above:
            raise CheckpointError(f"{path} contains itself, so it cannot be saved")
        self._above.add(id(value))
        try:
            return self._inner(value, path)
        finally:
            self._above.discard(id(value))

    def _inner(self, value: Any, path: str) -> Node:
        kind = type(value)
        if kind is list:
            return [self.node(item, f"{path}[{i}]") for i, item in enumerate(value)]
        for tag, made in SEQUENCES.items():
            if kind is made:
                return {tag: [self.node(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        for tag, made in MAPPINGS.items():
            if kind is made:
                return {tag: self._pairs(value.items(), path)}
        if kind is deque:
            return {"deque": [value.maxlen, [self.node(item, path) for item in value]]}
        if (held := _held(value)) is not None:
            return {"in_place": [kind.__qualname__, self.node(held[0], path)]}
        if (parts := _parts(value)) is not None:
            return {"parts": [kind.__qualname__, self._pairs(parts.items(), path)]}
        return self._pickled(value, path)

    def _pairs(self, items: Any, path: str) -> Node:
        pairs = [[self.node(k, path), self.node(v, f"{path}[{k!r}]")] for k, v in items]
        for key, _ in pairs:
            if not _is_key(key):
                raise CheckpointError(
                    f"{path} has the key {_described(key)}, which cannot be saved; use numbers,"
                    " strings, or tuples of these"
                )
        return pairs

    def _pickled(self, value: Any, path: str) -> Node:
        import pickle

        kind = type(value).__qualname__
        try:
            content = pickle.dumps(value)
        except Exception as error:  # any error of the object's own code
            raise CheckpointError(
                f"{path} is a {kind}, which cannot be saved ({error}); give its class state_dict()"
                " and load_state_dict(state)"
            ) from error
        self.pickled.append(f"{path} ({kind})")
        return {"pickle": [kind, self.leaf("plain", content)]}


def _held(value: Any) -> tuple[Any, Callable[[Any], None]] | None:
    """The state of an object and a function that sets it; None if not restored in place."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(value, getattr(nnx, "Pytree", nnx.Module)):
        state = nnx.state(value)

        def fill(pure: Any) -> None:
            nnx.replace_by_pure_dict(state, pure)
            nnx.update(value, state)

        return nnx.to_pure_dict(state), fill
    for get, put in IN_PLACE:
        if callable(getattr(value, get, None)) and callable(getattr(value, put, None)):
            return getattr(value, get)(), getattr(value, put)
    generator = getattr(value, "bit_generator", None)
    if generator is not None:  # a NumPy generator
        return generator.state, lambda state: setattr(generator, "state", state)
    return None


def check_generator(state: Any) -> None:
    """Checks the position in the state of a generator: NumPy would read out of bounds."""
    is_dict = isinstance(state, dict)
    found = [state["state"].get("pos", 0), state.get("buffer_pos", 0)] if is_dict else [state[2]]
    if not all(type(one) is int and 0 <= one <= 624 for one in found):
        raise ValueError("the position of a random generator is out of range")


def _parts(value: Any) -> dict[Any, Any] | None:
    """The parts of any other container by key; None if it is not a container."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if (found := jax.children(value)) is not None:
        return found
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return dict(vars(value)) if _is_open(value) else None


def _is_open(value: Any) -> bool:
    """Whether `__dict__` is the complete state of an object."""
    kind: Any = type(value)
    return (
        hasattr(value, "__dict__")
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__getstate__ is object.__getstate__
        and not any(base.__dict__.get("__slots__") for base in kind.__mro__)
        and not isinstance(value, (dict, list, tuple, set, frozenset, str, bytes, int, float))
    )


def _with_parts(like: Any, parts: dict[Any, Any]) -> Any:
    """`like` with other parts: changed in place if possible, else a copy."""
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(**parts)
    if jax.children(like) is not None:
        return jax.with_children(like, list(parts.values()))
    if hasattr(like, "__dataclass_fields__"):
        frozen = like.__dataclass_params__.frozen
        filled = copy.copy(like) if frozen else like
        for name, part in parts.items():
            object.__setattr__(filled, name, part)
        return filled
    vars(like).clear()
    vars(like).update(parts)
    return like


class _Nothing:
    """The default of `like`."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


class Plan:
    """How to rebuild a tree like `like`; `differences` lists why it does not fit."""

    def __init__(
        self, structure: Node, like: Any = NOTHING, *, name: str = "state", is_trusted: bool = False
    ) -> None:
        self.differences: list[str] = []
        self.likes: dict[str, dict[int, Any]] = {}
        self.is_trusted = is_trusted
        self._build = self._plan(structure, like, name)

    def check(self, source: str) -> None:
        """Raises if there are differences."""
        if self.differences:
            shown = self.differences[:MAX_DIFFERENCES]
            more = len(self.differences) - len(shown)
            lines = "".join(f"\n  {line}" for line in shown) + (f"\n  and {more} more" * (more > 0))
            raise CheckpointError(f"{source} does not fit:{lines}")

    def build(self, leaves: Leaves) -> Any:
        """The tree."""
        return self._build(leaves)

    def _differ(self, path: str, saved: str, given: str) -> Build:
        self.differences.append(f"{path}: the checkpoint has {saved}, this run has {given}")
        return lambda leaves: None

    def _plan(self, node: Node, like: Any, path: str) -> Build:
        if isinstance(node, list):
            return self._sequence(list, node, like, path)
        if not isinstance(node, dict):
            return self._value(node, like, path)
        ((tag, content),) = node.items()
        if tag in SEQUENCES:
            return self._sequence(SEQUENCES[tag], content, like, path)
        if tag in MAPPINGS:
            return self._mapping(MAPPINGS[tag], content, like, path)
        return getattr(self, f"_{tag}")(content, like, path)  # type: ignore[no-any-return]

    def _value(self, value: Any, like: Any, path: str) -> Build:
        if _holds_arrays(like) and not (_is_number(like) and isinstance(value, (int, float))):
            return self._differ(path, describe(value), describe(like))
        return lambda leaves: value

    def _int(self, text: str, like: Any, path: str) -> Build:
        return self._value(int(text, 16), like, path)

    def _float(self, text: str, like: Any, path: str) -> Build:
        return self._value(float(text), like, path)

    def _complex(self, pair: Node, like: Any, path: str) -> Build:
        real, imag = (self._plan(part, NOTHING, path) for part in pair)
        return lambda leaves: complex(real(leaves), imag(leaves))

    def _leaf(self, content: Node, like: Any, path: str) -> Build:
        format, index, description, *traits = content
        is_array = "[" in description
        # A number may be a Python number in one step and an array in the next.
        is_number = description.endswith("[]") and _is_number(like)
        is_unfilled = like is NOTHING or like is None or 0 in getattr(like, "shape", ())
        is_compared = not (is_number or is_unfilled) and (is_array or _holds_arrays(like))
        is_widened = is_compared and _is_wider(describe(like), description)
        if is_compared and not is_widened and describe(like) != description:
            return self._differ(path, description, describe(like))
        if like is not NOTHING:
            self.likes.setdefault(format, {})[index] = like
        module = FORMATS[format]

        def made(leaves: Leaves) -> Any:
            leaf = leaves[format][index]
            return module.fitted(wide(leaf) if is_widened else leaf, like, *traits)

        return made

    def _sequence(self, kind: type, nodes: list[Node], like: Any, path: str) -> Build:
        is_given = isinstance(like, kind) and len(like) > 0  # type: ignore[arg-type]
        likes = list(like) if is_given and kind in (list, tuple) else []
        for i in range(len(nodes), len(likes)):
            if _holds_arrays(likes[i]):
                self._differ(f"{path}[{i}]", "nothing", describe(likes[i]))
        for i in range(len(likes), len(nodes) if likes else 0):
            if _node_holds_arrays(nodes[i]):
                self._differ(f"{path}[{i}]", _described(nodes[i]), "nothing")
        if not is_given and _holds_arrays(like):
            return self._differ(path, f"a {kind.__name__} of {len(nodes)}", describe(like))
        likes += [NOTHING] * (len(nodes) - len(likes))
        pairs = zip(nodes, likes, strict=False)
        builds = [self._plan(node, one, f"{path}[{i}]") for i, (node, one) in enumerate(pairs)]
        return lambda leaves: kind([build(leaves) for build in builds])

    def _mapping(self, kind: type, pairs: list[Node], like: Any, path: str) -> Build:
        if not all(_is_key(key) for key, _ in pairs):
            raise ValueError(f"{path} has a key that is not a plain value")
        keys = [self._plan(key, NOTHING, path)({}) for key, _ in pairs]
        nodes = dict(zip(keys, (node for _, node in pairs), strict=True))
        if len(nodes) < len(pairs):
            raise ValueError(f"{path} has a key twice")
        if not isinstance(like, dict):
            if _holds_arrays(like):
                return self._differ(path, _described({"dict": pairs}), describe(like))
            like = {}
        # A part that older versions did not save keeps the value of this run.
        absent = {key: like[key] for key in like.keys() - nodes.keys()}
        new = {k: v for k, v in absent.items() if getattr(type(v), "__loop_new__", False) is True}
        for key in like.keys() - nodes.keys() - new.keys():
            if _holds_arrays(like[key]):
                self._differ(f"{path}[{key!r}]", "nothing", describe(like[key]))
        for key in nodes.keys() - like.keys() if like else ():
            if _node_holds_arrays(nodes[key]):
                self._differ(f"{path}[{key!r}]", _described(nodes[key]), "nothing")
        builds = {
            key: self._plan(node, like.get(key, NOTHING), f"{path}[{key!r}]")
            for key, node in nodes.items()
        }
        return lambda leaves: kind(new | {key: build(leaves) for key, build in builds.items()})

    def _deque(self, content: Node, like: Any, path: str) -> Build:
        maxlen, nodes = content
        build = self._sequence(list, nodes, NOTHING, path)
        return lambda leaves: deque(build(leaves), maxlen)

    def _in_place(self, content: Node, like: Any, path: str) -> Build:
        kind, node = content
        if like is NOTHING:
            return self._plan(node, NOTHING, path)
        held = _held(like)
        if held is None or kind != type(like).__qualname__:
            return self._differ(path, f"a {kind}", describe(like))
        # A torch optimizer has no state before its first step, so anything fits.
        build = self._plan(node, held[0], path)

        def filled(leaves: Leaves) -> Any:
            try:
                state = build(leaves)
                if library_of(like) == "numpy":
                    check_generator(state)
                held[1](state)
            except CheckpointError:
                raise
            except Exception as error:  # any error of the object's own code
                raise CheckpointError(f"{path} does not fit this {kind}: {error}") from error
            return like

        return filled

    def _parts(self, content: Node, like: Any, path: str) -> Build:
        kind, pairs = content
        if like is NOTHING or like is None:
            node = {"parts": content}
            return lambda leaves: Loose(node, leaves, self.is_trusted)
        if kind != type(like).__qualname__ or (parts := _parts(like)) is None:
            return self._differ(path, f"a {kind}", describe(like))
        build = self._mapping(dict, pairs, parts, path)
        is_fixed = jax.children(like) is not None or isinstance(like, tuple)
        if is_fixed and [key for key, _ in pairs] != list(parts):
            return self._differ(path, f"a {kind} of {len(pairs)}", f"one of {len(parts)}")
        return lambda leaves: _with_parts(like, build(leaves))

    def _code(self, name: str, like: Any, path: str) -> Build:
        if like is NOTHING:
            return self._differ(path, f"the function {name}, which is code", "nothing in its place")
        return lambda leaves: like

    def _pickle(self, content: Node, like: Any, path: str) -> Build:
        kind, node = content
        if not self.is_trusted:
            self.differences.append(
                f"{path}: a {kind} is saved as a pickle, which can run code; {HOW_TO_TRUST}"
            )
            return lambda leaves: None
        build = self._plan(node, NOTHING, path)

        def loaded(leaves: Leaves) -> Any:
            import pickle

            return pickle.loads(build(leaves))  # noqa: S301  only where the caller trusts the folder

        return loaded


def _is_wider(given: str, saved: str) -> bool:
    """Whether a 16-bit float was saved where this run has 32 bits, as in old averages."""
    kind, _, shape = saved.partition("[")
    return kind in ("float16", "bfloat16") and given == f"float32[{shape}"


def _is_number(like: Any) -> bool:
    return isinstance(like, (bool, int, float, complex)) or getattr(like, "shape", None) == ()


def _holds_arrays(like: Any) -> bool:
    if hasattr(like, "shape"):
        return True
    if isinstance(like, dict):
        return any(map(_holds_arrays, like.values()))
    if isinstance(like, (list, tuple)):
        return any(map(_holds_arrays, like))
    return jax.children(like) is not None or _held(like) is not None


def _node_holds_arrays(node: Node) -> bool:
    if isinstance(node, list):
        return any(map(_node_holds_arrays, node))
    if not isinstance(node, dict):
        return False
    ((tag, content),) = node.items()
    return tag in ("leaf", "in_place") or _node_holds_arrays(content)


def _is_key(node: Node) -> bool:
    """Whether a node can be a dict key: a plain value without leaves."""
    if not isinstance(node, dict):
        return not isinstance(node, list)
    ((tag, content),) = node.items()
    is_inner = tag in ("tuple", "frozenset") and all(map(_is_key, content))
    return is_inner or tag in NUMBERS


def _described(node: Node) -> str:
    """A short description of a node."""
    if isinstance(node, list):
        return f"a list of {len(node)}"
    if not isinstance(node, dict):
        return describe(node)
    ((tag, content),) = node.items()
    if tag == "leaf":
        return str(content[2])
    if tag in MAPPINGS:
        return "{" + ", ".join(str(key) for key, _ in content[:6]) + "}"
    if tag in ("in_place", "parts", "pickle"):
        return f"a {content[0]}"
    return f"a {tag}"


# -- to a folder and back ------------------------------------------------------------------------


def begin_state(
    frozen: Frozen, folder: Path, process: Process, is_copied: bool
) -> list[Callable[[], None]]:
    """Saves the state: rank 0 writes all of it, the others only their sharded parts."""
    if process.rank == 0:
        return begin(frozen, folder, "state", is_copied)
    return [
        FORMATS[format].begin(folder / f"state.{format}", leaves, is_copied)
        for format, leaves in frozen.leaves.items()
        if FORMATS[format].is_shared(leaves)
    ]


def begin(frozen: Frozen, folder: Path, name: str, is_copied: bool) -> list[Callable[[], None]]:
    """Copies what the next step may change; the returned functions write it."""

    def structure() -> None:
        import json

        (folder / f"{name}.json").write_text(json.dumps(frozen.structure))

    begun = [
        FORMATS[format].begin(folder / f"{name}.{format}", leaves, is_copied)
        for format, leaves in frozen.leaves.items()
    ]
    return [*begun, structure]


def load(manifest: Manifest, name: str, like: Any = NOTHING, *, is_trusted: bool = False) -> Any:
    """Reads a saved tree like `like`; reports differences before reading arrays."""
    try:
        structure = manifest.json(f"{name}.json")
        saved, is_pickled = _surveyed(structure)
        plan = Plan(structure, like, name=name, is_trusted=is_trusted)
        plan.check(str(manifest.place))
        if is_pickled and not is_trusted:
            raise CheckpointError(
                f"{manifest.place} has a pickle in {name}.json, which can run code; {HOW_TO_TRUST}"
            )
        leaves = {
            format: FORMATS[format].read(
                manifest, f"{name}.{format}", described, plan.likes.get(format, {}), is_trusted
            )
            for format, described in saved.items()
        }
        for format in saved.keys() - {"jax"}:  # JAX may use narrower types in this run
            if saved[format] != list(map(describe, leaves[format])):
                raise manifest.damaged(f"{name}.{format} does not match {name}.json")
        return plan.build(leaves)
    except CicloError:
        raise
    except Exception as error:  # any error of JSON, NumPy, torch or Orbax on a bad file
        reason = f"{type(error).__name__}: {error}"
        raise manifest.damaged(f"{name} cannot be read ({reason})") from error


def _surveyed(structure: Node) -> tuple[dict[str, list[str]], bool]:
    """The description of each leaf by format, and whether there are pickles.

    Checks the whole structure before anything is built. Each leaf must occur once.
    """
    leaves: dict[str, dict[int, str]] = {format: {} for format in FORMATS}
    tags = set()
    todo = [structure]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        if not isinstance(node, dict):
            continue
        ((tag, content),) = node.items()
        tags.add(tag)
        if tag != "leaf":
            todo.append(content)
            continue
        format, index, description, *_ = content
        if index in leaves[format]:
            raise ValueError(f"leaf {index} of {format} occurs twice")
        leaves[format][index] = description
    if unknown := tags - TAGS:
        raise ValueError(f"unknown part {unknown.pop()!r}")
    return {
        format: [found[i] for i in range(len(found))] for format, found in leaves.items() if found
    }, "pickle" in tags
