"""What is saved becomes a `checkpoint` span: the outermost call of the functions that save.

Wherever it goes, a file or a buffer: the loop waits for it. Not what a dataset or a model saves
while it works, and not what a thread saves that trains nothing: nobody waits for that.

Runs on the user's threads.
"""

from __future__ import annotations

import functools
import sys
import threading
from _thread import get_ident
from typing import TYPE_CHECKING, Any

from cirron import guard
from cirron.hooks import engine
from cirron.hooks.torch.compiling import run_uncompiled
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.hooks.patch import ImportWatch, Patches
    from cirron.hooks.torch.loops import Lane, Loops

# The module whose import is waited for, where in it and below it the functions are, and those.
SAVERS = (
    ("torch", ("", "serialization"), ("save",)),
    ("torch.distributed.checkpoint", ("", "state_dict_saver"), ("save", "async_save")),
    ("safetensors.torch", ("",), ("save_file", "save_model")),
    ("accelerate", ("Accelerator",), ("save_state",)),
)


class Saving:
    """Installs itself with the patches of torch's hook, which also take it off."""

    def __init__(self, watch: ImportWatch, patches: Patches, loops: Loops) -> None:
        self._watch = watch
        self._patches = patches
        self._loops = loops
        self.is_on = False  # somebody may hold our functions after they are taken off

    def install(self) -> None:
        self.is_on = True
        for module, places, names in SAVERS:
            self._watch.when_imported(module, functools.partial(self._add, module, places, names))

    def uninstall(self) -> None:
        self.is_on = False

    def _add(self, module: str, places: tuple[str, ...], names: tuple[str, ...]) -> None:
        made: dict[Any, Any] = {}  # one for a function that is in two places: pickle looks it up
        for place in places:
            owner: Any = sys.modules[module]
            owner = getattr(owner, place, None) if place else owner
            for name in names:
                original = getattr(owner, name, None)
                if original is not None:  # else another release
                    made[original] = made.get(original) or self._make(original)
                    self._patches.set(owner, name, made[original])

    def _make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            span, lane = None, self._loops.this_thread.lane
            if self.is_on:
                try:
                    span = begin(lane)
                except Exception as error:  # noqa: BLE001  protects the program's checkpoint
                    guard.caught("torch save", error)
            return engine.around(span, original, args, kwargs, self._loops.close)

        run_uncompiled(save, with_callees=False)
        return save


def begin(lane: Lane) -> hot.Span | None:
    """The span of what is saved now; None: it is a part of something else."""
    if lane.loading or lane.is_inside or "checkpoint" in hot.open_names():
        return None
    if lane.model is None and get_ident() != threading.main_thread().ident:
        return None
    lane.free.end_evaluation()
    return hot.begin("checkpoint")
