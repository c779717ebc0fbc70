"""Milliseconds of `import NAME` in a fresh interpreter, the best of several, as a JSON line."""

import json
import subprocess
import sys

NAMES = sys.argv[1:] or ["cirron"]
ROUNDS = 7
SCRIPT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def milliseconds(name):
    times = []
    for _ in range(ROUNDS):
        out = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(name)], capture_output=True, check=True
        )
        times.append(float(out.stdout) * 1e3)
    return round(min(times), 1)


print(json.dumps({name: milliseconds(name) for name in NAMES}))
