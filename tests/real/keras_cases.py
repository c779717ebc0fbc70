"""Trains with Keras in all the ways that `test_keras.py` looks at; run once for each backend.

Each case is a function and has a scope of its name. What is no span goes into `facts.json`.
"""

from __future__ import annotations

import functools
import json
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cirron as ci
from cirron import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

keras: Any = None  # imported once the profiler is there, as in most programs
np: Any = None

FACTS: dict[str, Any] = {}
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def data(rows: int = 10) -> tuple[Any, Any]:
    numbers = np.linspace(0, 1, rows * 4, dtype="float32").reshape(rows, 4)
    return numbers, numbers.sum(1, keepdims=True)


def endless() -> Iterator[tuple[Any, Any]]:
    while True:
        yield data(2)


def few(error: Exception | None = None) -> Iterator[tuple[Any, Any]]:
    for _ in range(3):
        yield data(2)
    if error is not None:
        raise error


def layers() -> list[Any]:
    seeded = [keras.initializers.GlorotUniform(seed=number) for number in range(2)]
    return [
        keras.layers.Dense(8, activation="relu", kernel_initializer=seeded[0]),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1, kernel_initializer=seeded[1]),
    ]


def new_model(model_class: Any = None, **options: Any) -> Any:
    made = (keras.Sequential if model_class is None else model_class)(layers())
    made.compile("adam", "mse", metrics=["mae"], **options)
    return made


@functools.cache
def model(number: int = 0) -> Any:
    """One that is used again: to compile one takes a second."""
    return new_model()


def fit(made: Any, *, epochs: int = 1, **options: Any) -> Any:
    given = options.pop("given", None) or data()
    return made.fit(
        *(given if isinstance(given, tuple) else (given,)),
        **{"batch_size": 4, "epochs": epochs, "verbose": 0, "shuffle": False, **options},
    )


# -- fits ------------------------------------------------------------------------------------


@case
def validation() -> None:
    class Keep(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            weights = {w.path: keras.ops.convert_to_numpy(w.value) for w in self.model.weights}
            np.savez(f"weights-{epoch}.npz", **weights)

    made = new_model()
    FACTS["history"] = fit(made, epochs=2, validation_data=data(), callbacks=[Keep()]).history
    FACTS["variables"] = [w.path for w in made.weights]
    FACTS["weights"] = [w.tolist() for w in made.get_weights()]


@case
def again() -> None:
    made = model()
    fit(made)
    fit(made, epochs=4, initial_epoch=2)


@case
def several_steps_at_once() -> None:
    if keras.backend.backend() != "torch":  # which has none
        made = new_model(steps_per_execution=2)
        fit(made, epochs=2, validation_data=data(), validation_batch_size=2)
        made.evaluate(*data(), batch_size=4, verbose=0)
        made.predict(data()[0], batch_size=4, verbose=0)


@case
def endless_data() -> None:
    options = {"steps_per_epoch": 2, "validation_data": endless(), "validation_steps": 2}
    fit(model(), given=endless(), epochs=2, batch_size=None, **options)


@case
def data_of_unknown_length() -> None:
    fit(model(), given=few(), batch_size=None)


@case
def early_stopping() -> None:
    stop = keras.callbacks.EarlyStopping("loss", min_delta=1e6, patience=1)
    fit(model(), epochs=9, callbacks=[stop])


@case
def stopped_in_a_batch() -> None:
    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1

    fit(model(), epochs=9, callbacks=[Stop()])
    fit(model())


@case
def subclassed() -> None:
    class Mine(keras.Model):  # type: ignore[misc]
        def __init__(self, parts: list[Any]) -> None:
            super().__init__()
            self.parts = parts
            self.encoder = keras.Sequential(parts[:1])

        def call(self, inputs: Any, training: bool = False) -> Any:
            for part in self.parts:
                inputs = part(inputs)
            return inputs

        def train_step(self, *args: Any) -> Any:
            if keras.backend.backend() == "torch":
                self.encoder(args[0][0])  # before the model itself, as a VAE does
            return super().train_step(*args)

    fit(new_model(Mine))


# -- fits that fail --------------------------------------------------------------------------


def failing(**options: Any) -> None:
    try:
        fit(model(), **options)
    except Exception as error:  # noqa: BLE001  TensorFlow makes one of its own of it
        FACTS.setdefault("raised", []).append(str(error))


@case
def a_callback_that_raises() -> None:
    class Fails(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise ValueError("from a callback")

    failing(callbacks=[Fails()])


@case
def data_that_raises() -> None:
    failing(given=few(ValueError("from the data")), batch_size=None)


@case
def a_validation_that_raises() -> None:
    bad = few(ValueError("from the validation"))
    failing(validation_data=bad, validation_batch_size=None)


# -- callbacks -------------------------------------------------------------------------------


@case
def marks_of_callbacks() -> None:
    class Marks(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            ci.mark("at_epoch_begin", epoch)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            ci.mark("at_batch_begin", batch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            ci.mark("at_batch_end", batch)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ci.mark("at_epoch_end", epoch)

    fit(model(), callbacks=[Marks()])


@case
def forms_of_callbacks() -> None:
    class Seen(keras.callbacks.Callback):  # type: ignore[misc]
        count = 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            Seen.count += 1

    class Own(keras.callbacks.CallbackList):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_begin(epoch, logs)

    made = model()
    lists = [kind([Seen()], model=made) for kind in (keras.callbacks.CallbackList, Own)]
    mine = [Seen()]
    for form in (mine, (Seen(),), Seen(), *lists):
        fit(made, callbacks=form)
    FACTS["forms"] = [Seen.count, len(mine), *(len(one.callbacks) for one in lists)]


@case
def a_callback_in_another_thread() -> None:
    class Async(keras.callbacks.Callback):  # type: ignore[misc]
        async_safe = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            FACTS["other_thread"] = threading.get_ident() != threading.main_thread().ident

    fit(model(), callbacks=[Async()])


@case
def fits_in_a_fit() -> None:
    class Inner(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            fit(model(1), epochs=2)
            self.model.evaluate(*data(), verbose=0)

    fit(model(), callbacks=[Inner()])


@case
def fits_in_threads() -> None:
    both = threading.Barrier(2)  # one that ends early would leave its id to the other

    def work(number: int) -> None:
        with ci.scope("thread"):
            both.wait()
            fit(model(number), epochs=2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- other methods ---------------------------------------------------------------------------


@case
def other_methods() -> None:
    made = model()
    made.evaluate(*data(), batch_size=4, verbose=0)
    made.predict(data()[0], batch_size=4, verbose=0)
    FACTS["on_batch"] = made.train_on_batch(*data(), return_dict=True)
    made.test_on_batch(*data())
    made.predict_on_batch(data()[0])


@case
def saving() -> None:
    save = keras.callbacks.ModelCheckpoint("model.keras", save_freq=2)
    made = model()
    fit(made, callbacks=[save])
    made.save_weights("model.weights.h5")


@case
def batches_of_several_outputs() -> None:
    inputs = keras.Input((4,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    made = keras.Model(inputs, outputs)
    losses, metrics = {"a": "mse", "b": "mae"}, {"a": ["mae"], "b": ["mae"]}
    made.compile(keras.optimizers.SGD(0.0), losses, metrics=metrics)  # learns nothing
    inputs, targets = data()
    given = (inputs, {"a": targets, "b": 5 * targets})
    FACTS["several"] = {}
    for method in (made.train_on_batch, made.test_on_batch):
        made.reset_metrics()  # which not every release does by itself
        as_dict = method(*given, return_dict=True)
        made.reset_metrics()
        FACTS["several"][method.__name__] = [as_dict, method(*given)]


# -- inside scopes of the program's own ------------------------------------------------------


@case
def in_epochs_of_mine() -> None:
    made = model()
    for _ in ci.epochs(range(2)):
        fit(made)


@case
def in_epochs_and_batches_of_mine() -> None:
    made = model()
    ci.watch(made)
    for _ in ci.epochs(range(2)):
        for _ in ci.batches(range(2)):
            made.train_on_batch(*data())


@case
def in_a_step_of_mine() -> None:
    with ci.scope("step", 7):
        fit(model())


@case
def a_torch_loop() -> None:
    if keras.backend.backend() != "torch":
        return
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    made = new_model()
    with ci.scope("build"):  # calls the layers
        made.build((None, 4))
    loader = DataLoader(TensorDataset(*map(torch.tensor, data(4))), batch_size=2)
    made.train()
    for _ in range(2):
        for inputs, targets in loader:
            made.zero_grad()
            ((made(inputs, training=True) - targets) ** 2).mean().backward()
            with torch.no_grad():
                weights = made.trainable_weights
                made.optimizer.apply([weight.value.grad for weight in weights], weights)


@case
def a_fit_after_a_torch_loop() -> None:
    if keras.backend.backend() != "torch":
        return
    import torch

    linear = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        linear(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    fit(model())


@case
def a_torch_loader() -> None:
    if keras.backend.backend() != "tensorflow":
        return
    from torch import tensor
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(*map(tensor, data())), batch_size=4)
    fit(model(), given=loader, epochs=2, batch_size=None, validation_data=loader)
    fit(model(), given=((one, other) for one, other in loader), batch_size=None)


# -- mistakes --------------------------------------------------------------------------------


@case
def a_mistake_of_ours() -> None:
    from cirron.hooks.keras import Run

    def fails(*_: Any) -> None:
        raise RuntimeError("ours")

    before, warn = Run.batch_ends, guard.warn
    Run.batch_ends, guard.warn, guard.strict = fails, lambda *_, **__: None, False  # type: ignore
    FACTS["epochs_with_mistakes"] = len(fit(model(), epochs=2).epoch)
    Run.batch_ends, guard.warn, guard.strict = before, warn, True  # type: ignore[method-assign]
    FACTS["mistakes"] = dict(guard.errors)
    guard.errors.clear()


# -- shutdown --------------------------------------------------------------------------------


def methods() -> list[Any]:
    names = (
        "fit",
        "evaluate",
        "predict",
        "train_on_batch",
        "test_on_batch",
        "predict_on_batch",
        "save",
        "save_weights",
    )
    events = [name for name in dir(keras.callbacks.CallbackList) if name.startswith("on_")]
    return [
        *(getattr(keras.Model, name) for name in names),
        *(getattr(keras.callbacks.CallbackList, name) for name in events),
        keras.optimizers.Optimizer.apply,
        *(
            [import_module("tensorflow").data.Dataset.from_generator]
            if keras.backend.backend() == "tensorflow"
            else []
        ),
    ]


def a_shutdown_in_a_fit() -> None:
    class Ends(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ci.shutdown()

    FACTS["epochs_with_shutdown"] = len(fit(model(), epochs=3, callbacks=[Ends()]).epoch)


def wrapped_by_mlflow(fit: Any) -> Any:
    """Its autologging passes callbacks by name."""

    @functools.wraps(fit)
    def wrapped(model: Any, *args: Any, **kwargs: Any) -> Any:
        return fit(model, *args, **{**kwargs, "callbacks": [*kwargs.get("callbacks", ())]})

    return wrapped


def main() -> None:
    global keras, np
    guard.strict = True  # a mistake of ours is an error here
    ci.profile(snapshots="full")
    keras, np = import_module("keras"), import_module("numpy")
    for name, function in CASES.items():
        with ci.scope(name):
            function()
    FACTS["health"] = {key: ci.health()[key] for key in ("errors", "frameworks_installed")}
    FACTS["version"] = keras.__version__
    FACTS["patched"] = [hasattr(method, "__wrapped__") for method in methods()]
    held = keras.Model.fit
    a_shutdown_in_a_fit()
    FACTS["epochs_of_held_fit"] = len(held(model(), *data(), epochs=2, verbose=0).epoch)
    originals = methods()
    plain = new_model()
    fit(plain, epochs=2, validation_data=data())
    FACTS["plain_weights"] = [w.tolist() for w in plain.get_weights()]
    original = keras.Model.fit
    keras.Model.fit = wrapped_by_mlflow(original)
    ci.profile(path="second")
    FACTS["epochs_of_wrapped_fit"] = len(model().fit(*data(), 4, 2, 0).epoch)
    ci.shutdown()
    keras.Model.fit = original
    FACTS["same"] = [one is other for one, other in zip(originals, methods(), strict=True)]
    Path("facts.json").write_text(json.dumps(FACTS, default=float))  # scalars of NumPy


if __name__ == "__main__":
    main()
