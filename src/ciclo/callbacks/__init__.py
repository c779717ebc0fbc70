"""Callbacks that are objects, one file a kind; each is loaded when it is used."""

from typing import TYPE_CHECKING, Any

HERE = (
    *("checkpoint", "early_stopping", "inner_loop", "keras_bar", "noop", "tqdm_bar"),
    *("wandb_logger", "LoopCallback", "LoopCallbackBase"),
)

if not TYPE_CHECKING:  # else a type checker would believe in every name

    def __getattr__(name: str) -> Any:
        if name not in HERE:
            raise AttributeError(f"module 'ciclo.callbacks' has no attribute {name!r}")
        import ciclo

        return getattr(ciclo, name)
