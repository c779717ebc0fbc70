"""Losses and metrics of a torch state, including stateful metrics."""

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

OFFERED = ("outputs", "targets", "batch", "module")  # values that a loss or a metric may name


def asked(name: str, function: Any) -> Asked:
    """A loss or a metric, called with the values that its parameters name."""
    return Asked(name, function, OFFERED, OFFERED[:2])


def is_stateful(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


class Crossing(TorchFunctionMode):
    """Warns about a loss that broadcasts outputs [n,1] and targets [n] to [n,n].

    It observes the torch functions that the loss calls; torch's own losses warn themselves.
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
    """A stateful metric, such as one of torchmetrics."""

    def __init__(self, name: str, metric: Any, device: torch.device, is_distributed: bool) -> None:
        self.name = name
        self.metric = metric.to(device) if hasattr(metric, "to") else metric
        self.update = asked(name, metric.update)
        self.is_distributed = is_distributed
        # Metrics of torchmetrics synchronise processes themselves; a collection has several.
        parts = list(metric.values()) if isinstance(metric, nn.ModuleDict) else [metric]
        self._synced: list[Any] = [one for one in parts if hasattr(one, "sync_context")]
        if hasattr(metric, "persistent"):
            metric.persistent(True)  # else its counts are not in its state dict
        if is_distributed and not self._synced and not hasattr(metric, "merge_state"):
            raise TypeError(
                f"the metric {name!r} ({type(metric).__name__}) counts in each process separately;"
                " use one of torchmetrics, or define merge_state(metrics)"
            )

    def compute(self) -> Any:
        """The current value, over all processes."""
        return self._merged().compute()

    def _merged(self) -> Any:
        if not self.is_distributed or self._synced:
            return self.metric
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.metric)
        gathered[0].merge_state(gathered[1:])
        return gathered[0]

    def state_dict(self) -> Any:
        """The counts of all processes together; rank 0 restores all of them."""
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
