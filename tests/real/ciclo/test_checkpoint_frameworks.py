"""Checkpoints of real torch, JAX, Flax, Equinox and Optax objects, and of real data loaders."""

from __future__ import annotations

import collections
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ciclo

if TYPE_CHECKING:
    from tests.real.conftest import Scripts


def there_and_back(state: Any, like: Any, **options: Any) -> Any:
    save = ciclo.checkpoint("there", overwrite=True)
    save(ciclo.Elapsed(), state)
    return save.restore(like, **options)


class TestTorch:
    def test_modules_optimizers_and_schedules(self) -> None:
        """They are filled in place, and go on as the originals do."""
        torch = pytest.importorskip("torch")

        def make(seed: int) -> Any:
            torch.manual_seed(seed)
            model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

        def train(model: Any, optimizer: Any, rates: Any) -> Any:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 3) * torch.arange(2)[:, None]).square().sum().backward()
                optimizer.step()
                rates.step()
            return [value.tolist() for value in model.state_dict().values()]

        state, like = make(0), make(1)
        train(*state)
        found = there_and_back(state, like)

        assert all(one is other for one, other in zip(found, like, strict=True))
        assert train(*state) == train(*found)

    def test_tensors_and_state_dicts(self) -> None:
        """Tensors keep type, `requires_grad` and being parameters; state dicts need no `like`."""
        torch = pytest.importorskip("torch")
        state = {
            "a": torch.ones(3, dtype=torch.bfloat16),
            "b": torch.arange(6.0).reshape(2, 3)[:, 1].requires_grad_(),
            "c": torch.nn.Parameter(torch.ones(1)),
            "d": torch.tensor(3),
            "e": torch.Generator().manual_seed(4),
        }
        like = {
            "a": torch.zeros(3, dtype=torch.bfloat16),
            "b": torch.zeros(2),
            "c": torch.nn.Parameter(torch.zeros(1)),
            "d": torch.tensor(0),
            "e": torch.Generator(),
        }
        found = there_and_back(state, like)

        assert [torch.bfloat16, torch.float32] == [found["a"].dtype, found["b"].dtype]
        assert [1.0, 4.0] == found["b"].tolist()
        assert isinstance(found["c"], torch.nn.Parameter)
        assert 4 == found["e"].initial_seed()
        plain = there_and_back(torch.nn.Linear(2, 2).state_dict(), {})
        assert (collections.OrderedDict, ["weight", "bias"]) == (type(plain), list(plain))

    def test_a_view_does_not_bring_its_base(self) -> None:
        """A row of a large matrix takes the room of a row."""
        torch = pytest.importorskip("torch")
        save = ciclo.checkpoint("there", asynchronous=False)
        save(ciclo.Elapsed(), torch.zeros(1000, 1000)[0])
        files = save.folder.place(1).rglob("*")

        assert sum(path.stat().st_size for path in files) < 50_000

    def test_another_module(self) -> None:
        """What differs is said, and the module is as it was."""
        torch = pytest.importorskip("torch")
        like = torch.nn.Linear(3, 2)
        before = like.weight.clone()
        with pytest.raises(ciclo.CheckpointError, match=r"state\['weight'\]: .*\[2,2\].*\[2,3\]"):
            there_and_back(torch.nn.Linear(2, 2), like)

        assert torch.equal(before, like.weight)

    @pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata calls it
    def test_stateful_data_loader(self) -> None:
        """torchdata's loader is asked where it is: nothing is read twice, in the same order."""
        torch = pytest.importorskip("torch")
        loaders = pytest.importorskip("torchdata.stateful_dataloader")
        read: list[int] = []

        class Data:
            def __len__(self) -> int:
                return 12

            def __getitem__(self, index: int) -> int:
                read.append(index)
                return index

        def run(stop: int, place: str) -> list[Any]:
            torch.manual_seed(5)
            seen: list[Any] = []
            loader = loaders.StatefulDataLoader(Data(), batch_size=2, shuffle=True)
            ciclo.fit(
                0,
                loader,
                steps=stop,
                train_step=lambda batch: seen.append(batch.tolist()),
                resume=place,
            )
            return seen

        whole = run(15, "whole")
        for stops in ((4, 15), (6, 15), (9, 12, 15)):
            place = f"cut-{stops}"
            read.clear()
            assert whole == [batch for stop in stops for batch in run(stop, place)]
            assert 30 == len(read)

    def test_grain(self) -> None:
        """Grain's iterators are asked where they are."""
        grain = pytest.importorskip("grain")

        def run(stop: int | None, place: str) -> list[int]:
            seen: list[int] = []
            data = grain.MapDataset.range(10).shuffle(seed=1).to_iter_dataset()
            tasks = {ciclo.every(1): lambda batch: seen.append(int(batch))}
            ciclo.loop(0, data, tasks, stop, resume=place)
            return seen

        assert run(None, "whole") == run(4, "cut") + run(None, "cut")


class TestJax:
    def test_pytrees(self) -> None:
        """Optax states, keys, bfloat16 and weak types come back as they were."""
        jax = pytest.importorskip("jax")
        optax = pytest.importorskip("optax")
        jnp = jax.numpy
        weights = {"w": jnp.arange(3.0), "layers": [jnp.ones(2, jnp.bfloat16), None]}
        state = (weights, optax.adam(0.1).init(weights), jax.random.key(7), jnp.asarray(2.0))
        like = jax.tree.map(jnp.zeros_like, state[:2]), jax.random.key(0), jnp.asarray(0.0)
        found = there_and_back(state, (*like[0], *like[1:]))

        assert jax.tree.structure(state) == jax.tree.structure(found)
        assert all(map(np.array_equal, jax.tree.leaves(state[:2]), jax.tree.leaves(found[:2])))
        assert jax.random.key_data(found[2]).tolist() == [0, 7]
        assert found[3].weak_type
        assert type(found[1][0]) is type(state[1][0])

    def test_abstract_and_sharded(self) -> None:
        """`like` may be shapes alone, with the sharding that is wanted."""
        jax = pytest.importorskip("jax")
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        wanted = jax.sharding.NamedSharding(mesh, jax.P("data"))
        like = jax.ShapeDtypeStruct((4,), "float32", sharding=wanted)
        found = there_and_back({"w": jax.numpy.arange(4.0)}, {"w": like})

        assert [0.0, 1.0, 2.0, 3.0] == found["w"].tolist()
        assert wanted == found["w"].sharding

    def test_flax_nnx(self) -> None:
        """Modules and optimizers of NNX are filled in place, random streams and statistics too."""
        jax = pytest.importorskip("jax")
        nnx = pytest.importorskip("flax.nnx")
        optax = pytest.importorskip("optax")

        class Net(nnx.Module):  # type: ignore[misc,name-defined,unused-ignore]
            def __init__(self, seed: int) -> None:
                rngs = nnx.Rngs(seed)
                self.linear = nnx.Linear(3, 4, rngs=rngs)
                self.norm = nnx.BatchNorm(4, rngs=rngs)
                self.dropout = nnx.Dropout(0.5, rngs=rngs)

            def __call__(self, x: Any) -> Any:
                return self.dropout(self.norm(self.linear(x)))

        def make(seed: int) -> Any:
            model = Net(seed)
            return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        def train(model: Any, optimizer: Any) -> Any:
            loss, gradient = nnx.value_and_grad(lambda model: model(x).sum())(model)
            optimizer.update(model, gradient)
            return float(loss)

        x = jax.numpy.arange(6.0).reshape(2, 3)
        state, like = make(0), make(1)
        train(*state)
        found = there_and_back(state, like)

        assert found[0] is like[0]
        assert [train(*state) for _ in range(3)] == [train(*found) for _ in range(3)]

    def test_flax_train_state_and_equinox(self) -> None:
        """Their functions are those of `like`; a counter may be a plain number in one of them."""
        jax = pytest.importorskip("jax")
        eqx = pytest.importorskip("equinox")
        optax = pytest.importorskip("optax")
        states = pytest.importorskip("flax.training.train_state")
        jnp = jax.numpy

        def begin() -> Any:
            return states.TrainState.create(
                apply_fn=len, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1)
            )

        trained = jax.jit(lambda s: s.apply_gradients(grads={"w": jnp.ones(3)}))(begin())
        nets = [eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(seed)) for seed in (0, 1)]
        found, net = there_and_back((trained, nets[0]), (begin(), nets[1]))

        assert (states.TrainState, len) == (type(found), found.apply_fn)
        assert (1, jnp.float32(0.9)) == (int(found.step), found.params["w"][0])
        assert eqx.tree_equal(nets[0], net)
        with pytest.raises(ciclo.CheckpointError, match=r"\['.layers'\]\[0\]\['.weight'\]: "):
            there_and_back(nets[0], eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0)))

    def test_a_donated_state(self) -> None:
        """The next step may take the memory of the state while it is being written."""
        jax = pytest.importorskip("jax")
        jnp = jax.numpy
        step = jax.jit(lambda state: state * 0 + 7, donate_argnums=0)
        save = ciclo.checkpoint("there", keep=None)
        for elapsed, _ in ciclo.elapse(range(3)):
            state = jnp.full((500, 500), float(elapsed.steps))
            save(elapsed, state)
            for _ in range(4):
                state = step(state)

        like = jnp.zeros((500, 500))
        assert [0.0, 1.0, 2.0] == [float(save.restore(like, step=n).mean()) for n in (1, 2, 3)]

    def test_without_orbax(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error says which package is missing."""
        jax = pytest.importorskip("jax")
        for name in [name for name in sys.modules if name.partition(".")[0] == "orbax"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "orbax", None)
        with pytest.raises(ciclo.MissingDependencyError, match="pip install orbax-checkpoint"):
            ciclo.checkpoint("there")(ciclo.Elapsed(), jax.numpy.ones(2))


def test_nothing_is_imported_that_is_not_needed(scripts: Scripts) -> None:
    """Saving and going on in plain Python imports no framework; with NumPy, only that."""
    ended = scripts.run(
        """
        import sys
        import ciclo
        found = {"jax", "torch", "numpy", "orbax", "flax"}
        def add(state, batch):
            return {"metrics": {"x": 1.0}}, state + batch
        tasks = {ciclo.every(1): add, ciclo.every(2): ciclo.checkpoint("run")}
        ciclo.loop(0, range(9), tasks, stop=4, resume="run")
        assert 36 == ciclo.loop(0, range(9), tasks, resume="run").state
        print(*sorted(found & set(sys.modules)))
        import numpy
        save = ciclo.checkpoint("arrays")
        save(ciclo.Elapsed(), numpy.ones(3))
        save.restore(numpy.zeros(3))
        print(*sorted(found & set(sys.modules)))
        """
    )

    assert ["", "numpy"] == ended.out.splitlines(), ended.err


def test_a_loop_by_hand_that_just_ends(scripts: Scripts) -> None:
    """The program ends after its last line, and the checkpoint that is being written is whole."""
    pytest.importorskip("jax")
    ended = scripts.run(
        """
        import jax.numpy as jnp
        import ciclo
        save = ciclo.checkpoint("logdir/my-model")
        for elapsed, batch in ciclo.elapse(range(2)):
            save(elapsed, {"w": jnp.full((200, 200), batch), "name": "x"})
        """
    )

    assert (0, "") == (ended.status, ended.err)
    found = ciclo.checkpoint(scripts.folder / "logdir/my-model").restore()
    assert (1.0, "x") == (float(found["w"].mean()), found["name"])
