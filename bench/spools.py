"""Makes a spool as large as asked for: `python bench/spools.py FOLDER --spans 10000000 --ranks 64`.

Runs of a torch loop, one session a rank: epochs of steps with data_load, forward, backward and
optimizer_step, a loss mark a step, snapshots of a few tensors an epoch. Times are seeded and vary;
`--slow-rank` waits longer for its data. `together` has ranks that wait for each other.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from cirron import wire

STEPS_IN_EPOCH = 1_000
BATCH_SPANS = 8_000  # some 2 MB, as the writer seals them
PHASES = (("data_load", 0.15), ("forward", 0.25), ("backward", 0.4), ("optimizer_step", 0.1))
TENSORS = ("embed.weight", "fc.weight", "fc.bias", "fc.weight.grad")
START_NS = 1_790_000_000_000_000_000
SPANS_OF_STEP = 5
# What each phase of a step takes, in ns, in the order of `PHASES`.
Times: TypeAlias = Callable[[int], list[int]]


def alone(rank: int, slow: bool) -> Times:
    """Steps of about a millisecond that wait for nobody."""
    random_ = random.Random(rank + 1_000_000)

    def times(step: int) -> list[int]:
        length = random_.randrange(900_000, 1_100_000)
        took = [int(length * share) for _, share in PHASES]
        return [took[0] * (3 if slow else 1), *took[1:]]

    return times


def together(ranks: int, steps: int, how: str) -> list[list[list[int]]]:
    """What ranks take that wait for each other at the end of backward: by step, rank and phase.

    Steps of 10 ms with 3 % of noise. `how`: "slow", rank 17 loads 5 ms longer; "rotating", one by
    chance does; "shared", all share them; "backward", rank 17 takes them in backward; "none".
    """
    random_ = random.Random(1)
    late, slow_rank = 5_000_000, 17
    table = []
    for _ in range(steps):
        rows = [
            [int(10_000_000 * share * random_.gauss(1, 0.03)) for share in (0.03, 0.3, 0.5, 0.15)]
            for _ in range(ranks)
        ]
        whose = random_.randrange(ranks)
        for rank, row in enumerate(rows):
            if how == "shared":
                row[0] += late // ranks
            elif how != "none" and rank == (whose if how == "rotating" else slow_rank):
                row[2 if how == "backward" else 0] += late
        end = max(sum(row[:3]) for row in rows)
        table.append([[*row[:2], end - sum(row[:2]), row[3]] for row in rows])
    return table


def write_rank(folder: Path, run_id: str, rank: int, ranks: int, spans: int, times: Times) -> None:
    """The spool of one rank."""
    random_ = random.Random(rank)
    prefix = f"{rank + 1:016x}"
    number = 0

    def new_id() -> str:
        nonlocal number
        number += 1
        return f"{prefix}{number:016x}"

    session = wire.Session(
        id=f"{rank + 1:032x}",
        run_id=run_id,
        attempt=0,
        host=f"node{rank // 8}",
        pid=1_000 + rank,
        rank=rank,
        local_rank=rank % 8,
        world_size=ranks,
        clock=wire.Clock(START_NS, 0, 1_000),
        program=wire.Program(script="train.py", arguments=["--lr", "0.1"], python="3.12.1"),
    )
    now = START_NS + random_.randrange(1_000_000)
    rows: list[bytes] = []
    marks: list[bytes] = []
    snapshots: list[bytes] = []
    root, epoch = new_id(), ""
    epoch_start, steps, written, batches = now, 0, 0, 0
    tail = f'"thread_id":1,"pid":{1_000 + rank},"rank":{rank}'

    def span(id_: str, name: str, parent: str | None, index: object, start: int, end: int) -> None:
        nonlocal written
        written += 1
        above = "null" if parent is None else f'"{parent}"'
        mode = '{"mode":"train"}' if name == "forward" else "{}"
        rows.append(
            f'{{"id":"{id_}","name":"{name}","parent_id":{above},"index":{index},'
            f'"start_ns":{start},"end_ns":{end},"cpu_ns":null,"gpu_ns":null,'
            f'"memory_peak_bytes":null,{tail},"attrs":{mode},"mark_ids":[]}}'.encode()
        )

    def seal() -> None:
        nonlocal batches
        batches += 1
        batch_id = f"{rank + 1:016x}{batches:016x}"
        header = wire.Header(
            schema_version=1,
            sdk_version="bench",
            batch_id=batch_id,
            created_ns=now,
            session=session,
        )
        joined = (b",".join(one) for one in (rows, marks, snapshots))
        pieces, _ = wire.encode_batch(header, wire.Sections(*([one] for one in joined)))
        (folder / f"{now:020d}-{batch_id}.json").write_bytes(b"".join(pieces))
        rows.clear(), marks.clear(), snapshots.clear()

    def end_epoch() -> None:
        span(epoch, "epoch", root, (steps - 1) // STEPS_IN_EPOCH, epoch_start, now)
        for name in TENSORS:
            values = [random_.gauss(0, 1 / (1 + steps)) for _ in range(4)]
            stats = {"mean": values[0], "std": abs(values[1]), "min": -1.0, "max": 1.0, "norm": 3.0}
            histogram = {"bins": [at / 8 - 1 for at in range(17)], "counts": [10] * 16}
            one = {"id": new_id(), "span_id": epoch, "tensor_name": name, "shape": [16, 10]}
            one |= {"dtype": "float32", "mode": "stats", "stats": stats | {"histogram": histogram}}
            snapshots.append(
                msgspec.json.encode(one | {"blob_uri": None, "ts_ns": now, "attrs": {}})
            )

    while written < spans - 2:
        if steps % STEPS_IN_EPOCH == 0:
            if epoch:
                end_epoch()
            epoch, epoch_start = new_id(), now
        step, began = new_id(), now
        phases = times(steps)
        for (name, _), took in zip(PHASES, phases, strict=True):
            span(new_id(), name, step, "null", now, now + took)
            now += took
        marks.append(
            f'{{"id":"{new_id()}","span_id":"{step}","name":"loss","value_type":"float",'
            f'"value":{2 / (1 + steps * 0.001) + random_.random() * 0.1},"attrs":{{}},'
            f'"ts_ns":{now},"kind":"point"}}'.encode()
        )
        now += 100_000
        span(step, "step", epoch, steps % STEPS_IN_EPOCH, began, now)
        steps += 1
        if len(rows) >= BATCH_SPANS:
            seal()
    end_epoch()
    span(root, "cirron.session", None, "null", START_NS, now)
    seal()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--spans", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--run-id", default="generated")
    parser.add_argument("--slow-rank", type=int)
    given = parser.parse_args()
    spool = given.folder / ".cirron" / "spool"
    spool.mkdir(parents=True)
    began = time.perf_counter()
    for rank in range(given.ranks):
        each = given.spans // given.ranks
        times = alone(rank, rank == given.slow_rank)
        write_rank(spool, given.run_id, rank, given.ranks, each, times)
    print(f"{given.spans:,} spans of {given.ranks} ranks in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
