"""`create_torch_state`: a module and its optimizer as a state.

Arguments are checked here, before torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ciclo.errors import check, need
from ciclo.judging import check_training, named

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
    """Creates a state with `train_step`, `test_step`, `predict_step` and `reset_step`.

    optimizer: a torch optimizer, or a function of the parameters that returns one
    losses: a function or module `loss(outputs, targets)`, or a dict of them, which is summed
    metrics: functions like losses, or objects with `update`, `compute` and `reset`
    strategy: "eager", "compile", or under torchrun "ddp" or "fsdp"
    device: the device of the module; by default it stays where it is. "cuda" under torchrun is the
        GPU of the process
    unpack: a function of a batch that returns inputs and targets. By default the last item of a
        tuple, or `y`, `target(s)` or `label(s)` of a dict, is the target
    accumulate: number of train steps per update, weighted by samples
    policy: "bfloat16" or "float16" for mixed precision (autocast)
    clip_norm: maximum gradient norm
    ema_decay: `test_step` and `predict_step` use a moving average of the parameters
    scheduler: a learning rate scheduler, stepped with the optimizer; or a function of the optimizer
        that returns one
    sync_batch_norm: whether batch norm uses the samples of all processes

    >>> state = ciclo.create_torch_state(
    ...     module, torch.optim.SGD(module.parameters(), 0.1), losses=torch.nn.CrossEntropyLoss()
    ... )
    >>> ciclo.fit(state, loader, epochs=3)
    """
    need("torch", "ciclo.create_torch_state()")
    from ciclo.torch import state, strategies

    allowed = ", ".join(f'"{one}"' for one in POLICIES) + " or None"
    check("policy", policy, lambda one: one is None or one in POLICIES, allowed)
    check_training(accumulate, clip_norm, ema_decay, unpack)
    named_losses = named("losses", losses, "loss")
    named_metrics = named("metrics", metrics, None)
    for name, one in [*named_losses.items(), *named_metrics.items()]:
        if isinstance(one, type):
            raise TypeError(
                f"{name!r} is a class; use a function of outputs and targets, or an instance"
            )
        if name == "<lambda>":
            raise ValueError('a lambda has no name; use metrics={"name": lambda ...}')
    if "loss" in named_losses and len(named_losses) > 1:
        raise ValueError('losses: "loss" is the name of their sum; use another name')
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
