"""Snapshots of JAX's trees: what is watched, when it is read, and what is said of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from tests import spools

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.conftest import Scripts

    from cirron import wire


def snapshots() -> list[wire.Snapshot]:
    """What is on disk of this session."""
    ci.flush()
    return spools.read_one(Path(".cirron")).snapshots


def named(name: str) -> list[wire.Snapshot]:
    return [one for one in snapshots() if one.tensor_name == name]


def means(name: str) -> list[float | None]:
    return [one.stats.mean for one in named(name)]


def names() -> list[str]:
    return [one.tensor_name for one in snapshots()]


def one_epoch(tree: Any) -> None:
    for _ in ci.epochs(range(1)):
        ci.watch(tree)


@jax.jit
def plus_one(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1, tree)


plus_one_in_place = jax.jit(
    lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0
)


# -- what is watched -------------------------------------------------------------------------


@pytest.mark.parametrize("step", [plus_one, plus_one_in_place], ids=["kept", "donated"])
def test_a_tree_that_is_watched_again(step: Callable[[Any], Any]) -> None:
    """`ci.watch(state)` as the last line of an epoch: each snapshot has that epoch's values."""
    ci.profile()
    state = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    for _ in ci.epochs(range(3)):
        state = step(state)
        ci.watch(state)

    assert [1.0, 2.0, 3.0] == means("w") == means("b")


@pytest.mark.parametrize("step", [plus_one, plus_one_in_place], ids=["kept", "donated"])
def test_a_function(step: Callable[[Any], Any]) -> None:
    """`ci.watch(lambda: state)`, once: the function is asked at the end of each epoch."""
    ci.profile()
    state = {"w": jnp.zeros(3)}
    ci.watch(lambda: state)
    for _ in ci.epochs(range(3)):
        state = step(state)

    assert [1.0, 2.0, 3.0] == means("w")


def test_values_are_those_of_the_boundary() -> None:
    """What the program does after the epoch's end, donation included, changes no snapshot."""
    ci.profile()
    state = {"w": jnp.zeros(100_000)}
    for _ in ci.epochs(range(5)):
        state = plus_one_in_place(state)
        ci.watch(state)
    for _ in range(50):
        state = plus_one_in_place(state)

    assert pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0]) == means("w")


def test_numpy_arrays_that_change_in_place() -> None:
    """An array of NumPy's in the tree is copied at the boundary."""
    ci.profile()
    state = {"w": np.zeros(3), "x": jnp.ones(1)}
    ci.watch(state)
    for _ in ci.epochs(range(2)):
        state["w"] += 1  # type: ignore[operator]
    state["w"] += 1  # type: ignore[operator]

    assert [1.0, 2.0] == means("w")


def test_trees_that_are_gone(caplog: pytest.LogCaptureFixture) -> None:
    """Watched once, an updated state is not there at the boundary: no stale values, one word."""
    ci.profile()
    state = {"w": jnp.zeros(3)}
    ci.watch(state)
    for _ in ci.epochs(range(3)):
        state = plus_one(state)

    assert [] == snapshots()
    (said,) = [one.getMessage() for one in caplog.records]
    assert "call ci.watch(state) again" in said
    assert "ci.watch(lambda: state)" in said


def test_trees_that_were_donated(caplog: pytest.LogCaptureFixture) -> None:
    """The same for arrays whose buffers were given away, though the program still has them."""
    ci.profile()
    first = {"w": jnp.zeros(3)}
    ci.watch(first)
    for _ in ci.epochs(range(1)):
        plus_one_in_place(first)

    assert first["w"].is_deleted()
    assert [] == snapshots()
    assert "no longer exist" in caplog.text


def test_nothing_is_kept_alive() -> None:
    """What is watched is the program's alone: an array that it lets go of is gone."""
    import weakref

    ci.profile()
    state = {"w": jnp.zeros(3)}
    reference = weakref.ref(state["w"])
    ci.watch(state)
    del state

    assert reference() is None


def test_nothing_is_kept_without_a_session() -> None:
    """Calling `ci.watch` each epoch of a program that does not profile holds nothing either."""
    import weakref

    from cirron import session

    references = []
    state = {"w": jnp.zeros(3)}
    for _ in range(3):
        state = plus_one(state)
        references.append(weakref.ref(state["w"]))
        ci.watch(state)

    assert [None, None, state["w"]] == [reference() for reference in references]
    assert 1 == len(session._to_watch)

    ci.profile()
    for _ in ci.epochs(range(1)):
        pass

    assert [3.0] == means("w")


def test_two_trees_of_the_same_shape() -> None:
    """Two trees that are watched in the same epoch are kept apart, in each of the epochs."""
    ci.profile()
    first, second = {"w": jnp.zeros(2)}, {"w": jnp.full(2, 10.0)}
    for _ in ci.epochs(range(3)):
        first, second = plus_one(first), plus_one(second)
        ci.watch(first)
        ci.watch(second)

    assert [1.0, 2.0, 3.0] == means("w")
    assert [11.0, 12.0, 13.0] == means("dict.w")


def test_an_earlier_state_that_the_program_keeps() -> None:
    """The best state so far, kept by the program, does not become another model."""
    ci.profile()
    state = {"w": jnp.zeros(2)}
    kept = []
    for _ in ci.epochs(range(3)):
        state = plus_one(state)
        kept.append(state)
        ci.watch(state)

    assert ["w"] * 3 == names()
    assert [1.0, 2.0, 3.0] == means("w")


def test_a_tree_beside_a_torch_model() -> None:
    """Models of both frameworks are in the same snapshot."""
    import torch

    ci.profile()
    model = torch.nn.Linear(2, 1)
    state = {"w": jnp.zeros(2)}
    ci.watch(model)
    ci.watch(state)
    for _ in ci.epochs(range(1)):
        pass

    assert {"weight", "bias", "w"} == set(names())


def test_a_function_is_asked_where_it_is_given() -> None:
    """A function that cannot be asked yet, or returns something else, is told at once."""
    ci.profile()

    def too_early() -> Any:
        return state

    with pytest.raises(ci.InputError, match=r"it raised NameError.*once there is a\s+state"):
        ci.watch(too_early)
    with pytest.raises(ci.InputError, match="returns a tree of JAX arrays; this one returned str"):
        ci.watch(lambda: "state")
    state = {"w": jnp.zeros(1)}
    ci.watch(too_early)


def test_a_function_that_fails_later(caplog: pytest.LogCaptureFixture) -> None:
    """The loop goes on, and the reason is told once."""
    ci.profile()
    box: dict[str, Any] = {"state": jnp.zeros(1)}
    ci.watch(lambda: box["state"])
    for _ in ci.epochs(range(2)):
        box.clear()

    assert [] == snapshots()
    (said,) = [one.getMessage() for one in caplog.records]
    assert "the function passed to ci.watch() raised KeyError('state')" in said


@pytest.mark.parametrize(
    "given",
    [
        *({}, {"a": 1}, {"name": "x"}, (), 5, "model", [object()], len),
        {1: np.zeros(1), "a": np.zeros(1)},  # JAX cannot sort these keys
    ],
)
def test_what_is_no_tree_of_arrays(given: Any) -> None:
    """An error says what was given and what is taken."""
    ci.profile()

    with pytest.raises(ci.InputError, match="or a tree of JAX arrays; got"):
        ci.watch(given)


def test_inside_of_a_jitted_function() -> None:
    """There are no values there, and the error says where to call it."""
    ci.profile()

    @jax.jit
    def step(state: Any) -> Any:
        ci.watch(state)
        return state

    with pytest.raises(ci.InputError, match="inside a function that JAX traces"):
        step({"w": jnp.zeros(1)})


# -- frameworks ------------------------------------------------------------------------------


def test_a_train_state() -> None:
    """Flax's TrainState with an optax optimizer: parameters and moments under their own names."""
    from flax import linen
    from flax.training.train_state import TrainState

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(3)(x)

    ci.profile()
    model = Model()
    variables = model.init(jax.random.key(0), jnp.ones((1, 2)))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(0.1))

    @jax.jit
    def step(state: Any) -> Any:
        loss = lambda params: state.apply_fn({"params": params}, jnp.ones((1, 2))).sum()  # noqa: E731
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    expected = []
    for _ in ci.epochs(range(2)):
        state = step(state)
        ci.watch(state)
        expected.append(float(state.params["Dense_0"]["kernel"].mean()))

    layer = ["Dense_0.bias", "Dense_0.kernel"]
    assert {
        "step",
        "opt_state.0.count",
        *(
            f"{tree}.{name}"
            for tree in ("params", "opt_state.0.mu", "opt_state.0.nu")
            for name in layer
        ),
    } == set(names())
    assert pytest.approx(expected) == means("params.Dense_0.kernel")
    assert [[2, 3]] * 2 == [one.shape for one in named("params.Dense_0.kernel")]


def test_an_nnx_module() -> None:
    """An NNX module is an object: it is watched once, and read at each boundary."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 1, rngs=rngs)])
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.layers[1](self.drop(self.layers[0](x)))

    ci.profile()
    model: Any = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    ci.watch(model)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
        optimizer.update(model, grads)

    expected = []
    for _ in ci.epochs(range(2)):
        step(model, optimizer)
        expected.append(float(model.layers[1].bias[...].mean()))

    assert expected[0] != expected[1]
    assert pytest.approx(expected) == means("layers.1.bias")
    assert {"layers.0.kernel", "layers.0.bias", "layers.1.kernel", "drop.rngs.key"} <= set(names())


def test_nnx_objects_in_a_tree() -> None:
    """A model and its optimizer together, under the names that they are given."""
    from flax import nnx

    ci.profile()
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    one_epoch({"model": model, "optimizer": optimizer, "scale": (scale := jnp.ones(1))})

    assert scale is not None  # the tree's leaves are the program's to keep
    assert {"model.kernel", "optimizer.opt_state.0.mu.kernel", "scale"} <= set(names())


def test_an_equinox_module() -> None:
    """An Equinox module is a tree; what is no array in it is left out."""
    import equinox as eqx

    ci.profile()
    model: Any = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))

    def loss(model: Any) -> Any:
        return model(jnp.ones(2)).sum()

    @eqx.filter_jit
    def step(model: Any) -> Any:
        gradient: Any = eqx.filter_grad(loss)
        return eqx.apply_updates(model, jax.tree.map(lambda grad: -grad, gradient(model)))

    for _ in ci.epochs(range(2)):
        model = step(model)
        ci.watch(model)

    layers = [f"layers.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")]
    assert layers * 2 == names()
    assert pytest.approx(float(model.layers[1].weight.mean())) == means("layers.1.weight")[1]


def test_a_dataclass() -> None:
    """A dataclass that is registered with JAX has the names of its fields."""

    @jax.tree_util.register_dataclass
    @dataclass
    class Params:
        weight: Any
        stages: tuple[Any, ...]

    ci.profile()
    params = Params(jnp.ones(2), (jnp.zeros(1), [jnp.ones(1)]))
    one_epoch(params)

    assert ["weight", "stages.0", "stages.1.0"] == names()


def test_gradients() -> None:
    """A tree named `grads` holds gradients: named after the weights, and judged as gradients."""
    ci.profile(snapshots="full")
    tree = {"params": {"w": jnp.ones(8)}, "grads": {"w": jnp.zeros(8)}}
    one_epoch(tree)

    assert ["params.w", "w.grad"] == sorted(names())
    (gradient,) = named("w.grad")
    assert str(gradient.blob_uri).endswith("/gradients.safetensors")
    ci.flush()
    marks = spools.read_one(Path(".cirron")).marks
    (found,) = [mark for mark in marks if mark.name == "training_health"]
    assert "dead: w.grad, since 0" == found.value


# -- values ----------------------------------------------------------------------------------


DTYPES = [
    *("bool", "int8", "uint8", "int32", "uint32", "float16", "float32", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4", "complex64"),
]


@pytest.mark.parametrize("library", [jnp, np], ids=["jax", "numpy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, library: Any) -> None:
    """The statistics are exact for each type, and raw values can be read back."""
    ci.profile(snapshots="full")
    numbers = jnp.arange(6) % 2 if dtype == "bool" else jnp.arange(6)
    values = (numbers * (1 + 2j) if dtype == "complex64" else numbers).astype(dtype).reshape(2, 3)
    one_epoch({"w": (given := library.asarray(values)), "other": jnp.ones(1)})
    (found,) = named("w")
    host = np.asarray(given)
    parts = [host.real, host.imag] if dtype == "complex64" else [host]
    exact = np.stack([part.astype(np.float64) for part in parts])

    assert ([2, 3], dtype) == (found.shape, found.dtype)
    assert found.stats.mean == pytest.approx(exact.mean(), rel=1e-12)
    assert found.stats.std == pytest.approx(exact.std(), rel=1e-12)
    assert (exact.min(), exact.max()) == (found.stats.min, found.stats.max)
    assert found.stats.norm == pytest.approx(np.sqrt((exact**2).sum()), rel=1e-12)
    assert exact.size == sum(found.stats.histogram.counts)
    assert np.array_equal(host, stored(found))


def stored(found: wire.Snapshot) -> Any:
    """What the file has, in the type that the record names."""
    import ml_dtypes

    path = str(found.blob_uri).removeprefix("file://")
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(found.tensor_name)
    kind = jnp.dtype(found.dtype)
    if hasattr(ml_dtypes, found.dtype) and tensor.dtype.is_floating_point:
        return tensor.float().numpy().astype(kind)
    return tensor.numpy().astype(kind)


def test_double_precision(scripts: Scripts) -> None:
    """64-bit arrays, complex ones too, where the program has turned them on."""
    ended = scripts.run("""
        import jax, jax.numpy as jnp
        jax.config.update("jax_enable_x64", True)
        import cirron as ci

        ci.profile(snapshots="full")
        tree = {"z": jnp.full((2, 2), 1 + 2j), "x": jnp.full(3, 0.1), "n": jnp.full((), 2**40)}
        for _ in ci.epochs(range(1)):
            ci.watch(tree)
        ci.shutdown()
        from safetensors.numpy import load_file
        from pathlib import Path
        (path,) = Path(".cirron/snapshots").rglob("*.safetensors")
        found = load_file(path)
        print(found["z"].tolist() == [[[1.0, 2.0]] * 2] * 2, found["x"].tolist(), found["n"])
    """)
    found = {one.tensor_name: one for one in scripts.session().snapshots}

    assert (0, "True [0.1, 0.1, 0.1] 1099511627776\n") == (ended.status, ended.out), ended.err
    assert ("complex128", 1.5, 0.5) == (
        found["z"].dtype,
        found["z"].stats.mean,
        found["z"].stats.std,
    )
    assert ("float64", 0.1) == (found["x"].dtype, found["x"].stats.max)
    assert ("int64", [], 2.0**40) == (found["n"].dtype, found["n"].shape, found["n"].stats.max)


def test_what_has_no_numbers() -> None:
    """Random keys, empty arrays, None, text, durations: nothing to measure, the rest is."""
    ci.profile(snapshots="full")
    others = {
        "text": np.array(["a", "bc"]),
        "objects": np.array([None, 1], object),
        "durations": np.array([1], "m8[s]"),
        "records": np.zeros(2, [("a", "f4")]),
    }
    tree = {
        **others,
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 3),
        "of an integer": np.zeros(2, jax.dtypes.float0),  # what jax.grad gives for one
        "empty": jnp.zeros((0, 3)),
        "none": None,
        "step": 3,
        "w": jnp.ones(1),
    }
    one_epoch(tree)
    found = {one.tensor_name: one for one in snapshots()}

    assert {*others, "key", "keys", "of an integer", "empty", "w"} == set(found)
    assert {"its values are not numbers"} == {found[name].attrs["unmeasured"] for name in others}
    assert (1.0, True) == (found["w"].stats.mean, found["w"].blob_uri is not None)
    assert ([3], "key<fry>") == (found["keys"].shape, found["keys"].dtype)
    assert "a random key is not a number" == found["key"].attrs["unmeasured"]
    reason = "the gradient of an integer has no values"
    assert reason == found["of an integer"].attrs["unmeasured"]
    assert None is found["key"].stats.mean is found["empty"].stats.mean
    assert [0, 3] == found["empty"].shape


def test_values_that_are_not_finite() -> None:
    """NaN and infinity are counted, and the statistics are over the rest."""
    ci.profile()
    tree = {"w": jnp.array([1.0, jnp.nan, 3.0, jnp.inf]), "b": jnp.array([jnp.nan], "bfloat16")}
    one_epoch(tree)
    found = {one.tensor_name: one for one in snapshots()}

    assert (2.0, 1, 1) == (
        found["w"].stats.mean,
        found["w"].attrs["nan_count"],
        found["w"].attrs["inf_count"],
    )
    assert (None, 1) == (found["b"].stats.mean, found["b"].attrs["nan_count"])


def test_shared_arrays() -> None:
    """An array that a tree has twice is recorded once, and says under which other name."""
    ci.profile()
    tied = jnp.ones(2)
    one_epoch({"embed": tied, "head": tied})
    (found,) = snapshots()

    assert ("embed", ["head"]) == (found.tensor_name, found.attrs["shared_with"])


def test_names_that_would_be_the_same() -> None:
    """Two arrays whose paths read alike still have a name each."""
    ci.profile()
    tree = {"a.b": jnp.ones(1), "a": {"b": jnp.zeros(1)}}
    one_epoch(tree)

    assert ["a.b", "a.b_"] == sorted(names())


def test_nothing_is_compiled_for_a_snapshot() -> None:
    """A boundary costs no compile, and is no transfer of the program's."""
    ci.profile()
    tree = {f"w{size}": jnp.ones(size) for size in range(1, 20)}
    jax.block_until_ready(tree)
    ci.flush()
    before = spans_named("compile", "transfer")
    one_epoch(tree)
    ci.flush()

    assert before == spans_named("compile", "transfer")
    assert 19 == len(snapshots())


def spans_named(*wanted: str) -> int:
    return sum(ci.trace(format="dict", name=name)["span_count"] for name in wanted)


def test_transfer_guard() -> None:
    """A program that forbids implicit transfers has its snapshots all the same."""
    ci.profile()
    tree = {"w": jnp.ones(3)}
    with jax.transfer_guard("disallow"):
        one_epoch(tree)

    assert [1.0] == means("w")


def test_little_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A copy that might not fit is left out, counted, and the loop goes on."""
    from cirron.snapshot import host

    monkeypatch.setattr(host, "available_bytes", lambda: 1_000_000)
    ci.profile()
    tree = {"w": jnp.ones(5_000_000)}
    with caplog.at_level(logging.WARNING):
        one_epoch(tree)

    assert [] == snapshots()
    assert 1 == ci.health()["snapshot_skip_count"]
    assert "might not fit in free memory" in caplog.text


@pytest.mark.parametrize(
    ("known", "expected"),
    [({"bytes_limit": 1000, "bytes_in_use": 200}, 200.0), ({}, float("inf")), (None, float("inf"))],
)
def test_a_device_s_memory(known: Any, expected: float) -> None:
    """A copy takes at most a quarter of what a device has left, where it says what that is."""
    from types import SimpleNamespace

    from cirron.snapshot.jax import free_bytes

    assert expected == free_bytes(SimpleNamespace(memory_stats=lambda: known))


def test_beside_a_torch_model() -> None:
    """A session that watches models of two frameworks has both, in one file."""
    import torch

    ci.profile(snapshots="full")
    model, tree = torch.nn.Linear(2, 1, bias=False), {"w": jnp.full(3, 2.0)}
    ci.watch(model)
    one_epoch(tree)
    found = {one.tensor_name: one for one in snapshots()}

    assert {"weight", "w"} == set(found)
    assert {"weights.safetensors"} == {
        str(one.blob_uri).rpartition("/")[2] for one in found.values()
    }
    assert np.array_equal(model.weight.detach().numpy(), stored(found["weight"]))
    assert np.array_equal(np.asarray(tree["w"]), stored(found["w"]))


# -- several devices -------------------------------------------------------------------------


def test_sharded_arrays(scripts: Scripts) -> None:
    """On eight devices the statistics are of the whole array, and its sharding is told."""
    ended = scripts.run(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        import cirron as ci

        ci.profile(snapshots="full")
        mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        whole = jnp.arange(64.0).reshape(8, 8)
        state = {"both": put(whole, "data", "model"), "rows": put(whole, "data"), "all": put(whole)}
        step = jax.jit(
            lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0,
            out_shardings=jax.tree.map(lambda x: x.sharding, state),
        )
        for _ in ci.epochs(range(2)):
            state = step(state)
            ci.watch(state)
        state = step(state)
        ci.shutdown()
        from pathlib import Path
        from safetensors.numpy import load_file
        paths = sorted(Path(".cirron/snapshots").rglob("*.safetensors"))
        sums = sorted(float(load_file(path)["both"][7, 7]) for path in paths)
        print(sums)
    """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    found = scripts.session().snapshots

    assert (0, "[64.0, 65.0]\n") == (ended.status, ended.out), ended.err
    assert [32.5, 33.5] * 3 == [
        one.stats.mean
        for name in ("both", "rows", "all")
        for one in found
        if one.tensor_name == name
    ]
    assert {(8, 8)} == {tuple(one.shape) for one in found}
    shardings = {one.tensor_name: one.attrs["sharding"] for one in found}
    assert "'data'" in shardings["rows"]
    assert "'model'" not in shardings["rows"]
    assert "'model'" in shardings["both"]


PROCESSES = """
    import os, sys
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    rank = int(os.environ["RANK"])
    jax.distributed.initialize(
        coordinator_address=f"127.0.0.1:{os.environ['PORT']}", num_processes=2, process_id=rank,
        initialization_timeout=30,
    )
    import jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import cirron as ci

    ci.profile(snapshots="full")
    mesh = Mesh(np.array(jax.devices()), ("data",))
    local = np.full((2, 3), float(rank), np.float32)
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), local)
    same = jax.make_array_from_process_local_data(NamedSharding(mesh, P()), np.ones(4, np.float32))
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
    tree = {"rows": rows, "same": same}
    for _ in ci.epochs(range(1)):
        loss = total(rows)
        ci.mark("loss", loss)
        ci.watch(tree)
        loss.block_until_ready()
    ci.shutdown()
    print(rows.is_fully_addressable, loss.is_fully_addressable)
"""


def test_two_processes(scripts: Scripts, free_port: int) -> None:
    """Each process has the statistics of its own shards, and says of what array; marks are kept."""
    started = [
        scripts.start(PROCESSES, RANK=str(rank), WORLD_SIZE="2", PORT=str(free_port))
        for rank in range(2)
    ]
    ended = [script.end(timeout_s=60.0) for script in started]

    said = [(one.status, one.out.splitlines()[-1:]) for one in ended]  # the last: Gloo prints too
    assert [(0, ["False False"])] * 2 == said, ended[0].err
    runs = sorted(scripts.sessions(), key=lambda run: run.session.rank or 0)
    for rank, run in enumerate(runs):
        found = {one.tensor_name: one for one in run.snapshots}
        assert (rank, [2, 3], [4, 3]) == (
            found["rows"].stats.mean,
            found["rows"].shape,
            found["rows"].attrs["shard_of"],
        )
        assert (1.0, [4]) == (found["same"].stats.mean, found["same"].shape)
        assert [6.0] == [mark.value for mark in run.marks if mark.name == "loss"]


@pytest.fixture
def free_port() -> int:
    """A port that nobody listened at a moment ago."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def test_shards_that_make_no_box(tmp_path: Path) -> None:
    """The shards of a process that lie apart are measured one after the other."""
    from types import SimpleNamespace

    from cirron.snapshot.jax import local_box

    shards = [
        SimpleNamespace(index=(slice(0, 2),), data=np.zeros(2)),
        SimpleNamespace(index=(slice(6, 8),), data=np.ones(2)),
        SimpleNamespace(index=(slice(0, 2),), data=np.zeros(2)),  # a copy on another device
    ]
    array = SimpleNamespace(shape=(8,), addressable_shards=shards)
    box = local_box(array)

    assert ([4], 2) == (box.shape, len(box.parts))
    assert [0.0, 0.0, 1.0, 1.0] == np.asarray(box).tolist()
