"""How long the background thread keeps the interpreter lock while it works off a backlog.

The main thread does nothing but read the clock; a gap between two readings is time in which it had
no lock. The same loop with no backlog shows what the machine itself takes away.
"""

import json
import os
import tempfile
import time

os.chdir(tempfile.mkdtemp())
import cirron as ci  # noqa: E402  the folder is changed first: profiling writes where it starts

SECONDS = 0.8
now = time.perf_counter_ns


def gaps_ms():
    """The gaps above 0.2 ms in a stretch of pure Python, longest first."""
    gaps = []
    last = began = now()
    while last - began < SECONDS * 1e9:
        this = now()
        if this - last > 200_000:
            gaps.append((this - last) / 1e6)
        last = this
    return sorted(gaps, reverse=True)


def summary(gaps):
    return {
        "count": len(gaps),
        "median_ms": round(gaps[len(gaps) // 2], 2) if gaps else 0.0,
        "p99_ms": round(gaps[len(gaps) // 100], 2) if gaps else 0.0,
        "worst_ms": round(gaps[0], 2) if gaps else 0.0,
    }


ci.profile(frameworks=[], flush_interval=3600)
idle = gaps_ms()
for _ in ci.batches(range(400_000)):
    ci.mark("loss", 0.5)
pending = ci.health()["records_pending"]
busy = gaps_ms()
drained = pending - ci.health()["records_pending"]
ci.shutdown()
print(json.dumps({"idle": summary(idle), "busy": summary(busy), "drained": drained}))
