"""The moments of the ready-made loops: keys of tasks, and method names of callbacks."""

from typing import Final

__all__ = [
    "on_train_start",
    "on_train_begin",
    "on_epoch_start",
    "on_epoch_begin",
    "on_reset_step",
    "on_train_batch_begin",
    "on_train_step",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_batch_begin",
    "on_test_step",
    "on_test_batch_end",
    "on_test_end",
    "on_predict_step",
    "on_epoch_end",
    "on_train_end",
]

on_train_start: Final = "on_train_start"
on_train_begin: Final = "on_train_begin"
on_epoch_start: Final = "on_epoch_start"
on_epoch_begin: Final = "on_epoch_begin"
on_reset_step: Final = "on_reset_step"
on_train_batch_begin: Final = "on_train_batch_begin"
on_train_step: Final = "on_train_step"
on_train_batch_end: Final = "on_train_batch_end"
on_test_begin: Final = "on_test_begin"
on_test_batch_begin: Final = "on_test_batch_begin"
on_test_step: Final = "on_test_step"
on_test_batch_end: Final = "on_test_batch_end"
on_test_end: Final = "on_test_end"
on_predict_step: Final = "on_predict_step"
on_epoch_end: Final = "on_epoch_end"
on_train_end: Final = "on_train_end"

# Other names of moments; the short ones are the method names of a state.
ALIASES = {
    on_train_begin: on_train_start,
    on_epoch_begin: on_epoch_start,
    "reset_step": on_reset_step,
    "train_step": on_train_step,
    "test_step": on_test_step,
    "predict_step": on_predict_step,
}
STEPS = {moment: name for name, moment in ALIASES.items() if not name.startswith("on_")}
MOMENTS = tuple(name for name in __all__ if name not in ALIASES)
