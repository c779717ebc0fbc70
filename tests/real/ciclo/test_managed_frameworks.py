"""States of linen, NNX, Equinox and Haiku: every loop, checkpoints, metrics, and the model back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ciclo

if TYPE_CHECKING:
    from pathlib import Path

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 16, 8)).astype("float32")
BATCHES = list(zip(X, X[..., :3].argmax(-1), strict=True))
KINDS = ["flax", "nnx", "equinox", "haiku"]


def accuracy(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1) == labels


def new_state(kind: str, **options: Any) -> Any:
    """A model with batch norm and dropout, so that training and evaluation differ."""
    options = {
        "losses": optax.softmax_cross_entropy_with_integer_labels,
        "metrics": {"accuracy": accuracy},
        **options,
    }
    tx = optax.adam(0.02)
    if kind == "flax":
        linen = pytest.importorskip("flax.linen")

        class Linen(linen.Module):  # type: ignore[misc, name-defined]
            @linen.compact  # type: ignore[untyped-decorator]
            def __call__(self, x: Any, deterministic: bool) -> Any:
                x = linen.BatchNorm(use_running_average=deterministic, momentum=0.8)(
                    linen.Dense(16)(x)
                )
                x = linen.Dropout(0.1, deterministic=deterministic)(linen.relu(x))
                return linen.Dense(3)(x)

        return ciclo.create_flax_state(Linen(), jnp.zeros((1, 8)), tx, **options)
    if kind == "nnx":
        return ciclo.create_nnx_state(nnx_model(), tx, **options)
    if kind == "equinox":
        module, kept = equinox_model()
        return ciclo.create_equinox_state(module, tx, model_state=kept, **options)
    haiku = pytest.importorskip("haiku")

    def function(x: Any, is_training: bool) -> Any:
        x = haiku.BatchNorm(True, True, 0.8)(haiku.Linear(16)(x), is_training)
        if is_training:
            x = haiku.dropout(haiku.next_rng_key(), 0.1, x)
        return haiku.Linear(3)(jax.nn.relu(x))

    return ciclo.create_haiku_state(function, jnp.zeros((1, 8)), tx, **options)


def nnx_model() -> Any:
    nnx = pytest.importorskip("flax.nnx")

    class Nnx(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.hidden = nnx.Linear(8, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, momentum=0.8, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.out = nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))

    return Nnx(nnx.Rngs(0))


def equinox_model() -> Any:
    equinox = pytest.importorskip("equinox")

    class Equinox(equinox.Module):  # type: ignore[misc, name-defined]
        hidden: Any
        norm: Any
        dropout: Any
        out: Any

        def __init__(self, key: Any) -> None:
            first, second = jax.random.split(key)
            self.hidden = equinox.nn.Linear(8, 16, key=first)
            self.norm = equinox.nn.BatchNorm(16, "batch", momentum=0.8, mode="batch")
            self.dropout = equinox.nn.Dropout(0.1)
            self.out = equinox.nn.Linear(16, 3, key=second)

        def __call__(self, x: Any, state: Any, *, key: Any = None) -> Any:
            x, state = self.norm(self.hidden(x), state)
            return self.out(self.dropout(jax.nn.relu(x), key=key)), state

    return equinox.nn.make_with_state(Equinox)(jax.random.key(0))


@pytest.mark.parametrize("kind", KINDS)
def test_every_loop(kind: str) -> None:
    """`fit`, `train_loop`, `test_loop`, `predict_loop` and a loop by hand train and evaluate it."""
    state = new_state(kind, strategy="jit_donate")
    untrained = ciclo.test_loop(state, BATCHES).history.collect("loss")[0]
    state, history, _ = ciclo.fit(state, BATCHES, BATCHES, epochs=6)

    assert history.last("loss_valid") < untrained / 1.5
    assert history.last("accuracy_valid") > 0.6
    state = ciclo.train_loop(state, BATCHES, epoch_duration=3, test_dataset=BATCHES).state
    for elapsed, batch in ciclo.elapse(BATCHES, stop=2):
        logs, state = state.train_step(batch)
        assert np.isfinite(float(logs.loss)), elapsed
    outputs = ciclo.predict_loop(state, list(X)).history.collect("preds")
    assert [(16, 3)] * 6 == [one.shape for one in outputs]
    np.testing.assert_allclose(outputs[0], state(X[0]), atol=1e-6)
    result = ciclo.loop(
        state, BATCHES, {ciclo.every(1): lambda state, batch: state.test_step(batch)}
    )
    assert 6 == len(result.history.collect("accuracy"))


@pytest.mark.parametrize("kind", KINDS)
def test_resume(kind: str, tmp_path: Path) -> None:
    """A run that goes on from a checkpoint ends with the same bits as one that was not cut."""
    whole = ciclo.fit(new_state(kind, strategy="jit_donate"), BATCHES, epochs=2).state

    def run(**options: Any) -> Any:
        save = ciclo.checkpoint(tmp_path / "run")
        options = {"callbacks": [save], "resume": tmp_path / "run", **options}
        return ciclo.fit(new_state(kind, strategy="jit_donate"), BATCHES, epochs=2, **options)

    run(steps=7)
    found = run()

    assert list(range(12)) == found.history.collect("steps")
    kept = [jax.tree.leaves((one.params, one.batch_stats)) for one in (whole, found.state)]
    for a, b in zip(*kept, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.array_equal(a, b)


def test_the_module_of_nnx_back() -> None:
    """The module that was given is left alone; the trained one puts out what the state does."""
    module = nnx_model()
    before = np.asarray(module.hidden.kernel[...])
    losses = optax.softmax_cross_entropy_with_integer_labels
    state = ciclo.create_nnx_state(module, optax.sgd(0.5), losses=losses, strategy="jit_donate")
    state = ciclo.fit(state, BATCHES, epochs=2).state
    back = ciclo.nnx_module(state)
    back.eval()

    assert np.array_equal(before, module.hidden.kernel[...])
    np.testing.assert_allclose(state(X[0]), back(X[0]), atol=1e-6)


def test_the_module_of_equinox_back() -> None:
    """The same for Equinox, whose modules never change."""
    equinox = pytest.importorskip("equinox")
    module = equinox.nn.MLP(8, 3, 16, 1, key=jax.random.key(0))
    losses = optax.softmax_cross_entropy_with_integer_labels
    state = ciclo.create_equinox_state(module, optax.sgd(0.5), losses=losses, strategy="jit_donate")
    state = ciclo.fit(state, BATCHES, epochs=2).state
    back = ciclo.equinox_module(state)

    assert not module.layers[0].weight.is_deleted()
    assert not np.array_equal(module.layers[0].weight, back.layers[0].weight)
    np.testing.assert_allclose(state(X[0]), jax.vmap(back)(X[0]), atol=1e-6)


def test_transformed_functions_of_haiku() -> None:
    """What `hk.transform` and `hk.transform_with_state` made is taken as it is."""
    haiku = pytest.importorskip("haiku")

    def function(x: Any) -> Any:
        return haiku.nets.MLP([16, 3])(x)

    losses = {"loss": optax.softmax_cross_entropy_with_integer_labels}
    for made in (haiku.transform(function), haiku.transform_with_state(function), function):
        state = ciclo.create_haiku_state(made, jnp.zeros((1, 8)), optax.sgd(0.1), losses=losses)
        _, state = state.train_step(BATCHES[0])
        assert 1 == int(state.step)


@pytest.mark.parametrize("strategy", ["jit", "jit_donate"])
def test_metrics_of_clu_and_nnx(strategy: str) -> None:
    """Both grow over an epoch, agree, and begin anew with the next."""
    clu = pytest.importorskip("clu.metrics")
    nnx = pytest.importorskip("flax.nnx")
    collection = clu.Collection.create(
        clu_accuracy=clu.Accuracy, clu_loss=clu.Average.from_output("loss")
    )
    metrics = {
        "rows": accuracy,
        "nnx_accuracy": nnx.metrics.Accuracy(),
        "several": nnx.MultiMetric(nnx_loss=nnx.metrics.Average("loss")),
        "clu": collection,
    }
    state = new_state("flax", metrics=metrics, strategy=strategy)
    _, history, _ = ciclo.fit(state, BATCHES, BATCHES[:2], epochs=2)
    rows = history.collect("rows")
    expected = [
        np.mean(rows[start : end + 1]) for start in (0, 6) for end in range(start, start + 6)
    ]

    np.testing.assert_allclose(expected, history.collect("nnx_accuracy"), rtol=1e-5)
    np.testing.assert_allclose(expected, history.collect("clu_accuracy"), rtol=1e-5)
    np.testing.assert_allclose(history.collect("nnx_loss"), history.collect("clu_loss"), rtol=1e-5)
    assert 2 == len(history.collect("nnx_accuracy_valid"))


def test_batches_in_other_forms() -> None:
    """Dicts, several inputs, and an `unpack` of one's own; several losses are summed."""
    linen = pytest.importorskip("flax.linen")

    class Two(linen.Module):  # type: ignore[misc, name-defined]
        @linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, a: Any, b: Any) -> Any:
            return linen.Dense(3)(a + b)

    x, y = BATCHES[0]
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    losses = {"entropy": cross_entropy, "size": lambda outputs, _: 0.1 * (outputs**2).mean()}
    inputs = (jnp.zeros((1, 8)), jnp.zeros((1, 8)))
    state = ciclo.create_flax_state(Two(), inputs, optax.sgd(0.1), losses=losses)
    found = [
        state.train_step(batch)[0].value("metrics.loss")
        for batch in (((x, x), y), ({"a": x, "b": x}, y), {"a": x, "b": x, "label": y})
    ]
    single = ciclo.create_flax_state(
        linen.Dense(3), jnp.zeros((1, 8)), losses=cross_entropy, unpack=lambda batch: (batch[1], y)
    )

    assert found[0] == found[1] == found[2]
    assert np.isfinite(float(single.test_step([y, x])[0].loss))
    logs, _ = state.train_step(((x, x), y))
    np.testing.assert_allclose(logs.loss, logs.entropy + logs.size, rtol=1e-6)


def test_evaluation_with_the_average() -> None:
    """With `ema_decay`, `test_step` evaluates the average of the parameters."""
    state = new_state("nnx", ema_decay=0.9, policy="bfloat16")
    for batch in BATCHES:
        _, state = state.train_step(batch)
    plain = state.replace(params=state.ema_params, ema_state=None, ema_decay=None)

    assert float(state.test_step(BATCHES[0])[0].loss) == float(plain.test_step(BATCHES[0])[0].loss)
    same = state.replace(ema_state=None, ema_decay=None)
    assert float(state.test_step(BATCHES[0])[0].loss) != float(same.test_step(BATCHES[0])[0].loss)


def test_what_is_no_model() -> None:
    """Losses and modules of the wrong kind say what to give."""
    with pytest.raises(ciclo.CicloError, match="or a function that returns one"):
        ciclo.create_nnx_state(3)
    with pytest.raises(ciclo.CicloError, match=r"losses\['loss'\] is 3; use a function"):
        new_state("nnx", losses=3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_without_losses(kind: str) -> None:
    """It says where to give them, since the step that would log them is not the user's."""
    state = new_state(kind, losses=None)

    with pytest.raises(ciclo.CicloError, match=r"no losses to train on.*losses=lambda") as caught:
        ciclo.fit(state, BATCHES, epochs=1)
    assert "add_loss" not in str(caught.value)
    assert ["metrics.accuracy"] == state.test_step(BATCHES[0])[0].names()
