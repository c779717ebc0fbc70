"""JAX programs while they are hooked: compiles, device time, transfers, checkpoints."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import monitoring

import cirron as ci
from cirron.hooks.jax import LOGGER, PHASES
from cirron.record import hot, value

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import Scripts, Traced

X = np.ones((4, 4), np.float32)


def found(name: str) -> list[dict[str, Any]]:
    """The session's spans of that name, by start."""
    spans = []

    def visit(node: dict[str, Any]) -> None:
        if node["name"] == name:
            spans.append(node)
        for child in node["children"]:
            visit(child)

    for root in ci.trace(format="dict")["roots"]:
        visit(root)
    return spans


def compiles(function: str) -> list[str]:
    """The causes of the compiles of a function."""
    wanted = [span["attrs"] for span in found("compile") if span["attrs"]["function"] == function]
    assert [number + 1 for number in range(len(wanted))] == [attrs["count"] for attrs in wanted]
    return [attrs["cause"] for attrs in wanted]


# -- compiles --------------------------------------------------------------------------------


def test_a_compile(traced: Traced) -> None:
    """The first call of a jitted function has its phases under the scope it is in; others none."""

    @jax.jit
    def step(x: Any) -> Any:
        return x * 2

    for _ in ci.batches(range(3)):
        step(X)

    assert "batch[0](trace lower compile) batch[1] batch[2]" == traced()
    assert ["first call"] == compiles("step")
    assert {"step"} == {found(name)[0]["attrs"]["function"] for name in ("trace", "lower")}


def test_a_recompile(traced: Traced) -> None:
    """A function that is compiled again says which argument is another."""

    @jax.jit
    def step(x: Any, y: Any) -> Any:
        return x.sum() + y.sum()

    step(X, X)
    step(X, np.ones((2, 2), np.float32))
    step(X, np.ones((2, 2), np.int32))

    assert [
        "first call",
        "argument 1: float32[2,2], float32[4,4] before",
        "argument 1: int32[2,2], float32[2,2] before",
    ] == compiles("step")


def test_a_recompile_for_other_reasons(traced: Traced) -> None:
    """A static argument is not among those that JAX tells; more arguments are counted."""
    import functools

    @functools.partial(jax.jit, static_argnums=1)
    def step(x: Any, power: int) -> Any:
        return jax.tree.map(lambda leaf: leaf**power, x)

    step(X, 2)
    step(X, 3)
    step((X, X), 3)
    step(tuple([np.ones(2, np.float32)] * 9), 3)
    step(tuple([np.ones(3, np.float32)] * 9), 3)

    causes = compiles("step")
    assert "the same arguments as before" in causes[1]
    assert "2 arguments, 1 before" == causes[2]
    assert "9 arguments, 2 before" == causes[3]
    assert causes[4].endswith("argument 2: float32[3], float32[2] before; and 6 more")


def test_remembered_functions_are_bounded(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that makes functions without end does not fill the memory."""

    def call(name: str, size: int) -> None:
        def function(x: Any) -> Any:
            return x * 2

        function.__name__ = name
        jax.jit(function)(np.ones(size))

    monkeypatch.setattr("cirron.hooks.jax.MAX_FUNCTIONS", 2)
    for size, name in enumerate(("one", "two", "three", "three", "one"), 1):
        call(name, size)
    counts = [(span["attrs"]["function"], span["attrs"]["count"]) for span in found("compile")]

    assert [("one", 1), ("two", 1), ("three", 1), ("three", 2), ("one", 1)] == [
        one for one in counts if one[0] in ("one", "two", "three")
    ]


def test_what_other_releases_tell(traced: Traced) -> None:
    """A trace in a trace is one, an end without a start none, and arguments may be missing."""
    trace, _, compiled = PHASES
    jax.monitoring.record_event_duration_secs(compiled, 0.1)
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    jax.monitoring.record_scalar(trace, 0.0, fun_name="step")
    jax.monitoring.record_scalar(trace, 0.0, fun_name="inner")
    jax.monitoring.record_event_duration_secs(trace, 0.1)
    with ci.scope("inside"):
        pass
    jax.monitoring.record_event_duration_secs(trace, 0.1)
    logging.getLogger(LOGGER).debug("Compiling %s", "step")
    jax.monitoring.record_scalar(compiled, 0.0, fun_name="jit_step")  # an older release's spelling
    jax.monitoring.record_event_duration_secs(compiled, 0.1)

    assert "trace(inside) compile" == traced()
    assert ["first call"] == compiles("step")


def test_ahead_of_time(traced: Traced) -> None:
    """`lower` and `compile` by hand are the same spans; shapes alone are traced, not compiled."""
    step = jax.jit(lambda x: x + 3)
    jax.eval_shape(step, X)
    with ci.scope("ahead"):
        step.lower(X).compile()(X)

    assert "trace ahead(lower compile)" == traced().replace("ahead(trace lower", "ahead(lower")


def test_a_function_that_cannot_be_traced(traced: Traced) -> None:
    """The trace ends with the error; a function that works has none, even in its handler."""

    @jax.jit
    def step(x: Any) -> Any:
        raise KeyError("no")

    with pytest.raises(KeyError), ci.scope("first"):
        step(X)
    try:
        raise ValueError("handled")
    except ValueError:
        with ci.scope("second"):
            jax.jit(lambda x: x - 7)(X)

    assert "first!(trace!) second(trace lower compile)" == traced()


def test_each_thread_has_its_own(traced: Traced) -> None:
    """A compile is under the scope of the thread that compiles."""
    barrier = threading.Barrier(3)

    def train(number: int) -> None:
        with ci.scope("thread", number):
            barrier.wait()
            jax.jit(lambda x: x * (number + 11))(X)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for span in found("thread"):
        assert ["trace", "lower", "compile"] == [child["name"] for child in span["children"]]


def test_the_persistent_cache(scripts: Scripts) -> None:
    """A compile that JAX's cache on disk answered says so."""
    body = """
        import jax, numpy as np
        jax.config.update("jax_compilation_cache_dir", "cache")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        import cirron as ci

        ci.profile(output="none")
        jax.jit(lambda x: x * 2)(np.ones(3))
        (span,) = ci.trace(format="dict", name="compile")["roots"]
        print(span["attrs"]["cache"])
    """

    assert ["miss\n", "hit\n"] == [scripts.run(body).out for _ in range(2)]


def test_jax_s_own_log_is_as_it_was(traced: Traced) -> None:
    """What JAX says to its logger at DEBUG goes to nobody who did not ask for it."""
    heard: list[str] = []

    class Ear(logging.Handler):  # hears whatever comes, as those of many programs do
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == LOGGER:
                heard.append(record.levelname)

    root, ear = logging.getLogger(), Ear()
    root.addHandler(ear)
    try:
        jax.jit(lambda x: x * 5)(X)
        with jax.log_compiles(True):
            jax.jit(lambda x: x * 6)(X)
        root.setLevel(logging.DEBUG)
        jax.jit(lambda x: x * 7)(X)
    finally:
        root.setLevel(logging.WARNING)
        root.removeHandler(ear)

    assert ["WARNING", "DEBUG"] == heard


def test_a_level_that_the_program_has_set() -> None:
    """A level that the program sets while it is profiled stays."""
    logger = logging.getLogger(LOGGER)
    ci.profile(output="none")
    logger.setLevel(logging.ERROR)
    ci.shutdown()
    level = logger.level
    logger.setLevel(logging.NOTSET)

    assert logging.ERROR == level


# -- inside of what is traced ----------------------------------------------------------------


def test_scopes_and_marks_inside_of_a_jitted_function(traced: Traced) -> None:
    """A scope shows the time it takes to trace, once; a mark has no value there and is counted."""

    @jax.jit
    def step(x: Any) -> Any:
        with ci.scope("inside"):
            loss = x.sum()
            ci.mark("loss", loss)
            ci.mark("constant", 3)
        return loss

    for _ in ci.batches(range(2)):
        ci.mark("loss", step(X))
    (inside,) = found("inside")

    assert "batch[0](trace(inside) lower compile) batch[1]" == traced()
    assert [("constant", 3)] == [(mark["name"], mark["value"]) for mark in inside["marks"]]
    assert 1 == ci.health()["mark_drop_count"]


def test_callbacks_of_compiled_code(traced: Traced) -> None:
    """A mark that the compiled code calls back for is there at each run."""

    @jax.jit
    def step(x: Any) -> Any:
        jax.debug.callback(lambda total: ci.mark("total", total), x.sum())
        return x + 1

    x = jnp.zeros(2)
    for _ in range(3):
        x = step(x)
    jax.effects_barrier()
    (root,) = ci.trace(format="dict")["roots"]

    assert [0.0, 2.0, 4.0] == [mark["value"] for mark in root["marks"]]


@pytest.mark.parametrize(
    "transform", [jax.grad, jax.vmap, jax.checkpoint], ids=lambda f: f.__name__
)
def test_transformations(traced: Traced, transform: Any) -> None:
    """The same under each transformation, with the transformed function's own result."""

    def loss(x: Any) -> Any:
        with ci.scope("loss"):
            ci.mark("x", x)
            return (x**2).sum()

    given = jnp.arange(4.0) if transform is jax.vmap else jnp.float32(3)

    assert np.array_equal(given**2 if transform is not jax.grad else 6.0, transform(loss)(given))
    assert 1 == len(found("loss"))
    assert 1 == ci.health()["mark_drop_count"]


def test_scan(traced: Traced) -> None:
    """The body of a scan is traced once, however often it runs."""

    def body(total: Any, x: Any) -> Any:
        with ci.scope("body"):
            return total + x, total

    total, _ = jax.lax.scan(body, 0.0, jnp.arange(100.0))

    assert 4950.0 == total
    assert 1 == len(found("body"))


def test_without_jit(traced: Traced) -> None:
    """`jax.disable_jit` runs the function itself: each call has its scopes and its values."""

    @jax.jit
    def step(x: Any) -> Any:
        with ci.scope("inside"):
            ci.mark("loss", x.sum())
        return x

    with jax.disable_jit():
        for _ in ci.batches(range(2)):
            step(jnp.asarray(X))

    assert [[16.0], [16.0]] == [
        [mark["value"] for mark in span["marks"]] for span in found("inside")
    ]


def test_nothing_of_ours_is_in_the_program() -> None:
    """What is compiled is the same, letter for letter, with and without profiling."""

    def text() -> str:
        @jax.jit
        def step(w: Any, x: Any) -> Any:
            with ci.scope("inside"):
                return jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

        return str(step.lower(X, X).as_text()) + str(jax.make_jaxpr(step)(X, X))

    wanted = text()
    ci.profile(output="none")

    assert wanted == text()


def test_results_are_the_same() -> None:
    """Training gives the same bits with and without profiling."""

    def weights() -> Any:
        optimizer = optax.adam(1e-2)
        params = {"w": jax.random.normal(jax.random.key(0), (4, 4))}
        state = optimizer.init(params)

        @jax.jit
        def step(params: Any, state: Any, x: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda p: ((x @ p["w"]) ** 2).mean())(params)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, loss

        for epoch in ci.epochs(range(3)):
            for batch in ci.batches(range(5)):
                x = jax.device_put(np.full((4, 4), epoch + batch, np.float32))
                params, state, loss = step(params, state, x)
                ci.mark("loss", loss)
            ci.watch(params)
        return params["w"]

    ci.profile(enabled=False)
    wanted = weights()
    ci.shutdown()
    ci.profile()

    assert np.array_equal(wanted, weights())


# -- device time -----------------------------------------------------------------------------


def test_device_time(traced: Traced) -> None:
    """A span with a mark that a device computes has the device's time; the loop does not wait."""

    @jax.jit
    def step(x: Any) -> Any:
        return jax.lax.fori_loop(0, 100, lambda _, x: jnp.sin(x @ x), x).sum()

    x = jnp.full((512, 512), 0.001)
    step(x).block_until_ready()
    with ci.scope("step"):
        loss = step(x)
        ci.mark("loss", loss)
        was_ready = loss.is_ready()
    (span,) = found("step")

    assert not was_ready
    assert float(loss) == span["marks"][0]["value"]
    assert span["attrs"]["device_ns"] > span["wall_us"] * 1_000  # it was over before the device was


def test_device_time_of_several_steps(traced: Traced) -> None:
    """Times follow one another: together they are never more than the time that passed."""

    @jax.jit
    def step(x: Any) -> Any:
        return jax.lax.fori_loop(0, 50, lambda _, x: jnp.sin(x @ x), x)

    x = jnp.full((64, 64), 0.01)
    step(x)
    with ci.scope("all"):
        for _ in ci.batches(range(10)):
            x = step(x)
            ci.mark("loss", x[0, 0])
            ci.mark("norm", x[1, 1])
        x.block_until_ready()
    times = [span["attrs"]["device_ns"] for span in found("batch")]

    assert 10 == len(times)
    assert all(one >= 0 for one in times)
    assert 0 < sum(times)


def test_one_thread_waits(traced: Traced) -> None:
    """What is marked is waited for once: nobody else wakes up for each of its values."""

    @jax.jit
    def step(x: Any) -> Any:
        return jax.lax.fori_loop(0, 100, lambda _, x: jnp.sin(x @ x), x)

    x: Any = jnp.full((512, 512), 0.001)
    seen: set[str] = set()
    for _ in ci.batches(range(5)):
        x = step(x)
        ci.mark("loss", x[0, 0])
    while not x.is_ready():  # the flusher has looked at marks whose values are still to come
        seen.update(thread.name for thread in threading.enumerate())
        time.sleep(0.01)
    losses = [span["marks"][0]["value"] for span in found("batch")]

    assert float(x[0, 0]) == losses[-1]
    assert "cirron-jax" in seen
    assert "cirron-values" not in seen


def test_device_time_begins_after_a_compile(traced: Traced) -> None:
    """The time to compile what computes a value is not the device's."""
    with ci.scope("step"):
        loss = jax.jit(lambda x: x.sum() * 3)(X)
        compiled_ns = hot.now()
        ci.mark("loss", loss)
        span = hot.innermost()
        assert span.attrs is not None
        start_ns = span.attrs["device_ns"].start_ns

    assert span.start < start_ns <= compiled_ns


def test_values_that_are_waited_for_are_bounded(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the bound a span has no device time; its marks have their values all the same."""
    monkeypatch.setattr("cirron.hooks.jax.MAX_WAITING", 0)
    with ci.scope("step"):
        ci.mark("loss", jnp.float32(2.5))
    (span,) = found("step")

    assert "device_ns" not in span["attrs"]
    assert 2.5 == span["marks"][0]["value"]


def test_values_of_the_host_have_no_device_time(traced: Traced) -> None:
    """Plain numbers, NumPy's, tracers: nothing is measured; nor for a mark outside of scopes."""
    with ci.scope("step"):
        ci.mark("loss", 1.0)
        ci.mark("norm", np.float32(2.0))
    ci.mark("loss", jnp.float32(1.0))

    assert "device_ns" not in found("step")[0]["attrs"]
    assert "device_ns" not in ci.trace(format="dict")["roots"][0]["attrs"]


def test_a_value_that_is_donated(traced: Traced) -> None:
    """A mark whose array the program gives away before it is read is lost, and counted."""
    consume = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(100):  # until the array is given away before the worker has seen it
        with ci.scope("step"):
            loss = jnp.float32(1.0)
            ci.mark("loss", loss)
        consume(loss)
    ci.flush()
    spans = found("step")

    assert 100 == len(spans)
    assert ci.health()["mark_drop_count"] == 100 - sum(len(span["marks"]) for span in spans)


def test_a_program_that_ends_while_the_device_is_busy(scripts: Scripts) -> None:
    """The exit is as it would be; what was recorded is on disk."""
    ended = scripts.run("""
        import jax, jax.numpy as jnp
        import cirron as ci

        ci.profile()
        step = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, x: jnp.sin(x @ x), x))
        x = jnp.ones((256, 256))
        for _ in ci.batches(range(3)):
            x = step(x)
            ci.mark("loss", x[0, 0])
        print("done")
    """)

    assert (0, "done\n", "") == (ended.status, ended.out, ended.err)
    assert 3 == len(scripts.spans("batch"))


# -- transfers and checkpoints ---------------------------------------------------------------


def test_transfers(traced: Traced) -> None:
    """What the program puts on a device, or gets from it, is a span with its size."""
    with ci.scope("load"):
        batch = jax.device_put({"x": X, "y": np.ones(4, np.float32)})
    host = jax.device_get(batch)

    assert "load(transfer) transfer" == traced()
    assert np.array_equal(X, host["x"])
    assert [("device", 80), ("host", 80)] == [
        (span["attrs"]["to"], span["attrs"]["bytes"]) for span in found("transfer")
    ]


def test_a_transfer_that_fails(traced: Traced) -> None:
    """The exception is the program's, and the span has it."""
    with pytest.raises(TypeError):
        jax.device_put("text")

    assert "transfer!" == traced()


def test_transfers_inside_of_traced_functions(traced: Traced) -> None:
    """Inside of jit, grad and vmap nothing is transferred, and there is no such span."""

    def place(x: Any) -> Any:
        return jax.device_put(x) + jax.device_put(np.float32(1))

    assert 2.0 == jax.jit(place)(1.0)
    assert 1.0 == jax.grad(lambda x: jax.device_put(x))(1.0)
    assert [] == found("transfer")


@pytest.fixture
def saved() -> Any:
    """Orbax, and a state to save."""
    import orbax.checkpoint as ocp

    return ocp, {"w": jnp.ones(3)}


def actions() -> list[tuple[str, str]]:
    return [(span["attrs"]["action"], span["attrs"]["by"]) for span in found("checkpoint")]


def test_a_checkpoint_manager(traced: Traced, saved: Any, tmp_path: Path) -> None:
    """Saves, restores and waits are spans, once each; a save that was not due is none."""
    ocp, state = saved
    options = ocp.CheckpointManagerOptions(save_interval_steps=2)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        results = [manager.save(step, args=ocp.args.StandardSave(state)) for step in range(3)]
        manager.wait_until_finished()
        restored = manager.restore(2, args=ocp.args.StandardRestore(state))

    assert [True, False, True] == results
    assert np.array_equal(np.ones(3), restored["w"])
    by = "CheckpointManager"
    assert [("save", by), ("save", by), ("wait", by), ("restore", by)] == actions()[:4]


def test_a_checkpointer(traced: Traced, saved: Any, tmp_path: Path) -> None:
    """The same without a manager."""
    ocp, state = saved
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", state)
        checkpointer.wait_until_finished()
        checkpointer.restore(tmp_path / "one", state)

    by = "StandardCheckpointer"
    assert [("save", by), ("wait", by), ("restore", by)] == actions()[:3]


# -- coming and going ------------------------------------------------------------------------


def listeners() -> tuple[list[Any], ...]:
    return (
        monitoring.get_event_listeners(),
        monitoring.get_event_duration_listeners(),
        monitoring.get_scalar_listeners(),
    )


def test_everything_is_put_back() -> None:
    """After shutdown JAX and Orbax are what they were."""
    import orbax.checkpoint as ocp

    logger = logging.getLogger(LOGGER)

    def state() -> Any:
        classes = (ocp.CheckpointManager, ocp.Checkpointer, ocp.AsyncCheckpointer)
        methods = [dict(vars(kind)) for kind in classes]
        return listeners(), jax.device_put, jax.device_get, logger.level, logger.filters[:], methods

    before = state()
    for _ in range(2):
        ci.profile(output="none")
        assert state() != before
        ci.shutdown()

        assert before == state()
        assert {} == value.TAKERS


def test_listeners_that_the_program_has_cleared() -> None:
    """A program that takes all listeners off does not break the shutdown."""
    kept = listeners()
    ci.profile(output="none")
    jax.monitoring.clear_event_listeners()
    ci.shutdown()
    for name, own in zip(("event", "event_duration_secs", "scalar"), kept, strict=True):
        for listener in own:
            getattr(jax.monitoring, f"register_{name}_listener")(listener)

    assert kept == listeners()


def test_profile_before_jax(scripts: Scripts) -> None:
    """The hook comes when the program imports JAX; we import neither it nor what is built on it."""
    ended = scripts.run("""
        import sys
        import cirron as ci

        ci.profile(output="none")
        print("jax" in sys.modules, ci.health()["frameworks_installed"])
        import jax, jax.numpy as jnp
        print(ci.health()["frameworks_installed"])
        state = {"w": jnp.ones(2)}
        for _ in ci.epochs(range(1)):
            state = jax.jit(lambda tree: tree)(state)
            ci.watch(state)
            ci.mark("loss", state["w"].sum())
        ci.flush()
        built_on_it = ("flax", "optax", "equinox", "orbax", "torch")
        print([name for name in built_on_it if name in sys.modules])
        ci.shutdown()
        print([finder for finder in sys.meta_path if "cirron" in type(finder).__module__])
    """)

    lines = ["False []", "['jax']", "[]", "[]", ""]
    assert (0, "", lines) == (ended.status, ended.err, ended.out.split("\n"))


def test_orbax_that_is_imported_later(scripts: Scripts) -> None:
    """Orbax is hooked when the program imports it."""
    ended = scripts.run("""
        import jax, jax.numpy as jnp
        import cirron as ci

        ci.profile(output="none")
        import orbax.checkpoint as ocp
        from pathlib import Path
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path("one").absolute(), {"w": jnp.ones(2)})
        print(ci.trace(format="dict", name="checkpoint")["roots"][0]["attrs"]["action"])
    """)

    assert (0, "save\n") == (ended.status, ended.out), ended.err


def test_asking_for_jax_without_jax(scripts: Scripts) -> None:
    """`frameworks=["jax"]` where JAX is not installed says so; without it all is well."""
    ended = scripts.run("""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name == "jax":
                    raise ModuleNotFoundError(name)

        sys.meta_path.insert(0, Blocked())
        import cirron as ci

        try:
            ci.profile(frameworks=["jax"])
        except ValueError as error:
            print(error)
        ci.profile(output="none")
        try:
            ci.watch({"w": 1})
        except ci.InputError as error:
            print(error)
        print(ci.health()["frameworks_installed"])
    """)

    said = "frameworks=['jax']: jax is not installed. Install it, or leave it out"
    watched = (
        "ci.watch() takes a model, such as a torch.nn.Module or a tree of JAX arrays; got dict."
        " Keras and Trainer models are found without it"
    )
    assert (0, "", f"{said}\n{watched}\n[]\n") == (ended.status, ended.err, ended.out)
