"""Which code asks a DataLoader for items, and how a loop was left. Read from frames, bytecode and
reference counts.

No other module of `hooks/` reads these. Each question names the program in `tests/real/programs/`
that needs it.

Runs on the user's threads.
"""

from __future__ import annotations

import gc
import os
import sys
from dis import opmap
from inspect import CO_GENERATOR
from traceback import walk_stack, walk_tb
from types import FrameType, GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cirron.record import hot
from cirron.record.attrs import describe_error
from cirron.record.value import MAX_TEXT_BYTES

if TYPE_CHECKING:
    from types import CodeType

FOR_ITER = opmap["FOR_ITER"]
# Where a frame is when a `for` releases its iterator without an error: at a `break`, a `return`, or
# the end of the loop.
LEAVES = {opmap.get(name) for name in ("POP_TOP", "POP_ITER", "END_FOR", "FOR_ITER", "SWAP")}
# The function of torch that runs every optimizer step.
STEP_CODE = torch.optim.Optimizer.profile_hook_step(len).__code__
WITHIN = hot.within.__code__
# Before Python 3.12, a frame is added to the traceback only when the exception leaves it.
ADDS_FRAMES_LATE = sys.version_info < (3, 12)
# What looking for generators may take in addition to its share of the time.
FREE_NS = 200_000_000
HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Asker(NamedTuple):
    """The code that asks an iterator for items, and the code that uses them. They differ if a
    generator fetches the items.
    """

    # Whether a `for` asks, and not a call such as `next`, which may fetch a single item
    # (`peek_and_mean`) and be called again after an error (`broken_items`, `prefetcher_by_hand`).
    is_for: bool
    is_user_for: bool  # whether a `for` asks the generator (`generators_read_ahead`)
    generator: CodeType | None
    user: CodeType  # the function that uses the items (`validations_by_next`)

    @property
    def may_read_ahead(self) -> bool:
        """Whether it may fetch an item before it has used the one before (`prefetch_loader`)."""
        return self.generator is not None or not self.is_for


def find_asker(frame: FrameType) -> Asker:
    """The code that asks for the item that is being fetched."""
    asker = user = outside(frame)
    while user.f_back is not None and is_generator(user):
        user = user.f_back
    generator = asker.f_code if is_generator(asker) else None
    return Asker(is_at_for(asker), is_at_for(user), generator, user.f_code)


def outside(frame: FrameType) -> FrameType:
    """The nearest frame that is not of the hooks."""
    while frame.f_back is not None:
        if not (frame.f_code is WITHIN or frame.f_code.co_filename.startswith(HERE)):
            break
        frame = frame.f_back
    return frame


def is_at_for(frame: FrameType) -> bool:
    return frame.f_code.co_code[frame.f_lasti] == FOR_ITER


def is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & CO_GENERATOR)


class Generators:
    """Finds out whether a generator has ended. That looks at all objects, which takes milliseconds,
    or seconds in a large program. It is done once an epoch, for at most 1 % of the time.
    """

    def __init__(self) -> None:
        self._began_ns = hot.now()
        self._spent_ns = -FREE_NS

    def has_ended(self, generator: CodeType, iterator: Any, is_asking: bool) -> bool:
        """Whether the generator that asked for the items has ended (`engine_class`). Otherwise it
        is on the stack, or waits at a `yield` and holds the iterator (`cycled_generator`).

        `is_asking`: a generator of the same function asks for other items right now.
        """
        began = hot.now()
        is_dear = self._spent_ns > (began - self._began_ns) / 100
        if is_dear or running(generator) > is_asking:
            return False
        holders = gc.get_referrers(iterator)
        self._spent_ns += hot.now() - began
        return not any(isinstance(one, (GeneratorType, FrameType)) for one in holders)


def references_to(iterator: Any) -> int:
    """The reference count. A `break` lowers it, even if a variable or a loader with persistent
    workers keeps the iterator (`mnist_early_break`).
    """
    return sys.getrefcount(iterator)


def running_optimizers() -> int:
    """How many optimizer steps are on the stack, one inside the other (`lbfgs_closure`)."""
    return running(STEP_CODE)


def running(code: CodeType) -> int:
    count, frame = 0, sys._getframe(1)
    while frame.f_back is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count


def error_that_left(frame: FrameType) -> str | None:
    """The exception that ended a `for` (`early_stop_exception`).

    The iterator is released while the exception propagates, and Python then gives no access to the
    exception. But it is one of the youngest objects, and its traceback contains the frame.
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
        frames = walk_stack(frame if trace is None else trace.tb_frame)
    else:
        frames = walk_tb(trace)
    return any(one is frame for one, _ in frames)
