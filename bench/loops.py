"""Microseconds that a loop of ciclo adds to an iteration. Prints one JSON line.

Each loop is timed next to a bare `for` that makes the same calls, round by round, so that a slow
moment hits both. Peers (Fabric, Ignite, Keras) are timed with the same no-op step where they are
installed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

os.chdir(tempfile.mkdtemp())
os.environ.setdefault("KERAS_BACKEND", "torch")
import ciclo  # noqa: E402  the folder is changed first: profiling writes where it starts
import cirron as ci  # noqa: E402

COUNT = int(os.environ.get("COUNT", "20000"))
ROUNDS = int(os.environ.get("ROUNDS", "9"))
now = time.perf_counter_ns


def noop():
    pass


def log():
    return {"metrics": {"loss": 0.5}}


def bare(tasks):
    def run(count):
        for _ in range(count):
            for _ in range(tasks):
                noop()

    return run


def looped(tasks, callback=noop):
    def run(count):
        ciclo.loop(0, range(count), [(ciclo.every(1), callback)] * tasks)

    return run


def one_due_three_not(count):
    ciclo.loop(
        0, range(count), [(ciclo.every(1), noop)] + [(ciclo.every(10**9), noop) for _ in range(3)]
    )


def elapse(count):
    for _ in ciclo.elapse(range(count)):
        pass


def fit(count):
    ciclo.fit(0, range(count), epochs=1, train_step=noop)


def timed(function, count):
    began = now()
    function(count)
    return (now() - began) / count / 1000


def measure(function, tasks=1, count=COUNT):
    """The best of the rounds in us, and as a ratio to the bare loop beside it."""
    ours, floor = [], []
    for _ in range(ROUNDS):
        floor.append(timed(bare(tasks), count))
        ours.append(timed(function, count))
        ci.flush()
    return {"us": round(min(ours), 3), "ratio": round(min(ours) / min(floor), 1)}


def ignite(count):
    from ignite.engine import Engine

    Engine(lambda engine, batch: noop()).run(range(count), max_epochs=1)


def keras_callbacks(count):
    """Keras without its step: what it does around one for a no-op callback."""
    import keras

    class Noop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            noop()

    callbacks = keras.callbacks.CallbackList([Noop()], add_history=True)
    callbacks.on_train_begin()
    for step in range(count):
        callbacks.on_train_batch_begin(step)
        callbacks.on_train_batch_end(step, {"loss": 0.5})
    callbacks.on_train_end()


def hold_ms(kind, asynchronous, rounds=5):
    """How long a checkpoint of a state of 100 MB holds the loop, and how long until it is whole."""
    import shutil

    import numpy as np

    array = np.random.default_rng(0).random((4, 25, 1000, 250), dtype="f4")  # four of 25 MB
    if kind == "torch":
        import torch

        state = {str(i): torch.from_numpy(one.copy()) for i, one in enumerate(array)}
    elif kind == "jax":
        import jax

        state = {
            str(i): jax.block_until_ready(jax.numpy.asarray(one)) for i, one in enumerate(array)
        }
    else:
        state = {str(i): one.copy() for i, one in enumerate(array)}
    held, whole = [], []
    save = ciclo.checkpoint("held", asynchronous=asynchronous)
    for elapsed, _ in ciclo.elapse(range(rounds + 1)):
        began = now()
        save(elapsed, state)
        held.append((now() - began) / 1e6)
        save.wait()
        whole.append((now() - began) / 1e6)
    shutil.rmtree("held")
    middle = rounds // 2
    return round(sorted(held[1:])[middle], 1), round(sorted(whole[1:])[middle], 1)


def fabric(count):
    """Fabric has no loop of its own: what calling a no-op callback in a bare one takes."""
    from lightning.fabric import Fabric

    class Noop:
        def on_train_batch_end(self):
            noop()

    calls = Fabric(accelerator="cpu", devices=1, callbacks=[Noop()])
    for _ in range(count):
        calls.call("on_train_batch_end")


def import_ms(module):
    # As for a user, whose first import leaves compiled files for the others.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    code = f"import time; a = time.perf_counter(); import {module}; print(time.perf_counter() - a)"
    taken = [
        float(subprocess.check_output([sys.executable, "-c", code], env=environ)) for _ in range(7)
    ]
    return round(min(taken) * 1000, 2)


found = {"python": sys.version.split()[0]}
found["bare"] = {"one_us": round(min(timed(bare(1), COUNT) for _ in range(ROUNDS)), 3)}
found["elapse"] = measure(elapse)
found["one_task"] = measure(looped(1))
found["four_tasks"] = measure(looped(4), tasks=4)
found["one_due_three_not"] = measure(one_due_three_not)
found["one_task_logging"] = measure(looped(1, log))
found["four_tasks_logging"] = measure(looped(4, log), tasks=4)
found["fit"] = measure(fit)
for peer in (fabric, ignite, keras_callbacks):
    try:
        found[peer.__name__] = measure(peer)
    except ImportError:
        pass
ci.profile(frameworks=[], output="none")
for name, tasks in (("one_task", 1), ("four_tasks", 4)):
    profiled = measure(looped(tasks), tasks=tasks)
    # A step has its own span, that of the wait, and one for each task.
    added = (profiled["us"] - found[name]["us"]) / (1 + tasks)
    found[f"{name}_profiled"] = {**profiled, "added_us_a_step_and_task": round(added, 3)}
ci.shutdown()
for kind in ("numpy", "torch", "jax"):
    try:
        held, whole = hold_ms(kind, True)
        found[f"checkpoint_100mb_{kind}"] = {
            "held_ms": held,
            "whole_ms": whole,
            "synchronous_ms": hold_ms(kind, False)[0],
        }
    except ImportError:
        pass
found["import_ms"] = import_ms("ciclo")
print(json.dumps(found))
