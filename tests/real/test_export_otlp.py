"""OpenTelemetry spans: in a file, and sent to an HTTP server; read by the official protobufs."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

import cirron as ci
from cirron import errors
from cirron.export import otlp

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.real import export_cases
    from tests.real.export_cases import MARKUP, NAMES, START_NS
else:
    import export_cases
    from export_cases import MARKUP, NAMES, START_NS


class Server:
    """A collector: it keeps what it gets, and answers as it is told."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answers: list[tuple[int, bytes]] = []
        self.headers: dict[str, str] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append((self.path, dict(self.headers), body))
                status, answer = server.answers.pop(0) if server.answers else (200, b"")
                self.send_response(status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.stop()


def spans_of(data: bytes) -> list[Any]:
    request = service.ExportTraceServiceRequest.FromString(data)
    return [
        span
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def attributes(given: Any) -> dict[str, Any]:
    found = {}
    for one in given.attributes:
        kind = one.value.WhichOneof("value")
        found[one.key] = None if kind is None else getattr(one.value, kind)
    return found


def test_a_file_is_one_request(tmp_path: Path) -> None:
    """The file decodes as one message with each span once, at its time."""
    run = export_cases.plain(tmp_path)
    run.export("otlp", tmp_path / "spans.pb")
    spans = spans_of((tmp_path / "spans.pb").read_bytes())
    wanted = run.sql("SELECT name, start_ns, end_ns FROM spans ORDER BY ALL").fetch().rows

    assert wanted == sorted(
        (span.name, span.start_time_unix_nano, span.end_time_unix_nano) for span in spans
    )
    assert len(spans) == len({(span.trace_id, span.span_id) for span in spans})
    assert all(len(span.trace_id) == 16 and len(span.span_id) == 8 for span in spans)


def test_a_trace_a_step(tmp_path: Path) -> None:
    """A step is the root of a trace of its own, with a link to its epoch in the session's trace."""
    export_cases.plain(tmp_path, ranks=1).export("otlp", tmp_path / "spans.pb")
    spans = spans_of((tmp_path / "spans.pb").read_bytes())
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    steps = [span for span in spans if span.name == "step"]
    root = next(span for span in spans if span.name == "cirron.session")

    assert 10 == len({span.trace_id for span in steps})
    for step in steps:
        assert b"" == step.parent_span_id
        (link,) = step.links
        assert root.trace_id == link.trace_id != step.trace_id
        assert "epoch" == by_id[link.trace_id, link.span_id].name
    for span in spans:
        if span.name in ("forward", "backward"):
            assert "step" == by_id[span.trace_id, span.parent_span_id].name
        if span.name == "epoch":
            assert root == by_id[span.trace_id, span.parent_span_id]


def test_who_ran_is_the_resource(tmp_path: Path) -> None:
    """Rank, host and process are told once a request, not on each span."""
    export_cases.plain(tmp_path).export("otlp", tmp_path / "spans.pb")
    request = service.ExportTraceServiceRequest.FromString((tmp_path / "spans.pb").read_bytes())
    first, second = (attributes(one.resource) for one in request.resource_spans)

    assert (0, "node", 100, "run") == tuple(
        first[name] for name in ("cirron.rank", "host.name", "process.pid", "cirron.run_id")
    )
    assert 1 == second["cirron.rank"]


def test_marks_are_events(tmp_path: Path) -> None:
    """A step has its loss as an event, with the time at which it was marked."""
    export_cases.plain(tmp_path, ranks=1, epochs=1, steps=1).export("otlp", tmp_path / "spans.pb")
    spans = spans_of((tmp_path / "spans.pb").read_bytes())
    (event,) = next(span for span in spans if span.name == "step").events

    assert ("loss", START_NS + 950_000) == (event.name, event.time_unix_nano)
    assert {"value": 1.0} == attributes(event)


def test_whatever_a_file_holds_is_encoded(tmp_path: Path) -> None:
    """Odd names, values and times; an open span ends with the session and says so."""
    run = export_cases.hostile(tmp_path)
    run.export("otlp", tmp_path / "spans.pb")
    spans = {span.name: span for span in spans_of((tmp_path / "spans.pb").read_bytes())}

    assert set(NAMES) <= set(spans)
    assert MARKUP == attributes(spans[MARKUP])[MARKUP] == spans[MARKUP].status.message
    assert attributes(spans["open"])["cirron.open"] is True
    assert run.sessions[0].last_ns == spans["open"].end_time_unix_nano
    assert spans["backwards"].start_time_unix_nano == spans["backwards"].end_time_unix_nano
    assert 0 == spans["long ago"].start_time_unix_nano
    assert {"nan", "inf", "-inf"} <= {
        attributes(event)["value"] for event in spans["step"].events if event.name == "odd"
    }


def test_spans_are_sent_in_chunks(tmp_path: Path, server: Server, monkeypatch: Any) -> None:
    """An address gets requests that are no larger than allowed, and all spans between them."""
    monkeypatch.setattr(otlp, "MAX_BYTES", 5_000)
    run = export_cases.plain(tmp_path)
    run.export("otlp", server.url, headers={"Authorization": "Bearer secret"})

    assert len(run.spans) == sum(len(spans_of(body)) for _, _, body in server.requests)
    assert len(server.requests) > 2
    for path, headers, body in server.requests:
        assert "/v1/traces" == path
        assert len(body) <= 5_000
        assert "application/x-protobuf" == headers["Content-Type"]
        assert "Bearer secret" == headers["Authorization"]


def test_a_busy_server_is_asked_again(tmp_path: Path, server: Server) -> None:
    """503 is tried again, and nothing is lost or sent twice."""
    server.answers = [(503, b""), (429, b"")]
    server.headers = {"Retry-After": "86400"}
    run = export_cases.plain(tmp_path, ranks=1)
    run.export("otlp", server.url)

    assert 3 == len(server.requests)
    assert len(run.spans) == len(spans_of(server.requests[-1][2]))


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([(404, b"no such page")], "answered 404: no such page"),
        ([(307, b"")], "answered 307"),
        ([(503, b"full")] * 9, "answered 503: full"),
        ([(200, b"not protobuf \xff")], None),
    ],
)
def test_a_server_that_does_not_take_it(
    tmp_path: Path, server: Server, answers: list[tuple[int, bytes]], said: str | None
) -> None:
    """The error says what the server said; a redirect is not followed, and tries have an end."""
    server.answers = answers
    server.headers = {"Location": "http://127.0.0.1:1/elsewhere"}
    run = export_cases.plain(tmp_path, ranks=1)

    if said is None:
        run.export("otlp", server.url)
    else:
        with pytest.raises(errors.CirronError, match=said):
            run.export("otlp", server.url)
    assert len(server.requests) <= 1 + otlp.TRIES


def test_a_server_that_rejects_some(tmp_path: Path, server: Server) -> None:
    """A partial success is an error that says how many spans are missing."""
    answer = service.ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = 7
    answer.partial_success.error_message = "too old"
    server.answers = [(200, answer.SerializeToString())]

    with pytest.raises(errors.CirronError, match="rejected 7 spans: too old"):
        export_cases.plain(tmp_path, ranks=1).export("otlp", server.url)


def test_no_server(tmp_path: Path, monkeypatch: Any) -> None:
    """An address where nobody listens is an error that names it, soon."""
    run = export_cases.plain(tmp_path, ranks=1)
    began = time.monotonic()

    with pytest.raises(errors.CirronError, match=r"127\.0\.0\.1:1/v1/traces could not be"):
        run.export("otlp", "http://127.0.0.1:1/v1/traces")
    with pytest.raises(errors.CirronError, match="could not be reached"):
        ci.open(tmp_path).export("otlp", "http://")
    assert time.monotonic() - began < 20
