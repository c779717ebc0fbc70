"""Every statement of the seeds on scopes, marks, loops, sinks, read-back and lifecycle.

Seeds 000 and 003 whole, and those parts of 001. What they say of frameworks, snapshots, `watch`,
`wrap` and inference is tested where those are.
"""

from __future__ import annotations

import atexit
import inspect
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader, Dataset

import cirron as ci
from cirron import session

if TYPE_CHECKING:
    from collections.abc import Iterator


def root() -> dict[str, Any]:
    """The session's node."""
    found: dict[str, Any] = ci.trace(format="dict")["roots"][-1]
    return found


def batches(tmp_path: Path, folder: str = ".cirron") -> list[dict[str, Any]]:
    paths = sorted((tmp_path / folder / "spool").glob("*.json"))
    return [json.loads(path.read_bytes()) for path in paths]


def spans(tmp_path: Path, folder: str = ".cirron") -> list[dict[str, Any]]:
    return [span for batch in batches(tmp_path, folder) for span in batch["spans"]]


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "cirron-flush"]


LIVE = re.compile(r"\[cirron\] [^ ]+(\[\d+\])? - [\d.]+(us|ms|s)( \{.*\})?")


class TestLoops:
    """Seed 000."""

    def test_epochs_yield_the_values_of_the_iterable(self) -> None:
        """`ci.epochs(range(20))` yields exactly 0..19 while producing 20 epoch spans."""
        ci.profile(output="none")

        assert list(range(20)) == list(ci.epochs(range(20)))
        assert [("epoch", n) for n in range(20)] == [
            (node["name"], node["index"]) for node in root()["children"]
        ]

    @pytest.mark.parametrize("name", ["epochs", "batches"])
    def test_signatures(self, name: str) -> None:
        """`def epochs(iterable: Iterable[T]) -> Iterator[T]`, and batches alike."""
        signature = inspect.signature(getattr(ci, name))

        assert ["iterable"] == list(signature.parameters)
        assert "Iterable[T]" == signature.parameters["iterable"].annotation
        assert "Iterator[T]" == signature.return_annotation

    @pytest.mark.parametrize("wrapper", [ci.epochs, ci.batches])
    def test_any_iterable(self, wrapper: Any) -> None:
        """Both accept any iterable and pass values through unchanged."""

        class OldStyle:
            def __getitem__(self, index: int) -> int:
                if index == 3:
                    raise IndexError
                return index

        def generator() -> Iterator[int]:
            yield from range(3)

        for iterable in ([0, 1, 2], (0, 1, 2), range(3), generator(), iter(range(3)), OldStyle()):
            assert [0, 1, 2] == list(wrapper(iterable))
        items = [object(), object()]
        assert all(a is b for a, b in zip(items, wrapper(items), strict=True))

    def test_indices_start_at_0(self) -> None:
        """The index starts at 0 and increments per iteration, in each loop anew."""
        ci.profile(output="none")
        for _ in ci.epochs("ab"):
            for _ in ci.batches("xyz"):
                pass

        assert [[0, 1, 2], [0, 1, 2]] == [
            [batch["index"] for batch in epoch["children"]] for epoch in root()["children"]
        ]

    def test_stall_time_of_a_data_loader(self) -> None:
        """For a DataLoader the time inside `__next__` is `data_load_ns`, apart from compute."""

        class Slow(Dataset[int]):
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> int:
                time.sleep(0.02)
                return index

        ci.profile(output="none")
        for _ in ci.batches(DataLoader(Slow(), batch_size=None)):
            pass

        found = ci.trace(format="dict", name="batch")["roots"]
        assert 3 == len(found)
        assert all(20e6 <= batch["attrs"]["data_load_ns"] < 5e9 for batch in found)
        assert min(batch["wall_us"] for batch in found) < 20_000  # the span is the compute

    def test_no_stall_time_elsewhere(self) -> None:
        """It works on any iterable, but stall measurement is PyTorch-only."""
        ci.profile(output="none")
        list(ci.batches(range(3)))

        assert [{}] * 3 == [batch["attrs"] for batch in root()["children"]]

    def test_break_closes_cleanly(self) -> None:
        """A break out of the loop closes the current scope cleanly."""
        ci.profile(output="none")
        for _ in ci.epochs(range(5)):
            for _ in ci.batches(range(5)):
                break
            break
        with ci.scope("after"):
            pass

        assert [("epoch", False), ("after", False)] == [
            (node["name"], node["open"]) for node in root()["children"]
        ]
        assert 1 == ci.health()["scope_depth"]

    def test_an_iteration_costs_at_most_10_us(self) -> None:
        """About 10 us an iteration, at most (ours is a tenth of it)."""
        ci.profile(output="none")
        best_ns = float("inf")
        for _ in range(5):
            began = time.perf_counter_ns()
            for _ in ci.epochs(range(5_000)):
                pass
            best_ns = min(best_ns, (time.perf_counter_ns() - began) / 5_000)

        assert best_ns < 10_000


class TestScopes:
    """Seed 001, custom regions."""

    def test_scopes_nest_under_what_is_open(self) -> None:
        """Scopes nest arbitrarily under whatever scope is already open."""
        ci.profile(output="none")
        for _ in ci.epochs(range(1)):
            for _ in ci.batches(range(1)):
                with ci.scope("augmentation"), ci.scope("crop"):
                    pass
        (epoch,) = root()["children"]
        (batch,) = epoch["children"]
        (augmentation,) = batch["children"]

        assert ("augmentation", ["crop"]) == (
            augmentation["name"],
            [node["name"] for node in augmentation["children"]],
        )

    def test_scopes_nest_64_levels_deep(self, caplog: pytest.LogCaptureFixture) -> None:
        """Max depth: 64."""

        def nest(depth: int) -> None:
            if depth:
                with ci.scope("x"):
                    nest(depth - 1)

        ci.profile(output="none")
        nest(100)

        assert 64 == ci.trace(format="dict")["span_count"]
        assert 1 == ci.health()["scope_depth"]

    def test_works_before_and_without_a_profiler(self) -> None:
        """Recording works with no profiler, in memory."""
        with ci.scope("before"):
            ci.mark("loss", 0.5)
        (node,) = ci.trace(format="dict")["roots"]

        assert ("before", [{"name": "loss", "value": 0.5, "kind": "point"}]) == (
            node["name"],
            node["marks"],
        )


class TestMarks:
    """Seed 001, values."""

    def test_innermost_open_scope(self) -> None:
        """Marks attach scalar values to the innermost open scope."""
        ci.profile(output="none")
        with ci.scope("outer"), ci.scope("inner"):
            ci.mark("loss", 0.5)
        (outer,) = root()["children"]

        assert ([], ["loss"]) == (
            outer["marks"],
            [mark["name"] for mark in outer["children"][0]["marks"]],
        )

    def test_points_are_a_series(self) -> None:
        """kind="point" is the default: values of a series, all kept, in order."""
        ci.profile(output="none")
        for value in (3, 2, 1):
            ci.mark("loss", value)

        assert [(3, "point"), (2, "point"), (1, "point")] == [
            (mark["value"], mark["kind"]) for mark in root()["marks"]
        ]

    def test_a_summary_is_the_canonical_value(self, capsys: pytest.CaptureFixture[str]) -> None:
        """kind="summary" is the single value that viewers show on the span."""
        ci.profile(output="none")
        with ci.scope("epoch"):
            ci.mark("loss", 3.0)
            ci.mark("loss", 2.0)
            ci.mark("loss", 0.25, kind="summary")
        ci.trace()

        assert "{loss=0.25}" in capsys.readouterr().out


class TestProfile:
    """Seed 003: signature, parameters, errors, returns."""

    def test_signature(self) -> None:
        """The signature is the seed's: names, order, defaults; and after them what came later."""
        assert [
            ("config", None),
            ("frameworks", None),
            ("snapshots", None),
            ("sample_rate", None),
            ("flush_interval", None),
            ("enabled", True),
            ("path", None),
            ("output", None),
            ("sinks", None),
            ("tags", None),
            ("overhead", None),
            ("report", None),
            ("loss_marks", None),
        ] == [(p.name, p.default) for p in inspect.signature(ci.profile).parameters.values()]
        assert "Profiler" == inspect.signature(ci.profile).return_annotation
        assert {inspect.Parameter.POSITIONAL_OR_KEYWORD} == {
            p.kind for p in inspect.signature(ci.profile).parameters.values()
        }

    def test_annotations(self) -> None:
        """The types are the seed's; and of what came later, its own."""
        assert {
            "config": "dict[str, Any] | None",
            "frameworks": "list[str] | None",
            "snapshots": "Literal['stats', 'sampled', 'full'] | None",
            "sample_rate": "float | None",
            "flush_interval": "float | None",
            "enabled": "bool",
            "path": "str | None",
            "output": "str | list[str] | None",
            "sinks": "Sequence[Emitter] | None",
            "tags": "list[str] | dict[str, str] | None",
            "overhead": "float | None",
            "report": "bool | None",
            "loss_marks": "bool | None",
        } == {
            name: str(p.annotation).replace('"', "'")
            for name, p in inspect.signature(ci.profile).parameters.items()
        }

    def test_defaults(self) -> None:
        """snapshots "stats", sample_rate 0.01, flush_interval 1.0, ./.cirron, output "spool"."""
        values = ci.Cirron().settings

        assert ("stats", 0.01, 1.0, "./.cirron", ("spool",), True) == (
            values.snapshots,
            values.sample_rate,
            values.flush_interval,
            values.output_dir,
            values.output,
            values.enabled,
        )

    def test_none_means_the_instance_s_default(self, tmp_path: Path) -> None:
        """None means "use the Cirron instance default"; an explicit value overrides per call."""
        instance = ci.Cirron(output_dir="instance", output="spool", flush_interval=7)
        instance.profile(flush_interval=None)
        instance.shutdown()  # folders are made by threads of ours
        assert (tmp_path / "instance" / "spool").is_dir()

        instance.profile(path="call")
        instance.shutdown()
        assert (tmp_path / "call" / "spool").is_dir()

    def test_second_calls_are_no_ops(self, caplog: pytest.LogCaptureFixture) -> None:
        """Call once: a later call logs a warning and returns the same handle."""
        first = ci.profile(output="none")
        threads = our_threads()
        second = ci.profile(output="spool", path="elsewhere")

        assert first is second
        assert ["WARNING"] == [record.levelname for record in caplog.records]
        assert "ci.profile() was called again" in caplog.text
        assert threads == our_threads()
        assert not Path("elsewhere").exists()

    def test_shutdown_clears_the_singleton(self, caplog: pytest.LogCaptureFixture) -> None:
        """`ci.shutdown()` clears the singleton; `ci.profile()` after it starts a fresh profiler."""
        first = ci.profile(output="none")
        first_id = ci.health()["session_id"]
        with ci.scope("old"):
            pass
        ci.shutdown()
        second = ci.profile(output="none")

        assert first is not second
        assert first_id != ci.health()["session_id"]
        assert ([], "") == (root()["children"], caplog.text)

    def test_config_is_read_with_get(self) -> None:
        """config: feature flags that your code reads via `config.get(...)`."""
        profiler = ci.profile(config={"fast_path": True}, output="none")

        assert (True, None, 3) == (
            profiler.config.get("fast_path"),
            profiler.config.get("other"),
            profiler.config.get("other", 3),
        )

    def test_path_overrides_the_spool_folder(self, tmp_path: Path) -> None:
        """path overrides the local spool directory."""
        ci.profile(path="traces")
        with ci.scope("x"):
            pass
        ci.shutdown()

        assert ["x", "cirron.session"] == [span["name"] for span in spans(tmp_path, "traces")]
        assert not (tmp_path / ".cirron").exists()

    def test_the_background_thread_flushes_at_the_interval(self, tmp_path: Path) -> None:
        """flush_interval: how often the background thread writes, with nobody asking."""
        ci.profile(flush_interval=0.01)
        with ci.scope("x"):
            pass
        deadline = time.monotonic() + 10
        while not spans(tmp_path) and time.monotonic() < deadline:
            threading.Event().wait(0.005)

        assert ["x"] == [span["name"] for span in spans(tmp_path)]

    def test_a_disabled_profiler_does_nothing(self, tmp_path: Path) -> None:
        """enabled=False is a no-op profiler: no thread, no files, no handlers, no records."""
        handlers = signal.getsignal(signal.SIGTERM)
        profiler = ci.profile(enabled=False)
        with ci.scope("x"):
            ci.mark("loss", 0.5)

        assert isinstance(profiler, ci.Profiler)
        assert ([], [], handlers) == (
            our_threads(),
            list(tmp_path.iterdir()),
            signal.getsignal(signal.SIGTERM),
        )
        assert 0 == ci.trace(format="dict")["span_count"]

    @pytest.mark.parametrize(
        ("argument", "value", "valid"),
        [
            ("output", "disk", "'spool', 'log', 'stdout', 'none'"),
            ("output", ["spool", "disk"], "'spool', 'log', 'stdout', 'none'"),
            ("output", [], "'spool', 'log', 'stdout', 'none'"),
            ("output", ["none", "log"], "'none' cannot be combined with other outputs"),
            ("snapshots", "all", "'stats', 'sampled', 'full'"),
            ("sample_rate", 2, "from 0 to 1"),
            ("sample_rate", "x", "from 0 to 1"),
            ("flush_interval", 0, "above 0"),
            ("flush_interval", -1, "above 0"),
            ("frameworks", ["pytorch"], "'torch'"),
            ("frameworks", "torch", "a list of names"),
            ("enabled", "perhaps", "True, False"),
            ("path", "", "path of a folder"),
            ("config", [1], "a dict"),
        ],
    )
    def test_invalid_values_raise_before_anything_is_touched(
        self, argument: str, value: Any, valid: str, tmp_path: Path
    ) -> None:
        """Invalid values raise ValueError before anything is touched, and name the valid ones."""
        handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        callbacks = atexit._ncallbacks()
        with pytest.raises(ValueError, match=re.escape(valid)):
            ci.profile(**{argument: value})

        assert ([], []) == (list(tmp_path.iterdir()), our_threads())
        assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
        assert callbacks == atexit._ncallbacks()
        assert ci.health()["enabled"] is False

    def test_profile_returns_a_handle(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Returns a Profiler handle exposing health, flush, trace, and shutdown."""
        profiler = ci.profile(output="none")
        with ci.scope("x"):
            pass
        profiler.flush()

        assert profiler.health()["enabled"] is True
        assert 2 == profiler.trace(format="dict")["span_count"]
        assert ["x"] == [n["name"] for n in profiler.trace("dict", name="x", last=1)["roots"]]
        profiler.trace()
        assert "cirron.session" in capsys.readouterr().out
        profiler.shutdown()
        assert ci.health()["enabled"] is False

    def test_a_handle_of_a_session_that_has_ended(self) -> None:
        """A handle ends its own session, and not the one that came after it."""
        old = ci.profile(output="none")
        old.shutdown()
        ci.profile(output="none")
        old.shutdown()

        assert ci.health()["enabled"] is True


class TestWhatItDoes:
    """Seed 003: "What it does", steps 1, 2, 3, 6, 7, 8; seed 001, the happy path."""

    def test_explicit_config_overrides_the_platform(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """1: explicit config, then the platform's, then defaults, key by key."""
        monkeypatch.setenv("CIRRON_CONFIG", '{"a": "platform", "b": "platform"}')
        config = ci.profile(config={"a": "explicit"}, output="none").config

        assert ("explicit", "platform", "default") == (
            config.get("a"),
            config.get("b"),
            config.get("c", "default"),
        )

    def test_platform_ids_are_in_every_batch(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """2: CIRRON_RUN_ID, _PIPELINE_ID, _DEPLOYMENT_ID and _WORKSPACE_ID are in every batch."""
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        for name in ("RUN", "PIPELINE", "DEPLOYMENT", "WORKSPACE"):
            monkeypatch.setenv(f"CIRRON_{name}_ID", f"the-{name}")
        ci.profile()
        with ci.scope("x"):
            pass
        ci.shutdown()

        for batch in batches(tmp_path):
            session = batch["session"]
            assert ("the-RUN", "the-PIPELINE", "the-DEPLOYMENT", "the-WORKSPACE") == (
                session["run_id"],
                session["pipeline_id"],
                session["deployment_id"],
                session["workspace_id"],
            )

    @pytest.mark.parametrize(
        ("environ", "transport"),
        [
            ({}, "file_only"),
            ({"CIRRON_API_KEY": "k", "CIRRON_API_ENDPOINT": "http://127.0.0.1:9"}, "http"),
            ({"CIRRON_RUN_ID": "r"}, "event_stream"),
            ({"CIRRON_RUN_ID": "r", "CIRRON_API_KEY": "k"}, "event_stream"),
        ],
    )
    def test_the_transport_follows_the_environment(
        self, environ: dict[str, str], transport: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """3: event stream inside of a pipeline, else HTTP with a key, else files alone."""
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        ci.profile(output="none")

        assert transport == ci.health()["transport"]

    def test_the_background_thread(self) -> None:
        """6: one flush thread, from `ci.profile()` until `ci.shutdown()`."""
        assert [] == our_threads()
        ci.profile(output="none")
        assert ["cirron-flush"] == our_threads()
        ci.shutdown()
        assert [] == our_threads()

    def test_exit_and_signal_handlers_are_restored(self) -> None:
        """7: atexit and signals are watched, a user's own handler too, and all is put back."""

        def mine(number: int, frame: Any) -> None:
            pass

        before = {number: signal.signal(number, mine) for number in (signal.SIGTERM, signal.SIGINT)}
        callbacks = atexit._ncallbacks()
        try:
            ci.profile(output="none")
            watched = [signal.getsignal(number) for number in before]
            registered = atexit._ncallbacks()
            ci.shutdown()

            assert mine not in watched
            assert callbacks < registered
            assert [mine, mine] == [signal.getsignal(number) for number in before]
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def test_the_root_scope(self, tmp_path: Path) -> None:
        """8: `cirron.session` is the root, with framework, device, cuda_count, mixed_precision."""
        ci.profile()
        assert ("cirron.session", True) == (root()["name"], root()["open"])
        ci.shutdown()
        (span,) = spans(tmp_path)

        assert ("cirron.session", None) == (span["name"], span["parent_id"])
        assert {"framework", "device", "cuda_count", "mixed_precision"} <= set(span["attrs"])


ALL_OUTPUTS = [
    list(names)
    for names in chain.from_iterable(
        combinations(("spool", "log", "stdout"), count) for count in (1, 2, 3)
    )
]


class TestOutput:
    """Seeds 001 and 003, output sinks."""

    def record(self, output: Any, monkeypatch: pytest.MonkeyPatch) -> str:
        """What is on standard output after a short run with these sinks."""
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stdout", stream)
        ci.profile(output=output)
        with ci.scope("epoch", index=0):
            ci.mark("epoch_loss", 0.52341)
        with ci.scope("plain"):
            pass
        ci.shutdown()
        return stream.getvalue()

    @pytest.mark.parametrize("output", [*ALL_OUTPUTS, "spool", "log", "stdout", "none"], ids=str)
    def test_each_combination_of_sinks_works(
        self,
        output: Any,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        tmp_path: Path,
    ) -> None:
        """Each sink does its own and nothing else, alone and with any others."""
        with caplog.at_level(logging.INFO, "cirron.trace"):
            printed = self.record(output, monkeypatch).splitlines()
        logged = [r.getMessage() for r in caplog.records if r.name == "cirron.trace"]
        names = {output} if isinstance(output, str) else set(output)

        assert ("spool" in names) == bool(list(tmp_path.glob(".cirron/spool/*.json")))
        assert ("spool" in names) == (tmp_path / ".cirron").exists()
        assert (3 if "stdout" in names else 0) == len(printed)
        assert (3 if "log" in names else 0) == len(logged)
        assert all(LIVE.fullmatch(line) for line in [*printed, *logged])
        if {"stdout", "log"} <= names:
            assert printed == logged

    def test_the_default_is_spool(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The default writes each batch as a JSON file under ./.cirron/spool/."""
        assert "" == self.record(None, monkeypatch)
        (batch,) = batches(tmp_path)

        assert 1 == batch["schema_version"]
        assert ["epoch", "plain", "cirron.session"] == [s["name"] for s in batch["spans"]]
        assert [0.52341] == [mark["value"] for mark in batch["marks"]]

    def test_log_is_info_on_its_logger(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """ "log" emits one INFO line per closed span on the `cirron.trace` logger."""
        with caplog.at_level(logging.INFO, "cirron.trace"):
            self.record("log", monkeypatch)

        assert [("cirron.trace", logging.INFO)] * 3 == [
            (record.name, record.levelno) for record in caplog.records
        ]

    def test_the_live_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A live span line looks like `[cirron] epoch[0] - 142us {epoch_loss=0.5234}`."""
        epoch, plain, _ = self.record("stdout", monkeypatch).splitlines()

        assert re.fullmatch(r"\[cirron\] epoch\[0\] - [\d.]+(us|ms) \{epoch_loss=0\.5234\}", epoch)
        assert re.fullmatch(r"\[cirron\] plain - [\d.]+(us|ms)", plain)
        from cirron.view import text

        assert "[cirron] epoch[0] - 142us {epoch_loss=0.5234}" == text.live_line(
            "epoch", 0, 142_000, {"epoch_loss": 0.52341}
        )

    def test_lines_come_while_training_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """ "stdout" is a live feed: lines come at a flush, not at the end."""
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stdout", stream)
        ci.profile(output="stdout")
        with ci.scope("x"):
            pass
        ci.flush()

        assert stream.getvalue().startswith("[cirron] x - ")

    def test_none_keeps_traces_in_memory(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """ "none": no spool, no log, no print; traces stay in memory for `ci.trace()`."""
        assert "" == self.record("none", monkeypatch)
        assert [] == list(tmp_path.iterdir())
        assert ["epoch", "plain"] == [node["name"] for node in root()["children"]]

    @pytest.mark.parametrize("output", ["none", "spool", "log", "stdout", ["spool", "stdout"]])
    def test_independent_of_the_transport(
        self, output: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """With CIRRON_RUN_ID batches flow over the event stream regardless of output."""
        monkeypatch.setenv("CIRRON_RUN_ID", "run-7")
        lines = self.record(output, monkeypatch).splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        names = [span["name"] for event in events for span in event["payload"]["spans"]]

        assert {"trace_batch"} == {event["__cirron_event__"] for event in events}
        assert {(1, ci.__version__)} == {(e["schema_version"], e["sdk_version"]) for e in events}
        assert {"run-7"} == {event["payload"]["session"]["run_id"] for event in events}
        assert ["cirron.session", "epoch", "plain"] == sorted(names)
        assert ("spool" in output) == (tmp_path / ".cirron").exists()


class TestTrace:
    """Seed 001, in-process read-back."""

    @pytest.fixture(params=[True, False], ids=["profiled", "no-profiler"])
    def recorded(self, request: pytest.FixtureRequest) -> bool:
        """Two epochs of two batches, with and without a profiler."""
        if request.param:
            ci.profile(output="none")
        for epoch in ci.epochs(range(2)):
            for batch in ci.batches("ab"):
                ci.mark("loss", epoch, batch=batch)
        return bool(request.param)

    def test_trace_prints_a_text_tree(
        self, recorded: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`ci.trace()` prints a text tree to stdout and returns nothing."""
        assert ci.trace() is None
        lines = capsys.readouterr().out.splitlines()
        indent = "  " if recorded else ""

        assert recorded == lines[0].startswith("cirron.session - ")
        assert f"{indent}epoch[0]" in [line.split(" - ")[0] for line in lines]
        assert f"{indent}  batch[1]" in [line.split(" - ")[0] for line in lines]
        assert any("{loss=1}" in line for line in lines)

    def test_dict_format_is_nested(self, recorded: bool) -> None:
        """`format="dict"` is a nested dict with roots and span_count."""
        found = ci.trace(format="dict")
        epochs = found["roots"][0]["children"] if recorded else found["roots"]

        assert ({"roots", "span_count"}, 6 + recorded) == (set(found), found["span_count"])
        assert {"name", "index", "wall_us", "attrs", "marks", "children"} <= set(epochs[0])
        assert [("batch", 0), ("batch", 1)] == [
            (node["name"], node["index"]) for node in epochs[0]["children"]
        ]
        assert [{"name": "loss", "value": 1, "kind": "point", "attrs": {"batch": "a"}}] == (
            epochs[1]["children"][0]["marks"]
        )

    def test_json_format_is_the_dict_as_a_string(self, recorded: bool) -> None:
        """`format="json"` is the same as a JSON string."""
        text, found = ci.trace(format="json", name="epoch"), ci.trace(format="dict", name="epoch")

        assert isinstance(text, str)
        assert found == json.loads(text)

    def test_df_format_has_one_row_per_span(self, recorded: bool) -> None:
        """`format="df"` is a pandas DataFrame, one row per span, with the known columns."""
        frame = ci.trace(format="df")

        assert [
            "id",
            "parent_id",
            "name",
            "index",
            "wall_us",
            "cpu_ns",
            "gpu_ns",
            "memory_peak_bytes",
            "mark_count",
            "depth",
            "start_ns",
            "end_ns",
            "path",
            "attrs",
            "marks",
        ] == list(frame.columns)
        assert 6 + recorded == len(frame)
        assert {"epoch": 2, "batch": 4} == (
            frame[frame.name != "cirron.session"].groupby("name").size().to_dict()
        )
        assert [1, 1, 1, 1] == frame[frame.name == "batch"].mark_count.to_list()
        assert frame.groupby("name").wall_us.quantile(0.5)["epoch"] > 0

    def test_name_filters_spans(self, recorded: bool) -> None:
        """`name` keeps matching spans and what is inside them."""
        found = ci.trace(format="dict", name="epoch")

        assert (["epoch", "epoch"], 6) == ([n["name"] for n in found["roots"]], found["span_count"])
        assert 4 == ci.trace(format="dict", name="batch")["span_count"]
        assert {"roots": [], "span_count": 0} == ci.trace(format="dict", name="absent")

    def test_last_keeps_the_newest_spans(self, recorded: bool) -> None:
        """`last=n` keeps the n most recently closed spans."""
        frame = ci.trace(format="df", last=2)

        assert [("batch", 1), ("epoch", 1)] == sorted(zip(frame.name, frame["index"], strict=True))
        assert 6 == ci.trace(format="dict", last=10)["span_count"]
        assert 0 == ci.trace(format="dict", last=0)["span_count"]

    def test_name_and_last(self, recorded: bool) -> None:
        """Both filters together: the last of the matching ones."""
        frame = ci.trace(format="df", name="batch", last=1)

        assert [("batch", 1)] == list(zip(frame.name, frame["index"], strict=True))

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"format": "yaml"}, "use one of 'tree', 'dict', 'json', 'df'"),
            ({"last": -1}, "a whole number, 0 or more"),
            ({"last": 1.5}, "a whole number, 0 or more"),
            ({"last": True}, "a whole number, 0 or more"),
            ({"name": 3}, "the name of a scope"),
        ],
    )
    def test_bad_trace_arguments_name_the_allowed_values(self, arguments: Any, text: str) -> None:
        """A bad argument is a ValueError that says what is allowed."""
        with pytest.raises(ValueError, match=re.escape(text)):
            ci.trace(**arguments)

    def test_it_never_writes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """With no profiler it is purely in memory: safe on a read-only file system."""
        with ci.scope("x"):
            ci.mark("loss", 0.5)
        os.chmod(tmp_path, 0o500)
        try:
            for format in ("tree", "dict", "json", "df"):
                ci.trace(format=format)
        finally:
            os.chmod(tmp_path, 0o700)

        assert ([], []) == (list(tmp_path.iterdir()), our_threads())

    def test_it_does_not_take_from_the_spool(self, tmp_path: Path) -> None:
        """Reading back writes nothing, and what was read still reaches the disk."""
        ci.profile(flush_interval=3600)
        with ci.scope("x"):
            pass
        ci.trace(format="dict")
        assert [] == batches(tmp_path)
        ci.shutdown()

        assert ["x", "cirron.session"] == [span["name"] for span in spans(tmp_path)]

    def test_open_spans_are_there(self) -> None:
        """The current tree has the spans that are still open, with the time so far."""
        ci.profile(output="none")
        with ci.scope("open"):
            (node,) = root()["children"]

        assert ("open", True) == (node["name"], node["open"])
        assert node["wall_us"] > 0

    def test_it_can_be_read_after_the_end(self) -> None:
        """After `ci.shutdown()` the session's tree can still be read."""
        ci.profile(output="none")
        with ci.scope("x"):
            pass
        ci.shutdown()

        assert ("cirron.session", False, ["x"]) == (
            root()["name"],
            root()["open"],
            [node["name"] for node in root()["children"]],
        )


class TestLifecycle:
    """Seed 001, lifecycle."""

    def test_flush_drains_buffers_to_the_spool(self, tmp_path: Path) -> None:
        """`ci.flush()` synchronously drains scope and mark buffers to the spool."""
        ci.profile(flush_interval=3600)
        for i in range(2_000):
            with ci.scope("x", index=i):
                ci.mark("m", i)
        ci.flush()
        marks = [mark["value"] for batch in batches(tmp_path) for mark in batch["marks"]]

        assert list(range(2_000)) == [span["index"] for span in spans(tmp_path)]
        assert list(range(2_000)) == marks

    def test_health_has_the_documented_counters(self) -> None:
        """`ci.health()`: enabled, drop counts, frameworks, transport, spool usage."""
        ci.profile()
        with ci.scope("x"):
            inside = ci.health()
        ci.flush()
        health = ci.health()

        assert {
            "enabled",
            "frameworks_installed",
            "transport",
            "scope_depth",
            "mark_drop_count",
            "spool_drop_count",
            "spool_bytes",
            "flush_latency_ns",
        } <= set(health)
        assert (2, 1) == (inside["scope_depth"], health["scope_depth"])
        assert (0, 0) == (health["mark_drop_count"], health["spool_drop_count"])
        assert health["spool_bytes"] > 0
        assert health["flush_latency_ns"] > 0

    def test_shutdown_closes_the_session(self, tmp_path: Path) -> None:
        """`ci.shutdown()` closes the root, flushes, stops the thread, clears the singleton."""
        ci.profile(flush_interval=3600)
        with ci.scope("x"):
            pass
        ci.shutdown()

        assert ["x", "cirron.session"] == [span["name"] for span in spans(tmp_path)]
        assert ([], False) == (our_threads(), ci.health()["enabled"])

    @pytest.mark.parametrize("is_on", [True, False])
    def test_harmless_at_any_time(self, is_on: bool) -> None:
        """All three work before, after and without a profiler, and twice."""
        for _ in range(2):
            ci.flush()
            assert ci.health()["enabled"] is False
            ci.shutdown()
        ci.profile(output="none", enabled=is_on)
        for _ in range(2):
            ci.flush()
            ci.shutdown()
            assert ci.health()["enabled"] is False


class TestDistributed:
    """Seeds 001 and 003, distributed training."""

    def test_every_span_has_its_rank(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """RANK, LOCAL_RANK and WORLD_SIZE are read, and every span is tagged with the rank."""
        for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
            monkeypatch.setenv(name, value)
        ci.profile()
        for _ in ci.epochs(range(2)):
            with ci.scope("x"):
                pass
        ci.shutdown()
        sessions = [batch["session"] for batch in batches(tmp_path)]

        assert [3] * 5 == [span["rank"] for span in spans(tmp_path)]
        assert {(3, 1, 8)} == {(s["rank"], s["local_rank"], s["world_size"]) for s in sessions}

    def test_an_unknown_rank_is_not_0(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A rank that is not given is unknown: LOCAL_RANK alone never stands for it."""
        monkeypatch.setenv("LOCAL_RANK", "1")
        ci.profile()
        ci.shutdown()

        assert [None] == [span["rank"] for span in spans(tmp_path)]


class TestWhatTraceSaysOfItself:
    """Read-back is honest about what it does not have."""

    def test_older_spans_are_gone(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When memory had to give up older spans, the tree says so."""
        monkeypatch.setattr(session._memory, "max_bytes", 100_000)
        ci.profile(output="none")
        for _ in ci.batches(range(2_000)):
            pass
        ci.trace()

        assert "older spans are no longer in memory" in capsys.readouterr().out

    def test_trace_says_that_profiling_is_off(self, capsys: pytest.CaptureFixture[str]) -> None:
        """When profiling is off, it says that, not that nothing was recorded."""
        ci.profile(enabled=False)
        ci.trace()

        assert "profiling is off" in capsys.readouterr().out


class TestInstance:
    """The explicit instance."""

    def test_signature(self) -> None:
        """`Cirron` takes its eight settings by name, and after them what is ours."""
        assert [
            "api_key",
            "api_endpoint",
            "output_dir",
            "snapshots",
            "sample_rate",
            "flush_interval",
            "spool_max_bytes",
            "output",
        ] == list(inspect.signature(ci.Cirron).parameters)[:8]

    def test_its_methods_are_the_module_s(self, tmp_path: Path) -> None:
        """An instance profiles with its settings and has the same methods."""
        instance = ci.Cirron(output_dir="mine", spool_max_bytes=10_000_000)
        profiler = instance.profile()
        for _ in instance.epochs(range(1)):
            for _ in instance.batches(range(1)):
                with instance.scope("x"):
                    instance.mark("loss", 0.5)
        instance.flush()

        assert profiler is ci.profile()
        assert instance.health()["enabled"] is True
        assert 4 == instance.trace(format="dict")["span_count"]
        instance.shutdown()
        assert 4 == len(spans(tmp_path, "mine"))

    @pytest.mark.parametrize("bad", [{"output": "x"}, {"sample_rate": 5}, {"spool_max_bytes": 0}])
    def test_a_bad_setting_raises_when_the_instance_is_created(self, bad: Any) -> None:
        """A bad setting is an error when the instance is made."""
        with pytest.raises(ValueError, match="is not valid"):
            ci.Cirron(**bad)
