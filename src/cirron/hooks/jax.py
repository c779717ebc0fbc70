"""JAX: `trace`, `lower`, `compile`, `transfer` and `checkpoint` spans, and device time.

JAX reports when it traces, lowers and compiles a function. A jitted call is not patched, so it
costs the same as without cirron, and none of cirron's code is ever traced. JAX writes the arguments
of a function that it compiles to a logger that is usually silent.

Runs on the user's threads. One background thread, `cirron-jax`, waits for marked values: when a
value is ready, the device has finished the work for it.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from time import sleep
from typing import TYPE_CHECKING, Any

import jax
import jax.monitoring

from cirron import guard
from cirron.hooks.engine import Tentative, Wrapper, around, end_if_used
from cirron.record import hot, value

if TYPE_CHECKING:
    from typing import TypeAlias

    from cirron.hooks import Snapshots
    from cirron.hooks.engine import Call
    from cirron.settings import Settings

    # Scalars on devices, their marks, and the spans' `device_ns`; None ends the thread.
    Values: TypeAlias = SimpleQueue[tuple[Any, "Awaited", "DeviceTime"] | None]

# JAX's names for the phases of a compilation, and ours.
PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
CACHE = {
    "/jax/compilation_cache/cache_hits": "hit",
    "/jax/compilation_cache/cache_misses": "miss",
}

# Logs "Compiling %s with global shapes and types %s" before each compilation.
LOGGER = "jax._src.interpreters.pxla"

MAX_FUNCTIONS = 1_000  # whose last arguments are remembered
MAX_DIFFERENCES = 3  # arguments that a cause names
# Values that follow each other faster than this are collected together: waking up takes the GIL
# from the training thread.
SOON_S = 0.001
MAX_WAITING = 10_000  # values in the queue; spans beyond that have no device time

CHECKPOINTERS = "CheckpointManager", "Checkpointer", "AsyncCheckpointer", "StandardCheckpointer"
ACTIONS = {"save": "save", "restore": "restore", "wait_until_finished": "wait"}


class ThreadState(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        # Open phases: JAX's name, the span (None for a trace inside a trace), and the exception
        # that was being handled when the phase began.
        self.phases: list[tuple[str, hot.Span | None, BaseException | None]] = []
        self.arguments: tuple[str, list[str]] | None = None  # of the function to be compiled
        self.compiled_ns = 0  # when the last phase ended


class JaxHook(Wrapper):
    """Installs and removes the hooks."""

    name = "jax"
    what = "jax hooks"

    def __init__(self, settings: Settings, snapshots: Snapshots) -> None:
        super().__init__(settings, snapshots)
        self._state = ThreadState()
        self._compiles = Compiles(self._state)
        self._readiness = Readiness(self._state)

    def _replace(self) -> None:
        self._compiles.install()
        self._readiness.install()
        for name, direction in (("device_put", "device"), ("device_get", "host")):
            self._wrap(jax, name, functools.partial(self._transfer, direction))
        self._watch.when_imported("orbax.checkpoint", self._see_checkpoints)

    def uninstall(self) -> None:
        super().uninstall()
        self._compiles.uninstall()
        self._readiness.uninstall()

    def _transfer(self, direction: str, call: Call) -> Any:
        return around(self._tell(self._begin_transfer, direction, call), call)

    def _begin_transfer(self, direction: str, call: Call) -> hot.Span | None:
        leaves = jax.tree_util.tree_leaves(call.args[0] if call.args else call.keywords.get("x"))
        if self._state.phases or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return None  # a function is being traced
        size = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        return hot.begin("transfer", None, {"to": direction, "bytes": size})

    # -- checkpoints ------------------------------------------------------------------------

    def _see_checkpoints(self) -> None:
        orbax = sys.modules["orbax.checkpoint"]
        for kind in CHECKPOINTERS:
            owner = getattr(orbax, kind, None)
            for name, action in ACTIONS.items():
                if owner is not None and name in vars(owner):
                    self._wrap(owner, name, functools.partial(self._checkpoint, action))

    def _checkpoint(self, action: str, call: Call) -> Any:
        # A manager calls checkpointers, and waits for them in its own thread.
        is_orbax_thread = type(threading.current_thread()).__module__.startswith("orbax.")
        if "checkpoint" in hot.open_names() or is_orbax_thread:
            return call()
        attrs = {"action": action, "by": type(call.args[0]).__name__}
        span = hot.begin("checkpoint", None, attrs, Tentative)
        result = around(span, call, end=lambda _: None)
        (end_if_used if result is False else hot.close)(span)  # False: no save was due
        return result


# -- compiles --------------------------------------------------------------------------------


class Compiles:
    """Listens to JAX's reports of compilations, in the thread that compiles."""

    def __init__(self, state: ThreadState) -> None:
        self._state = state
        self._seen: dict[str, tuple[int, list[str]]] = {}  # function -> times, and last arguments
        self._level: int | None = None  # the logger's level before `install`

    def install(self) -> None:
        jax.monitoring.register_scalar_listener(self._on_start)
        jax.monitoring.register_event_duration_secs_listener(self._on_end)
        jax.monitoring.register_event_listener(self._on_event)
        logger = logging.getLogger(LOGGER)
        self._level = logger.level
        logger.addFilter(self._on_log)
        logger.setLevel(logging.DEBUG)

    def uninstall(self) -> None:
        if self._level is None:
            return
        logger = logging.getLogger(LOGGER)
        logger.removeFilter(self._on_log)
        if logger.level == logging.DEBUG:  # else the program has set it since
            logger.setLevel(self._level)
        self._level = None
        unregister("scalar", self._on_start)
        unregister("event_duration", self._on_end)
        unregister("event", self._on_event)

    def _on_start(self, event: str, value: Any, **about: Any) -> None:
        phase = PHASES.get(event)
        if phase is None:
            return
        # Older releases also report each function that the traced one calls.
        if phase == "trace" and self._state.phases:
            self._state.phases.append((event, None, None))
            return
        with guard.quiet("jax compile"):
            function = function_name(str(about.get("fun_name", "")))
            attrs: dict[str, Any] = {"function": function}
            if phase == "compile":
                attrs |= self._cause(function)
            span = hot.begin(phase, None, attrs)
            self._state.phases.append((event, span, sys.exc_info()[1]))

    def _on_end(self, event: str, duration_secs: float, **about: Any) -> None:
        phases = self._state.phases
        if not phases or phases[-1][0] != event:
            return
        with guard.quiet("jax compile"):
            _, span, handled = phases.pop()
            if span is not None:
                error = sys.exc_info()[1]
                if error is None or error is handled:
                    hot.close(span)
                else:
                    hot.fail(span, error)
                self._state.compiled_ns = span.end

    def _on_event(self, event: str, **about: Any) -> None:
        phases = self._state.phases
        if event in CACHE and phases and (span := phases[-1][1]) is not None:
            span.set(cache=CACHE[event])

    def _on_log(self, record: logging.LogRecord) -> bool:
        """Reads what is about to be compiled; lets through what would be logged anyway."""
        with guard.quiet("jax compile"):  # another release's record may have other arguments
            if isinstance(record.args, tuple) and len(record.args) == 3:
                name, types, shardings = record.args
                self._state.arguments = function_name(str(name)), describe(types, shardings)
        parent = logging.getLogger(LOGGER).parent
        level = self._level or (logging.WARNING if parent is None else parent.getEffectiveLevel())
        return record.levelno >= level

    def _cause(self, function: str) -> dict[str, Any]:
        """Why a function is compiled: it is the first call, or its arguments have changed."""
        given, self._state.arguments = self._state.arguments, None
        arguments = given[1] if given is not None and given[0] == function else []
        times, before = self._seen.pop(function, (0, []))
        while len(self._seen) >= MAX_FUNCTIONS:
            del self._seen[next(iter(self._seen))]
        self._seen[function] = (times + 1, arguments)
        cause = "first call" if not times else difference(before, arguments)
        return {"cause": cause, "count": times + 1}


def unregister(kind: str, listener: Any) -> None:
    from jax._src import monitoring  # older releases have no public function for this

    name = f"unregister_{kind}_listener"
    remove = getattr(jax.monitoring, name, None) or getattr(monitoring, f"_{name}_by_callback")
    with suppress(AssertionError, ValueError):  # the program has cleared all listeners
        remove(listener)


def function_name(name: str) -> str:
    """`step` for JAX's `jit(step)`, or `jit_step` of older releases."""
    if name.startswith("jit(") and name.endswith(")"):
        return name[4:-1]
    return name.removeprefix("jit_")


def describe(types: Any, shardings: Any) -> list[str]:
    """The arguments, each as `float32[4,4]`, with its sharding if it has one."""
    specs = (getattr(sharding, "spec", None) for sharding in shardings)
    return [
        str(kind) if spec is None else f"{kind} {spec}"
        for kind, spec in zip(types, specs, strict=True)
    ]


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
            "the same arguments as before: an unused or static argument, a setting of JAX or the"
            " function itself has changed"
        )
    more = len(found) - MAX_DIFFERENCES
    return "; ".join(found[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


# -- device time -----------------------------------------------------------------------------


class DeviceTime(value.Deferred):
    """The `device_ns` of a span: how long the devices took to compute the values marked in it."""

    __slots__ = ("asked", "done", "spent_ns", "start_ns")
    is_awaited = True

    def __init__(self, span: hot.Span) -> None:
        super().__init__(span)
        self.start_ns = span.start
        self.asked = 0  # written by the span's thread only
        self.done = 0  # written by the waiting thread only
        self.spent_ns = 0

    def poll(self) -> bool:
        if not self.is_ready and self.done == self.asked:
            self.value = None if self.is_lost else self.spent_ns
            self.is_ready = True
            self.source = None
        return self.is_ready


class Awaited(value.Deferred):
    """The value of a mark, which `Readiness` waits for."""

    __slots__ = ()
    is_awaited = True

    def poll(self) -> bool:
        source = self.source
        with suppress(Exception):  # reading the value below raises the real error
            if not self.is_ready and not source.is_ready():
                return False
        return super().poll()


class Readiness:
    """Waits for marked values, one after the other, on its own thread.

    A span's `device_ns` ends when its last value is ready. It starts at the latest of: the span's
    start, the end of the last compilation in it, the moment the previous value was ready.
    """

    def __init__(self, state: ThreadState) -> None:
        self._state = state
        self._values: Values = SimpleQueue()
        self._thread: threading.Thread | None = None

    def install(self) -> None:
        value.TAKERS["jaxlib"] = self.take

    def uninstall(self) -> None:
        """Stops taking values. Queued ones are still resolved: the records of spans need them."""
        if value.TAKERS.get("jaxlib") == self.take:
            del value.TAKERS["jaxlib"]
        self._values.put(None)
        self._values, self._thread = SimpleQueue(), None

    def take(self, scalar: Any) -> value.Deferred:
        """Defers the value of a mark. Runs on the user's thread."""
        try:
            if not scalar.is_fully_addressable and scalar.is_fully_replicated:
                scalar = scalar.addressable_data(0)  # every process has the same value
            span = hot.innermost()
            if span.parent is not span and self._values.qsize() < MAX_WAITING:
                mark = Awaited(scalar)
                self._measure(span, mark)
                return mark
        except Exception as error:  # noqa: BLE001  the mark must work with any array
            guard.caught("jax device time", error)
        return value.Deferred(scalar)

    def _measure(self, span: hot.Span, mark: Awaited) -> None:
        known = None if span.attrs is None else span.attrs.get("device_ns")
        if not isinstance(known, DeviceTime):
            known = DeviceTime(span)
            span.set(device_ns=known)
        known.start_ns = max(known.start_ns, self._state.compiled_ns)
        known.asked += 1
        self._values.put((mark.source, mark, known))
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=wait_for, args=(self._values,), name="cirron-jax", daemon=True
            )
            self._thread.start()


def wait_for(values: Values) -> None:
    ready_ns: dict[frozenset[Any], int] = {}  # when the last value of these devices was ready
    last_ns = 0
    while (item := values.get()) is not None:
        scalar, mark, time = item
        span, is_soon = time.source, False
        try:
            scalar.block_until_ready()  # releases the GIL
            now, devices = hot.now(), frozenset(scalar.devices())
            time.spent_ns += max(0, now - max(time.start_ns, ready_ns.get(devices, 0)))
            ready_ns[devices] = now
            is_soon, last_ns = now - last_ns < SOON_S * 1e9, now
        except Exception:  # noqa: BLE001  keeps the thread alive; the program gets the error itself
            time.is_lost = True  # the value was donated, or could not be computed
        time.done += 1
        mark.poll()  # here, so that no other thread has to wake up for it
        if span is None or span.end:
            time.poll()
        del item, scalar, mark, time, span
        if is_soon and values.empty():
            sleep(SOON_S)
