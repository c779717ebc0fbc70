"""The one place that catches cirron's internal errors.

Code that runs inside a training run is wrapped in `guard.quiet("what it does")`. An error there is
counted and logged once per kind, and the run continues with less telemetry. In tests it is raised
again, so that it cannot hide: `cirron.testing` and this project's own tests set `strict`.
"""

from __future__ import annotations

from collections import Counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType

strict = False
# Logs on another thread, where the user's handler may block. Returns False to log right here.
relay: Callable[[Callable[[], None]], bool] | None = None
errors: Counter[str] = Counter()

# The traceback of an exception, bypassing its class.
TRACE: Callable[[BaseException], TracebackType | None] = BaseException.__dict__[
    "__traceback__"
].__get__


class quiet:  # noqa: N801  reads as a statement: with guard.quiet("drain"):
    """Swallows, counts and logs an internal error; lets Ctrl-C and SystemExit through."""

    __slots__ = ("what",)
    swallows: type[BaseException] = Exception

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        # Not isinstance(), which may call `__class__` of a user's exception.
        if error is None or not issubclass(type(error), self.swallows):
            return False
        if strict or is_of_handler(codes_of(error)):
            return False
        caught(self.what, error)
        return True


class contained(quiet):  # noqa: N801  as above
    """The same for cirron's own threads, which nothing may end, not even a SystemExit."""

    __slots__ = ()
    swallows = BaseException


def codes_of(error: BaseException) -> list[CodeType]:
    """The functions in the traceback of an exception, outermost first."""
    codes = []
    trace = TRACE(error)
    while trace is not None:
        codes.append(trace.tb_frame.f_code)
        trace = trace.tb_next
    return codes


def is_of_handler(codes: list[CodeType]) -> bool:
    """Whether a signal handler of the program is among these functions.

    What it raises while cirron's code runs is meant for the program, such as a time limit.
    """
    import signal

    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    known = [getattr(getattr(handler, "func", handler), "__code__", None) for handler in handlers]
    return any(code in known for code in codes)


def caught(what: str, error: BaseException) -> None:
    """Counts an internal error and logs the first of its kind; raises it in tests.

    For code that runs at every step, where the `with` of `quiet` would cost too much.
    """
    if strict or is_of_handler(codes_of(error)):
        raise error
    kind = f"{what}: {type(error).__name__}"
    errors[kind] += 1
    if errors[kind] == 1:
        warn(
            "internal error in %s; your program is fine and continues with less telemetry",
            what,
            error=error,
        )


def warn(message: str, *args: object, error: BaseException | None = None) -> None:
    """Logs a warning on the `cirron` logger."""
    if relay is None or not relay(lambda: log(message, args, error)):
        log(message, args, error)


def log(message: str, args: tuple[object, ...], error: BaseException | None) -> None:
    import logging

    try:
        logging.getLogger("cirron").warning("cirron: " + message, *args, exc_info=error)
    except Exception as failure:  # a logging handler that fails must not end the training
        if is_of_handler(codes_of(failure)):
            raise
        errors[f"warning: {type(failure).__name__}"] += 1
