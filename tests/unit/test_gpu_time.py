"""GPU time and memory of spans, with a device that does what the test says."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

import cirron as ci
from cirron import guard, testing
from cirron.hooks.engine import Training
from cirron.hooks.torch import gpu
from cirron.record import clock, hot, value
from cirron.ship import collect
from cirron.ship.collect import Collector
from cirron.ship.sinks.memory import Memory
from cirron.wire import decode_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cirron import wire

FAULT = RuntimeError("CUDA error: an illegal memory access was encountered")


class FakeEvent:
    """An event of a fake device: over once the device is done with all before it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.at_ms = 0.0
        self.stream = -1

    def record(self, stream: int) -> None:
        self.cuda.check()
        self.cuda.recorded += 1
        self.at_ms = self.cuda.work_ms.get(stream, 0.0)
        self.stream = stream

    def query(self) -> bool:
        self.cuda.asked += 1
        self.cuda.check()
        return self.at_ms <= self.cuda.done_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.query()
        assert self.query()
        return end.at_ms - self.at_ms


class FakeCuda(gpu.Cuda):
    """A device that works on what it is given when it is told to."""

    def __init__(self) -> None:
        self.free = {}
        self.work_ms: dict[int, float] = {}  # given to each stream so far
        self.done_ms = 0.0
        self.current = threading.local()
        self.used_devices = {0}
        self.capturing = False
        self.fault: Exception | None = None
        self.made = self.recorded = self.asked = self.care = self.memory_asked = 0
        self.is_capturing = lambda: self.capturing
        self.has_context = self.used_devices.__contains__
        self.device_count = lambda: 4
        self.current_stream = self._current_stream

    def _current_stream(self, device: int) -> tuple[int, int, int]:
        if device == -1:
            device = getattr(self.current, "device", 0)
        # CUDA captures no graph on its default stream.
        return getattr(self.current, "stream", int(self.capturing)), device, 1

    def check(self) -> None:
        if self.fault is not None:
            raise self.fault

    def work(self, ms: float) -> None:
        """Gives the current stream something to do."""
        stream = getattr(self.current, "stream", 0)
        self.work_ms[stream] = self.work_ms.get(stream, 0.0) + ms

    def finish(self) -> None:
        """Lets the device do all that it was given."""
        self.done_ms = max(self.work_ms.values(), default=0.0)

    def new_event(self) -> Any:
        self.made += 1
        return FakeEvent(self)

    def new_stream(self, key: tuple[int, int, int]) -> Any:
        return key[0]

    def peak_bytes(self, device: int) -> int:
        self.memory_asked += 1
        self.check()
        return 1000 + device

    def read(self, scalars: list[Any]) -> list[Any]:
        return [scalar.given for scalar in scalars]

    def beside_captures(self, call: Callable[[], Any]) -> Any:
        self.care += 1
        return call()


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """A device whose clock goes along with all spans."""
    device = FakeCuda()
    hot.use_device_clock(gpu.GpuClock(device))
    yield device
    hot.use_device_clock(None)


class Rig:
    """A collector of its own, without a background thread."""

    def __init__(self, now: Callable[[], int] = clock.now) -> None:
        self.memory = Memory()
        self.asked: list[list[value.Deferred]] = []  # requests
        self.before = hot.attach(hot.State(deque(), now=now))
        state = hot.State(hot.ring, opened=hot.opened, now=now, sequence=hot.sequence)
        self.collector = Collector(state, self.memory, clock.Anchor(0, 0, 0))
        self.collector.on_deferred = self.asked.append

    @property
    def written(self) -> list[tuple[str, int | None]]:
        """Names and GPU times of the spans that need wait no longer."""
        self.collector.drain()
        self.collector.step()
        spans: list[wire.Span] = []
        for chunk, _ in self.memory.chunks():
            spans += decode_spans(chunk)
        return [(span.name, span.gpu_ns) for span in spans]


@pytest.fixture
def rig() -> Iterator[Rig]:
    found = Rig(testing.FakeClock())
    yield found
    hot.attach(found.before)


def ms(count: float) -> int:
    return round(count * 1e6)


def gpu_times(captured: testing.Captured) -> dict[str, int | None]:
    return {span.name: span.gpu_ns for span in captured.spans}


def test_scopes_have_the_time_that_the_device_took(cuda: FakeCuda) -> None:
    """A span's `gpu_ns` is the device's time between its ends, and no attribute."""
    with testing.capture() as captured:
        with ci.scope("outer", variant="a"):
            cuda.work(1)
            with ci.scope("inner"):
                cuda.work(2)
        cuda.work(4)
        cuda.finish()

    assert {"inner": ms(2), "outer": ms(3)} == gpu_times(captured)
    assert [{}, {"variant": "a"}] == [span.attrs for span in captured.spans]


def test_loops_and_hooks_have_it_too(cuda: FakeCuda) -> None:
    """So have `ci.epochs`, `ci.batches`, and what hooks open."""
    with testing.capture() as captured:
        for _ in ci.epochs(range(1)):
            for _ in ci.batches(range(1)):
                span = hot.begin("forward", None, {"mode": "train"})
                cuda.work(2)
                hot.close(span)
        cuda.finish()

    assert {"forward": ms(2), "batch": ms(2), "epoch": ms(2)} == gpu_times(captured)
    assert {"mode": "train"} == captured.spans[0].attrs


def test_a_span_that_failed_has_it(cuda: FakeCuda) -> None:
    """An exception leaves the time as it leaves the span."""
    with testing.capture() as captured:
        with contextlib.suppress(KeyError), ci.scope("outer"):
            cuda.work(1)
            raise KeyError("x")
        cuda.finish()

    assert ms(1) == captured.spans[0].gpu_ns
    assert "KeyError: 'x'" == captured.spans[0].attrs["error"]


@pytest.mark.parametrize("name", ["data_load", "compile"])
def test_what_the_host_waits_for_has_none(cuda: FakeCuda, name: str) -> None:
    """Waiting for data and compiling are the host's time: no event is spent on them."""
    with testing.capture() as captured:
        hot.close(hot.begin(name))

    assert {name: None} == gpu_times(captured)
    assert 0 == cuda.recorded


def test_events_are_used_again(cuda: FakeCuda) -> None:
    """There are as many events as are in use at once, however many spans there are."""
    with testing.capture() as captured:
        for _ in range(100):
            with ci.scope("outer"), ci.scope("inner"):
                cuda.work(1)
            cuda.finish()
            assert [ms(1), ms(1)] == [span.gpu_ns for span in captured.spans][-2:]

    assert 4 == cuda.made
    assert 4 == len(cuda.free[0])


def test_a_span_without_a_record_gives_its_event_back(cuda: FakeCuda) -> None:
    """A span that is dropped costs no event."""
    for _ in range(5):
        hot.drop(hot.begin("step"))

    assert (1, 1) == (cuda.made, len(cuda.free[0]))


def test_nobody_waits_for_the_device(cuda: FakeCuda, rig: Rig) -> None:
    """Spans that close behind one whose time is not there wait with it, in their order."""
    with ci.scope("first"):
        cuda.work(1)
    cuda.finish()
    with ci.scope("second"):
        cuda.work(1)
    with ci.scope("third"):
        pass
    hot.close(hot.begin("data_load"))

    assert [] == rig.written
    assert 3 == len(rig.collector.waiting_values())

    for one in rig.asked.pop():
        one.poll()

    for one in rig.collector.waiting_values():
        one.poll()
    assert [("first", ms(1))] == rig.written

    cuda.finish()
    for one in rig.collector.waiting_values():
        one.poll()

    wanted = [("first", ms(1)), ("second", ms(1)), ("third", 0), ("data_load", None)]
    assert wanted == rig.written


def test_one_request_for_all_of_a_slice(cuda: FakeCuda, rig: Rig) -> None:
    """The background thread is asked once for all spans that closed meanwhile, and has them all."""
    for _ in range(10):
        with ci.scope("x"):
            cuda.work(1)
    cuda.finish()
    rig.collector.drain()
    ((*others, last),) = rig.asked
    last.resolve(others)

    assert [("x", ms(1))] * 10 == rig.written


def test_what_waits_is_shown(cuda: FakeCuda, rig: Rig) -> None:
    """Whoever asks meanwhile sees the spans without their time."""
    with ci.scope("x"):
        ci.mark("loss", 0.5)
        cuda.work(1)
    rig.collector.settle(timeout_s=0)

    (found,) = rig.collector.held_records()
    assert ("x", None, 1) == (found.name, found.gpu_ns, len(found.mark_ids))
    assert [] == rig.written

    cuda.finish()
    rig.collector.settle(timeout_s=0)

    assert [("x", ms(1))] == rig.written
    assert [] == rig.collector.held_records()


def test_a_span_does_not_wait_for_ever(cuda: FakeCuda, rig: Rig) -> None:
    """After half a minute a span is written without its time, and its events are free."""
    with ci.scope("x"):
        cuda.work(1)
    assert [] == rig.written

    cast("testing.FakeClock", hot.now).advance(collect.HOLD_NS / 1e9)

    assert [("x", None)] == rig.written
    assert 2 == len(cuda.free[0])


def test_not_too_many_wait(cuda: FakeCuda, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """When more wait than may, the oldest are written without their time."""
    monkeypatch.setattr(collect, "MAX_HELD", 3)
    for index in range(5):
        with ci.scope(f"x{index}"):
            cuda.work(1)

    assert [("x0", None), ("x1", None)] == rig.written


def test_the_end_waits_for_nobody(cuda: FakeCuda, rig: Rig) -> None:
    """What is unresolved when a session ends is written without its time; nothing is lost."""
    with ci.scope("x"):
        cuda.work(1)
    with ci.scope("open"):
        rig.collector.close_open()
        rig.collector.drain()
        assert [] == rig.written
        rig.collector.give_up()

    assert [("x", None), ("open", None)] == rig.written


def test_a_device_that_fails(cuda: FakeCuda, rig: Rig) -> None:
    """After a fault spans have no time, and the device is left alone; it is no error of ours."""
    for _ in range(5):
        with ci.scope("before"):
            cuda.work(1)
    cuda.fault = FAULT
    for _ in range(5):
        with ci.scope("after"):
            pass
    rig.collector.drain()
    rig.collector.settle()

    assert [("before", None)] * 5 + [("after", None)] * 5 == rig.written
    assert hot.device_clock is None
    assert 0 == cuda.asked
    assert {} == guard.errors


def test_a_fault_that_asking_finds(cuda: FakeCuda, rig: Rig) -> None:
    """A fault that shows when the device is asked ends the asking: one question, no more."""
    for _ in range(5):
        with ci.scope("before"):
            cuda.work(1)
    cuda.fault = FAULT
    rig.collector.drain()
    rig.collector.settle()

    assert [("before", None)] * 5 == rig.written
    assert 1 == cuda.asked
    assert hot.device_clock is None


def test_a_capture_is_left_alone(cuda: FakeCuda) -> None:
    """No event is recorded while a CUDA graph is captured: not at a start, and not at an end."""
    with testing.capture() as captured:
        cuda.capturing = True
        with ci.scope("inside"):
            pass
        with ci.scope("left"):
            cuda.capturing = False
        assert 0 == cuda.recorded
        with ci.scope("entered"):
            cuda.capturing = True
        cuda.capturing = False
        with ci.scope("around"):
            cuda.capturing = True
            cuda.capturing = False
            cuda.work(1)
        cuda.finish()

    wanted = {"inside": None, "left": None, "entered": None, "around": ms(1)}
    assert wanted == gpu_times(captured)
    assert 2 == cuda.made


def test_asking_ends_no_capture(cuda: FakeCuda) -> None:
    """Every question to the device is asked in the way that captures of other threads allow."""
    with testing.capture() as captured:
        for _ in range(3):
            with ci.scope("x"):
                cuda.work(1)
        cuda.finish()
        assert 3 == len(captured.spans)

    assert 3 == cuda.care


def test_a_span_on_two_devices(cuda: FakeCuda) -> None:
    """A span that begins on one device and ends on another has no time; its event is free."""
    cuda.used_devices.add(1)
    with testing.capture() as captured:
        with ci.scope("x"):
            cuda.current.device = 1
        with ci.scope("y"):
            cuda.work(1)
        cuda.finish()

    assert {"x": None, "y": ms(1)} == gpu_times(captured)
    assert [1, 2] == [len(cuda.free[device]) for device in (0, 1)]


def test_a_device_that_the_program_does_not_use(cuda: FakeCuda) -> None:
    """No context is made on a device: the only one in use is measured, or else none."""
    cuda.used_devices.clear()
    with testing.capture() as captured:
        with ci.scope("nothing"):
            pass
        cuda.used_devices.add(3)
        with ci.scope("third"):
            cuda.work(1)
        cuda.used_devices.add(2)
        with ci.scope("two"):
            pass
        cuda.finish()

    assert {"nothing": None, "third": ms(1), "two": None} == gpu_times(captured)
    assert {3} == set(cuda.free)


def test_threads_have_streams_of_their_own(cuda: FakeCuda) -> None:
    """Threads measure their own streams, and share the events without mixing them up."""
    wrong: list[Any] = []

    def train(stream: int) -> None:
        cuda.current.stream = stream
        for _ in range(100):
            with ci.scope(f"stream {stream}"):
                cuda.work(stream)
            cuda.finish()

    with testing.capture() as captured:
        threads = [threading.Thread(target=train, args=(stream,)) for stream in (1, 2, 3, 4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            captured.spans  # noqa: B018  asks, while the others record
        for thread in threads:
            thread.join()
        for span in captured.spans:
            if span.gpu_ns != ms(int(span.name.split()[1])):
                wrong.append((span.name, span.gpu_ns))

    assert [] == wrong
    assert len({id(event) for event in cuda.free[0]}) == len(cuda.free[0]) == cuda.made


def test_memory_at_the_end_of_epochs_and_steps(cuda: FakeCuda) -> None:
    """An epoch says what the allocator has had at most; steps do so ten times a second at most."""
    with testing.capture() as captured:
        for _ in ci.epochs(range(2)):
            for _ in ci.batches(range(50)):
                with ci.scope("forward"):
                    pass

    peaks = {span.name: span.memory_peak_bytes for span in captured.spans[::-1]}
    assert {"epoch": 1000, "batch": 1000, "forward": None} == peaks
    assert 3 <= cuda.memory_asked <= 6


def test_an_allocator_that_keeps_no_count(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once; the time is there without it."""

    def refuse(device: int) -> int:
        cuda.memory_asked += 1
        raise NotImplementedError

    monkeypatch.setattr(cuda, "peak_bytes", refuse)
    with testing.capture() as captured:
        for _ in ci.epochs(range(3)):
            pass
        found = [(span.gpu_ns, span.memory_peak_bytes) for span in captured.spans]

    assert [(0, None)] * 3 == found
    assert 1 == cuda.memory_asked


class FakeScalar:
    """A scalar on the fake device, as torch would have it."""

    __module__ = "torch"
    shape = ()
    device = torch.device("cuda", 0)
    is_cpu = False
    is_cuda = True

    dtype = torch.float32
    _version = 0

    def __init__(self, given: float) -> None:
        self.given = given
        self.copies = 0

    def item(self) -> float:
        raise AssertionError("nobody may wait for the device")

    def get_device(self) -> int:
        return 0

    def detach(self) -> FakeScalar:
        return self

    def clone(self) -> FakeScalar:
        self.copies += 1
        return FakeScalar(self.given)


def test_a_mark_of_a_device_scalar(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark has the value that the scalar had then, and nobody waits for it."""
    monkeypatch.setattr(gpu, "PLAIN_TENSORS", {FakeScalar})
    loss = FakeScalar(0.5)
    with testing.capture() as captured:
        ci.mark("loss", loss)
        loss.given = 0.7
        cuda.finish()

        assert [0.5] == [mark.value for mark in captured.marks]


class NoSnapshots:
    is_watching = False

    def expect(self, model: Any) -> None:
        pass

    def keep_gradients(self, *, is_last: bool) -> None:
        pass

    def take(self, span: hot.Span, *models: Any) -> None:
        pass


def test_a_value_that_a_framework_logs(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied once, and is a point of its step and the summary of its epoch all the same."""
    monkeypatch.setattr(gpu, "PLAIN_TENSORS", {FakeScalar})
    training, loss = Training(NoSnapshots()), FakeScalar(0.5)
    with testing.capture() as captured:
        training.begin_epoch(0, None)
        training.begin_step(0)
        training.log({"loss": loss})
        loss.given = 0.7
        training.end()
        cuda.finish()

        marks = [(one.value, one.kind) for one in captured.marks]
    assert [(0.5, "point"), (0.5, "summary")] == marks
    assert 1 == loss.copies


def test_a_mark_inside_a_capture(cuda: FakeCuda, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no value while a graph is captured: the mark is counted as lost."""
    monkeypatch.setattr(gpu, "PLAIN_TENSORS", {FakeScalar})
    cuda.capturing = True
    ci.mark("loss", FakeScalar(0.5))
    rig.collector.drain()

    assert 1 == rig.collector.lost_values


def test_a_tensor_of_another_kind(cuda: FakeCuda) -> None:
    """A subclass of a tensor is asked in its own way, as without the clock."""
    found = value.capture(FakeScalar(0.5), hot.device_clock)

    assert value.Deferred is type(found)
    assert 0.5 == found.source.given
    assert 0 == cuda.recorded


def test_a_forked_child_leaves_the_device_alone(cuda: FakeCuda) -> None:
    """The device that a parent uses is not the child's."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if hot.device_clock is None and hot.span_type is hot.Span else 1)

    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def need_cuda_untouched() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("another test has initialised CUDA in this process")


def test_the_clock_comes_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are measured once the program initialises CUDA, and no longer after shutdown."""
    need_cuda_untouched()
    device = FakeCuda()
    monkeypatch.setattr(gpu, "the_cuda", lambda: device)
    queued = cast("list[Any]", torch.cuda._queued_calls)
    before = list(queued)
    ci.profile(output="none")
    with ci.scope("early"):
        assert hot.device_clock is None
        (ours,) = [call for call, _ in queued if call not in [known for known, _ in before]]
        ours()  # what torch does when CUDA is initialised
    with ci.scope("late"):
        device.work(1)
    device.finish()
    frame = ci.trace(format="df").set_index("name")
    ci.shutdown()

    assert frame.loc["late", "gpu_ns"] == ms(1)
    assert frame["gpu_ns"].isna().sum() == 2  # the session, and the span that began before
    assert before == queued
    assert hot.device_clock is None
    assert hot.span_type is hot.Span


def test_cuda_is_not_initialised_by_us() -> None:
    """Hooks wait for CUDA, and do not begin it."""
    need_cuda_untouched()
    ci.profile(output="none")
    with ci.scope("x"):
        pass
    ci.shutdown()

    assert not torch.cuda.is_initialized()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
def test_a_scope_inside_compiled_code(cuda: FakeCuda) -> None:
    """Events are recorded each time the code runs, not while it is compiled."""

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with ci.scope("inside"):
            return x * 2

    with testing.capture() as captured:
        for _ in range(3):
            assert torch.equal(torch.full((2,), 2.0), compiled(torch.ones(2)))
        cuda.finish()

    assert [("inside", 0)] * 3 == [(span.name, span.gpu_ns) for span in captured.spans]
    assert 6 == cuda.recorded


def test_losses_that_come_fast_share_an_event(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event a loss would cost more than the rest of a short step; the last ones are not lost."""
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    device_clock = hot.device_clock
    assert isinstance(device_clock, gpu.GpuClock)
    kept = [device_clock.keep(FakeScalar(number / 10), hot.now()) for number in range(30)]
    assert cuda.recorded <= 3  # one each 20 ms

    device_clock.settle()
    cuda.finish()
    device_clock.ask([one for one in kept if isinstance(one, gpu.OnDevice)])

    assert [number / 10 for number in range(30)] == [one.value for one in kept if one is not None]
    assert cuda.made <= 4, "events are used again"
