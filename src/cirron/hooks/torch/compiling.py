"""`torch.compile` and the hooks.

Compiling has a span. Compiled code contains no hooks: Dynamo goes straight to a module's forward,
and does not compile the hooks where it returns to Python.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cirron import guard
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.hooks.patch import ImportWatch, Patches


class Compiling:
    """Records compiles, and keeps the hooks out of compiled code."""

    def __init__(self, close: Callable[[hot.Span], None]) -> None:
        self._close = close
        self._open: list[hot.Span] = []

    def install(self, watch: ImportWatch, patches: Patches, original: Any) -> None:
        """`original`: `nn.Module.__call__` before it was replaced."""
        go_straight = partial(go_straight_to_forward, patches, original)
        watch.when_imported("torch._dynamo.callback", self._add_callbacks)
        watch.when_imported("torch._dynamo.variables.nn_module", go_straight)
        # Compiled code has no value to mark, and a call of `ci.mark` would break the graph, or fail
        # with `fullgraph=True`.
        watch.when_imported("torch._dynamo.config", lambda: ignored_functions().add(hot.mark))

    def _add_callbacks(self) -> None:
        handler = sys.modules["torch._dynamo.callback"].callback_handler
        handler.register_start_callback(self._before)
        handler.register_end_callback(self._after)

    def uninstall(self) -> None:
        ignored_functions().discard(hot.mark)
        module = sys.modules.get("torch._dynamo.callback")
        if module is not None and self._before in module.callback_handler.start_callbacks:
            module.callback_handler.remove_start_callback(self._before)
            module.callback_handler.remove_end_callback(self._after)

    def _before(self, *_: Any) -> None:
        with guard.quiet("torch compile"):
            self._open.append(hot.begin("compile"))

    def _after(self, *_: Any) -> None:
        with guard.quiet("torch compile"):
            if self._open:
                self._close(self._open.pop())


def go_straight_to_forward(patches: Patches, original: Any) -> None:
    """Makes Dynamo go straight to a module's forward, as with torch's own `__call__`.

    Otherwise it would trace through ours, with the same result, and compile again once ours is
    removed.
    """
    module, name = sys.modules["torch._dynamo.variables.nn_module"], "unpatched_nn_module_call"
    ours = torch.nn.Module.__call__
    if getattr(module, name, None) in (original, ours):  # imported before or after ours was set
        patches.set(module, name, ours, original)


def ignored_functions() -> set[Any]:
    """The functions that Dynamo skips. Some releases of torch have no such list."""
    config: Any = sys.modules.get("torch._dynamo.config")
    return getattr(config, "ignore_logging_functions", set())


def run_uncompiled(function: Any, *, with_callees: bool) -> None:
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # an older torch compiles our functions, which costs time once
        return
    callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))
