"""How a module of torch runs: as it is, compiled, or in several processes that torchrun started.

torch does all of it (`torch.compile`, `DistributedDataParallel`, `fully_shard`); here is what they
need around them, so that each trains to the same parameters as one process with the whole batch.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ciclo.errors import CicloError, warn

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells a process


class Placed:
    """A module where it trains: in this process, as it is."""

    name = "eager"
    is_distributed = False

    def __init__(self, module: nn.Module, device: torch.device, before: dict[int, str]) -> None:
        self.module = module
        self.device = device
        self.before = before  # the names of the parameters that the optimizer was made with
        self.processes = dist.get_world_size() if self.is_distributed else 1
        self.train = self.evaluate = self._wrap()

    def _wrap(self) -> Callable[..., Any]:
        return self.module

    def exchange(self, is_wanted: bool) -> AbstractContextManager[None]:
        """Around a forward and a backward pass: whether processes exchange gradients then."""
        return nullcontext()

    def share(self, samples: int) -> Callable[[], torch.Tensor] | None:
        """What this process's loss weighs in the mean that processes make of their gradients.

        It is asked for before the forward pass and called after it: the exchange goes on meanwhile.
        Where all have as many samples it is exactly 1, but none can know that of the others.
        """
        if self.processes == 1:
            return None
        total = torch.full((), samples, dtype=torch.float64, device=self.device)
        summed: Any = dist.all_reduce(total, async_op=True)

        def weight() -> torch.Tensor:
            summed.wait()  # on a GPU its stream waits, not the host
            return samples * self.processes / total

        return weight

    def summed(self, samples: list[int]) -> list[int]:
        """The samples of some steps in all processes; its own, if not all took these steps."""
        if self.processes == 1:
            return samples
        all_samples: list[Any] = [None] * self.processes
        dist.all_gather_object(all_samples, samples)
        is_alike = all(len(one) == len(samples) for one in all_samples)
        return [sum(each) for each in zip(*all_samples, strict=True)] if is_alike else samples

    def exchanged(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients that processes have not yet exchanged, as if they had."""
        return gradients

    def evaluated(self) -> None:
        """Called after a forward pass that no backward pass follows."""

    def optimizer(self, given: Any) -> Optimizer | None:
        """The user's optimizer with the parameters that the module has now."""
        if given is None:
            return None
        made: Any = given
        if not isinstance(given, torch.optim.Optimizer) and callable(given):
            made = given([one for one in self.module.parameters() if one.requires_grad])
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is {made!r}; use an optimizer of torch or a function that makes one,"
                " such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
            )
        optimizer: Optimizer = made
        if made is given:
            self._rebind(optimizer)
        return optimizer

    def _rebind(self, optimizer: Optimizer) -> None:
        held = [one for group in optimizer.param_groups for one in group["params"]]
        now = dict(self.module.named_parameters(remove_duplicate=False))
        if not any(id(one) in self.before for one in held):
            raise ValueError(
                "the optimizer has none of the module's parameters; make it of this module:"
                " torch.optim.SGD(module.parameters(), lr=0.1)"
            )
        moved = [one for one in held if now.get(self.before.get(id(one), "")) is not one]
        if any(id(one) in self.before for one in moved) and optimizer.state:
            raise ValueError(
                f'strategy="{self.name}" replaces the parameters, and this optimizer has already'
                " stepped with the old ones; give a new one, and its state by load_state_dict"
            )
        for group in optimizer.param_groups:
            group["params"] = [now.get(self.before.get(id(p), ""), p) for p in group["params"]]


class Compiled(Placed):
    """The same, compiled by `torch.compile`."""

    name = "compile"

    def _wrap(self) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(self.module)
        return compiled


class DataParallel(Placed):
    """A copy in each process, which average their gradients (`DistributedDataParallel`)."""

    name = "ddp"
    is_distributed = True

    def __init__(self, module: nn.Module, device: torch.device, before: dict[int, str]) -> None:
        super().__init__(module, device, before)
        self.evaluate = module  # all copies are the same: there is nothing to exchange

    def _wrap(self) -> Callable[..., Any]:
        ids = [self.device.index] if self.device.type == "cuda" else None
        self._parallel = DistributedDataParallel(self.module, device_ids=ids)
        return self._parallel

    def exchange(self, is_wanted: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_wanted else self._parallel.no_sync()

    def exchanged(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        means = [one / self.processes for one in gradients]
        for one in means:
            dist.all_reduce(one)
        return means


class Sharded(Placed):
    """A part of each parameter in each process (`fully_shard`).

    Gradients are exchanged after each backward pass, else each process would keep them whole.
    """

    name = "fsdp"
    is_distributed = True

    def _wrap(self) -> Callable[..., Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not any(isinstance(one, FSDPModule) for one in self.module.modules()):
            for value in (*self.module.parameters(), *self.module.buffers()):
                dist.broadcast(value.detach(), src=0)  # else each keeps a part of its own start
        if not isinstance(self.module, FSDPModule):
            mesh = init_device_mesh(self.device.type, (self.processes,))
            for block in self._blocks():
                fully_shard(block, mesh=mesh)
            fully_shard(self.module, mesh=mesh)
        return self.module

    def _blocks(self) -> list[nn.Module]:
        """The layers in lists of a module, inner ones first: what is gathered at a time."""
        from torch.distributed.fsdp import FSDPModule

        containers = (nn.ModuleList, nn.ModuleDict)
        return [
            layer
            for one in reversed(list(self.module.modules()))
            if isinstance(one, nn.ModuleList)
            for layer in one
            if not isinstance(layer, (FSDPModule, *containers))
            and next(layer.parameters(), None) is not None
        ]

    def evaluated(self) -> None:
        root: Any = self.module
        root.reshard()  # the outermost waits for a backward pass to do it


STRATEGIES: dict[str, type[Placed]] = {
    one.name: one for one in (Placed, Compiled, DataParallel, Sharded)
}


def place(module: Any, strategy: str, device: Any, sync_batch_norm: bool) -> Placed:
    """Puts a module where a strategy trains it, or says why it cannot."""
    kind = STRATEGIES.get(strategy)
    if kind is None:
        allowed = ", ".join(f'"{name}"' for name in STRATEGIES)
        raise ValueError(f"strategy={strategy!r} is not valid; use one of {allowed}")
    if isinstance(module, DistributedDataParallel):
        raise TypeError('module is in DistributedDataParallel; give the module, and strategy="ddp"')
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module is {module!r}; create_torch_state needs a torch.nn.Module. There are"
            " create_flax_state, create_nnx_state, create_equinox_state and create_haiku_state"
        )
    if kind.is_distributed and not dist.is_initialized():
        missing = [name for name in LAUNCHED if name not in os.environ]
        if missing:
            script = os.path.basename(sys.argv[0]) or "train.py"
            raise CicloError(
                f'strategy="{strategy}" needs a process for each device, which torchrun starts:\n'
                f"    torchrun --nproc-per-node=2 {script}\n"
                f'With one process use strategy="eager" or "compile". ({", ".join(missing)} are'
                " not set)"
            )
    target = _device(module, device, kind.is_distributed)
    before = {id(value): name for name, value in module.named_parameters()}
    module = module.to(target) if device is not None else module
    if kind.is_distributed:
        _connect(target)
        module = _with_synced_batch_norm(module, target) if sync_batch_norm else module
    return kind(module, target, before)


def _device(module: nn.Module, asked: Any, is_distributed: bool) -> torch.device:
    """Where the module is to be; for "cuda" in one of several processes, the GPU of this one."""
    if asked is None:
        return next((one.device for one in module.parameters()), torch.device("cpu"))
    target = torch.device(asked)
    if target.type != "cuda":
        return target
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise CicloError(
            f'device="{asked}" is asked for, and torch {torch.__version__} sees no GPU; use'
            ' device="cpu", or a torch that is built for CUDA on a machine that has it'
        )
    own = int(os.environ.get("LOCAL_RANK", 0)) if is_distributed else 0
    index = own if ":" not in str(target) else target.index
    if index >= count:
        raise CicloError(
            f'device="{asked}" would be GPU {index} for this process, and there are {count} GPUs;'
            f" start as many processes: torchrun --nproc-per-node={count}"
        )
    return torch.device("cuda", index)


def _connect(device: torch.device) -> None:
    """Has the processes that torchrun started find each other, unless they have."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_disconnect)


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def mean_over_processes(values: list[Any], samples: int, device: torch.device) -> list[Any]:
    """Means over the samples of all processes, in one exchange that no device is waited for."""
    packed = torch.stack(
        [
            one.detach().to(device, torch.float32)
            if isinstance(one, torch.Tensor)
            else torch.full((), float(one), device=device)
            for one in values
        ]
        + [torch.ones((), device=device)]
    ).mul_(samples)
    dist.all_reduce(packed)
    return list((packed[:-1] / packed[-1]).unbind())


def _with_synced_batch_norm(module: nn.Module, device: torch.device) -> nn.Module:
    """Batch norm that counts the samples of all processes, which torch has for GPUs."""
    if not any(type(one) in BATCH_NORMS for one in module.modules()):
        return module
    if device.type == "cpu":
        warn(
            "torch.nn.SyncBatchNorm does not work on the CPU, so batch norm counts the samples of"
            " each process by itself; sync_batch_norm=False says that this is meant"
        )
        return module
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return converted
