"""Metrics of a torch state that go on from batch to batch, and what all of them may ask for."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from ciclo.errors import warn
from ciclo.judging import Asked, crossed, crossed_shape

if TYPE_CHECKING:
    import torch

OFFERED = ("outputs", "targets", "batch", "module")  # what a loss or a metric may ask for by name


def asked(name: str, function: Any) -> Asked:
    """A loss or a metric, called with what it asks for."""
    return Asked(name, function, OFFERED, OFFERED[:2])


def is_stateful(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


class Crossing(TorchFunctionMode):
    """Warns of a loss that makes [n,n] of outputs [n,1] and targets [n] while it runs.

    It sees what the loss itself calls; losses of torch warn by themselves.
    """

    def __init__(self, name: str, outputs: Any, targets: Any) -> None:
        super().__init__()
        self._warning = crossed(name, outputs, targets)
        self._shape = crossed_shape(outputs, targets)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple) else (result,)
        if self._shape is not None and any(getattr(x, "shape", 0) == self._shape for x in made):
            self._shape = None
            warn(self._warning)
        return result


class Running:
    """A metric that goes on from batch to batch, such as one of torchmetrics."""

    def __init__(self, name: str, metric: Any, device: torch.device, is_distributed: bool) -> None:
        self.name = name
        self.metric = metric.to(device) if hasattr(metric, "to") else metric
        self.update = asked(name, metric.update)
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
