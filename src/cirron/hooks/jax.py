"""JAX: `trace`, `lower`, `compile`, `transfer` and `checkpoint` spans; device time of marks' spans.

JAX tells by itself when it traces, lowers and compiles a function; nothing of a jitted call is
patched, so that it costs what it costs without us, and nothing of ours is ever traced. What the
arguments of a compiled function are, JAX says to a logger that is usually silent.

A value that is marked is also waited for, on a thread of ours: when it is there, the device has
done what it had to do for it. Runs on the user's threads otherwise.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from queue import SimpleQueue
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.monitoring

from cirron import guard
from cirron.hooks.engine import Tentative, Wrapper, around, end_if_used
from cirron.hooks.patch import ImportWatch
from cirron.record import hot, value

if TYPE_CHECKING:
    from cirron.hooks import Snapshots
    from cirron.settings import Settings

# What JAX calls the phases of a compile, and we.
PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
CACHE = {
    "/jax/compilation_cache/cache_hits": "hit",
    "/jax/compilation_cache/cache_misses": "miss",
}
KINDS = ("scalar_listener", "event_duration_secs_listener", "event_listener")

# Says "Compiling %s with global shapes and types %s" before each compile, usually to nobody.
LOGGER = "jax._src.interpreters.pxla"

MAX_FUNCTIONS = 1_000  # whose last arguments are remembered
MAX_DIFFERENCES = 3  # that a cause names
# Values that come more often than this are waited for together: each time takes the interpreter
# lock from training.
SOON_S = 0.001
MAX_WAITING = 10_000  # values that are waited for; past that, spans have no device time

CHECKPOINTERS = "CheckpointManager", "Checkpointer", "AsyncCheckpointer", "StandardCheckpointer"
ACTIONS = {"save": "save", "restore": "restore", "wait_until_finished": "wait"}


class Lane(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        # That are open: JAX's name and our span, None for a trace inside of a trace.
        self.phases: list[tuple[str, hot.Span | None]] = []
        self.arguments: tuple[str, list[str]] | None = None  # of the function to be compiled
        self.compiled_ns = 0  # when the last phase ended


class JaxHook(Wrapper):
    """Installs and removes the hooks."""

    name = "jax"
    what = "jax hooks"

    def __init__(self, settings: Settings, snapshots: Snapshots) -> None:
        super().__init__(settings, snapshots)
        self._watch = ImportWatch()
        self._lane = Lane()
        self._compiles = Compiles(self._lane)
        self._readiness = Readiness(self._lane)

    def install(self) -> None:
        self.uninstall()
        self._is_on = True
        self._compiles.install()
        self._readiness.install()
        for name, direction in (("device_put", "device"), ("device_get", "host")):
            self._wrap(jax, name, functools.partial(self._transfer, direction))
        self._watch.when_imported("orbax.checkpoint", self._see_checkpoints)

    def uninstall(self) -> None:
        self._is_on = False
        self._watch.undo()
        self._patches.undo()
        self._compiles.uninstall()
        self._readiness.uninstall()

    def _transfer(self, direction: str, original: Any, args: Any, kwargs: Any) -> Any:
        span = None
        if not self._lane.phases:  # else a function runs only to be traced
            span = self._tell(begin_transfer, direction, args[0] if args else kwargs.get("x"))
        return around(span, original, args, kwargs)

    # -- checkpoints ------------------------------------------------------------------------

    def _see_checkpoints(self) -> None:
        orbax = sys.modules["orbax.checkpoint"]
        for kind in CHECKPOINTERS:
            owner = getattr(orbax, kind, None)
            for name, action in ACTIONS.items():
                if owner is not None and name in vars(owner):
                    self._wrap(owner, name, functools.partial(self._checkpoint, action))

    def _checkpoint(self, action: str, original: Any, args: Any, kwargs: Any) -> Any:
        # A manager has checkpointers, and a thread that waits for them.
        is_orbax_thread = type(threading.current_thread()).__module__.startswith("orbax.")
        if "checkpoint" in hot.open_names() or is_orbax_thread:
            return original(*args, **kwargs)
        attrs = {"action": action, "by": type(args[0]).__name__}
        span = hot.begin("checkpoint", None, attrs, Tentative)
        result = around(span, original, args, kwargs, end=lambda _: None)
        (end_if_used if result is False else hot.close)(span)  # the first: it was not due
        return result


def begin_transfer(direction: str, x: Any) -> hot.Span | None:
    """Opens the span of a transfer, unless it is only traced."""
    leaves = jax.tree_util.tree_leaves(x)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    size = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
    return hot.begin("transfer", None, {"to": direction, "bytes": size})


# -- compiles --------------------------------------------------------------------------------


class Compiles(logging.Filter):
    """Listens to what JAX says of compiles, in the thread that compiles."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self._lane = lane
        self._seen: dict[str, tuple[int, list[str]]] = {}  # function -> times, and last arguments
        self._level: int | None = None  # of the logger, before us
        self._listeners = dict(
            zip(KINDS, (self._on_start, self._on_end, self._on_event), strict=True)
        )

    def install(self) -> None:
        for kind, listener in self._listeners.items():
            getattr(jax.monitoring, f"register_{kind}")(listener)
        logger = logging.getLogger(LOGGER)
        self._level = logger.level
        logger.addFilter(self)
        logger.setLevel(logging.DEBUG)

    def uninstall(self) -> None:
        if self._level is None:
            return
        logger = logging.getLogger(LOGGER)
        logger.removeFilter(self)
        if logger.level == logging.DEBUG:  # else the program has set it since
            logger.setLevel(self._level)
        self._level = None
        for kind, listener in self._listeners.items():
            unregister(kind, listener)

    def _on_start(self, event: str, value: Any, **about: Any) -> None:
        phase = PHASES.get(event)
        if phase is None:
            return
        if phase == "trace" and self._lane.phases:  # older releases: of each function it calls
            self._lane.phases.append((event, None))
            return
        with guard.quiet("jax compile"):
            function = function_name(str(about.get("fun_name", "")))
            attrs: dict[str, Any] = {"function": function}
            if phase == "compile":
                attrs |= self._cause(function)
            self._lane.phases.append((event, hot.begin(phase, None, attrs)))

    def _on_end(self, event: str, duration: float, **about: Any) -> None:
        phases = self._lane.phases
        if event in PHASES and phases and phases[-1][0] == event:
            with guard.quiet("jax compile"):
                span = phases.pop()[1]
                if span is not None:
                    hot.close(span)
                    self._lane.compiled_ns = span.end

    def _on_event(self, event: str, **about: Any) -> None:
        span = self._lane.phases[-1][1] if event in CACHE and self._lane.phases else None
        if span is not None:
            with guard.quiet("jax compile"):
                span.set(cache=CACHE[event])

    def filter(self, record: logging.LogRecord) -> bool:
        """Reads what is to be compiled; passes on what would be logged without us."""
        try:
            if isinstance(record.args, tuple) and len(record.args) == 3:
                name, types, shardings = record.args
                self._lane.arguments = function_name(str(name)), describe(types, shardings)
        except Exception as error:  # noqa: BLE001  protects the compile from another JAX's record
            guard.caught("jax compile", error)
        parent = logging.getLogger(LOGGER).parent
        level = self._level or (logging.WARNING if parent is None else parent.getEffectiveLevel())
        return record.levelno >= level

    def _cause(self, function: str) -> dict[str, Any]:
        """Why a function is compiled: for the first time, or because its arguments are others."""
        given, self._lane.arguments = self._lane.arguments, None
        arguments = given[1] if given is not None and given[0] == function else []
        times, before = self._seen.pop(function, (0, []))
        while len(self._seen) >= MAX_FUNCTIONS:
            del self._seen[next(iter(self._seen))]
        self._seen[function] = (times + 1, arguments)
        cause = "first call" if not times else difference(before, arguments)
        return {"cause": cause, "count": times + 1}


def unregister(kind: str, listener: Any) -> None:
    from jax._src import monitoring  # in older releases, nothing public takes a listener off

    kind = kind.replace("_secs", "")
    name = f"unregister_{kind}"
    remove = getattr(jax.monitoring, name, None) or getattr(monitoring, f"_{name}_by_callback")
    try:
        remove(listener)
    except (AssertionError, ValueError):  # the program has cleared all listeners
        pass


def function_name(name: str) -> str:
    """`step` for JAX's `jit(step)`, or an older one's `jit_step`."""
    if name.startswith("jit(") and name.endswith(")"):
        return name[4:-1]
    return name.removeprefix("jit_")


def describe(types: Any, shardings: Any) -> list[str]:
    """The arguments, each as `float32[4,4]`, with its sharding where it is given one."""
    found = []
    for kind, sharding in zip(types, shardings, strict=True):
        text = str(kind)
        spec = getattr(sharding, "spec", None)
        found.append(text if spec is None else f"{text} {spec}")
    return found


def difference(before: list[str], now: list[str]) -> str:
    if len(before) != len(now):
        return f"{len(now)} arguments, {len(before)} before"
    found = [
        f"argument {number}: {new}, {old} before"
        for number, (old, new) in enumerate(zip(before, now, strict=True))
        if old != new
    ]
    if not found:
        return (
            "the same arguments as before: one that it does not use, a static one, a setting of"
            " JAX's, or the function itself is another"
        )
    more = len(found) - MAX_DIFFERENCES
    return "; ".join(found[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


# -- device time -----------------------------------------------------------------------------


class DeviceTime(value.Polled):
    """How long the devices took for the values that are marked in a span."""

    __slots__ = ("asked", "done", "has_failed", "span", "spent_ns", "start_ns")

    def __init__(self, span: hot.Span) -> None:
        self.span = span
        self.start_ns = span.start
        self.asked = 0  # written by the span's thread alone,
        self.done = 0  # this one by the thread that waits
        self.spent_ns = 0
        self.has_failed = False

    def poll(self) -> int | None:
        if self.done != self.asked:
            return None
        if self.has_failed:
            raise RuntimeError("a value was donated, or could not be computed")
        return self.spent_ns


class Awaited(value.Deferred):
    """A mark's value, or a span's `device_ns`, which `Readiness` waits for."""

    __slots__ = ()
    is_awaited = True

    def poll(self) -> bool:
        source = self.source
        if not self.is_ready and not isinstance(source, DeviceTime):
            try:
                if not source.is_ready():
                    return False
            except Exception:  # noqa: BLE001  the value is asked for, and says what is wrong
                pass
        return super().poll()


class Readiness:
    """Waits for the values that are marked, one after the other, on a thread of its own.

    A span's `device_ns` is the time until its last value is there: from the span's start, or from
    the end of the last compile in it, or from when the value before was there, whichever is last.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._values: SimpleQueue[Waiting | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        value.TAKERS["jaxlib"] = self.take

    def uninstall(self) -> None:
        """What is waited for is still waited for: the spans' records wait for it too."""
        if value.TAKERS.get("jaxlib") == self.take:
            del value.TAKERS["jaxlib"]
        self._values.put(None)
        self._values, self._thread = SimpleQueue(), None

    def take(self, scalar: Any) -> value.Deferred:
        """The value of a mark, for later. Runs on the user's thread."""
        mark = value.Deferred(scalar)
        try:
            if not scalar.is_fully_addressable and scalar.is_fully_replicated:
                mark.source = scalar.addressable_data(0)  # the same in each process
            span = hot.innermost()
            if span.parent is not span and self._values.qsize() < MAX_WAITING:
                awaited = Awaited(mark.source)
                self._measure(span, awaited)
                mark = awaited
        except Exception as error:  # noqa: BLE001  protects the mark from an array that objects
            guard.caught("jax device time", error)
        return mark

    def _measure(self, span: hot.Span, mark: Awaited) -> None:
        known = None if span.attrs is None else span.attrs.get("device_ns")
        if not isinstance(known, value.Deferred):
            known = Awaited(DeviceTime(span))
            span.set(device_ns=known)
        time: DeviceTime = known.source
        time.start_ns = max(time.start_ns, self._lane.compiled_ns)
        time.asked += 1
        self._values.put(Waiting(mark.source, mark, time, known))
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=wait_for, args=(self._values,), name="cirron-jax", daemon=True
            )
            self._thread.start()


class Waiting(NamedTuple):
    """A value that is waited for."""

    scalar: Any
    mark: Awaited
    time: DeviceTime
    device_ns: value.Deferred  # of the span, from `time`


def wait_for(values: SimpleQueue[Waiting | None]) -> None:
    ready_ns: dict[frozenset[Any], int] = {}  # the last value of these devices
    last_ns = 0
    while (item := values.get()) is not None:
        time, is_soon = item.time, False
        try:
            item.scalar.block_until_ready()  # without the interpreter lock
            now, devices = hot.now(), frozenset(item.scalar.devices())
            time.spent_ns += max(0, now - max(time.start_ns, ready_ns.get(devices, 0)))
            ready_ns[devices] = now
            is_soon, last_ns = now - last_ns < SOON_S * 1e9, now
        except Exception:  # noqa: BLE001  protects the thread: the program hears of it by itself
            time.has_failed = True
        time.done += 1
        item.mark.poll()  # nobody else need wake up for it
        if time.span.end:
            item.device_ns.poll()
        del item, time
        if is_soon and values.empty():
            sleep(SOON_S)
