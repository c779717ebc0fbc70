"""Ciclo: training loops as a small language.

>>> state, history, elapsed = ciclo.loop(state, dataset, {ciclo.every(1): train_step}, stop=1000)

The public list and nothing else. The core is bound directly; callbacks and the ready-made loops are
loaded on first use. No framework is imported before it is needed.
"""

from typing import TYPE_CHECKING

from ciclo._seam import __version__
from ciclo.elapsed import Elapsed, Period, elapse
from ciclo.errors import (
    CallbackError,
    CheckpointError,
    CicloError,
    MissingDependencyError,
    MonitorError,
    PeriodError,
)
from ciclo.history import History, history
from ciclo.interrupts import Preempted
from ciclo.logs import Logs, logs
from ciclo.loop import LoopState, Result, loop
from ciclo.schedules import Schedule, after, always, at, every, never, piecewise

if TYPE_CHECKING:
    from ciclo import managed
    from ciclo._compat import LoopCallbackBase, LoopElement, callback, inject
    from ciclo.callbacks.adapters import clu_action, keras_callback, register_adapter
    from ciclo.callbacks.bars import keras_bar, rich_bar, tqdm_bar
    from ciclo.callbacks.base import LoopCallback, noop
    from ciclo.callbacks.inner import inner_loop
    from ciclo.callbacks.loggers import (
        Logger,
        console_logger,
        mlflow_logger,
        tensorboard_logger,
        trackio_logger,
        wandb_logger,
    )
    from ciclo.callbacks.meters import ema, throughput
    from ciclo.callbacks.saving import checkpoint
    from ciclo.callbacks.stopping import NotFiniteError, early_stopping, nan_guard
    from ciclo.jax.equinox import create_equinox_state, equinox_module
    from ciclo.jax.haiku import create_haiku_state
    from ciclo.jax.linen import create_flax_state
    from ciclo.jax.managed import ManagedState
    from ciclo.jax.model import FlaxState
    from ciclo.jax.nnx import create_nnx_state, nnx_module
    from ciclo.jax.strategies import (
        JIT,
        DataParallel,
        Eager,
        Strategy,
        get_strategy,
        register_strategy,
    )
    from ciclo.loops import fit, predict_loop, test_loop, train_loop
    from ciclo.moments import (
        on_epoch_begin,
        on_epoch_end,
        on_epoch_start,
        on_predict_step,
        on_reset_step,
        on_test_batch_begin,
        on_test_batch_end,
        on_test_begin,
        on_test_end,
        on_test_step,
        on_train_batch_begin,
        on_train_batch_end,
        on_train_begin,
        on_train_end,
        on_train_start,
        on_train_step,
    )
    from ciclo.torch.create import create_torch_state

# Where the names are that are loaded on first use.
LAZY = {
    "ciclo._compat": ("LoopCallbackBase", "LoopElement", "callback", "inject"),
    "ciclo.callbacks.adapters": ("clu_action", "keras_callback", "register_adapter"),
    "ciclo.callbacks.bars": ("keras_bar", "rich_bar", "tqdm_bar"),
    "ciclo.callbacks.base": ("LoopCallback", "noop"),
    "ciclo.callbacks.saving": ("checkpoint",),
    "ciclo.callbacks.inner": ("inner_loop",),
    "ciclo.callbacks.loggers": (
        "Logger",
        "console_logger",
        "mlflow_logger",
        "tensorboard_logger",
        "trackio_logger",
        "wandb_logger",
    ),
    "ciclo.callbacks.meters": ("ema", "throughput"),
    "ciclo.callbacks.stopping": ("NotFiniteError", "early_stopping", "nan_guard"),
    "ciclo.loops": ("fit", "predict_loop", "test_loop", "train_loop"),
    "ciclo.jax.managed": ("ManagedState",),
    "ciclo.moments": (
        "on_epoch_begin",
        "on_epoch_end",
        "on_epoch_start",
        "on_predict_step",
        "on_reset_step",
        "on_test_batch_begin",
        "on_test_batch_end",
        "on_test_begin",
        "on_test_end",
        "on_test_step",
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_train_begin",
        "on_train_end",
        "on_train_start",
        "on_train_step",
    ),
    "ciclo.jax.equinox": ("create_equinox_state", "equinox_module"),
    "ciclo.jax.linen": ("create_flax_state",),
    "ciclo.jax.haiku": ("create_haiku_state",),
    "ciclo.jax.model": ("FlaxState",),
    "ciclo.jax.nnx": ("create_nnx_state", "nnx_module"),
    "ciclo.torch.create": ("create_torch_state",),
    "ciclo.jax.strategies": (
        "JIT",
        "DataParallel",
        "Eager",
        "Strategy",
        "get_strategy",
        "register_strategy",
    ),
}

# Modules that are there without an import of their own.
SUBMODULES = (
    "callbacks",
    "logging",
    "loops",
    "managed",
    "strategies",
    "timetracking",
    "types",
    "utils",
)

__all__ = [
    # time and schedules
    "Elapsed",
    "Period",
    "Schedule",
    "after",
    "always",
    "at",
    "elapse",
    "every",
    "never",
    "piecewise",
    # logs
    "History",
    "Logs",
    "history",
    "logs",
    # loops
    "LoopState",
    "Result",
    "fit",
    "loop",
    "on_epoch_begin",
    "on_epoch_end",
    "on_epoch_start",
    "on_predict_step",
    "on_reset_step",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_test_begin",
    "on_test_end",
    "on_test_step",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_train_begin",
    "on_train_end",
    "on_train_start",
    "on_train_step",
    "predict_loop",
    "test_loop",
    "train_loop",
    # callbacks
    "Logger",
    "LoopCallback",
    "LoopCallbackBase",
    "LoopElement",
    "callback",
    "checkpoint",
    "clu_action",
    "console_logger",
    "early_stopping",
    "ema",
    "inject",
    "inner_loop",
    "keras_bar",
    "keras_callback",
    "mlflow_logger",
    "nan_guard",
    "noop",
    "register_adapter",
    "rich_bar",
    "tensorboard_logger",
    "throughput",
    "tqdm_bar",
    "trackio_logger",
    "wandb_logger",
    # states
    "DataParallel",
    "Eager",
    "FlaxState",
    "JIT",
    "ManagedState",
    "Strategy",
    "create_equinox_state",
    "create_flax_state",
    "create_haiku_state",
    "create_nnx_state",
    "create_torch_state",
    "equinox_module",
    "get_strategy",
    "managed",
    "nnx_module",
    "register_strategy",
    # errors
    "CallbackError",
    "CheckpointError",
    "CicloError",
    "MissingDependencyError",
    "MonitorError",
    "NotFiniteError",
    "PeriodError",
    "Preempted",
    "__version__",
]


if not TYPE_CHECKING:  # else a type checker would believe in every name

    def __getattr__(name: str) -> object:
        if name in SUBMODULES:
            import importlib

            return importlib.import_module(f"ciclo.{name}")
        for module, names in LAZY.items():
            if name in names:
                import importlib

                value = getattr(importlib.import_module(module), name)
                globals()[name] = value  # from now on the public name is the thing itself
                return value
        raise AttributeError(f"module 'ciclo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
