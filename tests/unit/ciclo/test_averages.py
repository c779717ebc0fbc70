"""The moving average is the same in the callback and in states of every framework."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import ciclo
from ciclo.managed import ManagedState, train_step

GRADIENTS = (1.0, -2.0, 4.0, 0.5)


@train_step
def follow(state: ManagedState, batch: Any) -> Any:
    return {"losses": {"loss": (state.params["w"] * batch).sum()}}, state


def jax_average(decay: float, start: Any, dtype: str) -> Any:
    state = ManagedState.create(
        params={"w": jnp.asarray(start, dtype)}, tx=optax.sgd(1.0), ema_decay=decay
    )
    for gradient in GRADIENTS:
        _, state = follow(state, jnp.asarray(gradient, dtype))
    return state.ema_params["w"]


def torch_average(decay: float, start: Any, dtype: str) -> Any:
    module = torch.nn.Linear(1, 1, bias=False).to(getattr(torch, dtype))
    torch.nn.init.constant_(module.weight, start)
    state = ciclo.create_torch_state(
        module,
        torch.optim.SGD(module.parameters(), 1.0),
        losses=lambda outputs, targets: outputs.sum(),
        ema_decay=decay,
    )
    for gradient in GRADIENTS:
        state.train_step((torch.full((1, 1), gradient, dtype=getattr(torch, dtype)), None))
    return state.ema_params["weight"]


def callback_average(decay: float, start: Any, dtype: str) -> Any:
    average = ciclo.ema(decay)
    step = lambda state, batch: state - jnp.asarray(batch, dtype)  # noqa: E731
    ciclo.loop(jnp.asarray(start, dtype), GRADIENTS, {ciclo.every(1): [step, average]})
    return average.value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("averaged", [callback_average, jax_average, torch_average])
def test_one_rule(averaged: Any, decay: float, dtype: str) -> None:
    """Each value counts `decay` times as much as the next, and what was before counts nothing."""
    seen = 8.0 - np.cumsum(GRADIENTS)
    expected = np.average(seen, weights=decay ** np.arange(len(seen))[::-1])

    found = averaged(decay, 8.0, dtype)

    assert float(found) == pytest.approx(expected, rel=1e-5 if dtype == "float32" else 4e-3)


def test_parameters_of_16_bits_are_followed() -> None:
    """The average of values that stay is that value, however many there were."""
    average = ciclo.ema(0.999)
    step = lambda state, batch: jnp.where(batch == 0, state, jnp.ones_like(state))  # noqa: E731
    start = jnp.zeros((), jnp.bfloat16)
    ciclo.loop(start, range(2000), {ciclo.every(1): [step, average]})

    assert float(average.value) == pytest.approx(1, abs=1e-3)


def test_an_average_of_an_older_version_goes_on() -> None:
    """One that was saved without a count is taken for what it is: it needs no correction."""
    average = ciclo.ema(0.5)
    average.load_state_dict({"value": 2.0, "is_first": False})
    ciclo.loop(4.0, [1], {ciclo.every(1): average})
    module = torch.nn.Linear(1, 1, bias=False)
    state = ciclo.create_torch_state(module, ema_decay=0.5)
    saved = state.state_dict()
    del saved["averaged"]
    state.load_state_dict({**saved, "average": [torch.full((1, 1), 7.0)]})

    assert 3.0 == average.value
    assert 7.0 == float(state.ema_params["weight"])


def test_a_checkpoint_of_an_older_version_with_16_bits_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Older versions saved averages in the type of the parameters: they are widened when read."""
    params = {"w": jnp.asarray([2.0], "bfloat16")}
    made = ManagedState.create(params=params, tx=optax.sgd(1.0), ema_decay=0.5)
    older = optax.EmaState(jnp.asarray(1, "int32"), {"w": jnp.asarray([3.5], "bfloat16")})
    save = ciclo.checkpoint("of-jax")
    save(ciclo.Elapsed(), made.replace(ema_state=older))
    restored = save.restore(made)

    assert jnp.float32 == restored.ema_state.ema["w"].dtype
    assert 7.0 == float(restored.ema_params["w"][0])
    assert 2.0 == float(follow(restored, jnp.zeros((), "bfloat16"))[1].params["w"][0])

    def of_older(self: Any) -> Any:
        saved = kept(self)
        del saved["averaged"]
        return {**saved, "average": [torch.full((1, 1), 7.0, dtype=torch.bfloat16)]}

    module = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    state = ciclo.create_torch_state(module, ema_decay=0.5)
    kept = type(state).state_dict
    save = ciclo.checkpoint("of-torch")
    with monkeypatch.context() as patched:
        patched.setattr(type(state), "state_dict", of_older)
        save(ciclo.Elapsed(), state)
    save.restore(state)

    assert 7.0 == float(state.ema_params["weight"])
    save(ciclo.Elapsed(steps=2), torch.ones(1))
    with pytest.raises(ciclo.CheckpointError, match=r"has float32\[1\], this run has bfloat16"):
        save.restore(torch.ones(1, dtype=torch.bfloat16))


class Parameters(NamedTuple):
    w: Any


def test_an_average_of_16_bits_in_a_type_of_your_own_goes_on() -> None:
    """It is kept in 32 bits, comes back so, and is there at once in a run that has ended."""

    def run(stop: int, place: str) -> float:
        average = ciclo.ema(0.9)
        step = lambda state: Parameters(state.w + 1)  # noqa: E731
        tasks = {ciclo.every(1): [step, average], ciclo.every(2): ciclo.checkpoint(place)}
        ciclo.loop(Parameters(jnp.ones(1, "bfloat16")), range(8), tasks, stop, resume=place)
        return float(average.value.w[0])

    whole = run(8, "whole")
    run(4, "cut")

    assert whole == run(8, "cut")
    assert whole == run(8, "cut")
