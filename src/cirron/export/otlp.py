"""OpenTelemetry spans: a file of `ExportTraceServiceRequest`, or requests to an OTLP/HTTP address.

Backends expect traces of a few hundred spans. So each step is a separate trace, whose root links to
the span that contains it. Everything outside steps is the session's trace. Marks are events of
their spans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron import errors, export, wire
from cirron.export import timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cirron.runs.opened import Run, Session

CHUNK_SPANS = 2_000
MAX_BYTES = 4 * 2**20  # the default limit of gRPC servers, which collectors use too
MAX_DEPTH = 8  # of attributes; protobuf readers accept 100 levels of messages
CONNECT_S, READ_S = 5.0, 30.0
TRIES = 3  # after the first one
BUSY = (429, 502, 503, 504)  # retryable, according to the specification

# `above` is the parent of a step, in another trace.
_SPANS = """
SELECT p.key, p.parent_key, p.step_key, above.step_key AS above_key, p.name, p.start_ns, p.end_ns,
    p.error, p.attrs, m.marks, p.id, p.pid, p.thread_id, p."index", p.epoch, p.step,
    p.cpu_ns, p.gpu_ns, p.memory_peak_bytes
FROM spans p
LEFT JOIN (
    SELECT key, step_key FROM spans WHERE session = :session
) above ON above.key = p.parent_key
LEFT JOIN (SELECT span_key, marks FROM span_marks WHERE session = :session) m ON m.span_key = p.key
WHERE p.session = :session
"""
# Columns that are attributes.
NAMES = ("id", "pid", "thread_id", "epoch", "step", *timeline.DETAILS)


def write(run: Run, path: str, *, headers: Mapping[str, str] | None = None) -> None:
    """Writes a file, or sends to an address such as `http://localhost:4318/v1/traces`."""
    module = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
    service = errors.need(module, 'export "otlp"', "opentelemetry-proto")
    from opentelemetry.proto.trace.v1 import trace_pb2 as protos

    requests = _requests(run, service, protos)
    if path.lower().startswith(("http://", "https://")):
        post = _poster(path, headers or {}, service)
        for request in requests:
            post(request)
        return
    with export.new_file(path) as file:
        for request in requests:
            file.write(request)  # concatenated requests are one request


def _requests(run: Run, service: Any, protos: Any) -> Iterator[bytes]:
    for session in run.sessions:
        spans: list[Any] = []
        for columns, rows in run.sql(_SPANS, session=session.key).batches():
            for row in rows:
                spans.append(_span(session, dict(zip(columns, row, strict=True)), protos))
                if len(spans) == CHUNK_SPANS:
                    yield from _encode(session, spans, service)
                    spans = []
        if spans:
            yield from _encode(session, spans, service)


def _encode(session: Session, spans: list[Any], service: Any) -> Iterator[bytes]:
    request = service.ExportTraceServiceRequest()
    found = request.resource_spans.add()
    for name, value in _resource(session).items():
        if value is not None:
            found.resource.attributes.add(key=name, value=_any(value))
    scope = found.scope_spans.add()
    scope.scope.name = "cirron"
    scope.spans.extend(spans)
    data: bytes = request.SerializeToString()
    if len(data) <= MAX_BYTES or len(spans) == 1:
        yield data
    else:
        half = len(spans) // 2
        yield from _encode(session, spans[:half], service)
        yield from _encode(session, spans[half:], service)


def _resource(session: Session) -> dict[str, Any]:
    info, program = session.info, session.program
    return {
        "service.name": program.script or "cirron",
        "service.instance.id": session.id,
        "host.name": None if info is None else info.host,
        "process.pid": session.pid,
        "process.command_args": program.arguments or None,
        "process.runtime.version": program.python,
        "vcs.ref.head.revision": program.commit,
        "cirron.run_id": session.run_id,
        "cirron.rank": session.rank,
        "cirron.world_size": None if info is None else info.world_size,
        "cirron.attempt": session.attempt,
    }


def _span(session: Session, row: dict[str, Any], protos: Any) -> Any:
    trace = _trace_id(session, row["step_key"])
    start_ns = max(0, row["start_ns"])
    is_open = row["end_ns"] is None
    span = protos.Span(
        trace_id=trace,
        span_id=_id(row["key"]),
        name=row["name"],
        kind=protos.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=start_ns,
        # OTLP has no open spans: it lasts until the last sign of life.
        end_time_unix_nano=max(start_ns, session.last_ns if is_open else row["end_ns"]),
    )
    if row["parent_key"] is not None:
        parent = _id(row["parent_key"])
        if row["key"] == row["step_key"]:
            span.links.add(trace_id=_trace_id(session, row["above_key"]), span_id=parent)
        else:
            span.parent_span_id = parent
    for name in NAMES:
        if row[name] is not None:
            span.attributes.add(key=f"cirron.{name}", value=_any(row[name]))
    if is_open:
        span.attributes.add(key="cirron.open", value=_any(True))
    for name, value in export.attributes(row["attrs"]).items():
        span.attributes.add(key=name, value=_any(value))
    if row["error"] is not None:
        span.status.code = protos.Status.STATUS_CODE_ERROR
        span.status.message = row["error"]
    for mark in export.listed(row["marks"]):
        value = mark["text"] if mark["value"] is None else mark["value"]
        event = span.events.add(name=mark["name"], time_unix_nano=max(0, mark["ts_ns"] or 0))
        event.attributes.add(key="value", value=_any(value))
    return span


def _trace_id(session: Session, step_key: int | None) -> bytes:
    return _id(session.key) + _id(step_key or 0)


def _id(key: int) -> bytes:
    return key.to_bytes(8, "big")


def _any(value: Any, depth: int = 0) -> Any:
    from opentelemetry.proto.common.v1 import common_pb2 as common

    if isinstance(value, bool):
        return common.AnyValue(bool_value=value)
    if isinstance(value, int):
        return common.AnyValue(int_value=value)
    if isinstance(value, float):
        return common.AnyValue(double_value=value)
    if isinstance(value, (list, dict)) and depth == MAX_DEPTH:
        value = wire.encode(value).decode()
    if isinstance(value, str):
        return common.AnyValue(string_value=value)
    if isinstance(value, list):
        values = [_any(one, depth + 1) for one in value]
        return common.AnyValue(array_value=common.ArrayValue(values=values))
    if isinstance(value, dict):
        pairs = [
            common.KeyValue(key=name, value=_any(one, depth + 1)) for name, one in value.items()
        ]
        return common.AnyValue(kvlist_value=common.KeyValueList(values=pairs))
    return common.AnyValue()


def _poster(url: str, headers: Mapping[str, str], service: Any) -> Callable[[bytes], None]:
    import urllib3

    retry = urllib3.Retry(
        total=TRIES,
        status_forcelist=BUSY,
        allowed_methods=None,  # POST too: sending twice is harmless, because spans have ids
        backoff_factor=0.2,
        redirect=0,  # records are sent only to the given address
        respect_retry_after_header=False,  # it may ask for a year
        raise_on_status=False,
        raise_on_redirect=False,
    )
    pool = urllib3.PoolManager(
        timeout=urllib3.Timeout(connect=CONNECT_S, read=READ_S), retries=retry
    )
    sent = {"Content-Type": "application/x-protobuf", "User-Agent": "cirron", **headers}

    def post(request: bytes) -> None:
        try:
            response = pool.request("POST", url, body=request, headers=sent)
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            # The reason for giving up is inside the error, after the name of the connection.
            reason = str(getattr(error, "reason", error)).rpartition("): ")[2]
            raise errors.CirronError(f"{url} could not be reached: {reason}") from None
        if response.status >= 300:
            said = response.data[:200].decode("utf-8", "replace")
            raise errors.CirronError(f"{url} answered {response.status}: {said or response.reason}")
        try:
            answer = service.ExportTraceServiceResponse.FromString(response.data)
        except Exception:  # noqa: BLE001  the server accepted the spans, in an answer that is not OTLP
            return
        if rejected := answer.partial_success.rejected_spans:
            why = answer.partial_success.error_message or "no reason was given"
            raise errors.CirronError(f"{url} rejected {rejected:,} spans: {why}")

    return post
