"""What `@ci.inference` adds to a call, as a ratio to `with ci.scope(...)`. Prints one JSON line.

All are timed round by round, so that a slow moment hits each of them.
"""

import asyncio
import json
import os
import tempfile
import time

os.chdir(tempfile.mkdtemp())
import cirron as ci  # noqa: E402  the folder is changed first: profiling writes where it starts

COUNT = int(os.environ.get("COUNT", "20000"))
ROUNDS = int(os.environ.get("ROUNDS", "9"))
ITEMS = 100  # of a stream
now = time.perf_counter_ns


def plain(x):
    return x


async def plain_async(x):
    return x


def plain_stream(x):
    for _ in range(ITEMS):
        yield "token"


decorated = ci.inference(plain)
decorated_async = ci.inference(plain_async)
decorated_stream = ci.inference(plain_stream)
answer = {"usage": {"prompt_tokens": 3, "completion_tokens": 5}}


def call(count):
    for _ in range(count):
        plain(1)


def scope(count):
    for _ in range(count):
        with ci.scope("request"):
            plain(1)


def inference(count):
    for _ in range(count):
        decorated(1)


def inference_usage(count):
    for _ in range(count):
        decorated(answer)


def call_async(count):
    async def run():
        for _ in range(count):
            await plain_async(1)

    asyncio.run(run())


def inference_async(count):
    async def run():
        for _ in range(count):
            await decorated_async(1)

    asyncio.run(run())


def items(count):
    for _ in range(count // ITEMS):
        for _ in plain_stream(1):
            pass


def inference_items(count):
    for _ in range(count // ITEMS):
        for _ in decorated_stream(1):
            pass


# (what is measured, what it is added to)
MEASURED = [
    (scope, call),
    (inference, call),
    (inference_usage, call),
    (inference_async, call_async),
    (inference_items, items),
]


def timed(function):
    began = now()
    function(COUNT)
    return (now() - began) / COUNT


def measure():
    """What each adds, in ns: the best of the rounds."""
    best = {}
    for _ in range(ROUNDS):
        for function, bare in MEASURED:
            for one in (bare, function):
                best[one] = min(timed(one), best.get(one, 1e12))
            ci.flush()
    return {function.__name__: best[function] - best[bare] for function, bare in MEASURED}


def report(added, scope_ns):
    return {
        name: {"ns": round(ns, 1), "ratio": round(ns / scope_ns, 3)} for name, ns in added.items()
    }


ci.profile(frameworks=[], output="none")
on = measure()
ci.shutdown()
ci.profile(enabled=False)
off = measure()
ci.shutdown()
found = report(on, on["scope"])
found["off"] = report(off, on["scope"])
print(json.dumps(found))
