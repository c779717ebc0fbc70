"""The Trainer's hook on a Trainer that is a page long: what is changed, told and left behind."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import guard, hooks, settings, testing

if TYPE_CHECKING:
    from collections.abc import Iterator

EVENTS = [f"on_{what}_{end}" for what in ("train", "epoch", "step") for end in ("begin", "end")]
EVENTS += ["on_optimizer_step", "on_log", "on_predict"]


class FakeCallback:
    """Has each event, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name in EVENTS:
            return lambda *args, **kwargs: None
        raise AttributeError(name)


class FakeHandler:
    def __init__(self, callbacks: Any) -> None:
        self.callbacks = list(callbacks)


class FakeTrainer:
    """Two epochs of two steps; tells of them as the real one does."""

    def __init__(self, callbacks: Any = ()) -> None:
        self.callback_handler = FakeHandler(callbacks)
        self.state = SimpleNamespace(global_step=0, max_steps=4)
        self.args = SimpleNamespace(gradient_accumulation_steps=1, ignore_data_skip=False)
        self.model = None
        self.losses: list[float] = [0.5, 0.25, 0.125, 0.0625]

    def tell(self, event: str, **kwargs: Any) -> None:
        given = {"model": "model", "train_dataloader": [1, 2], **kwargs}
        for callback in self.callback_handler.callbacks:
            getattr(callback, event)(self.args, self.state, None, **given)

    def train(self) -> str:
        self.state.global_step = 0
        self.tell("on_train_begin")
        for _ in range(2):
            self.tell("on_epoch_begin")
            for _ in range(2):
                self.tell("on_step_begin")
                self.training_step()
                self.tell("on_optimizer_step")
                self.state.global_step += 1
                self.tell("on_step_end")
                self._maybe_log_save_evaluate()
            self.tell("on_epoch_end")
            self._maybe_log_save_evaluate()
        self.tell("on_train_end")
        return "trained"

    def training_step(self) -> float:
        return self.losses[int(self.state.global_step)]

    def _maybe_log_save_evaluate(self) -> None:
        self.tell("on_log", logs={"rate": 0.1, "epoch": 1.0, "notes": ["not", "a", "scalar"]})

    def evaluate(
        self, rows: Any = None, ignored: Any = None, metric_key_prefix: str = "eval"
    ) -> None:
        self.tell("on_log", logs={f"{metric_key_prefix}_loss": 0.5})

    def _save_checkpoint(self) -> None:
        self.save_model()

    def save_model(self) -> None:
        pass


class Snapshots:
    """What the hook has asked for, by epoch and global step."""

    def __init__(self) -> None:
        self.expected: list[Any] = []
        self.taken: list[Any] = []

    def expect(self, model: Any) -> None:
        self.expected.append(model)

    def take(self, span: Any, *models: Any) -> None:
        self.taken.append((span.index, *models))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The hook, made for a fake `transformers`; its Trainer is a fresh class each time."""
    package, trainer = ModuleType("transformers"), ModuleType("transformers.trainer")
    callback: Any = ModuleType("transformers.trainer_callback")
    trainer.Trainer = type("Trainer", (), dict(vars(FakeTrainer)))  # type: ignore[attr-defined]
    callback.TrainerCallback = FakeCallback
    package.__version__ = "99.0"  # type: ignore[attr-defined]
    for module in (package, trainer, callback):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "cirron.hooks.transformers", raising=False)
    monkeypatch.setattr(hooks, "transformers", None, raising=False)
    yield importlib.import_module("cirron.hooks.transformers")
    monkeypatch.delitem(sys.modules, "cirron.hooks.transformers")


def new_hook(fake: Any, snapshots: Snapshots | None = None) -> Any:
    return fake.TransformersHook(settings.resolve({}), snapshots or Snapshots())


def test_epochs_contain_steps_and_end_with_a_snapshot(fake: Any) -> None:
    """Epochs hold steps, steps their values, and each epoch is snapshotted at its last step."""
    snapshots = Snapshots()
    with testing.capture() as captured:
        new_hook(fake, snapshots).install()
        fake.Trainer().train()

    lines = [line.partition(" - ")[0].strip() for line in captured.text().splitlines()]
    assert ["epoch[0]", "step[0]", "step[1]", "epoch[1]", "step[0]", "step[1]"] == lines
    losses = [(mark.value, mark.kind) for mark in captured.marks if mark.name == "step_loss"]
    first = [(0.5, "point"), (0.25, "point"), (0.25, "summary")]
    assert [*first, (0.125, "point"), (0.0625, "point"), (0.0625, "summary")] == losses
    kinds = [mark.kind for mark in captured.marks if mark.name == "rate"]
    assert ["point", "point", "summary"] * 2 == kinds
    assert {"step_loss", "rate"} == {mark.name for mark in captured.marks}
    # Twice each: with the gradients, and again at the end, which only counts if that was missed.
    assert [(0, "model"), (0, "model"), (1, "model"), (1, "model")] == snapshots.taken
    assert {"model"} == set(snapshots.expected)


def test_evaluations_and_checkpoints_are_spans(fake: Any) -> None:
    """Evaluations and checkpoints are scopes; one that is called by its like is not another."""
    with testing.capture() as captured:
        new_hook(fake).install()
        trainer = fake.Trainer()
        trainer.evaluate(None, None, "test")
        trainer._save_checkpoint()
        trainer.save_model()

    assert ["evaluation", "checkpoint", "checkpoint"] == [span.name for span in captured.spans]
    assert "test" == captured.spans[0].attrs["prefix"]
    assert [("test_loss", "summary")] == [(mark.name, mark.kind) for mark in captured.marks]


def test_install_and_uninstall(fake: Any) -> None:
    """Installing twice is installing once; afterwards the class is as it was."""
    before = dict(vars(fake.Trainer))
    hook = new_hook(fake)
    hook.install()
    first = vars(fake.Trainer)["train"]
    hook.install()
    trainer = fake.Trainer()
    hook.uninstall()

    assert first is not before["train"]
    assert before == dict(vars(fake.Trainer))
    assert [] == trainer.callback_handler.callbacks
    assert "trained" == trainer.train()


def test_a_trainer_has_one_callback(fake: Any) -> None:
    """A Trainer has one callback, the one that it was given or ours, before all others."""
    other, own = FakeCallback(), fake.CirronCallback()
    new_hook(fake).install()

    assert [own, other] == fake.Trainer([own, other]).callback_handler.callbacks
    ours, last = fake.Trainer([other]).callback_handler.callbacks
    assert isinstance(ours, fake.CirronCallback)
    assert last is other


def test_a_mistake_of_ours(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in the hook is counted, and the run goes on as if it were not there."""

    class Broken(Snapshots):
        def take(self, span: Any, *models: Any) -> None:
            raise RuntimeError

    hook = new_hook(fake, Broken())
    with testing.capture():
        monkeypatch.setattr(guard, "strict", False)  # as it is for users
        hook.install()
        assert "trained" == fake.Trainer().train()

    assert 4 == guard.errors["transformers hooks: RuntimeError"]  # two epochs, asked twice each


def test_a_mistake_of_theirs(fake: Any) -> None:
    """An error of the run passes through, and its spans say so."""

    class Failing(fake.Trainer):  # type: ignore[misc]
        def training_step(self) -> float:
            raise ValueError("no more")

    with testing.capture() as captured:
        new_hook(fake).install()
        with pytest.raises(ValueError, match="no more"):
            Failing().train()

    assert ["ValueError: no more"] * 2 == [span.attrs["error"] for span in captured.spans]


def test_an_old_release(fake: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A release that is too old is left as it is, with a word."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.30.2")
    before = dict(vars(fake.Trainer))
    ci.profile(output="none", frameworks=["transformers"])

    assert [] == ci.health()["frameworks_installed"]
    assert before == dict(vars(fake.Trainer))
    said = "transformers 4.30.2 is not hooked: it is older than 4.57, the first release that is"
    assert said in caplog.text


@pytest.mark.parametrize("name", ["transformers", "lightning", "pytorch_lightning"])
def test_asking_for_what_is_absent(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Asking for a framework that is not installed says so, and what to do."""
    monkeypatch.setattr(hooks, "is_installed", lambda module: False)
    with pytest.raises(ValueError, match=f"{name} is not installed. Install it, or leave it out"):
        ci.profile(frameworks=[name])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5.22.2", (5, 22, 2)), ("2.13.0+cpu", (2, 13)), ("5.0.0rc1", (5, 0)), (None, None)],
)
def test_versions_are_read_as_numbers(
    monkeypatch: pytest.MonkeyPatch, text: Any, expected: Any
) -> None:
    """A release is read as far as it is a number."""
    module = ModuleType("made_up")
    module.__version__ = text  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up", module)

    assert expected == hooks.version("made_up")
