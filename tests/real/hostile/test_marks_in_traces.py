"""`ci.mark` where there is no value, or where asking for it would change what the program does.

A mark inside a function that is traced, transformed or watched never raises. The function's graph
and results are the same with and without it. A value that cannot be had is counted as lost.
"""

from __future__ import annotations

import asyncio
import fractions
import os
import signal
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cirron as ci
from cirron.record import hot
from cirron.record import value as values

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, while it imports
    import torch._dynamo
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.conftest import Scripts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

Mark = Callable[[str, Any], None]
X = torch.tensor([1.0, 2.0, 3.0])


def no_mark(name: str, value: Any) -> None:
    pass


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    ci.profile(output="none")
    yield
    ci.shutdown()


def marked() -> tuple[list[Any], int]:
    """The values of all marks so far, and how many are lost."""
    ci.flush()
    (root,) = ci.trace(format="dict")["roots"]

    def below(node: dict[str, Any]) -> list[Any]:
        own = [mark["value"] for mark in node["marks"]]
        return own + [one for child in node["children"] for one in below(child)]

    return below(root), ci.health()["mark_drop_count"]


def is_lost(given: Any) -> bool:
    found = values.capture(given)
    return isinstance(found, values.Deferred) and found.is_lost


# -- torch: functions that are traced or transformed ---------------------------------------------


def loss_with(mark: Mark) -> Callable[[torch.Tensor], torch.Tensor]:
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.add_(1)
        total = y.sum()
        mark("total", total)
        return total * 2

    return loss


class Model(torch.nn.Module):
    def __init__(self, mark: Mark) -> None:
        super().__init__()
        self.mark = mark
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        total = self.inner(x).sum()
        self.mark("total", total)
        self.mark("bias", self.inner.bias)
        return total * 2


def export(mark: Mark, **options: Any) -> Any:
    exported = torch.export.export(Model(mark), (torch.ones(4, 3),), **options)
    return str(exported.graph), str(exported.range_constraints)


def traced(mark: Mark) -> str:
    script: Any = torch.jit.trace(loss_with(mark), X, check_trace=False)
    return str(script.graph).partition(" # ")[0]


def dimension() -> Any:
    return torch.export.Dim("rows", min=2, max=64)


func = torch.func
TRACES: dict[str, tuple[Callable[[Mark], Any], int]] = {
    # how, and how many of its marks have a value
    "vmap": (lambda mark: func.vmap(loss_with(mark))(torch.ones(2, 3)), 0),
    "vmap-in-chunks": (lambda mark: func.vmap(loss_with(mark), chunk_size=1)(X[None]), 0),
    "grad": (lambda mark: func.grad(loss_with(mark))(X), 1),
    "grad-of-grad": (
        lambda mark: func.grad(lambda x: func.grad(loss_with(mark))(x).sum())(X),
        1,
    ),
    "vmap-of-grad": (lambda mark: func.vmap(func.grad(loss_with(mark)))(torch.ones(2, 3)), 0),
    "grad-of-vmap": (
        lambda mark: func.grad(lambda x: func.vmap(loss_with(mark))(x).sum())(torch.ones(2, 3)),
        0,
    ),
    "jvp": (lambda mark: func.jvp(loss_with(mark), (X,), (X,)), 1),
    "vjp": (lambda mark: func.vjp(loss_with(mark), X)[0], 1),
    "jacrev": (lambda mark: func.jacrev(loss_with(mark))(X), 1),
    "hessian": (lambda mark: func.hessian(loss_with(mark))(X), 1),
    "functionalize": (lambda mark: func.functionalize(loss_with(mark))(X), 0),
    "make_fx": (lambda mark: make_fx(loss_with(mark))(X).code, 1),
    "make_fx-fake": (lambda mark: make_fx(loss_with(mark), tracing_mode="fake")(X).code, 0),
    "make_fx-symbolic": (
        lambda mark: make_fx(loss_with(mark), tracing_mode="symbolic")(X).code,
        0,
    ),
    "make_fx-of-grad": (lambda mark: make_fx(func.grad(loss_with(mark)))(X).code, 1),
    "make_fx-of-vmap": (lambda mark: make_fx(func.vmap(loss_with(mark)))(X[None]).code, 0),
    "make_fx-of-functionalize": (
        lambda mark: make_fx(func.functionalize(loss_with(mark)))(X).code,
        0,
    ),
    "make_fx-pre-dispatch": (lambda mark: make_fx(loss_with(mark), pre_dispatch=True)(X).code, 1),
    "fx": (lambda mark: torch.fx.symbolic_trace(Model(mark)).code, 0),
    "jit": (traced, 0),
    "export": (lambda mark: export(mark, strict=False), 0),
    "export-dynamic": (
        lambda mark: export(mark, strict=False, dynamic_shapes=({0: dimension()},)),
        0,
    ),
    "fake": (lambda mark: fake(mark), 0),
    "inference": (lambda mark: in_inference_mode(mark), 1),
    "forward-mode": (lambda mark: in_forward_mode(mark), 1),
    "checkpoint": (
        lambda mark: torch.utils.checkpoint.checkpoint(
            loss_with(mark), X.clone().requires_grad_(), use_reentrant=False
        ),
        1,
    ),
}


def fake(mark: Mark) -> str:
    with FakeTensorMode():
        return str(loss_with(mark)(torch.ones(3)))


def in_inference_mode(mark: Mark) -> Any:
    with torch.inference_mode():
        return loss_with(mark)(X)


def in_forward_mode(mark: Mark) -> Any:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(loss_with(mark)(forward_ad.make_dual(X, X)))
        return found.primal, found.tangent


@pytest.mark.parametrize("name", TRACES)
def test_a_mark_changes_no_trace(name: str) -> None:
    """Graph and results are the same with the mark; its value is recorded, or lost and counted."""
    run, recorded = TRACES[name]
    wanted, found = run(no_mark), run(ci.mark)

    assert str(wanted) == str(found)
    marks, lost = marked()
    assert recorded == len(marks)
    assert lost >= 1 or recorded


def test_values_inside_of_grad() -> None:
    """Under `torch.func.grad` the loss has a value, which is recorded."""
    func.grad(loss_with(ci.mark))(X)

    assert [pytest.approx(float((X.sin() + 1).sum()))] == marked()[0]


def test_symbolic_sizes() -> None:
    """A size that is symbolic is lost, and stays symbolic."""

    def run(mark: Mark) -> Any:
        def double(x: torch.Tensor) -> Any:
            rows, mean = x.shape[0], x.shape[0] / 2
            mark("rows", rows)
            mark("mean", mean)
            mark("is-large", rows > 3)
            mark("rows-or-more", x)  # whether it is one is not asked
            return x * 2

        graph: Any = make_fx(double, tracing_mode="symbolic")(torch.ones(5))
        return graph.code, str(graph.shape_env.guards)

    assert run(no_mark) == run(ci.mark)
    assert ([], 4) == marked()


def test_a_compiled_function() -> None:
    """A function that is compiled computes the same with a mark in it."""

    def run(mark: Mark) -> torch.Tensor:
        torch._dynamo.reset()
        compiled = torch.compile(loss_with(mark), backend="aot_eager")
        return torch.stack([compiled(X), compiled(X)])

    wanted, found = run(no_mark), run(ci.mark)
    torch._dynamo.reset()

    assert torch.equal(wanted, found)


# -- torch: modes of the user --------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Notes each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes each function of torch's, attributes included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Calls, Functions])
def test_a_mode_does_not_see_the_mark(mode: Any) -> None:
    """A mode of the user's sees the same calls with the mark, and the value is recorded."""

    def run(mark: Mark) -> list[str]:
        with mode() as watching:
            loss_with(mark)(X)
            mark("parameter", torch.nn.Parameter(X[0]))
        found: list[str] = watching.seen
        return found

    assert run(no_mark) == run(ci.mark)
    assert 2 == len(marked()[0])


def test_a_mode_that_raises() -> None:
    """A mode that forbids everything does not forbid a mark."""

    class Forbid(TorchDispatchMode):
        def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("nobody may do anything")

    total = X.sum()
    with Forbid():  # type: ignore[no-untyped-call]
        ci.mark("total", total)

    assert ([6.0], 0) == marked()


def test_a_default_device() -> None:
    """A default device, which is a mode too, changes nothing for marks."""
    with torch.device("meta"):
        ci.mark("total", X.sum())
        ci.mark("none", torch.zeros(()))

    assert ([6.0], 1) == marked()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", [Calls, Functions])
@pytest.mark.parametrize("is_profiled", [True, False])
def test_a_mode_does_not_see_the_mark_on_a_gpu(mode: Any, is_profiled: bool) -> None:
    """Nor does it see the copy of a value on a GPU, which is not waited for."""
    if not is_profiled:
        ci.shutdown()
    total = X.cuda().sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mode() as watching:
            found = values.capture(total, hot.device_clock)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found.resolve()

    assert ([], 6.0) == (watching.seen, found.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_profiled", [True, False])
def test_no_value_on_a_gpu(is_profiled: bool) -> None:
    """While a graph is captured, and once its memory is freed, a tensor has no value."""
    if not is_profiled:
        ci.shutdown()
    one, freed = torch.ones((), device="cuda"), torch.ones((), device="cuda")
    freed.untyped_storage().resize_(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        two = one + 1
        assert values.capture(two, hot.device_clock).is_lost
    graph.replay()

    assert values.capture(freed, hot.device_clock).is_lost
    assert 2.0 == two.item()


# -- torch: kinds of tensors ---------------------------------------------------------------------


class Own(torch.Tensor):
    """A subclass that notes what is done with it."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.seen.append(function)
        above: Any = super()
        return above.__torch_function__(function, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A subclass without data of its own, as quantised and distributed tensors are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        make: Any = torch.Tensor._make_wrapper_subclass
        found: Wrapper = make(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        return found

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("a mark computes nothing")


def freed() -> torch.Tensor:
    tensor = torch.tensor(2.0)
    tensor.untyped_storage().resize_(0)
    return tensor


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor(2.0), 0.1, 0, torch.qint8)


def sparse() -> torch.Tensor:
    return torch.tensor([2.0]).to_sparse()


KINDS: list[tuple[Callable[[], Any], Any]] = [
    (lambda: torch.tensor(2.0, requires_grad=True) * 1, 2.0),
    (lambda: torch.tensor(2.0).as_subclass(Own), 2.0),
    (lambda: torch.nn.Buffer(torch.tensor(2.0)), 2.0),
    (lambda: torch.tensor(2.0).to(torch.float8_e4m3fn), 2.0),
    (lambda: torch.tensor(1 + 2j).conj().imag, -2.0),
    (lambda: torch.tensor(2.0).share_memory_(), 2.0),
    (lambda: torch.tensor([[2.0]]).expand(1, 1).T, 2.0),
    (quantized, 2.0),
    (sparse, 2.0),
    (lambda: Wrapper(torch.tensor(2.0)), None),
    (lambda: torch.zeros((), device="meta"), None),
    (lambda: FakeTensorMode().from_tensor(torch.tensor(2.0)), None),
    (lambda: torch._to_functional_tensor(torch.tensor(2.0)), 2.0),
    (lambda: torch.tensor([[2.0]]).to_sparse_csr(), None),
    (lambda: torch.nested.nested_tensor([torch.tensor([2.0])]), None),
    (lambda: torch.nested.nested_tensor([torch.tensor([2.0])], layout=torch.jagged), None),
    (lambda: torch.nn.UninitializedParameter(), None),
    (lambda: torch.empty((), dtype=torch.bits8), None),
    (freed, None),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "expected"), KINDS, ids=range(len(KINDS)))
def test_kinds_of_tensors(make: Callable[[], Any], expected: Any) -> None:
    """Every kind of tensor has a value or is lost; none raises, and no subclass sees the mark."""
    given = make()
    Own.seen.clear()
    ci.mark("value", given)

    assert [] == Own.seen
    assert (([], 1) if expected is None else ([expected], 0)) == marked()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2),
        lambda: torch.zeros(0),
        lambda: torch.zeros(2).as_subclass(Own),
        lambda: Wrapper(torch.zeros(2)),
        lambda: torch.zeros(2, device="meta"),
        lambda: FakeTensorMode().from_tensor(torch.zeros(2)),
        lambda: torch.tensor(1j),
        lambda: torch.zeros(2).shape,
        lambda: torch.nn.Linear(1, 1),
    ],
    ids=range(9),
)
def test_what_is_plainly_no_scalar(make: Callable[[], Any]) -> None:
    """A tensor of several elements, or a complex one, is an error as ever."""
    with pytest.raises(ci.InputError, match=r"ci\.mark\('value', \.\.\.\) takes one float"):
        ci.mark("value", make())


def test_a_distributed_tensor() -> None:
    """A DTensor has a value where each rank has it; others are not asked for theirs."""
    from torch import distributed

    distributed.init_process_group("fake", rank=0, world_size=2, store=fake_store())
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        mesh = init_device_mesh("cpu", (2,))
        local = torch.tensor([2.0], requires_grad=True)
        ci.mark("whole", DTensor.from_local(local, mesh, [Replicate()]))
        ci.mark("part", DTensor.from_local(local, mesh, [Partial()]))
        with pytest.raises(ci.InputError):
            ci.mark("several", DTensor.from_local(local, mesh, [Shard(0)]))
    finally:
        distributed.destroy_process_group()

    assert ([2.0], 1) == marked()


def fake_store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def test_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the private names that we use, marks are recorded all the same."""
    for name in (
        "_get_tracing_state",
        "_len_torch_dispatch_stack",
        "_is_torch_function_mode_enabled",
        "_DisableTorchDispatch",
        "_functorch",
    ):
        monkeypatch.delattr(torch._C, name)
    from cirron.record.readers import torch_reader

    take, take_own = torch_reader(torch.Tensor), torch_reader(Own)
    assert take is not None
    assert take_own is not None
    assert (6.0, 6.0) == (take(X.sum(), None), take_own(X.sum().as_subclass(Own), None))


# -- JAX, Keras ----------------------------------------------------------------------------------


def jax_loss(mark: Mark) -> Callable[[Any], Any]:
    def loss(x: Any) -> Any:
        total = jnp.sin(x).sum()
        mark("total", total)
        return total * 2

    return loss


def sharded(mark: Mark) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
    spec = jax.sharding.PartitionSpec("rows")
    return jax.shard_map(
        lambda x: jax_loss(mark)(x)[None], mesh=mesh, in_specs=spec, out_specs=spec
    )


def scanned(mark: Mark) -> Any:
    return lambda x: jax.lax.scan(lambda carry, one: (jax_loss(mark)(one), carry), 0.0, x)


JAX: dict[str, Callable[[Mark], Any]] = {
    "jit": lambda mark: jax.jit(jax_loss(mark)),
    "vmap": lambda mark: lambda x: jax.vmap(jax_loss(mark))(x[None]),
    "grad": lambda mark: jax.grad(jax_loss(mark)),
    "jvp": lambda mark: lambda x: jax.jvp(jax_loss(mark), (x,), (x,)),
    "shard_map": sharded,
    "scan": scanned,
    "checkpoint": lambda mark: jax.checkpoint(jax_loss(mark)),
    "eval_shape": lambda mark: lambda x: (jax.eval_shape(jax_loss(mark), x), x)[1],
}


@pytest.mark.parametrize("name", JAX)
def test_a_mark_changes_no_jaxpr(name: str) -> None:
    """Under each transformation of JAX the program is the same, and the mark is lost."""
    x = jnp.arange(3.0)
    run = JAX[name]
    wanted, found = run(no_mark), run(ci.mark)

    assert str(jax.make_jaxpr(wanted)(x)) == str(jax.make_jaxpr(found)(x))
    assert str(wanted(x)) == str(found(x))
    marks, lost = marked()
    assert [] == marks
    assert lost >= 1


def test_a_class_that_is_called_tracer() -> None:
    """Only a tracer of JAX's has no value, not any class with such a name."""

    class LossTracer:
        def item(self) -> float:
            return 0.5

    ci.mark("loss", LossTracer())

    assert ([0.5], 0) == marked()


def test_a_symbolic_tensor_of_keras(scripts: Scripts) -> None:
    """While a Keras model is put together there is no value, and it is put together."""
    ended = scripts.run(
        """
        import cirron as ci
        import keras

        class Layer(keras.layers.Layer):
            def call(self, x):
                total = keras.ops.sum(x)
                ci.mark("total", total)
                return x * 2

        ci.profile(output="none")
        inputs = keras.Input((3,))
        ci.mark("input", inputs)
        keras.Model(inputs, Layer()(inputs))
        ci.flush()
        print(ci.health()["mark_drop_count"])
        """,
        KERAS_BACKEND="jax",
    )

    assert (0, "2\n") == (ended.status, ended.out)


@pytest.mark.heavy
def test_tensorflow() -> None:
    """In a `tf.function` a mark is lost and the graph is the same; eager values are recorded."""
    tf = pytest.importorskip("tensorflow")
    variable = tf.Variable(3.0)

    def operations(mark: Mark) -> list[str]:
        def double(x: Any) -> Any:
            mark("x", x)
            mark("variable", variable)
            return x * 2

        graph = tf.function(double).get_concrete_function(tf.constant(2.0)).graph
        return [operation.name for operation in graph.get_operations()]

    assert operations(no_mark) == operations(ci.mark)
    assert ([], 2) == marked()
    ci.mark("float", tf.constant(2.0))
    ci.mark("int", tf.constant(2))
    ci.mark("variable", variable)
    assert ([2.0, 2, 3.0], 2) == marked()
    with pytest.raises(ci.InputError):
        ci.mark("several", tf.constant([1.0, 2.0]))


# -- NumPy ---------------------------------------------------------------------------------------


def holding(item: Any) -> Any:
    array = np.empty((), dtype=object)
    array[()] = item
    return array


class Odd(np.ndarray):
    """An array whose own methods fail."""

    def item(self, *_: Any) -> Any:
        raise SystemExit

    @property  # type: ignore[misc]
    def shape(self) -> Any:
        raise SystemExit


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (holding(0.5), 0.5),
        (holding(torch.tensor(0.5)), 0.5),
        (holding(fractions.Fraction(1, 2)), 0.5),
        (np.array(0.5).view(Odd), 0.5),
        (np.ma.array(0.5), 0.5),
        (np.ma.array([0.5, 1.0], mask=[False, True])[:1], 0.5),
        (np.longdouble(0.5), 0.5),
        (np.ma.masked, None),
        (np.ma.array(0.5, mask=True), None),
        (np.ma.array([0.5], mask=[True]), None),
    ],
    ids=range(10),
)
def test_odd_arrays(given: Any, expected: Any) -> None:
    """What an array holds is recorded, by NumPy's own methods; what is masked has no value."""
    ci.mark("value", given)

    assert (([], 1) if expected is None else ([expected], 0)) == marked()


def self_containing() -> Any:
    array = holding(None)
    array[()] = array
    return array


@pytest.mark.parametrize(
    "given",
    [
        holding(None),
        holding({}),
        self_containing(),
        np.array([None, 1]),
        np.datetime64("2024-01-01", "ns"),
        np.timedelta64(5, "ns"),
        np.datetime64("NaT"),
        np.array("2024-01-01", dtype="datetime64[ns]"),
        np.clongdouble(1),
        np.array(1j),
        np.zeros((), dtype=[("a", "f4")]),
        np.ma.array([0.5, 1.0], mask=[True, True]),
        np.zeros(2).view(Odd),
    ],
    ids=range(13),
)
def test_arrays_that_are_plainly_no_scalar(given: Any) -> None:
    """Dates, complex numbers, records and objects are an error, whatever their unit."""
    with pytest.raises(values.NotAScalarError):
        values.capture(given)


# -- objects that fail or hang -------------------------------------------------------------------

ERRORS = [RuntimeError, SystemExit, asyncio.CancelledError, GeneratorExit, MemoryError]


def failing(error: type[BaseException], *names: str) -> Any:
    """An object whose attributes of these names raise; it has an `item` in any case."""

    def fail(self: Any, *_: Any) -> Any:
        raise error

    def item(self: Any) -> float:
        return 0.5

    body = {name: fail if name == "__float__" else property(fail) for name in names}
    return type("Failing", (), {"item": item, **body})()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    "name", ["item", "shape", "__float__", "__class__", "__dict__", "__module__"]
)
def test_a_value_that_fails(name: str, error: type[BaseException]) -> None:
    """No attribute of a value can hurt the program, whatever it raises."""
    found = values.capture(failing(error, name))
    found.resolve()

    assert (name == "item") == found.is_lost


@pytest.mark.parametrize("error", ERRORS)
def test_a_number_that_fails(error: type[BaseException]) -> None:
    """Nor can a number of the user's own that fails as it is converted."""

    class Number:
        def __float__(self) -> float:
            raise error

    class Forwarding:
        def __getattribute__(self, name: str) -> Any:
            raise error

    class Meta(type):
        def __hash__(cls) -> int:
            raise error

    class Unhashable(metaclass=Meta):
        pass

    assert is_lost(Number())
    assert is_lost(Forwarding())
    assert is_lost(Unhashable())
    ci.mark("value", Number())
    assert ([], 1) == marked()


@pytest.mark.parametrize("base", [int, float, str])
def test_a_subclass_of_a_scalar_that_fails(base: Any) -> None:
    """A subclass of int, float or str is taken as what it is, whatever its own methods do."""

    def fail(*_: Any) -> Any:
        raise SystemExit

    methods = ("__int__", "__index__", "__float__", "__str__", "__len__", "__eq__", "__bool__")
    body = {**dict.fromkeys(methods, fail), "__hash__": fail, "item": fail}
    ci.mark("value", type("Scalar", (base,), body)("7"))

    assert ([base("7")], 0) == marked()


def test_a_value_that_hangs() -> None:
    """`item` and `shape` of an unknown object are not asked for on the program's thread."""
    ends = threading.Event()
    asked: list[str] = []

    class Hanging:
        @property
        def shape(self) -> tuple[int, ...]:
            asked.append(threading.current_thread().name)
            ends.wait(20)
            return ()

        def item(self) -> float:
            asked.append(threading.current_thread().name)
            ends.wait(20)
            return 0.5

    ci.mark("value", Hanging())
    assert threading.current_thread().name not in asked
    ends.set()
    assert ([0.5], 0) == marked()
    assert 1 == len(asked)


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_about_a_value_that_fails(error: type[BaseException]) -> None:
    """What is plainly no scalar is an `InputError`, even if its shape cannot be shown."""

    class Shapeless:
        @property
        def shape(self) -> Any:
            raise error

    with pytest.raises(ci.InputError, match=r"got Shapeless\. Convert it first"):
        ci.mark("value", Shapeless())


def test_a_dead_proxy() -> None:
    """A weakref.proxy is the value that it stands for, and lost once that is gone."""
    total: Any = X.sum()
    proxy = weakref.proxy(total)
    assert 6.0 == values.capture(proxy)
    total = None

    assert is_lost(proxy)


def test_wrappers_have_the_value_of_the_moment() -> None:
    """An object that passes `.item` on to a tensor has the tensor's value of now."""

    class Wrapped:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    total = torch.tensor(1.0)
    ci.mark("wrapped", Wrapped(total))
    ci.mark("twice", Wrapped(Wrapped(total)))
    ci.mark("attribute", types.SimpleNamespace(item=total.item))
    total += 1

    assert ([1.0, 1.0, 1.0], 0) == marked()


def test_wrappers_in_a_circle() -> None:
    """Objects that pass `.item` on to each other come to an end."""

    class Wrapped:
        other: Any = None

        def __getattr__(self, name: str) -> Any:
            if name != "item":
                raise AttributeError(name)
            return types.MethodType(lambda self: 1.0, self.other)

    one, two = Wrapped(), Wrapped()
    one.other, two.other = two, one

    assert is_lost(one)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_a_signal_passes(raised: type[BaseException]) -> None:
    """What a handler raises while a value is asked is for the program, not the value's failure."""

    class Slow:
        def __float__(self) -> float:
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(100_000):  # the handler runs somewhere in here
                pass
            return 0.5

    def handle(*_: Any) -> None:
        raise raised

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(raised):
            ci.mark("value", Slow())
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_passes(scripts: Scripts) -> None:
    """Ctrl-C ends a program that is stuck in its own number, as ever."""
    script = scripts.start("""
        import time
        import cirron as ci

        class Slow:
            def __float__(self):
                print("asked", flush=True)
                time.sleep(20)
                return 0.5

        ci.profile(output="none")
        ci.mark("value", Slow())
    """)
    script.wait_for("asked")
    began = time.monotonic()
    script.kill(signal.SIGINT)
    ended = script.end()

    assert "KeyboardInterrupt" in ended.err
    assert time.monotonic() - began < 10


def test_marks_import_no_library(scripts: Scripts) -> None:
    """Marks of plain numbers and of foreign objects import no library."""
    ended = scripts.run("""
        import fractions, sys
        import cirron as ci

        ci.profile(output="none")
        ci.mark("fraction", fractions.Fraction(1, 2))
        ci.mark("text", "text")
        print([name for name in ("torch", "numpy", "jax", "tensorflow") if name in sys.modules])
    """)

    assert "[]\n" == ended.out
