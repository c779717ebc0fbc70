"""What a span with a mark costs until it is on disk, of whichever `cirron` is importable."""

import glob
import json
import os
import resource
import tempfile
import time

os.chdir(tempfile.mkdtemp())
import cirron as ci  # noqa: E402  the folder is changed first: profiling writes where it starts

COUNT = int(os.environ.get("COUNT", "300000"))


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


before_mb = peak_mb()
ci.profile(frameworks=[])
cpu = time.process_time()
began = time.perf_counter()
for _ in ci.batches(range(COUNT)):
    ci.mark("loss", 0.5)
looped = time.perf_counter()
ci.shutdown()
ended = time.perf_counter()
cpu = time.process_time() - cpu
grown_mb = peak_mb() - before_mb

files = glob.glob(".cirron/spool/*.json")
spans = marks = 0
for name in files:
    with open(name) as file:
        batch = json.load(file)
    spans += len(batch["spans"])
    marks += len(batch["marks"])
print(
    json.dumps(
        {
            "cpu_us": round(cpu / COUNT * 1e6, 2),
            "loop_us": round((looped - began) / COUNT * 1e6, 2),
            "shutdown_s": round(ended - looped, 2),
            "memory_mb": round(grown_mb),
            "bytes": sum(map(os.path.getsize, files)) // COUNT,
            "files": len(files),
            "spans_lost": max(0, COUNT - spans),
            "marks_lost": COUNT - marks,
        }
    )
)
