"""A `checkpoint` span for the outermost call of a function that saves, to a file or a buffer.

Calls by a dataset or a model, and on a thread that trains nothing, have no span, because the loop
does not wait for them.

Runs on the user's threads.
"""

from __future__ import annotations

import functools
import sys
import threading
from _thread import get_ident
from typing import TYPE_CHECKING, Any

import torch

from cirron import guard
from cirron.hooks import engine
from cirron.hooks.torch.compiling import run_uncompiled
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.hooks.patch import ImportWatch, Patches
    from cirron.hooks.torch.loops import Loops

# A module, the places of its functions ("" is the module itself), and their names.
SAVERS = (
    ("torch", ("", "serialization"), ("save",)),
    ("torch.distributed.checkpoint", ("", "state_dict_saver"), ("save", "async_save")),
    ("safetensors.torch", ("",), ("save_file", "save_model")),
    ("accelerate", ("Accelerator",), ("save_state",)),
)

STORAGES = (torch.UntypedStorage, torch.TypedStorage)


def install(watch: ImportWatch, patches: Patches, loops: Loops) -> None:
    """Wraps the functions, once their modules are imported. `patches` removes the wrappers."""
    for module, places, names in SAVERS:
        then = functools.partial(add, patches, loops, module, places, names)
        watch.when_imported(module, then)


def add(
    patches: Patches, loops: Loops, module: str, places: tuple[str, ...], names: tuple[str, ...]
) -> None:
    # One wrapper for both places, because pickle compares them.
    wrapper_of = functools.cache(functools.partial(wrap, loops))
    for place in places:
        owner: Any = sys.modules[module]
        owner = getattr(owner, place, None) if place else owner
        for name in names:
            original = getattr(owner, name, None)
            if original is not None:  # some releases lack it
                patches.set(owner, name, wrapper_of(original))


def wrap(loops: Loops, original: Callable[..., Any]) -> Callable[..., Any]:
    def end(span: hot.Span) -> None:
        loops.close(span)
        engine.extend_step(span)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        span = None
        # Pickling a tensor saves its storage.
        if loops.is_on and not (args and isinstance(args[0], STORAGES)):
            with guard.quiet("torch save"):
                span = begin(loops)
        return engine.around(span, original, args, kwargs, end)

    run_uncompiled(save, with_callees=False)
    return save


def begin(loops: Loops) -> hot.Span | None:
    """Returns None if this call is part of a fetch, a forward, or another checkpoint."""
    lane = loops.this_thread.find()
    if lane.loading or lane.is_inside or "checkpoint" in hot.open_names():
        return None
    if lane.model is None and get_ident() != threading.main_thread().ident:
        return None
    loops.end_evaluations(lane)
    return hot.begin("checkpoint")
