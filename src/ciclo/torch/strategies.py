"""How a torch module runs: eager, compiled, or in several processes started by torchrun.

They use `torch.compile`, `DistributedDataParallel` and `fully_shard`, with weights such that each
gives the same parameters as one process with the whole batch.
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

from ciclo.errors import CicloError, check, warn

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # environment variables of torchrun


class Placed:
    """A module on its device, eager, in one process."""

    name = "eager"
    is_distributed = False

    def __init__(self, module: nn.Module, device: torch.device, before: dict[int, str]) -> None:
        self.module = module
        self.device = device
        self.before = before  # names of the original parameters, by id
        self.processes = dist.get_world_size() if self.is_distributed else 1
        self.train = self.evaluate = self._wrap()

    def _wrap(self) -> Callable[..., Any]:
        return self.module

    def exchange(self, is_wanted: bool) -> AbstractContextManager[None]:
        """A context for forward and backward: whether processes exchange gradients."""
        return nullcontext()

    def share(self, samples: int) -> Callable[[], torch.Tensor] | None:
        """The weight of this process's loss in the mean of gradients over processes.

        The returned function is called after the forward pass, while the exchange is running. The
        weight is exactly 1 if all processes have the same number of samples.
        """
        if self.processes == 1:
            return None
        total = torch.full((), samples, dtype=torch.float64, device=self.device)
        summed: Any = dist.all_reduce(total, async_op=True)

        def weight() -> torch.Tensor:
            summed.wait()  # on a GPU the stream waits, not the host
            return samples * self.processes / total

        return weight

    def summed(self, samples: list[int]) -> list[int]:
        """Samples per step, summed over processes; its own if the numbers of steps differ."""
        if self.processes == 1:
            return samples
        all_samples: list[Any] = [None] * self.processes
        dist.all_gather_object(all_samples, samples)
        is_alike = all(len(one) == len(samples) for one in all_samples)
        return [sum(each) for each in zip(*all_samples, strict=True)] if is_alike else samples

    def exchanged(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Averages gradients that were not exchanged yet."""
        return gradients

    def evaluated(self) -> None:
        """Called after a forward pass without a backward pass."""

    def optimizer(self, given: Any) -> Optimizer | None:
        """The user's optimizer with the current parameters of the module."""
        if given is None:
            return None
        made: Any = given
        if not isinstance(given, torch.optim.Optimizer) and callable(given):
            trained = [one for one in self.module.parameters() if one.requires_grad]
            made = called_with("optimizer", given, trained)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is {made!r}; use a torch optimizer, or a function that returns one,"
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
                "the optimizer has none of the module's parameters; create it from this module:"
                " torch.optim.SGD(module.parameters(), lr=0.1)"
            )
        moved = [one for one in held if now.get(self.before.get(id(one), "")) is not one]
        if any(id(one) in self.before for one in moved) and optimizer.state:
            raise ValueError(
                f'strategy="{self.name}" replaces the parameters, but this optimizer has already'
                " stepped with the old ones; give a new one, and load its state_dict"
            )
        for group in optimizer.param_groups:
            group["params"] = [now.get(self.before.get(id(p), ""), p) for p in group["params"]]


class Compiled(Placed):
    """A module compiled by `torch.compile`."""

    name = "compile"

    def _wrap(self) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(self.module)
        return compiled


class DataParallel(Placed):
    """A replica in each process, with averaged gradients (`DistributedDataParallel`)."""

    name = "ddp"
    is_distributed = True

    def __init__(self, module: nn.Module, device: torch.device, before: dict[int, str]) -> None:
        super().__init__(module, device, before)
        self.evaluate = module  # replicas are equal, so there is nothing to exchange

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
    """Sharded parameters (`fully_shard`).

    Gradients are exchanged in each backward pass; otherwise each process would hold all of them.
    """

    name = "fsdp"
    is_distributed = True

    def _wrap(self) -> Callable[..., Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not any(isinstance(one, FSDPModule) for one in self.module.modules()):
            for value in (*self.module.parameters(), *self.module.buffers()):
                dist.broadcast(value.detach(), src=0)  # else shards have different initial values
        if not isinstance(self.module, FSDPModule):
            mesh = init_device_mesh(self.device.type, (self.processes,))
            for block in self._blocks():
                fully_shard(block, mesh=mesh)
            fully_shard(self.module, mesh=mesh)
        return self.module

    def _blocks(self) -> list[nn.Module]:
        """The modules to shard separately: items of ModuleLists, inner ones first."""
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
        root.reshard()  # the root module does this only after a backward pass


def called_with(option: str, make: Callable[..., Any], given: Any) -> Any:
    """What a function of the user creates from the parameters or the optimizer."""
    try:
        return make(given)
    except TypeError as error:
        what = {"optimizer": "parameters", "scheduler": "optimizer"}[option]
        error.add_note(
            f"ciclo: {option}= is called with the {what} alone; with more arguments, write"
            f" {option}=lambda {what}: ...({what}, ...)"
        )
        raise


STRATEGIES: dict[str, type[Placed]] = {
    one.name: one for one in (Placed, Compiled, DataParallel, Sharded)
}


def place(module: Any, strategy: str, device: Any, sync_batch_norm: bool) -> Placed:
    """Places a module by a strategy, or raises with the reason why not."""
    allowed = ", ".join(f'"{name}"' for name in STRATEGIES)
    check("strategy", strategy, lambda one: one in STRATEGIES, f"one of {allowed}")
    kind = STRATEGIES[strategy]
    if isinstance(module, DistributedDataParallel):
        raise TypeError(
            'module is wrapped in DistributedDataParallel; give the module, and strategy="ddp"'
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module is {module!r}; create_torch_state needs a torch.nn.Module. For JAX use"
            " create_flax_state, create_nnx_state, create_equinox_state or create_haiku_state"
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
    """The device of the module; "cuda" with several processes is the GPU of this one."""
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
    """Initialises the process group, unless it is initialised."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_disconnect)


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def mean_over_processes(values: list[Any], samples: int, device: torch.device) -> list[Any]:
    """Means weighted by samples over all processes, in one asynchronous exchange."""
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
    """Converts to SyncBatchNorm, which torch supports only on GPUs."""
    if not any(type(one) in BATCH_NORMS for one in module.modules()):
        return module
    if device.type == "cpu":
        warn(
            "torch.nn.SyncBatchNorm does not work on the CPU, so batch norm uses the samples of"
            " each process separately; sync_batch_norm=False disables this warning"
        )
        return module
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return converted
