"""`TorchState`: a module, its optimizer, and their steps.

A step leaves its values on their device: nothing here waits for it. With several processes, logs
are means over all of them, so that all make the same decisions.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ciclo import averages
from ciclo.averages import EmaState
from ciclo.device_values import describe
from ciclo.elapsed import samples_in
from ciclo.errors import CallbackError, CheckpointError, CicloError
from ciclo.judging import crossed_shape, named_outputs
from ciclo.logs import Logs
from ciclo.torch.batches import detached, is_number, to_device, unpacked
from ciclo.torch.metrics import Crossing, Running, asked, is_stateful
from ciclo.torch.strategies import called_with, mean_over_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    from ciclo.torch.strategies import Placed

CREATE = "ciclo.create_torch_state(module, optimizer, losses=...)"


class Window(NamedTuple):
    """The number of batches and samples whose gradients are accumulated."""

    batches: int = 0
    samples: float = 0


class TorchState:
    """A module, its optimizer and other training state, which steps change in place.

    Created by `create_torch_state`. `module`, `optimizer` and `scheduler` are the user's objects.
    """

    def __init__(
        self,
        placed: Placed,
        *,
        optimizer: Optimizer | None,
        losses: dict[str, Any],
        metrics: dict[str, Any],
        unpack: Callable[[Any], tuple[Any, Any]] | None,
        accumulate: int | None,
        policy: str | None,
        clip_norm: float | None,
        ema_decay: float | None,
        scheduler: Any,
    ) -> None:
        self.module = placed.module
        self.optimizer = optimizer
        self.scheduler = _scheduler(scheduler, optimizer)
        self.strategy = placed.name
        self.device = placed.device
        self._placed = placed
        self._unpack = unpacked if unpack is None else unpack
        self._accumulate = accumulate
        self._window = Window()
        self._dtype = None if policy in (None, "float32") else getattr(torch, str(policy))
        self._scaler = torch.amp.GradScaler(self.device.type) if policy == "float16" else None
        self._clip_norm = clip_norm
        self._looked_at: set[str] = set()  # losses that were checked once
        self._ema_decay = ema_decay
        self._average: EmaState | None = None
        if ema_decay is not None:
            self._average = EmaState(0, [_wide_zeros(one) for one in self.module.parameters()])
            self._move = get_ema_multi_avg_fn(ema_decay)
        self._loss_modules = {
            name: one.to(self.device) for name, one in losses.items() if isinstance(one, nn.Module)
        }
        self._losses = {name: asked(name, one) for name, one in losses.items()}
        stateful = {name: one for name, one in metrics.items() if is_stateful(one)}
        self._metrics = {
            name: asked(name, one) for name, one in metrics.items() if name not in stateful
        }
        # A separate copy for evaluations, which may run inside an epoch.
        self._train_metrics = self._running(stateful)
        self._test_metrics = self._running(copy.deepcopy(stateful))

    def _running(self, metrics: dict[str, Any]) -> dict[str, Running]:
        is_distributed = self._placed.is_distributed
        return {n: Running(n, one, self.device, is_distributed) for n, one in metrics.items()}

    def __repr__(self) -> str:
        return (
            f"<TorchState of {type(self.module).__name__} on {self.device},"
            f" strategy {self.strategy!r}>"
        )

    # -- steps ---------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> tuple[Logs, TorchState]:
        """Computes the losses of a batch, and runs one optimizer step."""
        if self.optimizer is None:
            raise CicloError(f"this state has no optimizer; create it with {CREATE}")
        if not self._losses:
            raise CicloError(
                f"this state has no loss to train on; create it with {CREATE}, such as"
                " losses=torch.nn.functional.cross_entropy"
            )
        batch = to_device(batch, self.device)
        samples = samples_in(batch)
        is_last = self._accumulate is None or self._window.batches + 1 >= self._accumulate
        if not self._window.batches:
            self.optimizer.zero_grad()
        # Accumulated gradients are divided by their samples at the end; a single step is weighted.
        share = self._placed.share(samples) if self._accumulate is None else None
        with self._mode(is_training=True), self._placed.exchange(is_last):
            logs, loss, found = self._computed(self._placed.train, batch)
            if not loss.requires_grad:
                raise CallbackError(
                    "the loss does not depend on the module's parameters; compute it from the"
                    " outputs with torch, without detach(), item() or no_grad()"
                )
            if self._accumulate is not None:
                loss = loss * samples  # divided by all samples at the end
            elif share is not None:
                loss = loss * share()
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        if self._accumulate is not None:
            self._window = Window(self._window.batches + 1, self._window.samples + samples)
        self._measure(logs, found, self._train_metrics)
        if is_last:
            self._step(self.optimizer, logs)
        return self._finished(logs, samples, self._train_metrics), self

    def flush_step(self) -> TorchState:
        """Applies accumulated gradients, at the end of an epoch."""
        if self.optimizer is not None and self._window.batches:
            gradients = self._gradients()
            for one, exchanged in zip(gradients, self._placed.exchanged(gradients), strict=True):
                one.copy_(exchanged)
            self._step(self.optimizer, Logs())
        return self

    def test_step(self, batch: Any) -> tuple[Logs, TorchState]:
        """Computes the losses and metrics of a batch, in evaluation mode."""
        if not (self._losses or self._metrics or self._test_metrics):
            raise CicloError(
                f"this state has no losses or metrics; create it with {CREATE}, or with metrics=..."
            )
        batch = to_device(batch, self.device)
        with torch.no_grad(), self._mode(is_training=False), self._with_average():
            logs, _, found = self._computed(self._placed.evaluate, batch)
            self._placed.evaluated()
        self._measure(logs, found, self._test_metrics)
        return self._finished(logs, samples_in(batch), self._test_metrics), self

    def predict_step(self, batch: Any) -> tuple[Logs, TorchState]:
        """Computes and logs the outputs for a batch."""
        batch = to_device(batch, self.device)
        inputs, _ = self._unpack(batch)
        with torch.no_grad(), self._mode(is_training=False), self._with_average():
            outputs = self._called(self._placed.evaluate, inputs)
            self._placed.evaluated()
        return Logs({"outputs": named_outputs(outputs, "outputs")}), self

    def reset_step(self) -> TorchState:
        """Resets stateful metrics, at the start of an epoch or an evaluation."""
        for running in (*self._train_metrics.values(), *self._test_metrics.values()):
            running.metric.reset()
        return self

    def __loop_samples__(self, samples: list[int]) -> list[int]:
        """The samples of each evaluation batch, summed over all processes."""
        return self._placed.summed(samples)

    # -- the parts of a step -----------------------------------------------------------------

    def _called(self, function: Callable[..., Any], inputs: Any) -> Any:
        with self._autocast():
            if isinstance(inputs, dict):
                return function(**inputs)
            return function(*inputs) if isinstance(inputs, tuple) else function(inputs)

    def _autocast(self) -> Any:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype)

    def _computed(
        self, function: Callable[..., Any], batch: Any
    ) -> tuple[Logs, torch.Tensor, dict[str, Any]]:
        """The losses of a batch as logs, their sum, and the values for metrics."""
        inputs, targets = self._unpack(batch)
        outputs = self._called(function, inputs)
        found = {"outputs": outputs, "targets": targets, "batch": batch, "module": self.module}
        logs = Logs()
        total: Any = None
        with self._autocast():
            for name, function in self._losses.items():
                is_new = name not in self._looked_at and crossed_shape(outputs, targets) is not None
                self._looked_at.add(name)
                with Crossing(name, outputs, targets) if is_new else nullcontext():
                    loss = function(found)
                if not isinstance(loss, torch.Tensor) or loss.dim():
                    hint = (
                        "a scalar: return loss.mean()"
                        if isinstance(loss, torch.Tensor)
                        else "a scalar tensor; compute it from the outputs with torch"
                    )
                    raise CallbackError(f"the loss {name!r} is {describe(loss)}; it must be {hint}")
                logs.add_loss(name, loss.detach())
                total = loss if total is None else total + loss
        if len(self._losses) > 1:
            logs.add_metric("loss", total.detach())
        return logs, total, found

    def _measure(self, logs: Logs, found: dict[str, Any], running: dict[str, Running]) -> None:
        if not (self._metrics or running):
            return
        found |= {"outputs": detached(found["outputs"])}
        with torch.no_grad():
            for name, function in self._metrics.items():
                logs.add_metric(name, function(found))
            for one in running.values():
                one.update(found)

    def _step(self, optimizer: Optimizer, logs: Logs) -> None:
        scaler = self._scaler
        if self._accumulate is not None:
            samples: Any = self._window.samples
            if self._placed.is_distributed:
                (samples,) = mean_over_processes([samples], 1, self.device)
            for one in self._gradients():
                one.div_(samples)
            self._window = Window()
        if self._clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm: Any = nn.utils.clip_grad_norm_(self._parameters(), self._clip_norm)
            logs.add_metric("grad_norm", _whole(norm))
        if scaler is None:
            optimizer.step()
        else:
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                return  # a gradient was not finite, so this step is skipped
        if self._average is not None:
            count, sums = self._average
            now = zip(self.module.parameters(), sums, strict=True)
            self._move(sums, [one.detach().to(total.dtype) for one, total in now], 0)
            self._average = EmaState(count + 1, sums)
        if self.scheduler is not None:
            logs.add_metric("learning_rate", optimizer.param_groups[0]["lr"])
            self.scheduler.step()

    def _parameters(self) -> list[torch.Tensor]:
        assert self.optimizer is not None
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def _gradients(self) -> list[torch.Tensor]:
        return [one.grad for one in self._parameters() if one.grad is not None]

    def _finished(self, logs: Logs, samples: int, running: dict[str, Running]) -> Logs:
        """The logs of a step, averaged over all processes."""
        if self._placed.is_distributed:
            places = [
                (values, name)
                for values in (logs.get("losses", {}), logs.get("metrics", {}))
                for name, value in values.items()
                if is_number(value)
            ]
            numbers = [values[name] for values, name in places]
            means = mean_over_processes(numbers, samples, self.device) if places else []
            for (values, name), mean in zip(places, means, strict=True):
                values[name] = mean
        for name, one in running.items():
            value = one.compute()
            for key, item in value.items() if isinstance(value, dict) else [(name, value)]:
                logs.add_stateful_metric(key, item)
        return logs

    @contextmanager
    def _mode(self, is_training: bool) -> Iterator[None]:
        """Sets the mode of the module, and restores the mode of each submodule afterwards.

        A module in training mode is not changed, because a submodule may be frozen on purpose.
        """
        if self.module.training == is_training:
            yield
            return
        modes = [(one, one.training) for one in self.module.modules()]
        self.module.train(is_training)
        try:
            yield
        finally:
            for one, mode in modes:
                one.training = mode

    @contextmanager
    def _with_average(self) -> Iterator[None]:
        """Temporarily replaces the parameters by their average, if there is one."""
        if self._average is None or not self._average.count:
            yield
            return
        parameters = list(self.module.parameters())
        kept = [one.clone() for one in parameters]
        _copy(self._averaged(self._average), parameters)
        try:
            yield
        finally:
            _copy(kept, parameters)

    @property
    def ema_params(self) -> dict[str, Any]:
        """The state dict of the module with averaged parameters."""
        if self._average is None:
            raise CicloError(
                "this state has no average; use create_torch_state(..., ema_decay=0.999)"
            )
        if not self._average.count:
            return self.module.state_dict()
        names = [name for name, _ in self.module.named_parameters()]
        values = zip(names, self._averaged(self._average), strict=True)
        return {**self.module.state_dict(), **dict(values)}

    def _averaged(self, average: EmaState) -> list[torch.Tensor]:
        share = averages.share(average.count, self._ema_decay)  # type: ignore[arg-type]
        parameters = zip(average.ema, self.module.parameters(), strict=True)
        return [(total / share).to(now.dtype) for total, now in parameters]

    # -- to a checkpoint and back --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that steps change. With several processes, all must call it."""
        metrics = {"train": self._train_metrics, "test": self._test_metrics}
        return {
            "module": self.module.state_dict(),
            "losses": {name: one.state_dict() for name, one in self._loss_modules.items()},
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "average": None if self._average is None else self._average.ema,
            "averaged": 0 if self._average is None else self._average.count,
            "window": self._open_window(),
            "metrics": {
                when: {name: one.state_dict() for name, one in running.items()}
                for when, running in metrics.items()
            },
        }

    def _open_window(self) -> dict[str, Any] | None:
        """The accumulated batches and gradients of all processes together."""
        if not self._window.batches:
            return None
        count = self._placed.processes
        samples: Any = self._window.samples
        if count > 1:
            samples = mean_over_processes([samples], 1, self.device)[0].item()
        waiting = [one.grad for one in self._parameters()]
        held = iter(self._placed.exchanged([one for one in waiting if one is not None]))
        return {
            "batches": self._window.batches,
            "samples": samples * count,
            "gradients": [None if one is None else next(held) * count for one in waiting],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The inverse of `state_dict`, from any strategy."""
        saved = {"averaged": inf, **saved}  # older ones have averages without bias correction
        mine = self.state_dict()
        for key, value in mine.items():
            theirs = saved.get(key)
            if key not in saved or ((theirs is None) != (value is None) and key != "window"):
                given = "nothing" if theirs is None else "one"
                raise CheckpointError(f"this is not a state of {self!r}: {key!r} is {given}")
        placed = {n: _spread(value, mine["module"].get(n)) for n, value in saved["module"].items()}
        self.module.load_state_dict(placed)
        for name, module in self._loss_modules.items():
            module.load_state_dict(saved["losses"][name])
        for name in ("optimizer", "scheduler"):
            if (owner := getattr(self, name)) is not None:
                owner.load_state_dict(saved[name])
        if self.optimizer is not None:
            for parameter, held in self.optimizer.state.items():
                for key, value in held.items():
                    held[key] = _spread(value, parameter)
        self._window = Window()
        if (window := saved["window"]) is not None:
            count = self._placed.processes
            self._window = Window(window["batches"], window["samples"] / count)
            for parameter, waits in zip(self._parameters(), window["gradients"], strict=True):
                parameter.grad = None if waits is None else _spread(waits / count, parameter)
        if self._scaler is not None:
            self._scaler.load_state_dict(saved["scaler"])
        if self._average is not None:
            sums = self._average.ema
            _copy([_spread(a, b) for a, b in zip(saved["average"], sums, strict=True)], sums)
            self._average = EmaState(saved["averaged"], sums)
        for when, running in (("train", self._train_metrics), ("test", self._test_metrics)):
            for name, one in running.items():
                one.load_state_dict(saved["metrics"][when][name])


def _scheduler(given: Any, optimizer: Optimizer | None) -> LRScheduler | None:
    if given is None:
        return None
    if optimizer is None:
        raise TypeError("scheduler= needs an optimizer: create_torch_state(module, optimizer, ...)")
    made = given
    if not isinstance(given, LRScheduler) and callable(given):
        made = called_with("scheduler", given, optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise TypeError(
            "scheduler: ReduceLROnPlateau steps once per epoch, by a value; leave it out here"
            " and step it yourself: {ciclo.on_epoch_end: lambda loop_state:"
            ' plateau.step(loop_state.logs.value("loss_valid"))}'
        )
    if not isinstance(made, LRScheduler):
        raise TypeError(
            f"scheduler is {made!r}; use one of torch.optim.lr_scheduler, or a function of the"
            " optimizer that returns one"
        )
    if made.optimizer is not optimizer:
        raise ValueError(
            "scheduler belongs to another optimizer; create it from the one given here"
        )
    return made


# -- parameters ------------------------------------------------------------------------------------


@torch.no_grad()
def _copy(values: list[Any], into: list[Any]) -> None:
    for target, value in zip(into, values, strict=True):
        target.copy_(value)


def _wide_zeros(parameter: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros_like(parameter.detach(), dtype=wide)


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _spread(value: Any, like: Any) -> Any:
    """Shards the value like `like`, if that is a DTensor."""
    is_spread = hasattr(like, "device_mesh")
    if not is_spread or hasattr(value, "device_mesh") or not isinstance(value, torch.Tensor):
        return value
    if value.shape != like.shape:
        return value  # a counter of the optimizer
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
