"""The Keras hook, with a module that stands for Keras: what it puts where, and takes away again."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci
from cirron import errors, guard, hooks, testing

if TYPE_CHECKING:
    from collections.abc import Iterator


class Callback:
    model: Any = None
    params: Any = None

    def set_model(self, model: Any) -> None:
        self.model = model

    def set_params(self, params: Any) -> None:
        self.params = params

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None: ...

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None: ...

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


def forward(name: str) -> Any:
    def event(self: Any, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name, lambda *_: None)(*args)

    event.__name__ = name
    return event


EVENTS = [
    f"on_{kind}_{end}"
    for kind in ("train", "epoch", "train_batch", "test", "test_batch", "predict", "predict_batch")
    for end in ("begin", "end")
]


def fake() -> ModuleType:
    """As much of Keras as the hook touches: a fit of two epochs of two batches."""
    callback_list: Any = type(
        "CallbackList",
        (),
        {
            "__init__": lambda self, callbacks: self.__dict__.update(
                callbacks=list(callbacks or ())
            ),
            **{name: forward(name) for name in EVENTS},
        },
    )

    class Model:
        name = "fake"
        lists: list[Any] = []  # noqa: RUF012  of the callbacks of each fit

        def fit(self, x: Any = None, epochs: int = 2, callbacks: Any = None) -> str:
            told = callback_list(callbacks)
            self.lists.append(told.callbacks)
            for one in told.callbacks:
                one.set_model(self)
            told.on_train_begin(None)
            for epoch in range(epochs):
                told.on_epoch_begin(epoch)
                for batch in range(2):
                    told.on_train_batch_begin(batch)
                    if x is not None:
                        raise x
                    told.on_train_batch_end(batch, {"loss": 0.5, "matrix": [[1], [2]]})
                told.on_epoch_end(epoch, {"loss": 0.25})
            told.on_train_end(None)
            return "history"

        def evaluate(self, callbacks: Any = None) -> None: ...

        def predict(self, callbacks: Any = None) -> None: ...

        def train_on_batch(self, return_dict: bool = False) -> Any:
            logs = {"a_loss": 1.5, "b_loss": 2.5, "loss": 4.0}
            return logs if return_dict else self._flatten_metrics_in_order(logs)

        def _flatten_metrics_in_order(self, logs: Any) -> list[float]:
            return [logs["loss"], logs["a_loss"], logs["b_loss"]]

        def test_on_batch(self, return_dict: bool = False) -> float:
            return 0.5

        def predict_on_batch(self) -> None: ...

    found = ModuleType("keras")
    callbacks = ModuleType("keras.callbacks")
    callbacks.__dict__.update(Callback=Callback, CallbackList=callback_list)
    backend = SimpleNamespace(backend=lambda: "jax")
    found.__dict__.update(callbacks=callbacks, Model=Model, backend=backend, __version__="3.15.1")
    return found


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, in the place of the real one."""
    module = fake()
    monkeypatch.setitem(sys.modules, "keras", module)
    monkeypatch.setitem(sys.modules, "keras.callbacks", module.callbacks)
    monkeypatch.delitem(sys.modules, "cirron.hooks.keras", raising=False)
    yield module
    sys.modules.pop("cirron.hooks.keras", None)


@pytest.fixture
def hook(keras: Any) -> Iterator[Any]:
    """The hook, installed."""
    found = new_hook()
    found.install()
    yield found
    found.uninstall()


def new_hook(take: Any = lambda *_: None, expect: Any = lambda _: None) -> Any:
    snapshots = SimpleNamespace(take=take, expect=expect)
    return importlib.import_module("cirron.hooks.keras").KerasHook(None, snapshots)


def methods(keras: Any) -> list[Any]:
    owners = (keras.Model, keras.callbacks.CallbackList)
    return [value for owner in owners for value in vars(owner).values() if callable(value)]


def test_a_fit_has_epochs_batches_and_marks(hook: Any, keras: Any) -> None:
    """A fit has its epochs and batches, its values as marks, and returns what it returns."""
    with testing.capture() as captured:
        returned = keras.Model().fit()
    epochs = captured.dict()["roots"]

    assert "history" == returned
    assert [("epoch", 0), ("epoch", 1)] == [(one["name"], one["index"]) for one in epochs]
    for epoch in epochs:
        assert [("loss", 0.25, "summary")] == [tuple(mark.values()) for mark in epoch["marks"]]
        assert [0, 1] == [batch["index"] for batch in epoch["children"]]
        marks = [tuple(mark.values()) for one in epoch["children"] for mark in one["marks"]]
        assert [("loss", 0.5, "point")] * 2 == marks


def test_each_fit_has_exactly_one_callback(hook: Any, keras: Any) -> None:
    """Each fit has one callback of ours in its list; a list that is given stays as it is."""
    mine = [Callback()]
    with testing.capture():
        keras.Model().fit()
        keras.Model().fit(callbacks=mine)
    first, second = keras.Model.lists

    assert (1, 2, 1) == (len(first), len(second), len(mine))
    assert mine[0] is second[1]


def test_the_callback_is_not_put_in_twice(hook: Any, keras: Any) -> None:
    """A list that has ours already, as when a method calls another one, gets no second one."""
    with testing.capture():
        keras.Model().fit()
        keras.Model().fit(callbacks=keras.Model.lists[0])

    assert [1, 1] == [len(one) for one in keras.Model.lists]


def test_an_error(hook: Any, keras: Any) -> None:
    """An error passes on, and the spans that it ends say so."""
    with testing.capture() as captured, pytest.raises(ValueError, match="no data"):
        keras.Model().fit(ValueError("no data"))

    assert ["batch", "epoch"] == [span.name for span in captured.spans]
    assert ["ValueError: no data"] * 2 == [span.attrs["error"] for span in captured.spans]


def test_the_end_of_an_epoch(keras: Any) -> None:
    """A snapshot is asked for with the epoch still open, and the model; it was told to come."""
    asked: list[Any] = []
    hook = new_hook(
        lambda span, model: asked.append((span.name, span.index, span.end, model)), asked.append
    )
    hook.install()
    model = keras.Model()
    with testing.capture():
        model.fit()
    hook.uninstall()

    assert [model, ("epoch", 0, 0, model), model, ("epoch", 1, 0, model)] == asked


def test_a_mistake_of_ours(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When our own code fails the fit goes on, and the mistake is counted."""

    def fails(*_: Any) -> None:
        raise RuntimeError("ours")

    hook = new_hook(fails)
    hook.install()
    monkeypatch.setattr(guard, "warn", lambda *_, **__: None)
    with testing.capture() as captured:
        monkeypatch.setattr(guard, "strict", False)
        returned = keras.Model().fit()
    hook.uninstall()

    assert "history" == returned
    assert {"keras hooks: RuntimeError": 2} == guard.errors
    assert 2 == sum(span.name == "epoch" for span in captured.spans)


def test_a_batch_alone(hook: Any, keras: Any) -> None:
    """`train_on_batch` is a batch, with its values by name, and returns what it would."""
    expected = {"a_loss": 1.5, "b_loss": 2.5, "loss": 4.0}
    with testing.capture() as captured:
        returned = [keras.Model().train_on_batch(), keras.Model().train_on_batch(True)]

    assert [[4.0, 1.5, 2.5], expected] == returned
    assert ["batch", "batch"] == [span.name for span in captured.spans]
    assert [*expected.items()] * 2 == [(mark.name, mark.value) for mark in captured.marks]


def test_values_without_names(hook: Any, keras: Any) -> None:
    """Where Keras does not say which value is which, none is marked."""
    del keras.Model._flatten_metrics_in_order
    with testing.capture() as captured:
        returned = keras.Model().test_on_batch()

    assert 0.5 == returned
    assert (["evaluation"], []) == ([span.name for span in captured.spans], captured.marks)


# -- before the first epoch ------------------------------------------------------------------


class Before(Callback):
    """Does something while Keras gets ready."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def set_model(self, model: Any) -> None:
        self.work()


def fit_with(keras: Any, work: Any) -> list[str]:
    """The spans of a fit of no epochs."""
    with testing.capture() as captured:
        keras.Model().fit(epochs=0, callbacks=[Before(work)])
    return [span.name for span in captured.spans]


def test_what_other_threads_record(hook: Any, keras: Any) -> None:
    """What another thread records meanwhile makes no `build` of ours."""

    def work() -> None:
        thread = threading.Thread(target=record)
        thread.start()
        thread.join()

    def record() -> None:
        with ci.scope("other"):
            ci.mark("value", 1)

    assert ["other"] == fit_with(keras, work)


def test_what_is_recorded_in_a_build(hook: Any, keras: Any) -> None:
    """A scope or a mark does, and so does a scope that is still open at its end."""

    def record() -> None:
        with ci.scope("mine"):
            pass

    left_open = ci.scope("left open")

    assert ["mine", "build"] == fit_with(keras, record)
    assert ["build"] == fit_with(keras, lambda: ci.mark("value", 1))
    assert ["build"] == fit_with(keras, left_open.__enter__)[:1]


def test_uninstall_restores_the_originals(keras: Any) -> None:
    """Afterwards the attributes are the originals, also when it was installed twice."""
    originals = methods(keras)
    hook = new_hook()
    hook.install()
    hook.install()
    patched = methods(keras)
    hook.uninstall()
    hook.uninstall()

    assert originals != patched
    assert originals == methods(keras)


def test_functions_that_somebody_holds(keras: Any) -> None:
    """A method that was taken from the class before the hook went off does nothing more."""
    hook = new_hook()
    hook.install()
    held = keras.Model.fit
    hook.uninstall()
    with testing.capture() as captured:
        returned = held(keras.Model())

    assert ("history", []) == (returned, captured.spans)


def test_an_old_release(keras: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Keras 2 is not hooked, and one line says so."""
    keras.__version__ = "2.15.0"
    originals = methods(keras)
    ci.profile(frameworks=["keras"], output="none")

    assert [] == ci.health()["frameworks_installed"]
    assert originals == methods(keras)
    assert "keras 2.15.0 is not hooked: it is older than 3.12" in caplog.text


@pytest.mark.parametrize("name", ["keras", "tensorflow"])
def test_without_keras(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for a framework that is not installed is an error that says so."""
    monkeypatch.setattr(hooks, "is_installed", lambda module: False)

    with pytest.raises(errors.SettingError, match=f"{name} is not installed. Install it, or leave"):
        ci.profile(frameworks=[name])


def test_tensorflow_means_keras(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for TensorFlow gets the hooks of Keras."""
    monkeypatch.setattr(hooks, "is_installed", lambda module: True)
    ci.profile(frameworks=["tensorflow"], output="none")

    assert ["keras"] == ci.health()["frameworks_installed"]
