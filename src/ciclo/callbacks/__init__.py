"""Callbacks that are objects, one file per kind; each is loaded on use."""

from typing import TYPE_CHECKING, Any

HERE = (
    *("checkpoint", "early_stopping", "inner_loop", "keras_bar", "noop", "tqdm_bar"),
    *("wandb_logger", "LoopCallback", "LoopState"),
)
OLD = ("CallbackOutput", "LoopCallbackBase", "OptimizationMode")  # where 0.1.9 has them

if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in HERE + OLD:
            raise AttributeError(f"module 'ciclo.callbacks' has no attribute {name!r}")
        import ciclo
        from ciclo import _compat

        return getattr(_compat if name in OLD else ciclo, name)
