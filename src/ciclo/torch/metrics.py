"""Losses and metrics of a torch state: what each asks for, and those that go on over batches."""

from __future__ import annotations

import copy
import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from ciclo.binding import name_of
from ciclo.errors import CallbackError

if TYPE_CHECKING:
    import torch

OFFERED = ("outputs", "targets", "batch", "module")  # what a loss or a metric may ask for by name


class Asked:
    """A loss or a metric, called with what it asks for: outputs and targets, or by name."""

    def __init__(self, name: str, function: Any) -> None:
        self.name = name
        self.function = function
        self._by_position, self._by_keyword = _arguments(name, function)

    def __call__(self, found: tuple[Any, ...]) -> Any:
        return self.function(
            *[found[i] for i in self._by_position],
            **{name: found[i] for name, i in self._by_keyword.items()},
        )


def _arguments(name: str, function: Any) -> tuple[list[int], dict[str, int]]:
    """Which of what is offered goes where."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):  # of some functions that are written in C
        return [0, 1], {}
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return [0, 1], {}
    named = {one.name for one in parameters}
    free = [OFFERED.index(one) for one in OFFERED[:2] if one not in named]
    by_position: list[int] = []
    by_keyword: dict[str, int] = {}
    is_skipping = False  # after an argument that keeps its default, the rest go by keyword
    for one in parameters:
        if one.kind is one.VAR_KEYWORD:
            continue
        is_offered = one.name in OFFERED
        if not is_offered and one.default is not one.empty:
            is_skipping = True
        elif not is_offered and (not free or one.kind is one.KEYWORD_ONLY):
            raise CallbackError(
                f"{name}{inspect.signature(called)} cannot be called: {one.name!r} has no value. A"
                " loss or a metric is a function of outputs and targets, and may ask for batch and"
                f" module by name: lambda outputs, targets: {name_of(function)}(outputs, targets,"
                f" {one.name}=...)"
            )
        else:
            source = OFFERED.index(one.name) if is_offered else free.pop(0)
            if is_skipping or one.kind is one.KEYWORD_ONLY:
                by_keyword[one.name] = source
            else:
                by_position.append(source)
    return by_position, by_keyword


def is_stateful(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


class Running:
    """A metric that goes on from batch to batch, such as one of torchmetrics."""

    def __init__(self, name: str, metric: Any, device: torch.device, is_distributed: bool) -> None:
        self.name = name
        self.metric = metric.to(device) if hasattr(metric, "to") else metric
        self.update = Asked(name, metric.update)
        self.is_distributed = is_distributed
        # Those of torchmetrics talk to the other processes by themselves; a collection has several.
        parts = list(metric.values()) if isinstance(metric, nn.ModuleDict) else [metric]
        self._synced: list[Any] = [one for one in parts if hasattr(one, "sync_context")]
        if hasattr(metric, "persistent"):
            metric.persistent(True)  # else what it has counted is not in its state dict
        if is_distributed and not self._synced and not hasattr(metric, "merge_state"):
            raise TypeError(
                f"the metric {name!r} ({type(metric).__name__}) counts in each process for itself;"
                " use one of torchmetrics, or give its class merge_state(metrics)"
            )

    def compute(self) -> Any:
        """Its value so far, of all processes."""
        return self._merged().compute()

    def _merged(self) -> Any:
        if not self.is_distributed or self._synced:
            return self.metric
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.metric)
        gathered[0].merge_state(gathered[1:])
        return gathered[0]

    def state_dict(self) -> Any:
        """What all processes have counted together; one of them gets all of it back."""
        with ExitStack() as stack:
            for one in self._synced if self.is_distributed else ():
                if one.update_called:
                    stack.enter_context(one.sync_context())
            return _held(self._merged())

    def load_state_dict(self, saved: Any) -> None:
        self.metric.reset()
        if self.is_distributed and dist.get_rank() > 0:
            return
        if hasattr(self.metric, "load_state_dict"):
            self.metric.load_state_dict(saved)
        else:
            vars(self.metric).update(copy.deepcopy(saved))


def _held(metric: Any) -> Any:
    return metric.state_dict() if hasattr(metric, "load_state_dict") else dict(vars(metric))
