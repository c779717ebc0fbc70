"""The JAX hook, with a JAX made for the test: each event when the test says so."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron.record import value

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE = "/jax/core/compile/jaxpr_trace_duration"
LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILE = "/jax/core/compile/backend_compile_duration"


class Tracer:
    """What a traced function gets instead of an array."""


class Monitoring(ModuleType):
    """The listeners, as a JAX that can or cannot take one off by a public name."""

    def __init__(self, *, is_old: bool) -> None:
        super().__init__("jax.monitoring")
        self.listeners: dict[str, list[Any]] = {"scalar": [], "event_duration": [], "event": []}
        self.private = ModuleType("jax._src.monitoring")
        for kind, known in self.listeners.items():
            add = "event_duration_secs" if kind == "event_duration" else kind
            setattr(self, f"register_{add}_listener", known.append)
            name = f"unregister_{kind}_listener"
            owner, name = (self.private, f"_{name}_by_callback") if is_old else (self, name)
            setattr(owner, name, known.remove)

    def start(self, event: str, function: str) -> None:
        for listener in self.listeners["scalar"]:
            listener(event, 0.0, fun_name=function)

    def end(self, event: str, function: str = "") -> None:
        for listener in self.listeners["event_duration"]:
            listener(event, 0.1, fun_name=function)

    def tell(self, event: str) -> None:
        for listener in self.listeners["event"]:
            listener(event)

    def compile(self, function: str, *types: str) -> None:
        """All that JAX does for one compile."""
        self.start(TRACE, function)
        self.end(TRACE)
        logging.getLogger("jax._src.interpreters.pxla").debug(
            "Compiling %s with global shapes and types %s. Argument mapping: %s.",
            f"jit({function})",
            types,
            [None] * len(types),
        )
        for event in (LOWER, COMPILE):
            self.start(event, f"jit({function})")
            self.end(event)


class FakeJax(ModuleType):
    """As much of JAX as the hook uses."""

    def __init__(self, *, is_old: bool = False) -> None:
        super().__init__("jax")
        self.__version__ = "0.10.2"
        self.monitoring = Monitoring(is_old=is_old)
        self._src = ModuleType("jax._src")
        self._src.monitoring = self.monitoring.private  # type: ignore[attr-defined]
        self.core = SimpleNamespace(Tracer=Tracer)
        self.tree_util = SimpleNamespace(tree_leaves=lambda tree: [tree])
        self.device_put: Any = lambda x, device=None: ("on device", x)
        self.device_get: Any = lambda x: ("on host", x)


@pytest.fixture(params=[False, True], ids=["new", "old"])
def jax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJax]:
    """A JAX that the program has imported, and a session that has hooked it."""
    fake = FakeJax(is_old=request.param)
    for name, module in {
        "jax": fake,
        "jax.monitoring": fake.monitoring,
        "jax._src": fake._src,
        "jax._src.monitoring": fake.monitoring.private,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "cirron.hooks.jax", raising=False)
    monkeypatch.delitem(sys.modules, "orbax.checkpoint", raising=False)
    ci.profile(output="none", frameworks=["jax"])
    yield fake
    ci.shutdown()
    sys.modules.pop("cirron.hooks.jax", None)
    importlib.invalidate_caches()


def spans() -> list[tuple[str, dict[str, Any]]]:
    (root,) = ci.trace(format="dict")["roots"]
    return [(span["name"], span["attrs"]) for span in root["children"]]


def test_phases_of_a_compile(jax: FakeJax) -> None:
    """Each phase is a span with the function's name; the compile has its cause."""
    jax.monitoring.compile("step", "float32[4]")

    assert [
        ("trace", {"function": "step"}),
        ("lower", {"function": "step"}),
        ("compile", {"function": "step", "cause": "first call", "count": 1}),
    ] == spans()


def test_a_compilation_names_its_cause(jax: FakeJax) -> None:
    """A compile is compared with the one before of the same function."""
    for types in (["f32[4]"], ["f32[8]"], ["f32[8]"], ["f32[8]", "i32[]"]):
        jax.monitoring.compile("step", *types)
        jax.monitoring.compile("other", "f32[1]")

    assert [
        "first call",
        "argument 0: f32[8], f32[4] before",
        "the same arguments as before: one that it does not use, a static one, a setting of JAX's,"
        " or the function itself is another",
        "2 arguments, 1 before",
    ] == [
        attrs["cause"]
        for name, attrs in spans()
        if attrs["function"] == "step" and "cause" in attrs
    ]


def test_functions_that_are_remembered_are_bounded(
    jax: FakeJax, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that makes functions without end does not fill the memory."""
    monkeypatch.setattr("cirron.hooks.jax.MAX_FUNCTIONS", 2)
    for name in ("a", "b", "c", "c", "a"):
        jax.monitoring.compile(name, "f32[1]")

    counts = [(attrs["function"], attrs["count"]) for name, attrs in spans() if name == "compile"]
    assert [("a", 1), ("b", 1), ("c", 1), ("c", 2), ("a", 1)] == counts


def test_compiles_inside_of_others(jax: FakeJax) -> None:
    """A constant that is computed while a function is traced is under that trace."""
    jax.monitoring.start(TRACE, "step")
    jax.monitoring.start(COMPILE, "jit_zeros")  # an older release's spelling
    jax.monitoring.tell("/jax/compilation_cache/cache_hits")
    jax.monitoring.end(COMPILE)
    jax.monitoring.end(TRACE)
    (root,) = ci.trace(format="dict")["roots"]
    ((outer, inner),) = [(span, span["children"][0]) for span in root["children"]]

    assert ("trace", "compile") == (outer["name"], inner["name"])
    assert ("zeros", "hit") == (inner["attrs"]["function"], inner["attrs"]["cache"])


def test_traces_inside_of_a_trace(jax: FakeJax) -> None:
    """Older releases tell of each function that the traced one calls: it is one trace."""
    jax.monitoring.start(TRACE, "step")
    jax.monitoring.start(TRACE, "inner")
    jax.monitoring.tell("/jax/compilation_cache/cache_hits")
    jax.monitoring.end(TRACE)
    with ci.scope("inside"):
        pass
    jax.monitoring.end(TRACE)
    (root,) = ci.trace(format="dict")["roots"]

    assert [("trace", ["inside"])] == [
        (span["name"], [child["name"] for child in span["children"]]) for span in root["children"]
    ]


def test_events_that_are_not_ours(jax: FakeJax) -> None:
    """Other events, and an end whose start came before the session, are nothing."""
    jax.monitoring.start("/program/own", "step")
    jax.monitoring.end("/program/own")
    jax.monitoring.end(COMPILE)
    jax.monitoring.tell("/jax/compilation_cache/cache_hits")

    assert [] == spans()


def test_a_log_record_of_another_shape(jax: FakeJax) -> None:
    """A JAX that says it otherwise leaves a compile without its arguments, and no error."""
    logging.getLogger("jax._src.interpreters.pxla").debug("Compiling %s", "step")
    jax.monitoring.start(COMPILE, "jit(step)")
    jax.monitoring.end(COMPILE)

    assert [("compile", {"function": "step", "cause": "first call", "count": 1})] == spans()


def test_transfers_are_spans_in_both_directions(jax: FakeJax) -> None:
    """Both directions are spans, with the result untouched; tracers and traced code are not."""
    assert ("on device", b"") == jax.device_put(b"", device=1)
    assert ("on host", b"") == jax.device_get(b"")
    jax.device_put(Tracer())
    jax.monitoring.start(TRACE, "step")
    jax.device_put(b"")
    jax.monitoring.end(TRACE)

    assert [("transfer", "device"), ("transfer", "host")] == [
        (name, attrs["to"]) for name, attrs in spans() if name == "transfer"
    ]


class Scalar:
    """An array that is ready when the test says so."""

    __module__ = "jaxlib.fake"
    shape = ()
    is_fully_addressable = True

    def __init__(self, number: float, *, fails: bool = False) -> None:
        self.number = number
        self.fails = fails
        self.ready = threading.Event()
        self.waited = threading.Event()

    def is_ready(self) -> bool:
        return self.ready.is_set()

    def block_until_ready(self) -> None:
        self.waited.set()
        assert self.ready.wait(10)
        if self.fails:
            raise RuntimeError("Array has been deleted")

    def devices(self) -> set[str]:
        return {"cpu"}

    def item(self) -> float:
        self.block_until_ready()
        return self.number


def test_device_time_is_measured_in_the_background(jax: FakeJax) -> None:
    """A span waits in the background for the last of its values; the next one begins there."""
    values = [Scalar(1.0), Scalar(2.0), Scalar(3.0)]
    with ci.scope("first"):
        ci.mark("loss", values[0])
        ci.mark("norm", values[1])
    with ci.scope("second"):
        ci.mark("loss", values[2])
    began_to_wait = values[0].waited.wait(10)
    for one in values:
        one.ready.set()
    first, second = [attrs["device_ns"] for _, attrs in spans()]

    assert began_to_wait
    assert first > 0
    assert second >= 0


def test_device_time_begins_after_a_compile(jax: FakeJax) -> None:
    """The time to compile what computes a value is not the device's."""
    scalar = Scalar(1.0)
    scalar.ready.set()
    with ci.scope("step"):
        jax.monitoring.compile("step", "f32[1]")
        compiled_ns = sys.modules["cirron.record.hot"].now()
        ci.mark("loss", scalar)
        innermost = sys.modules["cirron.record.hot"].innermost()
        start_ns = innermost.attrs["device_ns"].source.start_ns  # while the scope is open

    assert innermost.start < start_ns <= compiled_ns


def test_a_value_that_never_comes(jax: FakeJax) -> None:
    """A span whose value was given away has no device time, and the mark is counted."""
    scalar = Scalar(1.0, fails=True)
    scalar.ready.set()
    with ci.scope("step"):
        ci.mark("loss", scalar)

    assert [("step", {"device_ns": None})] == spans()
    assert 1 == ci.health()["mark_drop_count"]


def test_values_that_are_waited_for_are_bounded(
    jax: FakeJax, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the bound a span has no device time; its marks have their values all the same."""
    monkeypatch.setattr("cirron.hooks.jax.MAX_WAITING", 0)
    scalar = Scalar(1.0)
    scalar.ready.set()
    with ci.scope("step"):
        ci.mark("loss", scalar)

    assert [("step", {})] == spans()
    assert 0 == ci.health()["mark_drop_count"]


class Manager:
    """Orbax's, by its methods."""

    def save(self, step: int) -> bool:
        self.wait_until_finished()
        return step % 2 == 0

    def wait_until_finished(self) -> None:
        pass


def test_orbax_checkpoints_are_spans(jax: FakeJax, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax's methods are spans once the program has imported it; what was not due is none."""
    original = Manager.save
    orbax = ModuleType("orbax.checkpoint")
    orbax.CheckpointManager = Manager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", orbax)
    sys.modules["cirron.hooks.jax"].JaxHook._see_checkpoints(installed())
    manager = Manager()
    results = [manager.save(step) for step in range(3)]
    manager.wait_until_finished()
    found = spans()
    ci.shutdown()

    assert [True, False, True] == results
    assert ["save", "save", "wait"] == [attrs["action"] for _, attrs in found]
    assert original is Manager.save


def installed() -> Any:
    from cirron import session

    assert session._session is not None
    (hook,) = session._session.hooks._installed
    return hook


def test_everything_is_put_back(jax: FakeJax) -> None:
    """After shutdown there is nothing of ours left in it."""
    logger = logging.getLogger("jax._src.interpreters.pxla")
    ours = jax.device_put
    ci.shutdown()

    assert ours is not jax.device_put
    assert ("on device", 1) == jax.device_put(1)
    assert [[], [], []] == list(jax.monitoring.listeners.values())
    assert ([], logging.NOTSET, {}) == (logger.filters, logger.level, value.TAKERS)


def test_a_level_that_the_program_has_set(jax: FakeJax) -> None:
    """A level that was set since stays."""
    logger = logging.getLogger("jax._src.interpreters.pxla")
    logger.setLevel(logging.ERROR)
    ci.shutdown()
    found = logger.level
    logger.setLevel(logging.NOTSET)

    assert logging.ERROR == found


def test_an_older_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A release that is older than the table says is left alone, with a word."""
    fake = FakeJax()
    fake.__version__ = "0.4.30"
    monkeypatch.setitem(sys.modules, "jax", fake)
    ci.profile(output="none", frameworks=["jax"])

    assert [] == ci.health()["frameworks_installed"]
    assert "jax 0.4.30 is not hooked: it is older than 0.6" in caplog.text
