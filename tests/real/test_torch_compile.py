"""PyTorch models that are compiled, traced, scripted or exported while they are hooked."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.conftest import Scripts, Traced

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, while it imports
    import torch._dynamo
    from torch._dynamo.utils import counters

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

X = torch.ones(2, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    """Dynamo starts afresh, so that what it counts is the test's."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> tuple[int, int]:
    """How many graphs were made so far, and how many breaks there were."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_before(backend: str) -> None:
    """A model that is compiled already is seen, and not compiled again as hooks come and go."""
    model = Model()
    compiled = torch.compile(model, backend=backend)
    wanted = compiled(X)
    ci.profile(output="none")
    found = compiled(X)
    (root,) = ci.trace(format="dict")["roots"]
    ci.shutdown()
    compiled(X)

    assert torch.equal(wanted, found)
    assert ["forward"] == [span["name"] for span in root["children"]]
    assert [] == root["children"][0]["children"]
    assert (1, 0) == graphs()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_while_hooked(traced: Traced, backend: str) -> None:
    """One graph, no break; the time to compile is a span of its own; no recompile at shutdown."""
    model = Model()
    compiled = torch.compile(model, backend=backend)
    found = [compiled(X), compiled(X)]
    tree = traced()
    ci.shutdown()

    assert "forward:train(compile) forward:train" == tree
    assert torch.equal(model(X), found[0])
    assert torch.equal(compiled(X), found[1])
    assert (1, 0) == graphs()


def test_compiled_in_place(traced: Traced) -> None:
    """`model.compile()` is the same."""
    model = Model()
    wanted = model(X)
    model.compile(backend="eager")
    found = model(X)

    assert torch.equal(wanted, found)
    assert "forward:train forward:train(compile)" == traced()
    assert (1, 0) == graphs()


def test_a_part_that_is_compiled_in_place(traced: Traced) -> None:
    """A submodule that is compiled stays so inside a hooked model, hooks of its own included."""
    part = Model()
    model = nn.Sequential(nn.Linear(4, 4), part)
    model.requires_grad_(False)  # else torch warns of the graph that begins inside
    wanted = model(X)
    called: list[nn.Module] = []
    model[0].register_forward_hook(lambda module, *_: called.append(module))
    part.compile(backend="eager")

    assert torch.equal(wanted, model(X))
    assert [model[0]] == called
    assert traced().endswith("forward:train(compile)")
    assert (1, 0) == graphs()


def test_a_container_that_is_compiled_in_place(traced: Traced) -> None:
    """Dynamo does not compile torch's own containers from inside; nor does it our functions."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 1))
    wanted = model(X)
    model.compile(backend="eager")

    assert torch.equal(wanted, model(X))
    found = graphs()
    ci.shutdown()
    torch._dynamo.reset()
    counters.clear()
    model(X)
    assert graphs() == found


def test_a_whole_graph(traced: Traced) -> None:
    """`fullgraph=True`, which forbids any break, works on a function that calls hooked models."""
    first, second = Model(), nn.Linear(1, 1)
    compiled = torch.compile(lambda x: second(first(x)), backend="eager", fullgraph=True)

    assert torch.equal(second(first(X)), compiled(X))
    assert (1, 0) == graphs()


def test_explain(traced: Traced) -> None:
    """Dynamo finds one graph and no reason to break it."""
    found = torch._dynamo.explain(Model())(X)

    assert (1, 0) == (found.graph_count, found.graph_break_count)


def test_a_backward_that_is_compiled_late(traced: Traced) -> None:
    """A backward that compiles on its first run says so."""
    compiled = torch.compile(Model(), backend="aot_eager")
    for _ in range(2):
        compiled(X).sum().backward()
    found = traced()

    assert 1 == found.count("forward:train(compile)")
    assert found.endswith("forward:train backward")


def test_a_step_that_is_compiled(traced: Traced) -> None:
    """When the whole step is compiled, epochs and steps are still those of the loop."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    loader: Any = DataLoader(torch.ones(6, 4), batch_size=2)  # type: ignore[arg-type]
    for _ in range(2):
        for batch in loader:
            step(batch)

    steps = "step[1](data_load backward) step[2](data_load backward)"
    assert traced().endswith(f"epoch[1](step[0](data_load backward) {steps})")


def test_results_of_a_compiled_model_are_the_same() -> None:
    """Training a compiled model gives the same weights with and without profiling."""

    def weights() -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.Adam(model.parameters())
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(5):
            compiled(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        return list(model.parameters())

    wanted = weights()
    ci.profile(output="none")
    found = weights()

    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_fx(traced: Traced) -> None:
    """A symbolic trace of a hooked model is the same code, and no forward."""
    model = Model()
    found = torch.fx.symbolic_trace(model).code
    tree = traced()
    ci.shutdown()

    assert torch.fx.symbolic_trace(model).code == found
    assert "" == tree


def test_jit_trace(traced: Traced) -> None:
    """A model that was traced while hooked computes the same, and its calls are forwards."""
    model = Model().eval()
    script: Any = torch.jit.trace(model, X, check_trace=False)

    assert torch.equal(model(X), script(X))
    assert "forward:eval forward:eval forward:eval" == traced()
    assert "cirron" not in str(script.inlined_graph)


def test_jit_trace_in_a_loop(traced: Traced) -> None:
    """Describing the model of an epoch adds nothing to a trace, which torch compares with another
    one.
    """
    model = Model()
    both: Any = torch.cat([X, X])
    for number, x in enumerate(torch.utils.data.DataLoader(both, batch_size=len(X))):
        if number == 0:
            torch.jit.trace(model, x)
        model(x).sum().backward()

    assert "data_load forward:train backward" in traced()
    (epoch,) = ci.trace(format="dict", name="epoch")["roots"]
    assert "Model" == epoch["attrs"]["model_class"]


def test_jit_script(traced: Traced) -> None:
    """A scripted model computes the same, and its call is a forward."""
    model = Model().eval()
    script: Any = torch.jit.script(model)
    wanted = model(X)

    assert torch.equal(wanted, script(X))
    assert "forward:eval forward:eval" == traced()


@pytest.mark.parametrize("strict", [False, True])
def test_export(traced: Traced, strict: bool) -> None:
    """An export of a hooked model is the same graph, and no forward."""
    model = Model().eval()
    exported = torch.export.export(model, (X,), strict=strict)
    names = {name for name, *_ in flat(ci.trace(format="dict")["roots"])}
    ci.shutdown()

    assert str(torch.export.export(model, (X,), strict=strict).graph) == str(exported.graph)
    assert torch.equal(model(X), exported.module()(X))
    assert "forward" not in names


def flat(roots: list[dict[str, Any]]) -> list[tuple[str]]:
    return [found for one in roots for found in ((one["name"],), *flat(one["children"]))]


def test_shutdown_leaves_dynamo_as_it_was() -> None:
    """Nothing of ours is left in Dynamo after shutdown."""
    from torch._dynamo.callback import callback_handler

    nn_module: Any = sys.modules["torch._dynamo.variables.nn_module"]
    before = nn_module.unpatched_nn_module_call
    ci.profile(output="none")
    torch.compile(Model(), backend="eager")(X)

    assert 1 == len(callback_handler.start_callbacks)

    ci.shutdown()

    assert nn.Module.__call__ is before is nn_module.unpatched_nn_module_call
    assert [] == callback_handler.start_callbacks == callback_handler.end_callbacks


def test_dynamo_that_is_imported_while_hooked(scripts: Scripts) -> None:
    """We do not import Dynamo; imported later, it finds torch as it is without us."""
    ended = scripts.run("""
        import sys
        import torch
        import cirron as ci

        ci.profile(output="none")
        assert "torch._dynamo" not in sys.modules
        model = torch.nn.Linear(2, 1)
        torch.compile(model, backend="eager")(torch.ones(1, 2))
        (root,) = ci.trace(format="dict")["roots"]
        print([(span["name"], len(span["children"])) for span in root["children"]])
        ci.shutdown()
        from torch._dynamo.variables import nn_module
        print(nn_module.unpatched_nn_module_call is torch.nn.Module.__call__)
    """)

    assert (0, "[('forward', 1)]\nTrue\n") == (ended.status, ended.out)
