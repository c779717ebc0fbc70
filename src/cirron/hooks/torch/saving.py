"""A `checkpoint` span for the outermost call of a function that saves, to a file or a buffer.

Not for calls by a dataset or a model, nor on a thread that trains nothing: the loop does not wait
for those.

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
    from cirron.hooks.torch.passes import Lane

# The module to wait for, where in it the functions are ("" is the module itself), their names.
SAVERS = (
    ("torch", ("", "serialization"), ("save",)),
    ("torch.distributed.checkpoint", ("", "state_dict_saver"), ("save", "async_save")),
    ("safetensors.torch", ("",), ("save_file", "save_model")),
    ("accelerate", ("Accelerator",), ("save_state",)),
)

STORAGES = (torch.UntypedStorage, torch.TypedStorage)


class Saving:
    """Installed with the patches of torch's hook, which also remove it."""

    def __init__(self, watch: ImportWatch, patches: Patches, loops: Loops) -> None:
        self._watch = watch
        self._patches = patches
        self._loops = loops
        self.is_on = False  # the program may keep our functions after they are uninstalled

    def install(self) -> None:
        self.is_on = True
        for module, places, names in SAVERS:
            self._watch.when_imported(module, functools.partial(self._add, module, places, names))

    def uninstall(self) -> None:
        self.is_on = False

    def _add(self, module: str, places: tuple[str, ...], names: tuple[str, ...]) -> None:
        made: dict[Any, Any] = {}  # the same one in both places, which pickle compares
        for place in places:
            owner: Any = sys.modules[module]
            owner = getattr(owner, place, None) if place else owner
            for name in names:
                original = getattr(owner, name, None)
                if original is not None:  # some releases lack it
                    made[original] = made.get(original) or self._make(original)
                    self._patches.set(owner, name, made[original])

    def _make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            span, lane = None, self._loops.this_thread.find()
            # Pickling a tensor saves its storage.
            if self.is_on and not (args and isinstance(args[0], STORAGES)):
                with guard.quiet("torch save"):
                    span = begin(self._loops, lane)
            return engine.around(span, original, args, kwargs, self._end)

        run_uncompiled(save, with_callees=False)
        return save

    def _end(self, span: hot.Span) -> None:
        self._loops.close(span)
        engine.extend_step(span)


def begin(loops: Loops, lane: Lane) -> hot.Span | None:
    """None: this call is part of a fetch, a forward, or another checkpoint."""
    if lane.loading or lane.is_inside or "checkpoint" in hot.open_names():
        return None
    if lane.model is None and get_ident() != threading.main_thread().ident:
        return None
    loops.end_evaluations(lane)
    return hot.begin("checkpoint")
