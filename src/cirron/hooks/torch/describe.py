"""Settings that explain speed: of a loader, of a model, of the precision that is in force.

`Descriptions` puts them on spans, each once. The functions that find them do not raise, wait for a
device, or run slow code of the program: they walk a model by its dicts, and ask a data set for its
length only if a library defines that. What is unknown is None.

Runs on the user's threads. Loaded after torch is.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import BatchSampler, IterableDataset

from cirron import guard
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# A model with more tensors or submodules than this is not counted: each takes a microsecond.
MAX_PARTS = 3_000
MAX_WRAPPERS = 8  # around a model
# Different settings of loaders that are remembered; further ones are recorded each time.
MAX_RECORDED = 1_000

# Whose data sets and samplers know their length at once.
QUICK = frozenset(("builtins", "datasets", "numpy", "torch", "torchaudio", "torchvision"))

# Classes that have a model inside, with the name under which they keep it and what they are.
WRAPPERS = {
    "OptimizedModule": ("_orig_mod", None),
    "DistributedDataParallel": ("module", "DDP"),
    "DataParallel": ("module", "DataParallel"),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module", "FSDP"),
    "DeepSpeedEngine": ("module", "DeepSpeed"),
    "_FabricModule": ("_forward_module", None),
}
DEVICES = ("cuda", "cpu", "xpu", "mps")


class Descriptions:
    """Which settings have been recorded. Those that were recorded in an evaluation, which has no
    gradients, are recorded again in the epoch.
    """

    def __init__(self) -> None:
        # By loader, and by iterator: a `for` may not keep the loader as long as that.
        self._settings: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._recorded: set[tuple[Any, ...]] = set()
        # By whether it is a training, and whether the model was running.
        self._models: defaultdict[tuple[bool, bool], weakref.WeakSet[Any]] = defaultdict(
            weakref.WeakSet
        )

    def met(self, loader: Any, iterator: Any) -> None:
        settings = self._settings.get(loader)
        if settings is None:
            settings = self._settings[loader] = of_loader(loader)
        self._settings[iterator] = settings

    def of_loader(self, iterator: Any) -> dict[str, Any] | None:
        """The settings of an iterator's loader; None: the same ones were recorded before."""
        settings = None if iterator is None else self._settings.get(iterator)
        key = (torch.is_grad_enabled(), *(settings or {}).values())
        if key in self._recorded:
            return None
        if len(self._recorded) < MAX_RECORDED:
            self._recorded.add(key)
        return settings

    def put_loader(self, iterator: Any, span: hot.Span | None) -> None:
        if span is not None:
            put(span, self.of_loader(iterator) or {})

    def put_model(
        self, model: Any, span: hot.Span | None, *, is_training: bool, is_running: bool
    ) -> None:
        done = self._models[is_training, is_running]
        if span is not None and model not in done:
            done.add(model)
            # Autocast is on only while the model runs.
            put(span, of_model(model) | (of_mode() if is_running else {}))


def put(span: hot.Span, settings: dict[str, Any]) -> None:
    """Those of the first loader and model stay."""
    span.set(**(settings | (span.attrs or {})))


def find_described() -> hot.Span | None:
    """The span that has the settings of a loop whose epochs a framework or the program opens."""
    span = hot.innermost()
    while span.parent is not span and span.name not in ("epoch", "fit", "evaluation"):
        span = span.parent
    return None if span.parent is span else span


def of_loader(loader: Any) -> dict[str, Any]:
    """The arguments of a DataLoader."""
    with guard.quiet("describing a loader"):
        dataset, batches = read(loader, "dataset"), read(loader, "batch_sampler")
        size = read(loader, "batch_size")
        # A loader that is given a batch sampler says nothing true about these itself.
        batching = loader if size is not None or batches is None else batches
        sampler = read(loader if batches is None else batches, "sampler")
        if type(batches) not in (BatchSampler, type(None)):
            sampler = batches  # the program's own way to make batches
        is_stream = isinstance(dataset, IterableDataset)
        found = {
            "loader_workers": read(loader, "num_workers"),
            "loader_pin_memory": read(loader, "pin_memory"),
            "loader_prefetch_factor": read(loader, "prefetch_factor"),
            "loader_persistent_workers": read(loader, "persistent_workers"),
            "loader_batch_size": read(batching, "batch_size"),
            "loader_drop_last": read(batching, "drop_last"),
            "loader_sampler": None if is_stream else name_of(sampler),
            "loader_dataset": name_of(dataset),
            "loader_batches": None if is_stream else length_of(loader, batches, dataset),
        }
        return {name: plain(given) for name, given in found.items()}
    return {}


def of_model(model: Any) -> dict[str, Any]:
    """The class, size and strategy of a model. With FSDP1, the size is that of this rank."""
    found: dict[str, Any] = {}
    with guard.quiet("describing a model"):
        inner, strategies, is_compiled = unwrap(model)
        found = {
            "model_class": inner.__class__.__name__,
            **count(inner),
            "model_compiled": is_compiled,
            "model_threads": torch.get_num_threads(),
            "model_strategy": "+".join(strategies) or None,
        }
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            found["world_size"] = distributed.get_world_size()
    return found


def of_mode() -> dict[str, Any]:
    """The dtype of autocast; None: it is off."""
    found: dict[str, Any] = {}
    with guard.quiet("describing the precision"):
        on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        found["autocast"] = short(torch.get_autocast_dtype(on[0])) if on else None
    return found


# -- loaders -------------------------------------------------------------------------------------


def read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001  protects us from a loader whose attributes are computed
        return None


def plain(given: Any) -> Any:
    return given if isinstance(given, (str, int)) else None


def name_of(given: Any) -> str | None:
    return None if given is None else type(given).__name__


def is_quick(given: Any) -> bool:
    """Whether a library defines its length, not the program."""
    method = getattr(type(given), "__len__", None)
    module = getattr(method, "__module__", None) or type(given).__module__
    return method is not None and str(module).partition(".")[0] in QUICK


def length_of(loader: Any, batches: Any, dataset: Any) -> int | None:
    samplers = read(loader, "sampler"), batches, read(batches, "sampler")
    parts = loader, dataset, *(one for one in samplers if one is not None)
    return quick_length(loader, parts)


def round_of(iterator: Any) -> int | None:
    """The length of a sampler that an endless sampler repeats, as in YOLO and timm."""
    repeats = read(iterator, "_index_sampler")
    inner = read(repeats, "sampler")
    if inner is None or hasattr(type(repeats), "__len__"):
        return None
    below = read(inner, "sampler")
    return quick_length(inner, (inner,) if below is None else (inner, below))


def quick_length(given: Any, parts: Iterable[Any]) -> int | None:
    """The length, if it is known at once: libraries define it for all these parts."""
    try:
        return len(given) if all(map(is_quick, parts)) else None
    except Exception:  # noqa: BLE001  protects us from data that has no length
        return None


# -- models --------------------------------------------------------------------------------------


def unwrap(model: Any) -> tuple[Any, list[str], bool]:
    """The model without its wrappers, these, outermost first, and whether it is compiled."""
    strategies: list[str] = []
    is_compiled = False
    for _ in range(MAX_WRAPPERS):
        kinds = [kind.__name__ for kind in type(model).__mro__]
        is_compiled |= "OptimizedModule" in kinds or is_compiled_in_place(model)
        if "FSDPModule" in kinds:
            strategies.append("FSDP2")
        wrapper = next((WRAPPERS[kind] for kind in kinds if kind in WRAPPERS), None)
        inner = None if wrapper is None else parts_of(model, "_modules").get(wrapper[0])
        if wrapper is None or inner is None:
            break
        if wrapper[1] is not None:
            strategies.append(wrapper[1])
        model = inner
    return model, strategies, is_compiled


def is_compiled_in_place(module: Any) -> bool:
    return fields_of(module).get("_compiled_call_impl") is not None


def fields_of(module: Any) -> dict[str, Any]:
    """Its attributes, without calling `__getattr__` and the like."""
    found: dict[str, Any] = getattr(module, "__dict__", {})
    return found


def parts_of(module: Any, name: str) -> dict[str, Any]:
    """`_modules` or `_parameters` of a module."""
    return fields_of(module).get(name) or {}


def modules_of(model: Any) -> Iterator[Any]:
    """The model and all its submodules, each once."""
    seen, waiting = {id(model)}, [model]
    while waiting:
        module = waiting.pop()
        yield module
        for inner in list(parts_of(module, "_modules").values()):
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)


def count(model: Any) -> dict[str, Any]:
    """The sizes and types of its parameters; with too many of them, of the first ones."""
    tensors: dict[int, Any] = {}
    is_checkpointing = None  # unknown: a forward may call `checkpoint`
    is_whole = True
    for number, module in enumerate(modules_of(model)):
        if number >= MAX_PARTS or len(tensors) >= MAX_PARTS:
            is_whole = False
            break
        for tensor in list(parts_of(module, "_parameters").values()):
            if tensor is not None:
                tensors[id(tensor)] = tensor
        flag = fields_of(module).get("gradient_checkpointing")  # of transformers and diffusers
        if flag is True or type(module).__name__ == "CheckpointWrapper":  # torch's own
            is_checkpointing = True
    total = trainable = 0
    kinds, devices = set(), set()
    # Not the overrides of tensor subclasses, which may run code.
    with torch._C.DisableTorchFunction():
        for tensor in tensors.values():
            kinds.add(tensor.dtype)
            devices.add(tensor.device)
            if is_lazy(tensor):
                is_whole = False  # its size is not known before the first forward
                continue
            size = tensor.numel()
            total += size
            if tensor.requires_grad:
                trainable += size
    return {
        "model_parameters": total if is_whole else None,
        "model_trainable": trainable if is_whole else None,
        "model_tensors": len(tensors) if is_whole else None,
        "model_dtype": ",".join(sorted(map(short, kinds))) or None,
        "model_device": ",".join(sorted(map(str, devices))) or None,
        "model_checkpointing": is_checkpointing,
    }


def short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
