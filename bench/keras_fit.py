"""What profiling adds to a Keras step of about 10 ms, on torch and on JAX. Prints one JSON line.

Plain and profiled fits alternate in one process, a process for each backend. A fit is one epoch of
`STEPS` steps, its end and its snapshot included, with no callback of ours or of others in its way:
Keras is free to tell the ends of batches in another thread, as it is by default. `ratio` is the
median of those of neighbours, `ratio_error` how far that may be off by chance (one standard
error). The rest is of the best fits. Of the CPU time, which other programs on the machine hardly
change, there is what is added on the training's own thread and what is added on all. Steps compute
on one thread: one that takes all cores of the host is no stand-in for one on a GPU (`NPROC=2` has
JAX take two). `tiny` is a model that does next to nothing: what is added to it is all ours.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from math import sqrt
from statistics import median, stdev

BACKENDS = ("torch", "jax")
ROUNDS = int(os.environ.get("ROUNDS", "30"))
LIMIT_S = float(os.environ.get("LIMIT_S", "60"))  # of one comparison; three rounds are made anyway
STEPS = int(os.environ.get("STEPS", "200"))
STEP_NS = 10e6
CLOCKS = (time.perf_counter_ns, time.thread_time_ns, time.process_time_ns)


def measure():
    os.chdir(tempfile.mkdtemp())
    import keras
    import numpy

    import cirron as ci

    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)

    def make(width, rows):
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        inputs = numpy.random.default_rng(0).random((rows * STEPS, width), dtype="float32")
        return model, inputs, inputs[:, :1], rows

    def fit(model, inputs, targets, rows):
        began = [clock() for clock in CLOCKS]
        model.fit(inputs, targets, batch_size=rows, verbose=0, shuffle=False)
        return [(clock() - then) / STEPS for clock, then in zip(CLOCKS, began, strict=True)]

    def compare(case):
        fit(*case)
        plain, profiled = [], []
        ends = time.monotonic() + LIMIT_S
        for number in range(ROUNDS):
            if number >= 3 and time.monotonic() > ends:
                break
            for is_profiled in (number % 2 == 0, number % 2 == 1):
                if is_profiled:
                    ci.profile()
                (profiled if is_profiled else plain).append(fit(*case))
                ci.shutdown()
        ratios = [q[0] / p[0] for p, q in zip(plain, profiled, strict=True)]
        bare, ours = ([min(column) for column in zip(*of, strict=True)] for of in (plain, profiled))
        added = [round((q - p) / 1e3, 1) for p, q in zip(bare, ours, strict=True)]
        return {
            "plain_us": round(bare[0] / 1e3, 1),
            "added_us": added[0],
            "ratio": round(median(ratios), 4),
            "ratio_error": round(1.25 * stdev(ratios) / sqrt(len(ratios)), 4),  # of a median
            "added_thread_us": added[1],
            "added_cpu_us": added[2],
        }

    rows = 32
    for _ in range(2):  # nearer each time
        case = make(512, rows)
        fit(*case)
        rows = max(1, round(rows * STEP_NS / fit(*case)[0]))
    return {"step": compare(make(512, rows)), "tiny": compare(make(4, 4))}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure()))
    else:
        found = {}
        for backend in BACKENDS:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", __file__, backend],
                env={"NPROC": "1", **os.environ, "KERAS_BACKEND": backend},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(done.stderr)
            found[backend] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(found))
