"""Perfetto's trace, for ui.perfetto.dev and the trace processor.

Each rank is a process, each thread a track, each span a slice with arguments, each mark a counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron import errors, export, wire
from cirron.export import timeline

if TYPE_CHECKING:
    from cirron.runs.opened import Run

CHUNK_PACKETS = 10_000
SEQUENCE = 1  # the number of the only writer


def write(run: Run, path: str) -> None:
    """Writes a `.pftrace` file."""
    module = "perfetto.protos.perfetto.trace.perfetto_trace_pb2"
    protos = errors.need(module, 'export "perfetto"', "perfetto")
    with export.new_file(path) as file:
        trace = _Trace(protos, run.started_ns)
        for event in timeline.events(run):
            trace.add(event)
            if len(trace.packets.packet) >= CHUNK_PACKETS:
                file.write(trace.take())
        file.write(trace.take())


class _Trace:
    """Packets that are not written yet, and the tracks that have a descriptor."""

    def __init__(self, protos: Any, started_ns: int) -> None:
        self._protos = protos
        self._described: set[object] = set()
        self._counters: dict[tuple[int, str], int] = {}
        self.packets = protos.Trace()
        # Lets the Perfetto UI show the time of day.
        clocks = self._packet().clock_snapshot
        for clock in (protos.BUILTIN_CLOCK_BOOTTIME, protos.BUILTIN_CLOCK_REALTIME):
            clocks.clocks.add(clock_id=clock, timestamp=max(0, started_ns))

    def take(self) -> bytes:
        data: bytes = self.packets.SerializeToString()  # traces may be joined end to end
        self.packets = self._protos.Trace()  # Clear() would keep the memory of all before
        return data

    def add(self, event: timeline.Begin | timeline.End | timeline.Sample) -> None:
        kinds = self._protos.TrackEvent
        if isinstance(event, timeline.End):
            self._event(event.end_ns, event.track.number, kinds.TYPE_SLICE_END)
        elif isinstance(event, timeline.Begin):
            self._describe(event.track)
            slice_ = self._event(event.start_ns, event.track.number, kinds.TYPE_SLICE_BEGIN)
            slice_.name = event.name
            for name, value in event.details.items():
                _annotate(slice_.debug_annotations.add(name=name), value)
        elif event.value is not None:
            counter = self._counter(event.process, event.name)
            self._event(event.ts_ns, counter, kinds.TYPE_COUNTER).double_counter_value = event.value
        else:
            self._describe_process(event.process)
            instant = self._event(event.ts_ns, event.process.number, kinds.TYPE_INSTANT)
            instant.name = event.name
            instant.debug_annotations.add(name="value", string_value=event.text)

    def _packet(self) -> Any:
        return self.packets.packet.add(trusted_packet_sequence_id=SEQUENCE)

    def _event(self, at_ns: int, track: int, kind: int) -> Any:
        packet = self._packet()
        packet.timestamp = at_ns
        event = packet.track_event
        event.type = kind
        event.track_uuid = track
        return event

    def _describe(self, track: timeline.Track) -> None:
        if track.number in self._described:
            return
        self._describe_process(track.process)
        self._described.add(track.number)
        descriptor = self._packet().track_descriptor
        descriptor.uuid = track.number
        if track.main is None:
            descriptor.parent_uuid = track.process.number
            descriptor.thread.pid = track.process.number
            descriptor.thread.tid = track.number
            descriptor.thread.thread_name = track.name
        else:
            descriptor.parent_uuid = track.main
            descriptor.name = track.name

    def _describe_process(self, process: timeline.TraceProcess) -> None:
        if process.number in self._described:
            return
        self._described.add(process.number)
        descriptor = self._packet().track_descriptor
        descriptor.uuid = process.number
        descriptor.process.pid = process.number
        descriptor.process.process_name = process.name

    def _counter(self, process: timeline.TraceProcess, name: str) -> int:
        known = self._counters.get((process.number, name))
        if known is None:
            self._describe_process(process)
            # Larger than all numbers of processes and threads.
            known = self._counters[process.number, name] = 2**32 + len(self._counters)
            descriptor = self._packet().track_descriptor
            descriptor.uuid = known
            descriptor.parent_uuid = process.number
            descriptor.name = name
            descriptor.counter.SetInParent()
        return known


def _annotate(annotation: Any, value: Any) -> None:
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int):
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.string_value = value if isinstance(value, str) else wire.encode(value).decode()
