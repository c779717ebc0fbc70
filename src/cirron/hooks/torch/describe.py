"""Settings that explain speed: of the loader, the model, and autocast.

`Descriptions` writes each of them to one span. Collecting them does not wait for a device, or run
slow code of the program: models are read through their dicts, and a data set is asked for its
length only if a library defines `__len__`. Unknown values are None.

Runs on the user's threads. Loaded once the program has imported torch.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import BatchSampler, IterableDataset

from cirron import guard
from cirron.hooks.torch.free import scopes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cirron.record import hot

# Larger models are not counted: each tensor or submodule takes a microsecond.
MAX_PARTS = 3_000
MAX_WRAPPERS = 8  # around a model
# Loader settings that are remembered as recorded; further ones are recorded each time.
MAX_RECORDED = 1_000

# Packages whose data sets and samplers have a fast `__len__`.
QUICK = frozenset(("builtins", "datasets", "numpy", "torch", "torchaudio", "torchvision"))

# Wrapper classes: the attribute that holds the wrapped model, and the strategy.
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
    """Settings that have been recorded. Each is recorded twice: in the first epoch, and in the
    first evaluation, where gradients are off.
    """

    def __init__(self) -> None:
        # By loader and by iterator, because the iterator may outlive the loader.
        self._settings: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._recorded: set[tuple[Any, ...]] = set()
        # Models: with which `is_training` and `is_running` they were recorded.
        self._models: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()

    def add_iterator(self, loader: Any, iterator: Any) -> None:
        if loader not in self._settings:
            self._settings[loader] = {}
            with guard.quiet("describing a loader"):
                self._settings[loader] = of_loader(loader)
        self._settings[iterator] = self._settings[loader]

    def of_loader(self, iterator: Any) -> dict[str, Any] | None:
        """The settings of an iterator's loader; None if they have been recorded."""
        settings = None if iterator is None else self._settings.get(iterator)
        key = (torch.is_grad_enabled(), *(settings or {}).values())
        if key in self._recorded:
            return None
        if len(self._recorded) < MAX_RECORDED:
            self._recorded.add(key)
        return settings

    def put_loader(self, iterator: Any) -> None:
        span = find_described()
        if span is not None:
            put(span, self.of_loader(iterator) or {})

    def put_model(
        self, model: Any, span: hot.Span | None = None, *, is_training: bool, is_running: bool
    ) -> None:
        span, key = span or find_described(), (is_training, is_running)
        recorded = self._models.setdefault(model, set())
        if span is not None and key not in recorded:
            recorded.add(key)
            with guard.quiet("describing a model"):
                # Autocast is on only while the model runs.
                put(span, of_model(model) | (of_mode() if is_running else {}))


def put(span: hot.Span, settings: dict[str, Any]) -> None:
    """Adds settings, except those that the span already has from another loader or model."""
    span.set(**(settings | (span.attrs or {})))


def find_described() -> hot.Span | None:
    """The span for the settings if the program or a framework has opened the epoch."""
    return next((one for one in scopes() if one.name in ("epoch", "fit", "evaluation")), None)


def of_loader(loader: Any) -> dict[str, Any]:
    """The arguments of a DataLoader."""
    dataset, batches = read(loader, "dataset"), read(loader, "batch_sampler")
    size = read(loader, "batch_size")
    # With the program's batch sampler, the arguments of the loader are unused defaults.
    batching = loader if size is not None or batches is None else batches
    inner = read(batches, "sampler")
    sampler = read(loader, "sampler")
    is_stream = isinstance(dataset, IterableDataset)
    length = None if is_stream else quick_length(loader, dataset, sampler, batches, inner)
    if type(batches) is BatchSampler:
        sampler = inner
    elif batches is not None:
        sampler = batches  # a class of the program
    found = {
        "loader_workers": read(loader, "num_workers"),
        "loader_pin_memory": read(loader, "pin_memory"),
        "loader_prefetch_factor": read(loader, "prefetch_factor"),
        "loader_persistent_workers": read(loader, "persistent_workers"),
        "loader_batch_size": read(batching, "batch_size"),
        "loader_drop_last": read(batching, "drop_last"),
        "loader_sampler": None if is_stream else name_of(sampler),
        "loader_dataset": name_of(dataset),
        "loader_batches": length,
    }
    return {name: given if isinstance(given, (str, int)) else None for name, given in found.items()}


def of_model(model: Any) -> dict[str, Any]:
    """The class, size and strategy of a model. With FSDP1, the size is that of this rank."""
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
    on = next((device for device in DEVICES if torch.is_autocast_enabled(device)), None)
    return {"autocast": None if on is None else short(torch.get_autocast_dtype(on))}


# -- loaders -------------------------------------------------------------------------------------


def read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001  protects us from a loader whose attributes are computed
        return None


def name_of(given: Any) -> str | None:
    return None if given is None else type(given).__name__


def is_quick(given: Any) -> bool:
    """Whether a library defines its length, and not the program."""
    method = getattr(type(given), "__len__", None)
    module = getattr(method, "__module__", None) or type(given).__module__
    return method is not None and str(module).partition(".")[0] in QUICK


def round_of(iterator: Any) -> int | None:
    """The length of a sampler that an endless sampler repeats, as in YOLO and timm."""
    repeats = read(iterator, "_index_sampler")
    inner = read(repeats, "sampler")
    if inner is None or hasattr(type(repeats), "__len__"):
        return None
    return quick_length(inner, read(inner, "sampler"))


def quick_length(given: Any, *parts: Any) -> int | None:
    """The length of a loader or sampler if libraries define it for all its parts."""
    try:
        is_known = all(is_quick(one) for one in (given, *parts) if one is not None)
        return len(given) if is_known else None
    except Exception:  # noqa: BLE001  protects us from data that has no length
        return None


# -- models --------------------------------------------------------------------------------------


def unwrap(model: Any) -> tuple[Any, list[str], bool]:
    """The model without its wrappers, their strategies, and whether it is compiled."""
    strategies: list[str] = []
    is_compiled = False
    for _ in range(MAX_WRAPPERS):
        kinds = [kind.__name__ for kind in type(model).__mro__]
        is_compiled |= "OptimizedModule" in kinds
        is_compiled |= field(model, "_compiled_call_impl") is not None
        if "FSDPModule" in kinds:
            strategies.append("FSDP2")
        name, strategy = next((WRAPPERS[kind] for kind in kinds if kind in WRAPPERS), ("", None))
        inner = (field(model, "_modules") or {}).get(name)
        if inner is None:
            break
        if strategy is not None:
            strategies.append(strategy)
        model = inner
    return model, strategies, is_compiled


def field(module: Any, name: str) -> Any:
    """An attribute of a module, without calling its `__getattr__`."""
    return getattr(module, "__dict__", {}).get(name)


def modules_of(model: Any) -> Iterator[Any]:
    """The model and all its submodules, each once."""
    seen, waiting = set(), [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting.extend((field(module, "_modules") or {}).values())


def count(model: Any) -> dict[str, Any]:
    """The number and types of its parameters; the types of the first ones if there are too many."""
    tensors: dict[int, Any] = {}
    is_checkpointing = None  # unknown: a forward may call `checkpoint`
    is_whole = True
    for number, module in enumerate(modules_of(model)):
        if number >= MAX_PARTS or len(tensors) >= MAX_PARTS:
            is_whole = False
            break
        for tensor in list((field(module, "_parameters") or {}).values()):
            if tensor is not None:
                tensors[id(tensor)] = tensor
        # A flag of transformers and diffusers; a class of torch.
        has_flag = field(module, "gradient_checkpointing") is True
        if has_flag or type(module).__name__ == "CheckpointWrapper":
            is_checkpointing = True
    # A tensor subclass may override these methods, and run code.
    with torch._C.DisableTorchFunction():
        kinds = {one.dtype for one in tensors.values()}
        devices = {one.device for one in tensors.values()}
        # A lazy one has no size before the first forward.
        sizes = [(one.numel(), one.requires_grad) for one in tensors.values() if not is_lazy(one)]
    is_whole = is_whole and len(sizes) == len(tensors)
    return {
        "model_parameters": sum(size for size, _ in sizes) if is_whole else None,
        "model_trainable": sum(size for size, grad in sizes if grad) if is_whole else None,
        "model_tensors": len(tensors) if is_whole else None,
        "model_dtype": ",".join(sorted(map(short, kinds))) or None,
        "model_device": ",".join(sorted(map(str, devices))) or None,
        "model_checkpointing": is_checkpointing,
    }


def short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
