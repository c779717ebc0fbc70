"""What torch.compile and our hooks have to know of each other.

Time that it takes to compile is a span of its own. Compiled code holds nothing of ours: Dynamo
goes straight to a module's forward, and runs our functions as they are where it comes back to
Python.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from cirron import guard
from cirron.record import hot

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron.hooks.patch import ImportWatch, Patches


class Compiling:
    """Sees compiles, and keeps us out of them."""

    def __init__(
        self, watch: ImportWatch, patches: Patches, close: Callable[[hot.Span], None]
    ) -> None:
        self._watch = watch
        self._patches = patches
        self._close = close
        self._open: list[hot.Span] = []

    def install(self, original: Any) -> None:
        """`original` is what `nn.Module.__call__` was; it is ours by now."""
        self._watch.when_imported("torch._dynamo.callback", self._see)
        self._watch.when_imported(
            "torch._dynamo.variables.nn_module", lambda: self._be_transparent(original)
        )
        self._watch.when_imported("torch._dynamo.config", self._leave_marks_out)

    def _leave_marks_out(self) -> None:
        """Has Dynamo skip `ci.mark`: inside compiled code there is no value to take, and a call
        into Python would break the graph, or fail where the program wants it whole.
        """
        if (ignored := ignored_functions()) is not None:
            ignored.add(hot.mark)

    def _be_transparent(self, original: Any) -> None:
        """Has Dynamo go straight to a module's forward, as it does when `__call__` is torch's own.

        It would trace through ours otherwise, with the same result, and compile anew once ours is
        taken off.
        """
        module, name = sys.modules["torch._dynamo.variables.nn_module"], "unpatched_nn_module_call"
        ours = torch.nn.Module.__call__
        if getattr(module, name, None) is ours:  # imported since: it takes ours for torch's own
            setattr(module, name, original)
        if getattr(module, name, None) is original:
            self._patches.set(module, name, ours)

    def _see(self) -> None:
        handler = sys.modules["torch._dynamo.callback"].callback_handler
        handler.register_start_callback(self._before)
        handler.register_end_callback(self._after)

    def uninstall(self) -> None:
        if (ignored := ignored_functions()) is not None:
            ignored.discard(hot.mark)
        module = sys.modules.get("torch._dynamo.callback")
        if module is None:
            return
        handler = module.callback_handler
        if self._before in handler.start_callbacks:
            handler.remove_start_callback(self._before)
        if self._after in handler.end_callbacks:
            handler.remove_end_callback(self._after)

    def _before(self, *_: Any) -> None:
        with guard.quiet("torch compile"):
            self._open.append(hot.begin("compile"))

    def _after(self, *_: Any) -> None:
        with guard.quiet("torch compile"):
            if self._open:
                self._close(self._open.pop())


def ignored_functions() -> set[Any] | None:
    """The calls that Dynamo leaves out; None for a torch that has no such list."""
    return getattr(sys.modules.get("torch._dynamo.config"), "ignore_logging_functions", None)


def run_uncompiled(function: Any, *, with_callees: bool) -> None:
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # an older torch: what it makes of our functions costs time once
        return
    callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))
