"""Nanoseconds of each primitive, of whichever `cirron` is importable. Prints one JSON line.

Each is timed next to a bare context manager, round by round, so that a slow moment hits both.
"""

import json
import os
import sys
import tempfile
import time

os.chdir(tempfile.mkdtemp())
import cirron as ci  # noqa: E402  the folder is changed first: profiling writes where it starts

COUNT = int(os.environ.get("COUNT", "20000"))
ROUNDS = int(os.environ.get("ROUNDS", "9"))
now = time.perf_counter_ns


class Bare:
    __slots__ = ("began", "ended")

    def __enter__(self):
        self.began = now()
        return self

    def __exit__(self, *exception):
        self.ended = now()


def bare(count):
    kept = []
    for _ in range(count):
        with Bare() as span:
            pass
        kept.append(span)


def scope(count):
    for _ in range(count):
        with ci.scope("x"):
            pass


def scope_with_attrs(count):
    for index in range(count):
        with ci.scope("x", index=index, variant="beam"):
            pass


def mark(count):
    for _ in range(count):
        ci.mark("loss", 0.5)


def epochs(count):
    for _ in ci.epochs(range(count)):
        pass


def batches(count):
    for _ in ci.batches(range(count)):
        pass


def timed(function):
    began = now()
    function(COUNT)
    return (now() - began) / COUNT


def measure(function):
    """The best of the rounds, of the function and of the bare one beside it."""
    ours, floor = [], []
    for _ in range(ROUNDS):
        floor.append(timed(bare))
        ours.append(timed(function))
        ci.flush()
    return {"ns": round(min(ours), 1), "ratio": round(min(ours) / min(floor), 3)}


found = {"python": sys.version.split()[0]}
ci.profile(frameworks=[], output="none")
for function in (scope, scope_with_attrs, mark, epochs, batches):
    found[function.__name__] = measure(function)
ci.shutdown()
ci.profile(enabled=False)
found["scope_off"] = measure(scope)
ci.shutdown()
print(json.dumps(found))
