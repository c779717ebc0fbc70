"""How a callback is called, and what it may return. Checked once, when a loop is set up.

A callback is a function of up to four of state, batch, elapsed and loop_state, or an object with
`__loop_callback__(loop_state)`. It returns None, logs, a state, or a pair of logs and state.
"""

from __future__ import annotations

from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from ciclo.device_values import PLAIN, describe
from ciclo.errors import CallbackError, shown
from ciclo.logs import COLLECTIONS, Logs
from ciclo.schedules import Every, Schedule, always, as_schedule
from ciclo.unreturned import drops_its_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeAlias

    from ciclo._seam import Watch
    from ciclo.logs import LogsLike

    Arguments: TypeAlias = tuple[list[str], dict[str, str]]  # by position, by keyword

ARGUMENTS = ("state", "batch", "elapsed", "loop_state")
OF_THE_LOOP = ("logs", "history", "metadata", "accumulated_logs")  # attributes, never arguments
FORM = "def callback(state, batch, elapsed, loop_state): ..."
PAIR = "return logs, state"
NO_STATE = (type, FunctionType, BaseException)  # allowed only if the state already was one
LOGGED = frozenset(COLLECTIONS)  # collections of logs; rarely the keys of a state


STEPPED = "{ciclo.on_epoch_end: lambda: scheduler.step()}, or create_torch_state(scheduler=...)"
# Models by the module and name of their class, and the functions that create a state from them.
CREATORS = {
    ("torch.nn.modules.module", "Module"): "create_torch_state",
    ("flax.linen.module", "Module"): "create_flax_state",
    ("flax.nnx.module", "Module"): "create_nnx_state",
}


class Bound(NamedTuple):
    """A callback, ready to be called with the LoopState."""

    name: str
    call: Callable[[Any], Any]
    owner: Any


class Task(NamedTuple):
    """A callback and its schedule; `due` is None if it is always due."""

    schedule: Schedule
    due: Callable[[Any], bool] | None
    bound: Bound


def bind_tasks(tasks: Any, watch: Watch | None) -> list[Task]:
    """The tasks of a loop in order, from a dict or a list of (schedule, callbacks)."""
    bound = []
    for key, callbacks in pairs_of(tasks):
        if isinstance(key, str):
            raise CallbackError(
                f"{key!r} is a moment of train_loop, test_loop, predict_loop and fit;"
                " ciclo.loop needs a schedule, such as ciclo.every(1)"
            )
        schedule = as_schedule(key)
        is_always = isinstance(schedule, always) or (
            isinstance(schedule, Every) and schedule.amount.steps == 1
        )
        due = None if is_always else schedule.is_due
        if callbacks is None:
            raise CallbackError(
                f"None is not a callback of {schedule!r}; to do nothing: ciclo.noop"
            )
        bound += [Task(schedule, due, bind(one, watch)) for one in listed(callbacks)]
    return bound


def pairs_of(tasks: Any) -> list[tuple[Any, Any]]:
    """The items of a dict, or a list of pairs unchanged."""
    if hasattr(tasks, "items"):
        return list(tasks.items())
    pairs = list(tasks) if _is_several(tasks) else [tasks]
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise CallbackError(
                f"tasks are {{schedule: callbacks}} or a list of (schedule, callbacks); got"
                f" {pair!r}. Write {{ciclo.every(1): train_step}}"
            )
    return pairs


def listed(callbacks: Any) -> list[Any]:
    """One callback or several, as a list."""
    if callbacks is None:
        return []
    return list(callbacks) if _is_several(callbacks) else [callbacks]


def _is_several(given: Any) -> bool:
    return isinstance(given, (list, tuple)) or hasattr(given, "__next__")


def bind(callback: Any, watch: Watch | None = None) -> Bound:
    """Determines how to call a callback; raises CallbackError if it cannot be called."""
    from ciclo.callbacks import adapters

    name = name_of(callback)
    callback = adapters.adapt(getattr(callback, "__loop_step__", callback))
    if hasattr(type(callback), "__loop_callback__"):
        call = callback.__loop_callback__
    elif isinstance(callback, (type, Schedule)) or not callable(callback) or _is_layer(callback):
        raise CallbackError(
            f"{shown(callback)} is not a callback; use a function such as\n    {FORM}\n"
            f"or an object with __loop_callback__(loop_state).{_hint(name, callback)}"
        )
    else:
        call = with_arguments(name, callback)
        if drops_its_logs(callback):
            raise CallbackError(
                f"{name} fills logs but does not return them; end it with\n"
                f"    return logs\nor, with a new state,\n    {PAIR}"
            )
    if watch is not None:
        call = watch.call(getattr(callback, "span_name", None) or name, call)
    return Bound(name, call, callback)


def _hint(name: str, given: Any) -> str:
    """What to write in place of an object that is not a callback."""
    if steps_rate(given):
        return f" Step the scheduler yourself: {STEPPED}"
    if isinstance(given, Schedule):
        return " A schedule is a key of the tasks; combine two with & or |"
    if (create := creator_of(given)) is not None:
        return f" For a model: state = ciclo.{create}({name}, ...)"
    return f" Did you mean {name}(...)?" if isinstance(given, type) else ""


def creator_of(given: Any) -> str | None:
    """The function that creates a state from a model of this type; None for anything else."""
    for kind in type(given).__mro__:
        if (found := CREATORS.get((kind.__module__, kind.__name__))) is not None:
            return found
    return None


def _is_layer(given: Any) -> bool:
    """Whether this is a model that accepts any arguments when it is called, but cannot use them."""
    return creator_of(given) in ("create_torch_state", "create_flax_state")


def steps_rate(given: Any) -> bool:
    """Whether this is a learning rate scheduler of torch, or its class."""
    kinds = given.__mro__ if isinstance(given, type) else type(given).__mro__
    return any(kind.__module__ == "torch.optim.lr_scheduler" for kind in kinds)


def name_of(callback: Any) -> str:
    """The name of a callback in errors and in a profile."""
    while hasattr(callback, "func") and not hasattr(callback, "__name__"):
        callback = callback.func  # functools.partial
    name = getattr(callback, "__name__", None) or getattr(callback, "name", None)
    return name if isinstance(name, str) and name else type(callback).__name__


def with_arguments(name: str, function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Wraps a callback as a function of the LoopState."""
    by_position, by_keyword = callback_arguments(name, function)
    if by_keyword:
        # With two or more names, it returns a tuple.
        get = attrgetter("__class__", *by_keyword.values())
        names = tuple(by_keyword)
        return lambda run: function(
            *(getattr(run, one) for one in by_position),
            **dict(zip(names, get(run)[1:], strict=True)),
        )
    if not by_position:
        return lambda run: function()
    if by_position == ["state", "batch"]:  # the usual step; saves 0.15 us per call
        return lambda run: function(run.state, run.batch)
    get = attrgetter(*by_position)
    if len(by_position) == 1:
        return lambda run: function(get(run))
    return lambda run: function(*get(run))


def callback_arguments(
    name: str, function: Callable[..., Any], order: tuple[str, ...] = ARGUMENTS
) -> Arguments:
    """Which attributes of the LoopState a callback takes.

    order: what parameters with other names get, by position
    """
    import inspect

    def wrong(what: str) -> CallbackError:
        return CallbackError(
            f"{name}{inspect.signature(function)} cannot be a callback: {what}. A callback takes up"
            " to four of state, batch, elapsed and loop_state:\n   "
            f" {FORM.replace('callback', name)}"
        )

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise CallbackError(
            f"the arguments of {name} cannot be read; wrap it, as in"
            f" lambda state, batch: {name}(state, batch)"
        ) from None
    _refuse_lazy_functions(name, function)
    for one in parameters:
        is_given = one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if one.name in OF_THE_LOOP and one.default is one.empty and is_given:
            raise wrong(f"{one.name!r} is not an argument; read loop_state.{one.name}")
    return arguments_of(function, Offer(ARGUMENTS, order, wrong))


class Offer(NamedTuple):
    """The arguments available by name, and by position for parameters with other names."""

    names: tuple[str, ...]
    order: tuple[str, ...]
    wrong: Callable[[str], CallbackError]  # creates the error from a reason
    aliases: Mapping[str, str] = {}
    fills_rest: bool = False  # whether `**rest` receives all remaining arguments

    def source(self, parameter: str) -> str | None:
        """The argument that a parameter with this name receives, or None."""
        found = parameter if parameter in self.names else self.aliases.get(parameter)
        return found if found in self.names else None


def arguments_of(function: Callable[..., Any], offer: Offer) -> Arguments:
    """The arguments that a function takes, by position and by keyword."""
    import inspect

    found = list(inspect.signature(function).parameters.values())
    kinds = {one.kind for one in found}
    parameters = [one for one in found if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    positional = [one for one in parameters if one.kind is not one.KEYWORD_ONLY]
    if not positional and inspect.Parameter.VAR_POSITIONAL in kinds:
        return list(offer.order), {}
    needed = {offer.source(one.name) for one in parameters if one.default is one.empty}
    is_clear = None not in needed  # else an alias with a default may mean something else
    wanted = [
        one
        for one in parameters
        if one.default is one.empty
        or one.name in offer.names
        or (is_clear and offer.source(one.name) not in (None, *needed))
    ]
    sources = _sources([one.name for one in wanted if one in positional], offer)
    by_position: list[str] = []
    by_keyword: dict[str, str] = {}
    is_skipping = False  # after a skipped default, the rest are passed by keyword
    for one in positional:
        if one.name not in sources:
            is_skipping = True
        elif is_skipping:
            by_keyword[one.name] = sources[one.name]
        else:
            by_position.append(sources[one.name])
    for one in wanted:
        if one.kind is one.KEYWORD_ONLY:
            if (source := offer.source(one.name)) is None:
                raise offer.wrong(f"the keyword {one.name!r} has no value")
            by_keyword[one.name] = source
    if inspect.Parameter.VAR_KEYWORD in kinds:
        names = {one.name for one in parameters}
        if offer.fills_rest:
            by_keyword |= {one: one for one in offer.names if one not in names}
        elif not positional and not by_keyword:
            by_keyword = {one: one for one in offer.order}
    return by_position, by_keyword


def _sources(wanted: list[str], offer: Offer) -> dict[str, str]:
    """What each parameter gets: by name if the name is known, else by position.

    If known and unknown names are mixed, all must be in order; otherwise it is ambiguous.
    """
    found = {one: source for one in wanted if (source := offer.source(one)) is not None}
    others = [one for one in wanted if one not in found]
    placed = [one for one in wanted if one in others or found[one] in offer.order]
    for place, one in enumerate(placed if others else ()):
        if place >= len(offer.order):
            raise offer.wrong(f"{one!r} is one too many")
        if found.setdefault(one, offer.order[place]) != offer.order[place]:
            raise offer.wrong(
                f"{others[0]!r} is not a known name, and {one!r} is not in its position, so"
                f" it is not clear what {others[0]!r} is"
            )
    return found


def _refuse_lazy_functions(name: str, function: Callable[..., Any]) -> None:
    """Calling a coroutine function or a generator function runs none of its code."""
    import inspect

    for one in (function, type(function).__call__):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            raise CallbackError(
                f"{name} is async, and a loop does not wait for it; write def {name}, or"
                f" lambda state, batch: asyncio.run({name}(state, batch))"
            )
        if inspect.isgeneratorfunction(one):
            raise CallbackError(f"{name} has a yield, so calling it does nothing; use return")


def is_logs(value: Any) -> bool:
    """Whether this is a dict of dicts."""
    if isinstance(value, Logs):
        return True
    if not isinstance(value, dict):
        return False
    for key, inner in value.items():  # runs in each step; all() takes twice as long
        if not isinstance(inner, dict) or not isinstance(key, str):
            return False
    return True


def read(name: str, result: Any, state: Any = None) -> tuple[LogsLike | None, Any]:
    """The logs and the state that a callback returned; None for those it did not return.

    state: the state before; a dict with the same keys is a state, not logs
    """
    kind = type(result)
    if kind is tuple:
        if len(result) == 2 and (result[0] is None or is_logs(result[0])):
            if type(state) is tuple and len(state) == 2 and _is_alike(result[0], state[0]):
                raise CallbackError(_like_the_state(name, "tuple"))
            return result  # type: ignore[no-any-return]
        raise CallbackError(_not_a_pair(name, result))
    if isinstance(result, dict):
        if is_logs(result):
            if _is_alike(result, state):
                raise CallbackError(_like_the_state(name, "dict"))
            return result, None
        if _is_alike(result, state):
            return None, result
        raise CallbackError(
            f"{name} returned a dict, which is read as logs, but logs are a dict of dicts:\n"
            f"    return {_example(result)}\n"
            f"If it is the state:\n    return None, state"
        )
    return None, result


def check_new_state(name: str, state: Any, before: Any) -> None:
    """Refuses a value that is clearly not meant as the state, such as logs or a loss."""
    is_logged = isinstance(state, Logs) or (is_logs(state) and LOGGED.issuperset(state))
    if is_logged and state and not _is_alike(state, before):
        raise CallbackError(f"{name} returned logs in place of the state:\n    {PAIR}")
    are_arrays = hasattr(state, "shape") and hasattr(before, "shape")
    is_single = _is_single(state) and not _is_single(before) and not are_arrays
    is_other = isinstance(state, NO_STATE) and type(state) is not type(before)
    if before is not None and (is_single or is_other):
        raise CallbackError(
            f"{name} returned {describe(state)}, which would become the state in place of"
            f" {describe(before)}. To log it:\n"
            '    return {"metrics": {"loss": ...}}\n'
            "To end the loop:\n    loop_state.stop_iteration = True"
        )


def _is_single(value: Any) -> bool:
    return type(value) in PLAIN or getattr(value, "shape", None) == ()


def _is_alike(result: Any, state: Any) -> bool:
    """Whether a dict has the keys of the state: parameters are often a dict of dicts too."""
    return bool(result) and isinstance(state, dict) and result.keys() == state.keys()


def _like_the_state(name: str, kind: str) -> str:
    return (
        f"{name} returned a {kind} that looks like the state, but would be read as logs.\n"
        "If it is the state:\n    return None, state"
    )


def _not_a_pair(name: str, result: tuple[Any, ...]) -> str:
    if len(result) == 2 and isinstance(result[0], dict):
        return (
            f"{name} returned a pair whose logs are not a dict of dicts:\n"
            f"    return {_example(result[0])}, state"
        )
    kinds = ", ".join(type(item).__name__ for item in result)
    return (
        f"{name} returned the tuple ({kinds}), which is not (logs, state):\n    {PAIR}\n"
        "If the tuple is the state, return (None, state)"
    )


def _example(logs: dict[Any, Any]) -> str:
    """Flat logs as a dict of dicts; a train step needs its loss under "losses"."""
    names = [str(key) for key in list(logs)[:3]]
    kinds = {
        "losses": [name for name in names if "loss" in name],
        "metrics": [name for name in names if "loss" not in name],
    }
    shown = (
        f'"{kind}": {{{", ".join(f"{name!r}: ..." for name in named)}}}'
        for kind, named in kinds.items()
        if named
    )
    return f"{{{', '.join(shown)}}}"


def owners(bound: Iterable[Bound]) -> list[Bound]:
    """The bound callbacks, each object once."""
    seen: set[int] = set()
    kept = []
    for one in bound:
        if id(one.owner) not in seen:
            seen.add(id(one.owner))
            kept.append(one)
    return kept
