"""Which code asks for an item, and how a loop was left, from frames, bytecode and references.

Nothing else in `hooks/` reads these. Each function names the program in `tests/real/programs/` that
needs it.

Runs on the user's threads.
"""

from __future__ import annotations

import gc
import os
import sys
from dis import opmap
from inspect import CO_GENERATOR
from types import FrameType, GeneratorType
from typing import TYPE_CHECKING, Any

import torch

from cirron.record import hot
from cirron.record.attrs import describe_error
from cirron.record.value import MAX_TEXT_BYTES

if TYPE_CHECKING:
    from types import CodeType

FOR_ITER = opmap["FOR_ITER"]
# Instructions that release the iterator of a `for` without an error: `break` and `return` pop it,
# or the loop has ended.
LEAVES = {opmap.get(name) for name in ("POP_TOP", "POP_ITER", "END_FOR", "FOR_ITER", "SWAP")}
# The function in which torch runs the step of each optimizer.
STEP_CODE = torch.optim.Optimizer.profile_hook_step(len).__code__
WITHIN = hot.within.__code__
# The traceback of an exception that propagates ends where it was last caught.
ADDS_FRAMES_LATE = sys.version_info < (3, 12)
HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def outside(frame: FrameType) -> FrameType:
    """The nearest frame outside of the hooks: that of the code that asks for an item."""
    while frame.f_back is not None:
        if not (frame.f_code is WITHIN or frame.f_code.co_filename.startswith(HERE)):
            break
        frame = frame.f_back
    return frame


def is_for(asker: FrameType) -> bool:
    """Whether a `for` asks, and not a call such as `next`.

    A call may want a single item (`peek_and_mean`), and its caller may go on after an error
    (`broken_items`, `prefetcher_by_hand`).
    """
    return asker.f_code.co_code[asker.f_lasti] == FOR_ITER


def is_generator(asker: FrameType) -> bool:
    """Whether a generator asks: it may fetch an item before the last one is used
    (`prefetch_loader`).
    """
    return bool(asker.f_code.co_flags & CO_GENERATOR)


def past_generators(asker: FrameType) -> FrameType:
    """The code that asks a generator for an item, if that is what asks for one
    (`validations_by_next`).
    """
    while asker.f_back is not None and is_generator(asker):
        asker = asker.f_back
    return asker


def has_ended(generator: CodeType, iterator: Any, is_asking: bool) -> bool:
    """Whether a generator that has asked for the items has ended (`engine_class`). Else it runs, or
    it waits at a `yield` and holds the iterator (`cycled_generator`).

    `is_asking`: another one of its kind asks for other items right now. Looking for who holds an
    iterator takes milliseconds, once an epoch.
    """
    if running(generator) > is_asking:
        return False
    holders = (GeneratorType, FrameType)
    return not any(isinstance(one, holders) for one in gc.get_referrers(iterator))


def references_to(iterator: Any) -> int:
    """The number of references. A `break` drops that of its `for`, even if a variable or a loader
    with persistent workers keeps the iterator (`mnist_early_break`).
    """
    return sys.getrefcount(iterator)


def running_optimizers() -> int:
    """How many optimizers are stepping in this thread, each inside the other (`lbfgs_closure`)."""
    return running(STEP_CODE)


def running(code: CodeType) -> int:
    """How often this code is on the stack."""
    count, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count


def error_that_left(frame: FrameType) -> str | None:
    """The exception that has left a `for` (`early_stop_exception`).

    The iterator is released while the exception propagates, when Python gives no access to it. But
    it is among the youngest objects, and its traceback has the frame.
    """
    frame = outside(frame)
    if is_generator(frame) or frame.f_code.co_code[frame.f_lasti] in LEAVES:
        return None  # closing a generator raises GeneratorExit in it
    young = [one for one in gc.get_objects(0) if issubclass(type(one), BaseException)]
    for found in reversed(young):
        if has_passed(found, frame):
            return describe_error(type(found), found, MAX_TEXT_BYTES)
    return "an exception"


def has_passed(error: BaseException, frame: FrameType) -> bool:
    trace = error.__traceback__
    if ADDS_FRAMES_LATE:
        above: FrameType | None = frame if trace is None else trace.tb_frame
        while above is not None and above is not frame:
            above = above.f_back
        return above is frame
    while trace is not None and trace.tb_frame is not frame:
        trace = trace.tb_next
    return trace is not None
