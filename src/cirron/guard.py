"""The one place that catches our own mistakes.

Code of ours that runs inside somebody's training run is wrapped in `guard.quiet("what it does")`. A
mistake there is counted, logged once per kind, and the run goes on with less telemetry. In tests it
is re-raised, so that it cannot hide: `cirron.testing` and this project's own tests set `strict`.
"""

from __future__ import annotations

from collections import Counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType

strict = False
# Says something elsewhere, where a handler of the user's that blocks holds up nobody. False: here.
relay: Callable[[Callable[[], None]], bool] | None = None
errors: Counter[str] = Counter()

# Of an exception, whatever its class would answer.
TRACE: Callable[[BaseException], TracebackType | None] = BaseException.__dict__[
    "__traceback__"
].__get__


class quiet:  # noqa: N801  reads as a statement: with guard.quiet("drain"):
    """Swallows, counts and logs an exception of ours; lets Ctrl-C and exits through."""

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
        # Not isinstance(), which may ask a user's exception for its class.
        if error is None or not issubclass(type(error), self.swallows):
            return False
        if strict or is_of_handler(codes_of(error)):
            return False
        caught(self.what, error)
        return True


class contained(quiet):  # noqa: N801  as above
    """The same on a thread of ours, which nothing may end: not a foreign `SystemExit` either."""

    __slots__ = ()
    swallows = BaseException


def codes_of(error: BaseException) -> list[CodeType]:
    """The functions that an exception has come through, outermost first."""
    codes = []
    trace = TRACE(error)
    while trace is not None:
        codes.append(trace.tb_frame.f_code)
        trace = trace.tb_next
    return codes


def is_of_handler(codes: list[CodeType]) -> bool:
    """Whether a signal handler of the program is among these functions.

    What it raises while code of ours runs is for the program: a time limit, for one.
    """
    import signal

    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    known = [getattr(getattr(handler, "func", handler), "__code__", None) for handler in handlers]
    return any(code in known for code in codes)


def caught(what: str, error: BaseException) -> None:
    """Counts a mistake and logs the first of its kind; raises it in tests.

    What `quiet` does, for an `except` in code that runs at every step, where a `with` costs more
    than the rest.
    """
    if strict or is_of_handler(codes_of(error)):
        raise error
    kind = f"{what}: {type(error).__name__}"
    errors[kind] += 1
    if errors[kind] == 1:
        warn(
            "internal error in %s; your program is fine and goes on with less telemetry",
            what,
            error=error,
        )


def warn(message: str, *args: object, error: BaseException | None = None) -> None:
    """Says something to the user on the `cirron` logger."""
    if relay is None or not relay(lambda: log(message, args, error)):
        log(message, args, error)


def log(message: str, args: tuple[object, ...], error: BaseException | None) -> None:
    import logging

    logging.getLogger("cirron").warning("cirron: " + message, *args, exc_info=error)
