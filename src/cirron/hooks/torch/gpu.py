"""GPU time and memory of spans, measured without ever waiting for the device.

A CUDA event is recorded at the start of a span and another one at its end. A background thread
reads the time between them later, without waiting, through `value.Deferred`; then the events go
back to a pool. Nothing is recorded while a CUDA graph is captured, and queries from other threads
do not break the capture.

`start`, `stop`, `drop` and `copy` run on the user's threads. Nothing here initialises CUDA, or
creates a context on a device that the program does not use.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cirron import captures, guard
from cirron.hooks.engine import STEPS
from cirron.hooks.torch.compiling import run_uncompiled
from cirron.record import clock, hot, value
from cirron.record.budget import budget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The host waits in these; the work of the device belongs to the spans around them.
HOST_SPANS = frozenset(("data_load", "compile"))

# Querying the allocator costs as much as seven events: for steps it is done ten times a second.
MEMORY_SPANS = frozenset(("epoch", "evaluation", "step", "batch"))
MEMORY_NS = 100_000_000

# An event between two launches costs this much on an H200, in addition to the time of the call.
EVENT_NS = 16_000
# An event after the losses shows that they are computed. All losses of this period share one.
LOSSES_NS = 20_000_000
# A span that begins this soon after the end of the previous one shares its event.
SAME_NS = 100_000

PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))  # subclasses may override `clone`


class Cuda:
    """The functions of torch and the driver that are used, in one place for tests to replace."""

    def __init__(self) -> None:
        raw: Any = torch._C
        self.free: dict[int, list[Any]] = {}  # events, by device
        self.current_stream = raw._cuda_getCurrentStream  # -> (id, device, type); -1: current
        self.is_capturing = raw._cuda_isCurrentStreamCapturing
        self.has_context = raw._cuda_hasPrimaryContext
        self.device_count = torch.cuda.device_count
        self._new_event = raw._CudaEventBase  # `torch.cuda.Event` calls this one in turn
        self._memory_stats = raw._cuda_memoryStats
        self._reader_of = functools.cache(ScalarReader)  # by device

    def new_event(self) -> Any:
        """Creates an event that is never destroyed.

        Destroying one releases the GIL, which at exit kills the thread inside C++, and with it the
        process. After a device has failed, it also prints a warning for each event.
        """
        event = self._new_event(enable_timing=True)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))
        return event

    def new_stream(self, key: tuple[int, int, int]) -> Any:
        stream, device, kind = key
        return torch.cuda.Stream(stream_id=stream, device_index=device, device_type=kind)

    def peak_bytes(self, device: int) -> int:
        """The allocator's peak, since the start or since the program has reset it."""
        return int(self._memory_stats(device)["allocated_bytes"]["all"]["peak"])

    def read(self, scalars: list[Any]) -> list[Any] | None:
        """The values of scalars of one device and dtype; None if they take too long."""
        return self._reader_of(scalars[0].device.index).read(scalars)

    def beside_captures(self, call: Callable[[], Any]) -> Any:
        """Calls the driver in a way that is allowed while another thread captures a graph."""
        with captures.beside():
            return call()


class ScalarReader:
    """Copies scalars of one device to the host, on its own stream and without a sync."""

    TRIES = 20
    PAUSE_S = 0.00005  # sleeping releases the GIL; the copy of a few scalars takes about 10 us
    MOST = 256  # at once

    def __init__(self, device: int) -> None:
        self._stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event()
        self._pinned = functools.cache(  # by dtype
            lambda dtype: torch.empty(self.MOST, dtype=dtype, pin_memory=True)
        )

    def read(self, scalars: list[Any]) -> list[Any] | None:
        """The values of scalars of one dtype."""
        place = self._pinned(scalars[0].dtype)[: len(scalars)]
        with torch.cuda.stream(self._stream), torch.no_grad():
            flat = [scalar.reshape(()) if scalar.ndim else scalar for scalar in scalars]
            place.copy_(torch.stack(flat), non_blocking=True)
            self._event.record(self._stream)
        for _ in range(self.TRIES):
            time.sleep(self.PAUSE_S)
            if self._event.query():
                return place.tolist()
        return None


@functools.cache
def the_cuda() -> Cuda:
    """One for the process, so that sessions reuse its events."""
    return Cuda()


@dataclass(slots=True, eq=False)
class Point:
    """A recorded event: the end of a span, and the start of the next one if that begins at once.
    It goes back to the pool when all its users have read it.
    """

    event: Any  # None: not recorded yet
    users: int = 1


@dataclass(slots=True, eq=False)
class Place:
    """A stream, the free events of its device, and the last event on it."""

    clock: GpuClock
    stream: Any
    device: int
    free: list[Any]
    last: Point | None = None  # the end of a span
    last_under: hot.Span | None = None  # that span's parent
    last_ns: int = 0
    losses: Point | None = None  # of kept losses; its event is not recorded yet
    losses_ns: int = 0  # when the last such event was recorded

    def point_after(self, step: hot.Span, now_ns: int) -> Point | None:
        """The end of the previous phase of the same step, if that was a moment ago."""
        last = self.last
        if last is None or self.last_under is not step or not last.users:
            return None
        if step.name not in STEPS or now_ns - self.last_ns > SAME_NS:
            return None
        last.users += 1
        return last

    def give_back(self, point: Point) -> None:
        point.users -= 1
        if not point.users and point.event is not None:
            self.free.append(point.event)


class GpuClock:
    """Measures spans on the current stream of the current device."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._is_capturing = cuda.is_capturing
        self._current_stream = cuda.current_stream
        self._places: dict[tuple[int, int, int], Place] = {}
        self._is_broken = False  # the device has failed, and is not queried any more
        self._asking = threading.Lock()
        self._has_stats = True
        self._asked_memory_ns = 0

    # -- on the user's threads --------------------------------------------------------------

    def start(self, span: hot.Span) -> None:
        try:
            if span.name in STEPS:
                if not budget.begin_step(span.start):
                    if span.start - self._asked_memory_ns >= MEMORY_NS:
                        self._add_memory(span, self._place())
                    return
            elif span.name in HOST_SPANS or not is_in_measured(span):
                return
            began = clock.now()
            place = self._place()
            if place is not None:
                span.device = (place.point_after(span.parent, began) or self._record(place), place)
                budget.spend(clock.now() - began)
        except Exception as error:  # noqa: BLE001  protects the program from a device that failed
            self._fail(error)

    def stop(self, span: hot.Span) -> None:
        started = getattr(span, "device", None)
        if started is None:  # not started, or already stopped
            return
        began = clock.now()
        try:
            point, began_at = started
            place = self._place()
            # A graph is being captured, or the program has switched to another device.
            if place is None or place.free is not began_at.free:
                self.drop(span)
                return
            span.device = None
            is_step = span.name in STEPS
            # A step ends with its last child.
            end = (place.point_after(span, began) if is_step else None) or self._record(place)
            place.last, place.last_under, place.last_ns = end, span.parent, clock.now()
            if place.losses is not None and not is_step and span.parent.name not in STEPS:
                self._record_losses(place)  # for example, an epoch is over
            span.set(gpu_ns=GpuElapsed(place, point, end, place is began_at))
            if span.name in MEMORY_SPANS and (
                not is_step or began - self._asked_memory_ns >= MEMORY_NS
            ):
                self._add_memory(span, place)
            budget.spend(clock.now() - began)
        except Exception as error:  # noqa: BLE001  protects the program from a device that failed
            self._fail(error)

    def drop(self, span: hot.Span) -> None:
        started = getattr(span, "device", None)
        span.device = None
        if started is not None:
            started[1].give_back(started[0])

    def copy(self, scalar: Any) -> value.Deferred | None:
        if scalar.device.type != "cuda" or type(scalar) not in PLAIN_TENSORS:
            return None
        try:
            place = self._place(scalar.device.index)
            if place is None:  # a graph is being captured: the scalar has no value
                return value.lost()
            return Scalar(place, scalar.detach().clone(), self._record(place))
        except Exception as error:  # noqa: BLE001  protects the program from a device that failed
            self._fail(error)
            return value.lost()

    def keep(self, scalar: Any, now_ns: int) -> value.Deferred | None:
        """The value of a scalar that the program will not change, without a copy on the device."""
        if "torch._inductor.cudagraph_trees" in sys.modules:
            return self.copy(scalar)  # a replayed graph overwrites it with the same version
        try:
            # `_place`, inlined: each step has a loss.
            key = self._current_stream(scalar.get_device())
            place = None if key[0] else self._places.get(key)
            place = place or self._place(key[1])
            if place is None:
                return None
            losses = place.losses
            if losses is None:
                losses = place.losses = Point(None)
            else:
                losses.users += 1
            kept = Scalar(place, scalar.detach(), losses)
            if now_ns - place.losses_ns >= LOSSES_NS:
                self._record_losses(place)
            return kept
        except Exception as error:  # noqa: BLE001  protects the program from a device that failed
            self._fail(error)
            return None

    def settle(self) -> None:
        """Records the events of kept losses now, because no step may follow."""
        try:
            if not self._is_capturing():
                for place in list(self._places.values()):
                    self._record_losses(place)
        except Exception as error:  # noqa: BLE001  protects the program from a device that failed
            self._fail(error)

    def _record_losses(self, place: Place) -> None:
        losses, place.losses = place.losses, None
        if losses is not None and losses.users:
            losses.event = self._record(place).event
            place.losses_ns = clock.now()

    def _place(self, device: int = -1) -> Place | None:
        """The current stream; None if nothing may be recorded."""
        key = self._current_stream(-1)
        # The default stream, whose id is 0, cannot be captured.
        if key[0] and self._is_capturing():
            return None
        if device != -1 and device != key[1]:
            key = self._current_stream(device)
        return self._places.get(key) or self._find_place(key)

    def _find_place(self, key: tuple[int, int, int]) -> Place | None:
        cuda = self._cuda
        if not cuda.has_context(key[1]):
            # The program may name its device in each call, and never make it the current one.
            used = [device for device in range(cuda.device_count()) if cuda.has_context(device)]
            if len(used) != 1:
                return None
            key = cuda.current_stream(used[0])
        place = self._places.get(key)
        if place is None:
            free = cuda.free.setdefault(key[1], [])
            place = self._places[key] = Place(self, cuda.new_stream(key), key[1], free)
        return place

    def _record(self, place: Place) -> Point:
        try:
            event = place.free.pop()
        except IndexError:
            event = self._cuda.new_event()
        event.record(place.stream)
        budget.spend(EVENT_NS)
        return Point(event)

    def _add_memory(self, span: hot.Span, place: Place | None) -> None:
        self._asked_memory_ns = clock.now()
        if place is None or not self._has_stats:
            return
        try:
            span.set(memory_peak_bytes=self._cuda.peak_bytes(place.device))
        except Exception:  # noqa: BLE001  protects the span from an allocator without statistics
            self._has_stats = False

    # -- on a background thread, or the one of `ci.trace()` ---------------------------------

    def ask(self, waiting: Sequence[OnDevice]) -> None:
        """Queries all of these at once. Those that are computed, or lost, become ready."""
        # Another thread may be querying, or hang there.
        if not self._is_broken and self._asking.acquire(blocking=False):
            try:
                self._cuda.beside_captures(lambda: read_all(self._cuda, waiting))
            except Exception as error:  # noqa: BLE001  protects the thread from a device that failed
                self._fail(error)
            finally:
                self._asking.release()
        if self._is_broken:
            for one in waiting:
                one.lose()

    def forget(self, one: OnDevice) -> None:
        """Returns the events of a value that is not needed any more to the pool."""
        if self._asking.acquire(blocking=False):
            one.give_back()  # an event may be recorded again before it has completed
            self._asking.release()

    def _fail(self, error: Exception) -> None:
        """Stops the clock. The program gets the device's error from its own next call."""
        self._is_broken = True
        if hot.device_clock is self:
            hot.use_device_clock(None)
        if not isinstance(error, RuntimeError):
            guard.caught("torch gpu time", error)


class OnDevice(value.Deferred):
    """A value on the device, queried under the clock's lock: its events return to the pool once."""

    __slots__ = ("place", "points")
    is_batched = True
    place: Place
    points: tuple[Point, ...]

    def poll(self) -> bool:
        if not self.is_ready:
            self.place.clock.ask((self,))
        return self.is_ready

    def resolve(self, others: Sequence[value.Deferred] = ()) -> None:
        """Earlier values are computed when this one is, so that all are read together."""
        together = [one for one in (*others, self) if isinstance(one, OnDevice)]
        self.place.clock.ask(together)
        while not self.is_ready:
            time.sleep(value.POLL_S)
            self.place.clock.ask(together)
        super().resolve(others)

    def lose(self) -> None:
        if not self.is_ready:
            self.is_lost = self.is_ready = True

    def give_up(self) -> None:
        if not self.is_ready:
            self.lose()
            self.place.clock.forget(self)

    def give_back(self) -> None:
        points, self.points = self.points, ()
        for point in points:
            self.place.give_back(point)


class GpuElapsed(OnDevice):
    """The time between two events."""

    __slots__ = ("is_one_stream",)

    def __init__(self, place: Place, start: Point, end: Point, is_one_stream: bool) -> None:
        super().__init__(None)
        self.place = place
        self.points = (start, end)
        self.is_one_stream = is_one_stream  # then the start has completed when the end has

    def read(self) -> None:
        """Takes the time, if both events have completed."""
        start, end = (point.event for point in self.points)
        if end.query() and (self.is_one_stream or start.query()):
            self.value = max(0, round(start.elapsed_time(end) * 1e6))
            self.is_ready = True
            self.give_back()


class Scalar(OnDevice):
    """The value of a tensor, once the event after it has completed. Lost if the program has changed
    the tensor by then.
    """

    __slots__ = ("version",)

    def __init__(self, place: Place, tensor: Any, point: Point) -> None:
        # The parent's constructor, inlined: each step creates one.
        self.source = tensor
        self.value = None
        self.is_ready = self.is_lost = False
        self.place = place
        self.points = (point,)
        self.version = tensor._version

    def take(self, found: Any) -> None:
        try:
            self.value = found if found.__class__ is float else value.plain(found)
        except value.NotAScalarError:  # a complex number
            self.is_lost = True
        self.is_lost |= self.source._version != self.version
        self.is_ready = True
        self.source = None
        self.give_back()


def read_all(cuda: Any, waiting: Sequence[OnDevice]) -> None:
    """Takes the values that are computed; scalars are copied to the host together."""
    groups: dict[tuple[int, torch.dtype], list[Scalar]] = {}
    computed: dict[Point, bool] = {}
    for one in waiting:
        if one.is_ready:
            continue
        if isinstance(one, GpuElapsed):
            one.read()
        elif isinstance(one, Scalar):
            (point,) = one.points
            if point not in computed:  # many share one
                computed[point] = point.event is not None and bool(point.event.query())
            if computed[point]:
                groups.setdefault((one.place.device, one.source.dtype), []).append(one)
    for group in groups.values():
        for first in range(0, len(group), ScalarReader.MOST):
            some = group[first : first + ScalarReader.MOST]
            found = cuda.read([one.source for one in some])
            if found is not None:
                for one, its_value in zip(some, found, strict=True):
                    one.take(its_value)


def is_in_measured(span: hot.Span) -> bool:
    """Whether it is outside of steps, or in one whose device time is measured."""
    above = span.parent
    while above.name not in STEPS:
        if above.parent is above:
            return True
        above = above.parent
    return getattr(above, "device", None) is not None


class GpuTimes:
    """Measures spans once the program has initialised CUDA."""

    def __init__(self) -> None:
        self._clock: GpuClock | None = None

    def install(self) -> None:
        torch.cuda._lazy_call(self._begin)  # now, or when CUDA is initialised

    def uninstall(self) -> None:
        queued = torch.cuda._queued_calls
        queued[:] = [call for call in queued if call[0] != self._begin]
        if self._clock is not None and hot.device_clock is self._clock:
            self._clock.settle()
            hot.use_device_clock(None)
        self._clock = None

    def _begin(self) -> None:
        with guard.quiet("torch gpu time"):
            if torch.version.hip is None:
                self._clock = GpuClock(the_cuda())
                hot.use_device_clock(self._clock)


def stay_out_of_graphs() -> None:
    """Keeps Dynamo from compiling the clock where compiled code returns to Python."""
    span, clock = hot.DeviceSpan, GpuClock
    for function in (span.__enter__, span.__exit__, clock.start, clock.stop, clock.copy):
        run_uncompiled(function, with_callees=True)
