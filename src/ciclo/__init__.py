"""Ciclo: training loops as a small language.

>>> state, history, elapsed = ciclo.loop(state, dataset, {ciclo.every(1): train_step}, stop=1000)

The public list and nothing else. The core is bound directly; callbacks and the ready-made loops are
loaded on first use. No framework is imported before it is needed.
"""

# ruff: noqa: F403  each module says by `__all__` what of it is public

from typing import TYPE_CHECKING

from ciclo import elapsed, errors, interrupts, moments, schedules
from ciclo._seam import __version__
from ciclo.elapsed import *
from ciclo.errors import *
from ciclo.history import History, history
from ciclo.interrupts import *
from ciclo.logs import Logs, LogsLike, logs
from ciclo.loop import LoopState, Result, loop
from ciclo.moments import *
from ciclo.schedules import *

if TYPE_CHECKING:
    from ciclo import managed
    from ciclo._compat import *
    from ciclo.callbacks.adapters import *
    from ciclo.callbacks.bars import *
    from ciclo.callbacks.base import *
    from ciclo.callbacks.inner import *
    from ciclo.callbacks.loggers import *
    from ciclo.callbacks.meters import *
    from ciclo.callbacks.saving import *
    from ciclo.callbacks.stopping import *
    from ciclo.jax.equinox import *
    from ciclo.jax.haiku import *
    from ciclo.jax.linen import *
    from ciclo.jax.managed import ManagedState as ManagedState
    from ciclo.jax.model import FlaxState as FlaxState
    from ciclo.jax.nnx import *
    from ciclo.jax.strategies import *
    from ciclo.loops import *
    from ciclo.torch.create import *

# Names that are loaded on first use, by module.
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

# Modules that need no import of their own.
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

__all__ = ["History", "Logs", "LogsLike", "LoopState", "Result", "__version__"]
__all__ += ["history", "logs", "loop", "managed"]
__all__ += elapsed.__all__
__all__ += errors.__all__
__all__ += interrupts.__all__
__all__ += moments.__all__
__all__ += schedules.__all__
__all__ += [name for names in LAZY.values() for name in names]


if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name in SUBMODULES:
            import importlib

            return importlib.import_module(f"ciclo.{name}")
        for module, names in LAZY.items():
            if name in names:
                import importlib

                value = getattr(importlib.import_module(module), name)
                globals()[name] = value  # the next access is direct
                return value
        from ciclo.errors import did_you_mean

        hint = did_you_mean(name, __all__)
        raise AttributeError(f"module 'ciclo' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__
