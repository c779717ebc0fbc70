"""Values that the program logs with TensorBoard, W&B, MLflow, Comet or Aim become marks.

The table of loggers has the methods that take the values, with their parameters. The logger's
arguments and results are not changed. Only scalars are marked, on the innermost open span, with the
step that was logged. A value is marked once, even if the program or another hook marks it too, or
if it goes to two loggers. A slow call is also a `logging` span.

Runs on the user's threads. No logger is imported here: each is hooked when the program imports it.
"""

from __future__ import annotations

import sys
import threading
from _thread import _local, get_ident
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron import guard
from cirron.hooks.engine import Wrapper, extend_step, scalar_of
from cirron.record import hot

if TYPE_CHECKING:
    from types import FrameType
    from typing import TypeAlias

    from cirron.hooks import Hooks, Snapshots
    from cirron.hooks.engine import Call
    from cirron.settings import Settings

    Values: TypeAlias = list[tuple[Any, Any, Any]]  # name, value, step

MAX_VALUES = 1_000  # per call; the rest is ignored
# A shorter call has no span. A writer that only queues its values takes a tenth of this.
LONG_NS = 100_000

# Modules in which a framework passes values to trackers: if it is hooked, its hook marks them.
TELLERS = {
    "transformers.trainer_callback": "transformers",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": "lightning",
    "lightning.pytorch.loggers.utilities": "lightning",  # logs -1 as a placeholder
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector": "pytorch_lightning",
    "pytorch_lightning.loggers.utilities": "pytorch_lightning",
    "keras.src.callbacks.callback_list": "keras",
}
NO_NAMES: dict[str, str | None] = {}
# The parameters of loggers that are read.
NAMES = "tag", "main_tag", "key", "name", "prefix"
VALUES = "scalar_value", "tag_scalar_dict", "value", "data", "dic", "metrics"
STEPS = "global_step", "step"


class Logger(NamedTuple):
    """A logging library."""

    name: str
    module: str  # whose import triggers the installation
    owner: str  # the class in it
    methods: dict[str, str]  # with their parameters


class ThisThread(_local):
    is_logging = False  # inside a logger's method, which may call itself or another logger


class LoggersHook(Wrapper):
    """Installs and removes the hooks."""

    name = what = "loggers"

    def __init__(self, settings: Settings, snapshots: Snapshots, hooks: Hooks) -> None:
        super().__init__(settings, snapshots)
        self._hooks = hooks
        self._this_thread = ThisThread()

    def _replace(self) -> None:
        for logger in LOGGERS:
            self._watch.when_imported(logger.module, partial(self._add, logger))

    def uninstall(self) -> None:
        super().uninstall()
        hot.keep_names(False)

    def _add(self, logger: Logger) -> None:
        with guard.quiet(self.what):
            module = sys.modules[logger.module]
            kind: type | None = getattr(module, logger.owner, None)
            if kind is None:  # another release
                return
            for name, parameters in logger.methods.items():
                definer = next((one for one in kind.__mro__ if name in vars(one)), None)
                if definer is not None:
                    self._wrap(definer, name, partial(self._log, logger.name, f"self {parameters}"))
                # `wandb.log` is a bound method of the current run, taken before our patch.
                if isinstance(getattr(vars(module).get(name), "__self__", None), kind):
                    self._wrap(module, name, partial(self._log, logger.name, parameters))
            hot.keep_names(True)

    def _log(self, logger: str, parameters: str, call: Call) -> Any:
        this_thread = self._this_thread
        if this_thread.is_logging or hot.off:
            return call()
        this_thread.is_logging = True
        try:
            self._tell(self._mark, sys._getframe(2), logger, parameters, call)
            began = hot.now()
            result = call()
            if (ended := hot.now()) - began >= LONG_NS:
                self._tell(add_span, logger, began, ended)
            return result
        finally:
            this_thread.is_logging = False

    def _mark(self, caller: FrameType, logger: str, parameters: str, call: Call) -> None:
        if is_passed_on(caller, self._hooks.installed):
            return
        try:
            found = read(parameters, call.args, call.keywords)
        except AttributeError:  # the logger will raise this too
            return
        span = hot.innermost()
        for one in found:
            mark(span, logger, *one)


def mark(span: hot.Span, logger: str, name: Any, given: Any, step: Any) -> None:
    """Marks a scalar, unless the program, a hook or another logger has marked it in this span."""
    if not issubclass(type(name), str) or issubclass(type(given), str):
        return
    if getattr(span, "marked", NO_NAMES).get(name, logger) != logger:
        return
    scalar, at = scalar_of(given), scalar_of(step)
    if scalar is None:
        return
    attrs: dict[str, Any] = {"logger": logger}
    if isinstance(at, (int, float)):
        attrs["step"] = at
    hot.mark(name, scalar, **attrs)
    names = getattr(span, "marked", NO_NAMES)
    if name in names:
        names[name] = logger


def add_span(logger: str, began: int, ended: int) -> None:
    """Records a call that has ended, unless it was in a background thread outside any span."""
    if hot.innermost() is hot.root and get_ident() != threading.main_thread().ident:
        return
    span = hot.begin("logging", None, {"logger": logger}, at=began)
    if hot.device_clock is not None:
        hot.device_clock.drop(span)  # too late to measure it
    hot.close(span, ended)
    extend_step(span)


def is_passed_on(caller: FrameType | None, hooked: list[str]) -> bool:
    """Whether a hooked framework passes the values to the logger: its hook marks them already.

    In that case, only code of the framework and of loggers is between the two on the stack.
    """
    while caller is not None:
        module = caller.f_globals.get("__name__", "")
        if TELLERS.get(module) in hooked:
            return True
        if module.partition(".")[0] not in BETWEEN:
            return False
        caller = caller.f_back
    return False


# -- how each logger is called -------------------------------------------------------------------


def read(parameters: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
    """The values of a call: one, those of a dict, or those of MLflow's list of metrics."""
    arguments = dict(zip(parameters.split(), args, strict=False)) | kwargs
    name, given, step = (
        next((arguments[one] for one in known if one in arguments), None)
        for known in (NAMES, VALUES, STEPS)
    )
    if isinstance(given, (list, tuple)):  # reading an iterator would use it up
        return [(one.key, one.value, one.step) for one in given[:MAX_VALUES]]
    return flatten(given, step, name) if isinstance(given, dict) else [(name, given, step)]


def flatten(values: dict[Any, Any], step: Any, prefix: Any = None) -> Values:
    """The values of a nested dict, with the names joined by slashes."""
    found: Values = []
    dicts = [("" if prefix is None else f"{prefix}/", values)]
    for before, inner in dicts:  # grows during the loop
        for name, given in list(dict.items(inner))[:MAX_VALUES]:
            if len(found) + len(dicts) > MAX_VALUES:  # a dict may contain itself
                return found
            if not issubclass(type(name), str):
                continue
            if issubclass(type(given), dict):
                dicts.append((f"{before}{name}/", given))
            else:
                found.append((before + name, given, step))
    return found


# Hooked for their duration only.
SLOW = "add_histogram", "add_image", "add_images", "add_figure", "add_embedding", "flush"
TENSORBOARD = dict.fromkeys(SLOW, "") | {
    "add_scalar": "tag scalar_value global_step",
    "add_scalars": "main_tag tag_scalar_dict global_step",
}
# The functions of `mlflow`, its autologging and Lightning's logger all use the client.
MLFLOW = {"log_metric": "run_id key value timestamp step", "log_batch": "run_id metrics"}
COMET = {"log_metric": "name value step", "log_metrics": "dic prefix step"}

LOGGERS = (
    Logger("tensorboard", "torch.utils.tensorboard", "SummaryWriter", TENSORBOARD),
    Logger("tensorboardX", "tensorboardX", "SummaryWriter", TENSORBOARD),
    Logger("wandb", "wandb", "Run", {"log": "data step"}),
    Logger("mlflow", "mlflow", "MlflowClient", MLFLOW),
    Logger("comet", "comet_ml", "BaseExperiment", COMET),
    Logger("aim", "aim", "Run", {"track": "value name step"}),
)
# The packages that may be on the stack between a module of `TELLERS` and a logger.
BETWEEN = {"cirron", "lightning_fabric", "lightning_utilities"}
BETWEEN |= {module.partition(".")[0] for module in (*TELLERS, *(one.module for one in LOGGERS))}
