"""Loggers as programs call them: what is logged is marked, and the logger does what it always does.

TensorBoard is the real one. The others are real where they are installed; where they are not, a
module of the same public shape stands for them, which says what our table expects of them.
"""

from __future__ import annotations

import importlib
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import cirron as ci
from cirron import hooks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Of the loggers and the frameworks, about what is to come.
pytestmark = pytest.mark.filterwarnings("ignore")

Marks = list[tuple[str, Any, dict[str, Any]]]


def marks(*, name: str | None = None) -> Marks:
    """All marks of the session: name, value and attributes."""
    found = []

    def visit(node: dict[str, Any]) -> None:
        if name is None or node["name"] == name:
            found.extend(node["marks"])
        for child in node["children"]:
            visit(child)

    for root in ci.trace(format="dict")["roots"]:
        visit(root)
    return [(mark["name"], mark["value"], mark.get("attrs", {})) for mark in found]


def scalars(folder: Path | str) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads from a folder."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_a_long_call_is_a_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a writer that takes its time; the calls of one that does not leave nothing."""
    monkeypatch.setattr("cirron.hooks.loggers.LONG_NS", 50_000_000)  # of 0.1 ms: a busy machine
    ci.profile(output="none")
    with SummaryWriter(tmp_path) as writer, ci.scope("step"):
        writer.add_scalar("quick", 1.0)
        original = writer.file_writer.add_summary

        def wait(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.06)
            original(*args, **kwargs)

        writer.file_writer.add_summary = wait
        writer.add_scalar("slow", 1.0)
    (step,) = ci.trace(format="dict", name="step")["roots"]

    (logging,) = step["children"]
    assert ("logging", {"logger": "tensorboard"}) == (logging["name"], logging["attrs"])
    assert logging["wall_us"] > 50_000
    assert ["quick", "slow"] == [mark["name"] for mark in step["marks"]]


class TestTensorboard:
    """`torch.utils.tensorboard`."""

    def test_scalars(self) -> None:
        """What is added is a mark of the open span, with its step and the logger's name."""
        ci.profile(output="none")
        with SummaryWriter("runs") as writer, ci.scope("step"):
            writer.add_scalar("train/loss", torch.tensor(0.5), 3)
            writer.add_scalar(tag="accuracy", scalar_value=0.25)
            writer.add_scalars("split", {"a": 1.0, "b": 2}, global_step=4)

        logger = {"logger": "tensorboard"}
        assert [
            ("train/loss", 0.5, {**logger, "step": 3}),
            ("accuracy", 0.25, logger),
            ("split/a", 1.0, {**logger, "step": 4}),
            ("split/b", 2, {**logger, "step": 4}),
        ] == marks(name="step")

    def test_what_is_no_scalar(self) -> None:
        """Images, histograms, texts and several values at once are left alone."""
        ci.profile(output="none")
        with SummaryWriter("runs") as writer:
            writer.add_histogram("weights", torch.randn(10))
            writer.add_image("image", torch.zeros(3, 4, 4))
            writer.add_text("note", "text")
            with pytest.raises(AssertionError):
                writer.add_scalar("several", torch.zeros(3))

        assert [] == marks()

    @pytest.mark.parametrize("is_profiled", [False, True])
    def test_the_logger_gets_the_same(self, is_profiled: bool) -> None:
        """What TensorBoard reads afterwards is what the program logged."""
        if is_profiled:
            ci.profile(output="none")
        with SummaryWriter("runs") as writer:
            for step in range(3):
                returned = writer.add_scalar("loss", torch.tensor(step / 2), step)
        with pytest.raises(TypeError, match="scalar_value"):
            writer.add_scalar("loss")

        assert returned is None
        assert {"loss": [(0, 0.0), (1, 0.5), (2, 1.0)]} == scalars("runs")

    def test_no_trace_is_left(self) -> None:
        """After a shutdown the methods are the logger's own, and ones that were kept do nothing."""
        before = SummaryWriter.add_scalar
        ci.profile(output="none")
        with SummaryWriter("runs") as writer:
            kept = writer.add_scalar
            assert SummaryWriter.add_scalar is not before
            ci.shutdown()
            ci.profile(output="none")
            kept("loss", 1.0, 0)
            ci.shutdown()

        assert before is SummaryWriter.add_scalar
        assert {"loss": [(0, 1.0)]} == scalars("runs")

    def test_switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`CIRRON_LOGGERS=0` leaves the loggers as they are."""
        monkeypatch.setenv("CIRRON_LOGGERS", "0")
        before = SummaryWriter.add_scalar
        ci.profile(output="none")

        assert before is SummaryWriter.add_scalar

    def test_compiled_code(self) -> None:
        """A compiled function that logs computes and logs what it did."""
        ci.profile(output="none")
        with SummaryWriter("runs") as writer:

            @torch.compile(backend="eager")
            def step(x: Any, number: int) -> Any:
                y = (x * 2).sum()
                writer.add_scalar("y", y, number)
                return y + 1

            found = [step(torch.ones(3), number).item() for number in range(2)]

        assert [7.0, 7.0] == found
        assert {"y": [(0, 6.0), (1, 6.0)]} == scalars("runs")


# -- the others ----------------------------------------------------------------------------------


class Fake:
    """An object that takes every call, and keeps it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[Any] = []

    def close(self) -> None:
        pass


def fake(name: str, owner: str, **methods: Any) -> Any:
    """A module of this name, with a class that has these methods."""
    module: Any = ModuleType(name)
    setattr(module, owner, type(owner, (Fake,), {"__module__": name, **methods}))
    return module


def load(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Any:
    """The real module, or else this one in its place."""
    try:
        return importlib.import_module(module.__name__)
    except ImportError:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module


def log_tensorboardx(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_scalar(self: Any, tag: str, scalar_value: Any, global_step: Any = None) -> Any:
        self.calls.append((tag, scalar_value, global_step))

    def add_scalars(self: Any, main_tag: str, tag_scalar_dict: Any, global_step: Any = None) -> Any:
        self.calls.append((main_tag, tag_scalar_dict, global_step))

    methods = {"add_scalar": add_scalar, "add_scalars": add_scalars}
    module = load(monkeypatch, fake("tensorboardX", "SummaryWriter", **methods))
    writer = module.SummaryWriter("runs")
    writer.add_scalar("loss", 0.5, 1)
    writer.add_scalars("more", {"accuracy": 0.25}, 1)
    writer.close()


def log_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    def log(self: Any, data: Any, step: Any = None, commit: Any = None) -> None:
        self.calls.append((data, step, commit))

    module = fake("wandb", "Run", log=log)

    def init(**_: Any) -> Any:
        module.run = module.Run()
        module.log = module.run.log
        return module.run

    module.init, module.finish = init, lambda: None
    wandb = load(monkeypatch, module)
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.init(mode="offline", project="test")
    wandb.log({"loss": torch.tensor(0.5), "more": {"accuracy": 0.25}, "note": "a"}, step=1)
    wandb.finish()


def log_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Metric(SimpleNamespace):
        pass

    def log_metric(
        self: Any, run_id: str, key: str, value: Any, timestamp: Any = None, step: Any = None
    ) -> None:
        self.calls.append((run_id, key, value, timestamp, step))

    def log_batch(self: Any, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        for one in metrics:
            self.log_metric(run_id, one.key, one.value, None, one.step)

    module: Any = fake("mlflow", "MlflowClient", log_metric=log_metric, log_batch=log_batch)

    def log_metrics(metrics: Any, step: int) -> None:
        batch = [Metric(key=name, value=one, step=step) for name, one in metrics.items()]
        module.MlflowClient().log_batch("run", batch)

    module.log_metric = lambda key, value, step: module.MlflowClient().log_metric(
        "run", key, value, 0, step
    )
    module.log_metrics = log_metrics
    module.set_tracking_uri = module.start_run = module.end_run = lambda *_: None
    mlflow = load(monkeypatch, module)
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.start_run()
    mlflow.log_metric("loss", 0.5, 1)
    mlflow.log_metrics({"more/accuracy": 0.25}, 1)
    mlflow.end_run()


def log_comet(monkeypatch: pytest.MonkeyPatch) -> None:
    def log_metric(self: Any, name: str, value: Any, step: Any = None) -> None:
        self.calls.append((name, value, step))

    def log_metrics(self: Any, dic: Any, prefix: Any = None, step: Any = None) -> None:
        for name, value in dic.items():
            self.log_metric(name, value, step)

    module: Any = fake("comet_ml", "BaseExperiment", log_metric=log_metric, log_metrics=log_metrics)
    module.OfflineExperiment = type("OfflineExperiment", (module.BaseExperiment,), {})
    module.OfflineExperiment.end = lambda self: None
    comet = load(monkeypatch, module)
    experiment = comet.OfflineExperiment(project_name="test", offline_directory=".")
    experiment.log_metric("loss", torch.tensor(0.5), step=1)
    experiment.log_metrics({"accuracy": 0.25}, "more", 1)
    experiment.end()


def log_aim(monkeypatch: pytest.MonkeyPatch) -> None:
    def track(self: Any, value: Any, name: Any = None, step: Any = None, epoch: Any = None) -> None:
        self.calls.append((value, name, step, epoch))

    run = load(monkeypatch, fake("aim", "Run", track=track)).Run(repo=".")
    run.track(0.5, name="loss", step=1)
    run.track({"more/accuracy": 0.25}, step=1)
    run.close()


@pytest.mark.parametrize(
    ("logger", "log"),
    [
        ("tensorboardX", log_tensorboardx),
        ("wandb", log_wandb),
        ("mlflow", log_mlflow),
        ("comet", log_comet),
        ("aim", log_aim),
    ],
)
def test_other_loggers(
    logger: str, log: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value is marked once, under the name and with the step that it was logged with."""
    # Before, for what is only put into `sys.modules`; the real ones are there from now on.
    log(monkeypatch)
    ci.profile(output="none")
    log(monkeypatch)

    attrs = {"logger": logger, "step": 1}
    assert [("loss", 0.5, attrs), ("more/accuracy", 0.25, attrs)] == marks()


def test_a_run_that_was_begun_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb.log` of a run that is older than the profiler is marked, and put back afterwards."""
    module: Any = fake("wandb", "Run", log=lambda self, data, step=None: self.calls.append(data))
    module.run = module.Run()
    before = module.log = module.run.log
    monkeypatch.setitem(sys.modules, "wandb", module)
    ci.profile(output="none")
    module.log({"loss": 1.0})
    found = marks()
    ci.shutdown()

    assert [("loss", 1.0, {"logger": "wandb"})] == found
    assert [{"loss": 1.0}] == module.run.calls
    assert before is module.log


# -- nothing twice -------------------------------------------------------------------------------


class TestTwice:
    """A value is marked once, whoever else does."""

    def test_own_marks(self) -> None:
        """What the program marks in the same span is not marked again; elsewhere it is."""
        ci.profile(output="none")
        with SummaryWriter("runs") as writer:
            for index in range(2):
                with ci.scope("step", index):
                    ci.mark("loss", 1.0)
                    writer.add_scalar("loss", 1.0, index)
            with ci.scope("evaluation"):
                writer.add_scalar("loss", 2.0, 2)
                writer.add_scalar("loss", 3.0, 3)  # the same logger may go on

        assert [("loss", 1.0, {})] * 2 == marks(name="step")
        assert [2.0, 3.0] == [value for _, value, _ in marks(name="evaluation")]

    def test_an_outer_span_goes_on(self) -> None:
        """A logger's own marks of an outer span are no reason to leave out later ones."""
        ci.profile(output="none")
        with SummaryWriter("runs") as writer, ci.scope("epoch"):
            for index in range(2):
                with ci.scope("step", index):
                    writer.add_scalar("loss", index, index)
                writer.add_scalar("loss", index, index)

        assert [0, 1] == [value for _, value, _ in marks(name="epoch")]
        assert [0, 1] == [value for _, value, _ in marks(name="step")]

    def test_two_loggers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A value that goes to two loggers is marked by the first."""
        module: Any = fake("wandb", "Run", log=lambda self, data, step=None: None)
        monkeypatch.setitem(sys.modules, "wandb", module)
        ci.profile(output="none")
        with SummaryWriter("runs") as writer:
            writer.add_scalar("loss", 1.0, 5)
            module.Run().log({"loss": 1.0, "other": 2.0}, step=5)

        assert [("loss", "tensorboard"), ("other", "wandb")] == [
            (name, attrs["logger"]) for name, _, attrs in marks()
        ]


def lightning_module(lightning: Any, **methods: Any) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = (self.linear(batch[0]) ** 2).mean()
            self.log("train_loss", loss)
            self.logger.experiment.add_scalar("own", batch_idx, batch_idx)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
class TestLightning:
    """Lightning's TensorBoardLogger."""

    def fit(self, package: str) -> Any:
        lightning = importlib.import_module(package)
        loggers = importlib.import_module(
            "lightning.pytorch.loggers" if package == "lightning" else f"{package}.loggers"
        )
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=loggers.TensorBoardLogger("runs"),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(lightning_module(lightning), loader())
        return trainer

    def test_what_lightning_logs(self, package: str) -> None:
        """Lightning's hook marks it, once; what the module logs past it is marked, too."""
        importlib.import_module(package)
        ci.profile(output="none")
        trainer = self.fit(package)
        logged = scalars(trainer.logger.log_dir)

        assert 4 == len(logged["train_loss"])
        found = [(name, "logger" in attrs) for name, _, attrs in marks(name="step")]
        assert 4 == found.count(("train_loss", False))
        assert 4 == found.count(("own", True))
        assert 4 == found.count(("loss", False))  # what `backward` was called on
        assert 12 == len(found)
        assert {"train_loss", "own", "epoch", "loss"} >= {name for name, _, _ in marks()}

    def test_without_its_hook(self, package: str) -> None:
        """Where Lightning is not hooked, nobody else marks what its logger gets."""
        ci.profile(output="none", frameworks=["torch"])
        self.fit(package)

        found = [name for name, _, attrs in marks() if attrs.get("logger") == "tensorboard"]
        assert 4 == found.count("train_loss")


def test_fabric() -> None:
    """What a Fabric program logs is marked: no hook does."""
    lightning = importlib.import_module("lightning")
    loggers = importlib.import_module("lightning.fabric.loggers")
    ci.profile(output="none")
    fabric = lightning.Fabric(accelerator="cpu", loggers=loggers.TensorBoardLogger("runs"))
    fabric.log("loss", torch.tensor(0.5), step=2)

    assert [("loss", 0.5, {"logger": "tensorboard", "step": 2})] == marks()


def test_trainer() -> None:
    """What the Trainer's own TensorBoard callback logs is marked once, by the Trainer's hook."""
    transformers = importlib.import_module("transformers")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": ((self.linear(x).squeeze(-1) - labels) ** 2).mean()}

    class Own(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            writer.add_scalar("own", 1.0)

    importlib.import_module("transformers.trainer")
    ci.profile(output="none")
    assert "transformers" in ci.health()["frameworks_installed"]
    arguments = transformers.TrainingArguments(
        "out",
        per_device_train_batch_size=2,
        num_train_epochs=1,
        logging_steps=1,
        report_to=["tensorboard"],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
    )
    rows = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(8)]
    with SummaryWriter("runs") as writer:
        transformers.Trainer(
            model=Model(), args=arguments, train_dataset=rows, callbacks=[Own()]
        ).train()

    logged = [name for name, _, attrs in marks() if "logger" in attrs]
    assert ["own"] * 4 == logged
    assert 4 == [name for name, _, _ in marks(name="step")].count("loss")


def test_accelerate() -> None:
    """What `accelerator.log` gives to its trackers is marked."""
    accelerate = importlib.import_module("accelerate")
    ci.profile(output="none")
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir="runs")
    accelerator.init_trackers("test")
    accelerator.log({"loss": 0.5}, step=3)
    accelerator.end_training()

    assert [("loss", 0.5, {"logger": "tensorboard", "step": 3})] == marks()


def test_a_mistake_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """If marking fails, the logger is called all the same."""
    ci.profile(output="none")
    with SummaryWriter("runs") as writer, monkeypatch.context() as patch:
        patch.setattr("cirron.guard.strict", False)
        patch.setattr(hooks.Hooks, "installed", property(lambda self: 1 / 0))
        writer.add_scalar("loss", 1.0, 0)

    assert {"loss": [(0, 1.0)]} == scalars("runs")
    assert {"loggers: ZeroDivisionError": 1} == ci.health()["errors"]
