"""Microseconds that a loop of ciclo adds to an iteration. Prints one JSON line.

python bench/loops.py [--original PYTHON] [--save]

Each loop is timed next to a bare `for` that makes the same calls, round by round, so that a slow
moment hits both; what is timed is the work of the loop's own thread, so that other programs do not
count. Peers (Fabric, Ignite, Keras) are timed with the same no-op step where they are installed.
`--original` is a Python that has `requirements-ciclo.txt`: the same loops with the original Ciclo.
`--save` keeps the figures in bench/results/loops.json.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
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


def log_four():
    return {"metrics": {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5}}


def log_object():
    return ciclo.logs().add_metric("loss", 0.5)


def log_value(value):
    return lambda: {"metrics": {"loss": value}}


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


def timed(function, count, clock=time.thread_time_ns):
    began = clock()
    function(count)
    return (clock() - began) / count / 1000


def measure(function, tasks=1, count=COUNT, clock=time.thread_time_ns, floor=None):
    """The best of the rounds in us, and as a ratio to the bare loop beside it."""
    ours, bares = [], []
    for _ in range(ROUNDS):
        bares.append(timed(floor or bare(tasks), count, clock))
        ours.append(timed(function, count, clock))
        ci.flush()
    return {"us": round(min(ours), 3), "ratio": round(min(ours) / min(bares), 1)}


def logging(loops):
    """What each of the loops takes, as a multiple of the one that logs nothing, round by round."""
    best = {}
    for _ in range(3 * ROUNDS):
        for name, function in loops.items():
            best[name] = min(timed(function, COUNT // 4), best.get(name, 1e9))
    return {
        name: {"us": round(us, 3), "to_one_task": round(us / best["one_task"], 2)}
        for name, us in best.items()
    }


def scalars():
    """Loops that log a scalar of each library that is installed."""
    import numpy as np

    loops = {"numpy_scalar": looped(1, log_value(np.float32(0.5)))}
    try:
        import torch

        loops["torch_scalar"] = looped(1, log_value(torch.tensor(0.5)))
    except ImportError:
        pass
    return loops


def jitted(count=2000):
    """A jitted JAX step that logs a scalar, beside a bare loop of the same steps."""
    import jax
    import jax.numpy as jnp

    parameters = {"w": jnp.zeros(4)}

    @jax.jit
    def step(state, batch):
        return {"losses": {"loss": state["w"].sum()}}, {"w": state["w"] * 0.5}

    def steps(count):
        state = parameters
        for _ in range(count):
            _, state = step(state, 1.0)

    def loop(count):
        ciclo.loop(parameters, [1.0] * count, {ciclo.every(1): step})

    steps(1)
    found = measure(loop, count=count, floor=steps)
    floor = min(timed(steps, count) for _ in range(ROUNDS))
    return {**found, "bare_us": round(floor, 3), "ratio": round(found["us"] / floor, 2)}


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


arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--original", help="a Python that has the original Ciclo")
arguments.add_argument("--save", action="store_true", help="keep the figures in bench/results")
given = arguments.parse_args()

found = {"python": sys.version.split()[0]}
found["bare"] = {"one_us": round(min(timed(bare(1), COUNT) for _ in range(ROUNDS)), 3)}
found["elapse"] = measure(elapse)
found["one_task"] = measure(looped(1))
found["four_tasks"] = measure(looped(4), tasks=4)
found["one_due_three_not"] = measure(one_due_three_not)
found["one_task_logging"] = measure(looped(1, log))
found["four_tasks_logging"] = measure(looped(4, log), tasks=4)
found["logging"] = logging(
    {
        "one_task": looped(1),
        "one_float": looped(1, log),
        "four_tasks_a_float_each": looped(4, log),
        "four_floats": looped(1, log_four),
        "logs_object": looped(1, log_object),
        **scalars(),
    }
)
try:
    found["jax_logging"] = jitted()
except ImportError:
    pass
if given.original:
    line = subprocess.check_output(
        [given.original, "-W", "ignore", str(HERE / "loops_original.py")],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        stderr=subprocess.DEVNULL,
    )
    found["original_us"] = json.loads(line.splitlines()[-1])
found["fit"] = measure(fit)
for peer in (fabric, ignite, keras_callbacks):
    try:
        found[peer.__name__] = measure(peer)
    except ImportError:
        pass
ci.profile(frameworks=[], output="none")
for name, tasks in (("one_task", 1), ("four_tasks", 4)):
    # By the clock on the wall: the thread that writes the records counts as well.
    profiled = measure(looped(tasks), tasks=tasks, clock=now)
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
if given.save:
    written = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "figures": found,
    }
    (HERE / "results/loops.json").write_text(json.dumps(written, indent=2) + "\n")
print(json.dumps(found))
