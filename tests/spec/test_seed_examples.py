"""The code of the seeds, run as written, with small stand-ins for what they leave open."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

import cirron as ci

if TYPE_CHECKING:
    from pathlib import Path

X = torch.linspace(-1, 1, 16).unsqueeze(1)
MODEL = torch.nn.Linear(1, 1)


def train_step(batch: Any) -> torch.Tensor:
    loss: torch.Tensor = torch.nn.functional.mse_loss(MODEL(batch), 2 * batch)
    return loss


def train_one_epoch(epoch: int) -> None:
    ci.mark("trained", epoch)


@pytest.fixture
def loader() -> DataLoader[Any]:
    return DataLoader(X, batch_size=8)  # type: ignore[arg-type]


def children(name: str | None = None) -> list[dict[str, Any]]:
    """What is right under the session, or the roots of what has this name."""
    roots: list[dict[str, Any]] = ci.trace(format="dict", name=name)["roots"]
    if name is not None:
        return roots
    found: list[dict[str, Any]] = roots[0]["children"]
    return found


class TestSeed000:
    def test_epochs_and_what_it_is_equivalent_to(self) -> None:
        """Seed 000: `ci.epochs` is equivalent to `enumerate` with a scope round the body."""
        ci.profile(output="none")
        for epoch in ci.epochs(range(20)):
            train_one_epoch(epoch)
        wrapped = shape(children())
        ci.shutdown()
        ci.profile(output="none")
        for i, epoch in enumerate(range(20)):
            with ci.scope("epoch", index=i):
                train_one_epoch(epoch)

        assert shape(children()) == wrapped
        assert 20 == len(wrapped)

    def test_batches_wrap_a_loader(self, loader: DataLoader[Any]) -> None:
        """Seed 000: `for batch in ci.batches(loader)`."""
        ci.profile(output="none")
        for batch in ci.batches(loader):
            loss = train_step(batch)

        assert loss.item() >= 0
        batches = children("batch")
        assert [("batch", 0), ("batch", 1)] == [(n["name"], n["index"]) for n in batches]
        assert all(node["attrs"]["data_load_ns"] > 0 for node in batches)

    def test_epochs_batches_and_marks_combine(self, loader: DataLoader[Any]) -> None:
        """Seed 000: epochs, batches and a mark together."""
        ci.profile(output="none")
        for epoch in ci.epochs(range(20)):  # noqa: B007  as the seed has it
            for batch in ci.batches(loader):
                loss = train_step(batch)
                ci.mark("loss", loss.item())

        assert [("epoch", n) for n in range(20)] == [(e["name"], e["index"]) for e in children()]
        for node in children():
            batches = [one for one in node["children"] if one["name"] == "batch"]
            assert [0, 1] == [batch["index"] for batch in batches]
            for batch in batches:
                (mark,) = batch["marks"]
                assert ("loss", "point", float) == (mark["name"], mark["kind"], type(mark["value"]))


def shape(nodes: list[dict[str, Any]]) -> list[Any]:
    return [(n["name"], n["index"], n["attrs"], n["marks"], shape(n["children"])) for n in nodes]


class TestSeed001:
    def test_the_happy_path(self, tmp_path: Path) -> None:
        """Seed 001: `ci.profile()` is the whole setup."""
        ci.profile()

        assert (tmp_path / ".cirron" / "spool").is_dir()
        assert ci.health()["enabled"] is True

    def test_scopes_record_custom_regions(self) -> None:
        """Seed 001: explicit scopes, with and without attributes."""

        def augment(batch: list[int]) -> list[int]:
            return [*batch, 0]

        def beam_search(logits: list[float]) -> int:
            return logits.index(max(logits))

        batch, logits = [1], [0.1, 0.9]
        ci.profile(output="none")
        with ci.scope("augmentation"):
            batch = augment(batch)

        with ci.scope("postprocess", variant="beam-search"):
            output = beam_search(logits)

        assert ([1, 0], 1) == (batch, output)
        assert [("augmentation", {}), ("postprocess", {"variant": "beam-search"})] == [
            (node["name"], node["attrs"]) for node in children()
        ]

    def test_points_and_summaries_are_marked(self) -> None:
        """Seed 001: the four marks, three points and a summary."""
        model, val_acc = MODEL, 0.9
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
        loss = train_step(X)

        def compute_grad_norm(model: torch.nn.Linear) -> torch.Tensor:
            return torch.sqrt((model.weight.detach() ** 2).sum())

        ci.profile(output="none")
        ci.mark("loss", loss.item())  # point (default)
        ci.mark("grad_norm", compute_grad_norm(model))
        ci.mark("learning_rate", scheduler.get_last_lr()[0])
        ci.mark("epoch_accuracy", val_acc, kind="summary")  # canonical epoch value
        (root,) = ci.trace(format="dict")["roots"]

        assert [
            ("loss", "point"),
            ("grad_norm", "point"),
            ("learning_rate", "point"),
            ("epoch_accuracy", "summary"),
        ] == [(mark["name"], mark["kind"]) for mark in root["marks"]]
        assert (0.05, 0.9) == (root["marks"][2]["value"], root["marks"][3]["value"])

    def test_all_forms_of_trace_work(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Seed 001: the six calls of `ci.trace`."""
        ci.profile(output="none")
        for _ in ci.epochs(range(3)):
            with ci.scope("forward"):
                pass

        assert ci.trace() is None
        assert "epoch[0] - " in capsys.readouterr().out
        assert 7 == ci.trace(format="dict")["span_count"]
        assert isinstance(ci.trace(format="json"), str)
        assert 7 == len(ci.trace(format="df"))
        ci.trace(name="epoch")
        out = capsys.readouterr().out
        assert ("epoch[2]" in out, "cirron.session" in out) == (True, False)
        ci.trace(last=10)
        assert "forward" in capsys.readouterr().out

    def test_flush_health_and_shutdown_work(self, tmp_path: Path) -> None:
        """Seed 001: `ci.flush()`, `ci.health()`, `ci.shutdown()`."""
        ci.profile()
        with ci.scope("x"):
            pass
        ci.flush()  # synchronously drain scope + mark buffers to spool
        assert 1 == len(list(tmp_path.glob(".cirron/spool/*.json")))
        health = ci.health()
        assert (True, "file_only") == (health["enabled"], health["transport"])
        ci.shutdown()  # close root scope, flush, stop flush thread, clear singleton
        assert not ci.health()["enabled"]


class TestSeed003:
    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"snapshots": "sampled", "sample_rate": 0.05},
            {"frameworks": ["torch"]},
            {"output": "stdout"},
            {"output": "log"},
            {"output": ["spool", "log"]},
            {"output": ["spool", "stdout"]},
            {"output": "none"},
        ],
        ids=str,
    )
    def test_calls_of_profile(self, arguments: Any) -> None:
        """Seeds 001 and 003: every call of `ci.profile` that they show works."""
        with ci_profile(**arguments) as profiler:
            assert isinstance(profiler, ci.Profiler)
            assert profiler.enabled

    @pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
    def test_the_kill_switch(
        self, value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Seed 003: the development kill switch."""
        if value is not None:
            monkeypatch.setenv("ENABLE_PROFILE", value)
        ci.profile(enabled=os.environ.get("ENABLE_PROFILE") == "1")

        assert expected == ci.health()["enabled"]
        assert expected == (tmp_path / ".cirron").exists()

    def test_notebook_friendly_inspection(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Seed 003: no disk writes, no log noise, and the tree at the end."""
        ci.profile(output="none")  # no disk writes, no log noise
        with ci.scope("train"):
            pass
        ci.trace()  # render the scope tree in the cell

        assert ([], []) == (list(tmp_path.iterdir()), caplog.records)
        assert "  train - " in capsys.readouterr().out

    def test_disk_and_log(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Seed 001: `output=["spool", "log"]` is disk and log at once."""
        with caplog.at_level(logging.INFO, "cirron.trace"), ci_profile(output=["spool", "log"]):
            with ci.scope("x"):
                pass
            ci.flush()

        assert 1 <= len(list(tmp_path.glob(".cirron/spool/*.json")))
        assert any("[cirron] x - " in record.getMessage() for record in caplog.records)


class ci_profile:  # noqa: N801  reads as a statement
    """Profiles for the length of a block."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def __enter__(self) -> ci.Profiler:
        return ci.profile(**self.arguments)

    def __exit__(self, *_: object) -> None:
        ci.shutdown()
