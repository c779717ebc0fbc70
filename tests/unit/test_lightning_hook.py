"""Lightning's hook on loops that are a page long: what is changed, what is told, what is left."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cirron import guard, settings, testing
from cirron.hooks import lightning
from cirron.record import hot


def call_callback_hooks(trainer: Any, hook_name: str, *args: Any) -> None:
    """How Lightning tells its callbacks of something."""
    for callback in trainer.callbacks:
        callback(hook_name)


class FakeTrainer:
    calls = ""  # the module with what tells callbacks

    def __init__(self, callbacks: Any = ()) -> None:
        self.callbacks = list(callbacks)
        self.state = SimpleNamespace(stage=SimpleNamespace(value="validate"))
        self.global_step = self.current_epoch = 0
        self.accumulate_grad_batches = 2
        self.predicting = self.is_last_batch = False
        self.fit_loop = None
        self.lightning_module = "module"

    def tell(self, event: str) -> None:
        sys.modules[self.calls]._call_callback_hooks(self, event)

    def save_checkpoint(self, path: str) -> str:
        return path


class FitLoop:
    """Two epochs of two steps, each of two batches."""

    restarted_mid_epoch = False

    def __init__(self, trainer: Any, inner: Any, connector: Any) -> None:
        self.trainer, self.inner, self.connector = trainer, inner, connector
        self._data_fetcher: Any = None

    def run(self) -> str:
        self.setup_data()
        self.trainer.tell("on_train_start")
        for epoch in range(2):
            self.trainer.current_epoch = epoch
            self.setup_data()
            self.trainer.tell("on_train_epoch_start")
            for batch in range(4):
                self.trainer.is_last_batch = batch == 3
                self.inner.advance(batch)
            self.trainer.tell("on_train_epoch_end")
            self.on_advance_end()
        return "fitted"

    def setup_data(self) -> None:
        self._data_fetcher = self._data_fetcher or object()

    def on_advance_end(self) -> None:
        self.connector._first_loop_iter = None
        self.connector.log_metrics({"loss_epoch": 0.25})


class EpochLoop:
    def __init__(self, trainer: Any, connector: Any, closure: Any) -> None:
        self.trainer, self.connector, self.closure = trainer, connector, closure

    def advance(self, batch: int) -> None:
        self.trainer.tell("on_train_batch_start")
        if batch % 2:
            span = hot.begin("optimizer_step")  # as torch's hook does, before it calls the closure
            self.closure()
            hot.close(span)
            self.trainer.global_step += 1
        else:
            self.closure()
        self.trainer.tell("on_train_batch_end")
        self.connector._first_loop_iter = True
        if batch % 2:
            self.connector.log_metrics({"loss": 0.5})


class EvaluationLoop:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def run(self) -> str:
        return "evaluated"


class Closure:
    def __call__(self) -> None:
        hot.close(hot.begin("forward"))


class Connector:
    _first_loop_iter: Any = None

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def log_metrics(self, metrics: Any) -> None:
        pass


class Fake:
    """A package with all that the hook looks for, its classes fresh each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        def copy(kind: type) -> Any:
            return type(kind.__name__, (), dict(vars(kind)))

        self.trainer, self.fit, self.epoch = copy(FakeTrainer), copy(FitLoop), copy(EpochLoop)
        self.evaluation, self.prediction = copy(EvaluationLoop), copy(EvaluationLoop)
        self.closure, self.connector = copy(Closure), copy(Connector)
        self.trainer.calls = f"{name}.trainer.call"
        for place, names in {
            ".trainer.call": {"_call_callback_hooks": call_callback_hooks},
            ".trainer": {"Trainer": self.trainer},
            ".trainer.connectors.logger_connector": {"_LoggerConnector": self.connector},
            ".loops.optimization.automatic": {"Closure": self.closure},
            ".loops": {
                "_FitLoop": self.fit,
                "_TrainingEpochLoop": self.epoch,
                "_EvaluationLoop": self.evaluation,
                "_PredictionLoop": self.prediction,
            },
        }.items():
            module = ModuleType(name + place)
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, name + place, module)
        self.owners: list[Any] = [self.trainer, self.fit, self.epoch, self.evaluation]
        self.owners += [self.prediction, self.closure, self.connector]
        self.owners += [sys.modules[self.trainer.calls]]

    def train(self, trainer: Any = None) -> Any:
        trainer = trainer or self.trainer()
        connector = self.connector(trainer)
        inner = self.epoch(trainer, connector, self.closure())
        return self.fit(trainer, inner, connector).run()


ENDS = ("start", "end")
KINDS = {"lightning.pytorch": lightning.LightningHook}
KINDS |= {"pytorch_lightning": lightning.PytorchLightningHook}


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    return Fake(monkeypatch, name)


class Snapshots:
    """What the hook has asked for."""

    def __init__(self) -> None:
        self.expected: list[Any] = []
        self.taken: list[Any] = []

    def expect(self, model: Any) -> None:
        self.expected.append(model)

    def keep_gradients(self, *models: Any) -> None:
        pass

    def take(self, span: Any, *models: Any) -> None:
        self.taken.append((span.index, *models))


def new_hook(name: str, snapshots: Snapshots | None = None) -> Any:
    return KINDS[name](settings.resolve({}), snapshots or Snapshots())


def test_epochs_contain_steps_and_phases(fake: Fake, name: str) -> None:
    """Epochs hold steps, a step its batches, and the optimizer's step what it does itself."""
    snapshots = Snapshots()
    with testing.capture() as captured:
        new_hook(name, snapshots).install()
        assert "fitted" == fake.train()

    lines = [line.partition(" - ")[0].strip() for line in captured.text().splitlines()]
    step = ["forward", "forward", "optimizer_step"]
    steps = ["step[0]", *step, "step[1]", *step]
    assert ["data_setup", "epoch[0]", *steps, "epoch[1]", *steps] == lines
    marks = [(mark.name, mark.kind) for mark in captured.marks]
    summary = [("loss", "summary"), ("loss_epoch", "summary")]
    assert ([("loss", "point")] * 2 + summary) * 2 == marks
    assert {(0, "module"), (1, "module")} == set(snapshots.taken)
    assert {"module"} == set(snapshots.expected)


def test_evaluations_and_checkpoints_are_spans(fake: Fake, name: str) -> None:
    """Evaluations, predictions and checkpoints are scopes, and give back what they did."""
    with testing.capture() as captured:
        new_hook(name).install()
        trainer = fake.trainer()
        assert "evaluated" == fake.evaluation(trainer).run()
        trainer.predicting = True
        assert "evaluated" == fake.prediction(trainer).run()
        assert "here" == trainer.save_checkpoint("here")

    assert ["evaluation", "prediction", "checkpoint"] == [span.name for span in captured.spans]
    assert "validate" == captured.spans[0].attrs["stage"]


def test_install_and_uninstall(fake: Fake, name: str) -> None:
    """Installing twice is installing once; afterwards each class is as it was."""
    before = [dict(vars(owner)) for owner in fake.owners]
    hook = new_hook(name)
    hook.install()
    changed = [dict(vars(owner)) for owner in fake.owners]
    hook.install()
    trainer = fake.trainer()
    hook.uninstall()

    assert all(old != new for old, new in zip(before, changed, strict=True))
    assert before == [dict(vars(owner)) for owner in fake.owners]
    assert "fitted" == fake.train(trainer)


def test_callbacks_record_inside_their_span(fake: Fake, name: str) -> None:
    """A Trainer's callbacks are its own: what they record is inside of what they are told of."""
    new_hook(name).install()
    inside = []
    callbacks = [lambda event: inside.append((event, hot.innermost().name))]
    trainer = fake.trainer(callbacks)
    with testing.capture():
        fake.train(trainer)

    assert callbacks == trainer.callbacks
    told = [("on_train_epoch_start", "step"), *[(f"on_train_batch_{x}", "step") for x in ENDS] * 4]
    assert [*told, ("on_train_epoch_end", "epoch")] == inside[1 : len(told) + 2]


def test_a_release_with_other_parts(fake: Fake, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a part is not what it was, its spans are missing, and the run goes on."""
    monkeypatch.delattr(sys.modules[f"{name}.loops"], "_EvaluationLoop")
    with testing.capture() as captured:
        monkeypatch.setattr(guard, "strict", False)  # as it is for users
        new_hook(name).install()
        assert "fitted" == fake.train()
        assert "evaluated" == fake.evaluation(fake.trainer()).run()

    assert 1 == guard.errors["lightning hooks: AttributeError"]
    assert 2 == sum(span.name == "epoch" for span in captured.spans)


def test_a_mistake_of_theirs(fake: Fake, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the run passes through, and its spans say so."""

    def failing(closure: Any) -> None:
        raise ValueError("no more")

    monkeypatch.setattr(fake.closure, "__call__", failing)
    with testing.capture() as captured:
        new_hook(name).install()
        with pytest.raises(ValueError, match="no more"):
            fake.train()

    failed = [span.name for span in captured.spans if "error" in span.attrs]
    assert ["step", "epoch"] == failed
