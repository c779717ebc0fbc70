"""PyTorch: `data_load`, `forward`, `backward`, `optimizer_step`, `checkpoint`; above them `step`
and `epoch`.

The hooks here report fetches, forwards, backwards and optimizer steps to `loops.py`, which infers
the loop. Each hook has a fast path for the usual case: the next phase of a known training step. The
scalar that `backward` is called on is the step's loss.

Runs on the user's threads. Loaded once the program has imported torch.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, compiler
from torch._C import DisableTorchFunctionSubclass
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.nn.modules.loss import _Loss
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader
from torch.utils.data._utils import worker

from cirron import guard
from cirron.hooks import engine
from cirron.hooks.engine import STEPS
from cirron.hooks.patch import ImportWatch, Patches
from cirron.hooks.torch import saving
from cirron.hooks.torch.compiling import Compiling, run_uncompiled
from cirron.hooks.torch.free import current_graph_task_id, scopes
from cirron.hooks.torch.gpu import GpuTimes, stay_out_of_graphs
from cirron.hooks.torch.loops import Loops
from cirron.hooks.torch.passes import Lane, Load, is_in_train_mode, nothing, reference_to
from cirron.record import hot
from cirron.record.hot import losses

if TYPE_CHECKING:
    from cirron.hooks import Snapshots
    from cirron.settings import Settings

# Modules whose kind is cached; above this size, those that were deleted are removed.
MAX_MODULES = 1_000
# A module without parameters is checked for some again after this many calls.
LOOK_AGAIN = 64
# Class names of losses, which may have parameters, end in these.
NO_MODELS = ("Loss", "Criterion")
# Attributes of a forward.
TRAIN, EVAL = hot.Settled(mode="train"), hot.Settled(mode="eval")
NO_NAMES: dict[str, Any] = {}


class Inner(hot.OwnSpan):
    """A forward or a backward. Modules that run in it get no span of their own."""

    __slots__ = ()


Inner.phase_kind = Inner


class TorchHook:
    """Installs and removes the hooks."""

    name = "torch"
    installed: TorchHook | None = None  # in this process

    def __init__(self, settings: Settings, snapshots: Snapshots) -> None:
        self._patches = Patches()
        self._handles: list[Any] = []
        self._watch = ImportWatch()
        # Whether a module is a model; of one without parameters so far, the number of its calls.
        self._models: dict[weakref.ref[Any], int] = {}
        self._loops = Loops(settings.steps_per_epoch, snapshots)
        self._this_thread = self._loops.this_thread
        self._compiling = Compiling(self._loops.close)
        self._gpu_times = GpuTimes()
        self._marks_losses = settings.loss_marks

    def install(self) -> None:
        self.uninstall()
        self._loops.is_on = True
        TorchHook.installed = self
        put, module, call = self._patches.set, torch.nn.Module, torch.nn.Module.__call__
        loader, iterator = dataloader.DataLoader, dataloader._BaseDataLoaderIter
        put(module, "__call__", self._make_call(call))
        put(loader, "__iter__", self._make_iter(loader.__iter__))
        put(iterator, "__next__", self._make_next(iterator.__next__))
        workers = dataloader._MultiProcessingDataLoaderIter
        put(workers, "_shutdown_workers", self._make_shutdown(workers._shutdown_workers))
        put(worker, "_worker_loop", self._make_worker_loop(worker._worker_loop))
        put(torch.autograd, "backward", self._make_backward(torch.autograd.backward))
        put(torch.autograd, "grad", self._make_grad(torch.autograd.grad))
        put(GradScaler, "step", self._make_scaler_step(GradScaler.step))
        self._handles = [
            optimizers.register_optimizer_step_pre_hook(self._before_step),
            optimizers.register_optimizer_step_post_hook(self.after_step),
        ]
        hot.watch_losses(self._marks_losses)
        engine.END_INFERRED.append(self._loops.end_here)
        self._stay_out_of_graphs()
        self._compiling.install(self._watch, self._patches, call)
        saving.install(self._watch, self._patches, self._loops)
        with guard.quiet("torch gpu time"):
            self._gpu_times.install()

    @classmethod
    def describe(cls, model: Any, *, is_training: bool) -> None:
        """A framework knows the model of an epoch or evaluation; the program may call its parts."""
        if cls.installed is not None:
            descriptions = cls.installed._loops.descriptions
            descriptions.put_model(model, is_training=is_training, is_running=False)

    def uninstall(self) -> None:
        """Removes all hooks, and closes what this thread has open."""
        self._loops.is_on = False
        if TorchHook.installed is self:
            TorchHook.installed = None
        self._watch.undo()
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._compiling.uninstall()
        engine.END_INFERRED[:] = [one for one in engine.END_INFERRED if one != self._loops.end_here]
        self._loops.end(self._this_thread.lanes)
        hot.watch_losses(False)
        with guard.quiet("torch gpu time"):
            self._gpu_times.uninstall()

    # -- forward ----------------------------------------------------------------------------

    def _make_call(self, original: Any) -> Any:
        forward, current, within = self._forward, hot.current, hot.within
        this_thread = self._this_thread
        # torch's `__call__` only chooses between two functions. Choosing here instead saves a
        # third of what a submodule costs.
        code = getattr(original, "__code__", None)
        is_torchs = code is not None and code.co_names == ("_compiled_call_impl", "_call_impl")

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  nn.Module's own
            # First, because it is all that compiled code keeps of this function.
            if is_dynamo_compiling():
                return original(self, *args, **kwargs)
            span = current()
            if (
                # It may have ended: a task that was started in it outlives it.
                (span is not None and span.phase_kind is Inner and not span.end)
                # A module without parts, such as an image transform, is not a model.
                or not (self._parameters or self._modules)
                or (lane := this_thread.lane).is_inside
            ):
                if is_torchs and self._compiled_call_impl is None:
                    return self._call_impl(*args, **kwargs)
                return original(self, *args, **kwargs)
            is_plain = is_torchs and self._compiled_call_impl is None
            call = self._call_impl if is_plain else MethodType(original, self)
            step = lane.step
            if (
                step is None
                or step is not span
                or step.phase is not None
                or lane.described() is not self
                or not self.training
                or kwargs.get("training") is False  # see `_before_forward`
                or compiler._is_compiling_flag
            ):
                return forward(this_thread.find(), self, call, args, kwargs)
            # The fast path: the model of the last step runs in the next one.
            lane.is_inside = lane.has_worked = lane.has_run = True
            lane.model = lane.described
            try:
                return within(step, "forward", TRAIN, Inner, 0, call, args, kwargs)
            finally:
                lane.is_inside = False

        return __call__

    def _forward(self, lane: Lane, module: Any, call: Any, args: Any, kwargs: Any) -> Any:
        is_model: bool | None = False
        span = None
        try:
            is_model, span = self._before_forward(lane, module, args, kwargs)
        except Exception as error:  # noqa: BLE001  protects the forward from our mistakes
            guard.caught("torch forward", error)
        lane.is_inside = is_model is not None  # None: it may contain a model
        try:
            return engine.around(span, call, args, kwargs, self._loops.close, self._loops.fail)
        finally:
            lane.is_inside = False

    def _before_forward(
        self, lane: Lane, module: Any, args: Any, kwargs: Any
    ) -> tuple[bool | None, hot.Span | None]:
        """Whether it is a model, and the span of its forward."""
        reference = weakref.ref(module)
        is_model: int | None = self._models.get(reference)
        if is_model.__class__ is not bool:
            is_model = self._is_model(lane, reference, module)
        # With a task id, a backward runs a checkpointed part again.
        is_forward = is_model and self._loops.is_on and current_graph_task_id() == -1
        if not is_forward or compiler._is_compiling_flag or is_symbolic(args, kwargs):
            return is_model, None
        told = kwargs.get("training")  # to Keras's models: the mode of the module is any
        told = told if told.__class__ is bool else None
        is_in_train = is_in_train_mode(module) if told is None else told
        if lane.loading is None:  # a model in a dataset says nothing about the loop
            main = lane.main
            is_trained = is_in_train and torch.is_grad_enabled()
            is_outside = main is None and not (lane.passes or lane.free.is_open)
            if is_outside and not is_trained and is_part(reference, lane.model):
                return is_model, None  # `model.decode`, after a training: a part is not a model
            # A teacher is not what is trained. `generate` calls the encoder, a part of the model.
            if is_trained or not (lane.has_worked or is_part(reference, lane.model)):
                lane.model, lane.told = reference, told
            if not lane.has_worked or main is None or lane.has_item_left or lane.optimizers:
                self._begin_work(lane, reference, is_in_train=is_in_train)
            lane.has_run = True
        return is_model, hot.begin("forward", None, TRAIN if is_in_train else EVAL, Inner)

    def _is_model(self, lane: Lane, reference: weakref.ref[Any], module: Any) -> bool | None:
        calls = self._models.get(reference, 0)
        if calls % LOOK_AGAIN:
            self._models[reference] = calls + 1
            return None
        if len(self._models) > MAX_MODULES:
            for gone in [one for one in list(self._models) if one() is None]:
                self._models.pop(gone, None)
        self._models[reference] = False  # also if `is_a_model` raises: it is called once
        answer = is_a_model(module, is_first=not lane.has_run)
        self._models[reference] = calls + 1 if answer is None else answer
        return answer

    def _begin_work(self, lane: Lane, model: weakref.ref[Any], *, is_in_train: bool) -> None:
        """The first forward since a fetch, one without a loader, or inside an optimizer's step."""
        if lane.optimizers:
            lane.end_stale_optimizers()
        is_evaluating = not (is_in_train and torch.is_grad_enabled())
        is_expected = not lane.has_worked or lane.has_item_left
        if is_expected or (lane.has_used_pass and not is_evaluating):
            self._loops.saw_work(lane, is_evaluating=is_evaluating, is_in_train=is_in_train)
        if lane.main is None and not lane.has_used_pass:
            lane.free.before_forward(model, is_in_train=is_in_train)
        # `torch.jit.trace` notes each question about a tensor.
        if lane.described is not model and torch._C._get_tracing_state() is None:
            # Without gradients, the settings of its training are still to be recorded; and those of
            # items that were fetched with `next()`, once it is trained with them.
            has_grad = torch.is_grad_enabled()
            is_waiting = any(one.waiting for one in lane.passes)
            lane.described = model if has_grad and not is_waiting else nothing
            whole = None if lane.model is None else lane.model()
            whole = model() if whole is None else whole
            span = lane.free.own_epoch if lane.main is None else lane.main.span
            descriptions = self._loops.descriptions
            descriptions.put_model(whole, span, is_training=has_grad, is_running=True)

    # -- backward ---------------------------------------------------------------------------

    def _make_backward(self, original: Any) -> Any:
        this_thread, current, within = self._this_thread, hot.current, hot.within
        loops = self._loops

        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(*args, **kwargs)
            loss = args[0] if args else kwargs.get("tensors")
            lane = this_thread.lane
            step, span = lane.step, None
            if step is None or step is not current() or step.phase is not None or lane.is_inside:
                # With a task id, it is a checkpoint's backward inside another one.
                if lane.is_inside or current_graph_task_id() != -1 or not loops.is_on:
                    return original(*args, **kwargs)
                lane = this_thread.find()
                step, span = None, self._begin_backward(lane, loss)
            lane.is_inside = True
            try:
                if step is None:
                    return engine.around(span, original, args, kwargs, loops.close, loops.fail)
                at = note_loss(lane, step, loss)
                lane.has_worked = True
                return within(step, "backward", None, Inner, at, original, args, kwargs)
            finally:
                lane.is_inside = False

        return backward

    def _begin_backward(self, lane: Lane, loss: Any) -> hot.Span | None:
        """The slow path: this backward may change what is known about the loop."""
        try:
            if lane.optimizers:
                lane.end_stale_optimizers()
            if not is_training(lane):
                self._loops.saw_training(lane, by_backward=True)
            at = note_loss(lane, step_around(), loss)
            return hot.begin("backward", None, None, Inner, at)
        except Exception as error:  # noqa: BLE001  protects the backward
            guard.caught("torch backward", error)
            return None

    def _make_grad(self, original: Any) -> Any:
        """`torch.autograd.grad` is a backward if it is with respect to parameters, or to tensors
        that stand for those of the last model (`torch.func`).
        """
        backward = self._make_backward(original)
        this_thread = self._this_thread

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(outputs, inputs, *args, **kwargs)
            if isinstance(inputs, Iterator):  # `model.parameters()` can be read only once
                inputs = tuple(inputs)
            given = inputs.values() if inputs.__class__ is dict else inputs
            if isinstance(given, Tensor) or not isinstance(given, Iterable):
                given = (given,)
            is_of_weights = any(isinstance(one, Parameter) for one in given)
            lane = this_thread.find()
            if not (is_of_weights or stand_for_parameters(given, lane.model)):
                # What runs in it, such as the parts of a checkpoint, is no forward and no backward.
                was_inside, lane.is_inside = lane.is_inside, True
                try:
                    return original(outputs, inputs, *args, **kwargs)
                finally:
                    lane.is_inside = was_inside
            result = backward(outputs, inputs, *args, **kwargs)
            if not is_of_weights and lane.free.versions is not None:
                lane.free.versions = ()  # changes of these tensors cannot be seen
            return result

        return grad

    # -- optimizer --------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            return
        try:
            lane = self._this_thread.lane
            step = lane.step
            if step is not None and step is hot.current() and step.phase is None:
                lane.has_worked = True
                lane.optimizers.append((id(optimizer), hot.begin_phase(step, "optimizer_step")))
                return
            lane = self._this_thread.find()
            running = lane.optimizers
            if running:
                lane.end_stale_optimizers(inner=1)
            if not is_training(lane):
                self._loops.saw_training(lane, optimizer=id(optimizer))
            # A subclass calls its parent's step.
            is_part = running and running[-1][0] == id(optimizer)
            running.append((id(optimizer), None if is_part else hot.begin("optimizer_step")))
        except Exception as error:  # noqa: BLE001  protects the optimizer
            guard.caught("torch optimizer", error)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Also for the steps of Keras's optimizers, which are not torch's."""
        loops = self._loops
        if is_dynamo_compiling():
            loops.has_stepped_compiled = True  # compiled, and run with the compiled code
            return
        try:
            lane = self._this_thread.lane
            span = lane.optimizers.pop()[1] if lane.optimizers else None
            if span is not None:
                (hot.end_phase if span.phase is not None else loops.close)(span)
            if not lane.optimizers:  # not inside another optimizer's step
                loops.count_step(lane, id(optimizer))
        except Exception as error:  # noqa: BLE001  protects the optimizer
            guard.caught("torch optimizer", error)

    def _make_scaler_step(self, original: Any) -> Any:
        this_thread, loops = self._this_thread, self._loops

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            lane = this_thread.find()
            before = lane.optimizer_steps
            result = original(scaler, optimizer, *args, **kwargs)
            with guard.quiet("torch scaler"):
                is_unseen = lane.optimizer_steps == before and not loops.has_stepped_compiled
                if is_unseen and loops.is_on:
                    # The hooks see each step of torch's own optimizers.
                    is_skipped = isinstance(optimizer, Optimizer)
                    (loops.skip_step if is_skipped else loops.count_step)(lane, id(optimizer))
            return result

        return step

    # -- loading ----------------------------------------------------------------------------

    def _make_iter(self, original: Any) -> Any:
        this_thread, loops = self._this_thread, self._loops

        def __iter__(loader: Any) -> Any:  # noqa: N807  the loader's own
            setup = None
            with guard.quiet("torch loader"):
                # Persistent workers are already running.
                is_new = loader.num_workers and loader._iterator is None
                if is_new and not this_thread.find().loading and loops.is_on:
                    setup = hot.begin("data_setup")
            iterator = engine.around(setup, original, (loader,), end=hot.suspend)
            with guard.quiet("torch loader"):
                loops.descriptions.add_iterator(loader, iterator)
                if setup is not None:
                    loops.setups[iterator] = setup
                    # An iterator that is never asked for an item leaves its setup alone.
                    weakref.finalize(iterator, hot.release, setup).atexit = False
                # With persistent workers, a loader reuses an iterator that was left early.
                old = this_thread.find().find(iterator)
                if old is not None:
                    loops.end_pass(old)
            return iterator

        return __iter__

    def _make_next(self, original: Any) -> Any:
        loops, this_thread, within = self._loops, self._this_thread, hot.within
        begin_step, own, fetch, fail = loops.begin_step, hot.OwnSpan, self._fetch, loops.fail_load

        def __next__(iterator: Any) -> Any:  # noqa: N807  the iterator's own
            lane = this_thread.lane
            # A loader inside a dataset has no spans.
            if lane.loading is not None or not loops.is_on:
                return original(iterator)
            step, at = None, 0
            try:
                step, at = begin_step(lane, iterator)
            except Exception as error:  # noqa: BLE001  protects the loader
                guard.caught("torch loader", error)
            if step is None:
                return fetch(original, iterator)
            item = within(step, "data_load", None, own, at, original, (iterator,), NO_NAMES, fail)
            lane.loading = None
            lane.has_worked = lane.has_run = False
            return item

        return __next__

    def _fetch(self, original: Any, iterator: Any) -> Any:
        """The slow path: this fetch may change what is known about the loop."""
        load, loops = None, self._loops
        with guard.quiet("torch loader"):
            load = loops.begin_load(self._this_thread.find(), iterator)
        item = engine.around(load, original, (iterator,), None, loops.end_load, loops.fail_load)
        if isinstance(load, Load) and load in hot.opened:  # it waits for a parent
            with guard.quiet("torch loader"):
                load.item = reference_to(item)
        return item

    def _make_shutdown(self, original: Any) -> Any:
        """Workers are stopped in the last fetch, or when their iterator is released."""
        loops = self._loops

        def _shutdown_workers(iterator: Any) -> Any:
            lane, span = loops.this_thread.find(), None
            with guard.quiet("torch loader"):
                if not iterator._shutdown and loops.is_on:
                    span = hot.begin("data_teardown")
            if span is None:
                return original(iterator)
            result = engine.around(span, original, (iterator,), end=hot.suspend)
            with guard.quiet("torch loader"):
                loops.end_teardown(lane, iterator, span)
            return result

        return _shutdown_workers

    def _make_worker_loop(self, original: Any) -> Any:
        """Worker processes have no loop, so the hooks are removed there."""

        @functools.wraps(original)
        def _worker_loop(*args: Any, **kwargs: Any) -> Any:
            self._patches.undo()
            self._loops.is_on = False
            return original(*args, **kwargs)

        return _worker_loop

    def _stay_out_of_graphs(self) -> None:
        """Keeps Dynamo from compiling our functions where compiled code returns to Python."""
        loops = self._loops
        ours: list[Any] = [hot.begin, hot.close, hot.fail, hot.drop, hot.follow]
        ours += [hot.begin_phase, hot.end_phase, hot.open_phase]
        ours += [torch.autograd.backward, torch.autograd.grad]
        ours += [loops.begin_step, loops.begin_load, loops.end_load, loops.fail_load]
        ours += [loops.close, loops.iterator_gone, self._this_thread.find, reference_to]
        ours += [self._before_forward, self._is_model, self._begin_work]
        ours += [self._before_step, self.after_step, is_part.__wrapped__]
        for function in ours:
            run_uncompiled(function, with_callees=True)
        stay_out_of_graphs()
        # These call code of the program, which Dynamo may compile.
        loader, iterator = dataloader.DataLoader, dataloader._BaseDataLoaderIter
        outer: tuple[Any, ...] = (torch.nn.Module.__call__, self._forward, self._fetch)
        outer += (engine.around, hot.within)
        for function in (*outer, loader.__iter__, iterator.__next__):
            run_uncompiled(function, with_callees=False)


def is_a_model(module: Any, *, is_first: bool) -> bool | None:
    """Whether its calls are forwards; None: it is not a model, but may contain one.

    `is_first`: no model has run since the last fetch. A loss that is called then contains the
    model. Programs: `loss_around_model`, `model_in_loss`.
    """
    kind = type(module)
    if isinstance(module, (_Loss, ParametrizationList)):
        return False
    if kind.__name__.endswith(NO_MODELS):
        return None if is_first and not module._parameters else False
    if any(base.__module__.partition(".")[0] == "torchmetrics" for base in kind.__mro__):
        return False
    if getattr(module, "_is_replica", False):  # DataParallel makes one per device and call
        return False
    return True if next(module.parameters(), None) is not None else None


@functools.lru_cache(MAX_MODULES)
def is_part(reference: weakref.ref[Any], model: Callable[[], Any] | None) -> bool:
    """Whether a module is a part of the last model. Program: `vae`."""
    whole, part = None if model is None else model(), reference()
    if whole is None or whole is part:
        return False
    return any(one is part for one in whole.modules())


def is_symbolic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module is called for the shapes only. Keras does so to build a model, with tensors
    of its own or of the meta device. Program: `keras_functional`.
    """
    first = args[0] if args else next(iter(kwargs.values()), None)
    while type(first) in (list, tuple, dict) and first:
        first = next(iter(first.values() if type(first) is dict else first))
    return type(first).__name__ == "KerasTensor" or getattr(first, "is_meta", None) is True


def stand_for_parameters(given: Iterable[Any], model: Callable[[], Any] | None) -> bool:
    """Whether these have the shapes of all or some parameters of a model.

    A single one does not count if the model has more: it may be an input. Programs: `func_grad`,
    `func_head`.
    """
    module = None if model is None else model()
    if module is None:
        return False
    own = Counter(one.shape for one in module.parameters())
    shapes = Counter(getattr(one, "shape", None) for one in given)
    return shapes <= own and (shapes.total() > 1 or own.total() == 1)


def is_training(lane: Lane) -> bool:
    """Whether a backward or an optimizer step changes nothing that is known about the loop."""
    main = lane.main
    if main is None or not main.is_training or not lane.has_worked:
        return False
    return lane.passes[-1] is main and not main.items.is_exhausted


def note_loss(lane: Lane, step: hot.Span | None, loss: Any) -> int:
    """Keeps the scalar that a backward is called on, and returns the time. Without a step, it is
    kept for the first step of a loop without a loader.
    """
    known = losses.get(step, ())  # type: ignore[arg-type]
    if known is None or not hot.watches_losses:  # the program or a framework marks it
        return 0
    if loss.__class__ is not Tensor:
        loss = as_plain_tensor(loss)
    if loss is None:
        return 0
    clock = hot.device_clock
    if clock is not None and loss.is_cuda:
        if loss.ndim and loss.numel() != 1:
            return 0
        at = hot.now()
        taken: Any = clock.keep(loss, at)
    elif loss.is_cpu:
        try:
            taken = loss.item()
        except RuntimeError:  # it is not a scalar; inside `vmap`, it has one value per item
            return 0
        at = hot.now()
    else:
        return 0
    if taken is None or taken.__class__ is complex:
        return 0
    if step is not None:
        losses[step] = (*known, (taken, at)) if known else ((taken, at),)
    elif lane.free.held_under is not None:
        lane.free.losses.append((taken, at))
    return at


def as_plain_tensor(loss: Any) -> Tensor | None:
    """A loss in a tuple, or of a library's class that only adds methods (MONAI's `MetaTensor`)."""
    if loss.__class__ is tuple and len(loss) == 1:
        loss = loss[0]
    if not isinstance(loss, Tensor):
        return None
    if type(loss).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # has other data
        return None
    with DisableTorchFunctionSubclass():
        return Tensor.detach(loss)


def step_around() -> hot.Span | None:
    return next((one for one in scopes() if one.name in STEPS), None)
