"""`create_torch_state`: a module and its optimizer as a state that every loop can train.

What is given is checked and put together here; nothing of torch is loaded before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ciclo.errors import need
from ciclo.judging import named

if TYPE_CHECKING:
    from collections.abc import Callable

    from ciclo.torch.state import TorchState

__all__ = ["create_torch_state"]

POLICIES = ("float32", "bfloat16", "float16")


def create_torch_state(
    module: Any,
    optimizer: Any = None,
    *,
    losses: Any = None,
    metrics: Any = None,
    strategy: str = "eager",
    device: Any = None,
    unpack: Callable[[Any], tuple[Any, Any]] | None = None,
    accumulate: int | None = None,
    policy: str | None = None,
    clip_norm: float | None = None,
    ema_decay: float | None = None,
    scheduler: Any = None,
    sync_batch_norm: bool = True,
) -> TorchState:
    """A state with `train_step`, `test_step`, `predict_step` and `reset_step`, for every loop.

    optimizer: one of torch's, or a function that makes it from the parameters
    losses: a function or module `loss(outputs, targets)`, or a dict of them, which are summed
    metrics: the same, or objects with `update`, `compute` and `reset`, as those of torchmetrics
    strategy: "eager", "compile", or under torchrun "ddp" or "fsdp"
    device: where to put the module; without it, where it is. "cuda" under torchrun is the GPU of
        the process
    unpack: a function of a batch that returns inputs and targets; without it, the last item of a
        tuple, or `y`, `target(s)` or `label(s)` of a dict, is the targets
    accumulate: how many train steps make one update, each counted by its samples
    policy: "bfloat16" or "float16" to compute in that (autocast)
    clip_norm: the longest that a gradient may be
    ema_decay: has `test_step` and `predict_step` use a moving average of the parameters
    scheduler: of the learning rate, stepped with the optimizer; or a function that makes it from
        the optimizer
    sync_batch_norm: whether batch norm counts the samples of all processes

    >>> state = ciclo.create_torch_state(
    ...     module, torch.optim.SGD(module.parameters(), 0.1), losses=torch.nn.CrossEntropyLoss()
    ... )
    >>> ciclo.fit(state, loader, epochs=3)
    """
    need("torch", "ciclo.create_torch_state()")
    from ciclo.torch import state, strategies

    if policy is not None and policy not in POLICIES:
        allowed = ", ".join(f'"{one}"' for one in POLICIES)
        raise ValueError(f"policy={policy!r} is not valid; use {allowed} or None")
    if accumulate is not None and accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r} is not valid; use 1 or more, or None")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm!r} is not valid; use more than 0, or None")
    if ema_decay is not None and not 0 <= ema_decay < 1:
        raise ValueError(
            f"ema_decay={ema_decay!r} is not valid; use a decay such as 0.999, or None"
        )
    named_losses = named("losses", losses, "loss")
    named_metrics = named("metrics", metrics, None)
    for name, one in [*named_losses.items(), *named_metrics.items()]:
        if isinstance(one, type):
            raise TypeError(
                f"{name!r} is a class; use a function of outputs and targets, or an object of it"
            )
        if name == "<lambda>":
            raise ValueError('a lambda has no name; say metrics={"name": lambda ...}')
    if "loss" in named_losses and len(named_losses) > 1:
        raise ValueError('losses: "loss" is what their sum is called; give that one another name')
    placed = strategies.place(module, strategy, device, sync_batch_norm)
    return state.TorchState(
        placed,
        optimizer=placed.optimizer(optimizer),
        losses=named_losses,
        metrics=named_metrics,
        unpack=unpack,
        accumulate=accumulate,
        policy=policy,
        clip_norm=clip_norm,
        ema_decay=ema_decay,
        scheduler=scheduler,
    )
