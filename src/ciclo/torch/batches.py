"""Inputs and outputs of a torch module, in any containers."""

from __future__ import annotations

from typing import Any

import torch

from ciclo._trees import mapped
from ciclo.judging import split


def unpacked(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets: the last item of a tuple, or found by name in a dict."""
    if hasattr(batch, "items"):
        inputs, targets = split(batch)
        return tuple(inputs.values()) if len(inputs) == 1 else inputs, targets
    if isinstance(batch, (tuple, list)):
        return (tuple(batch[:-1]), batch[-1]) if len(batch) > 1 else (tuple(batch), None)
    return batch, None


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on the device; copies from pinned memory are asynchronous."""
    is_behind = device.type != "cpu"

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=is_behind)
        if hasattr(value, "__array_interface__"):
            return torch.as_tensor(value).to(device, non_blocking=is_behind)
        if hasattr(value, "to"):
            return value.to(device)
        is_mapping = hasattr(value, "items")
        return {key: mapped(moved, one) for key, one in value.items()} if is_mapping else value

    return mapped(moved, batch)


def detached(outputs: Any) -> Any:
    return mapped(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, outputs)


def is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.dim()
    return isinstance(value, (int, float))
