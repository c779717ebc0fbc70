"""input-bound: the steps wait for their data.

It is a finding if data_load takes 10 % of the window or more and the advised workers would save
10 %. The gain is a replay of a DataLoader with these workers. Without workers, the time to load
each batch is known. If n workers cannot keep up, a batch takes them n steps. If loading computes,
there are at most as many workers as cores, and no gain if it needs all of them. If the process
keeps all cores busy, the replay has free cores, and there is no gain either.

TensorFlow's compiled steps fetch their data inside the step. There, it is a finding, without a
gain, if the loading thread needs 90 % of the median step for a batch.

Slow starts: in three epochs or more, the wait for the first batch beyond the median, and starting
and stopping workers, take 20 % or more, and more than the rest of the loading. The gain is all of
it, if workers that are restarted can be kept.
"""

from __future__ import annotations

import math
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

from cirron.verdict.facts import MIN_STEPS
from cirron.verdict.findings import Abstained, Class, Finding, Prediction
from cirron.verdict.rules import MOST, STARVED, Judged, ms, percent, period_of, repeated, unclear
from cirron.verdict.whatif import lasting, with_workers, without
from cirron.view.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cirron.verdict.facts import Facts

KIND: Class = "input-bound"
SHARE = 0.10
MIN_GAIN = 0.10
# Short epochs always start slowly, so their starts must take longer than all other waits.
COLD = 0.20
MIN_EPOCHS = 3
UNSURE = 0.25
SET_UP = "loader set-up"
# With workers, the thread must be asleep for this share of the time. Otherwise the batches were
# ready, and more workers do not help.
ASLEEP = 0.20
# A stall is a wait of this many times the median.
STALL = 4.0
PEGGED = 0.9  # of the cores
BUSY = 0.5  # of the loading time; below it, loading waits for a disk or a network
WAITING = 0.25  # CPU time as a share of the workers' time; below it, they wait
MAX_WORKERS = 8
# Why the gain of more workers is not known.
BUSY_CORES = "loading needs every core"
SHARED = "the workers may wait for each other: for a lock, or the same disk"
SATURATED = 0.9  # of a step, to load a batch: the loading thread never gets ahead
# Batches that a worker loads in advance: torch's default, and the largest number to advise.
AHEAD, MAX_AHEAD = 2, 64
HANDOVER_NS = 300_000  # cost of taking a batch from a worker
# Samplers of libraries. They take next to no time, and another one may take any.
SAMPLERS = (
    *("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler"),
    *("BatchSampler", "DistributedSampler", "SeedableRandomSampler", "BatchSamplerShard"),
)


# Why no gain is predicted if the workers are kept already, and if they are restarted.
FIRST_BATCH = (
    "what the data set does there may be needed",
    "the workers still have to load the first batch, and that time is not known",
)


class Plan(NamedTuple):
    """The workers to try."""

    workers: int
    ahead: int
    left: float  # ns that the steps would take
    unsure: str = ""  # why the workers' gain is not known
    needed: int = 0  # workers to keep up, which may be more than there are cores
    is_waiting: bool | None = None  # loading waits instead of computing; None: not known


def judge(facts: Facts) -> Judged:
    loads = [step.data_load or 0 for step in facts.steps if step.data_load is not None]
    if not loads and facts.loading_ns:
        return judge_beside(facts)
    if not loads:
        return Abstained(KIND, "no data_load was recorded, so the time to load data is not known")
    if len(loads) < MIN_STEPS:
        return Abstained(KIND, "too few steps")
    typical = median(loads)
    # No worker loads the first batch of an epoch in advance.
    late = {
        at: max((facts.steps[at].data_load or 0) - typical, 0.0) for at in facts.first_of_epochs
    }
    waits = [(step.data_load or 0) - late.get(at, 0.0) for at, step in enumerate(facts.steps)]
    cold = sum(late.values()) + facts.account.get(SET_UP, 0)
    if len(late) >= MIN_EPOCHS and cold > max(COLD * facts.window_ns, sum(waits)):
        return judge_cold(facts, cold, late, typical)
    return judge_waits(facts, loads, waits)


def judge_waits(facts: Facts, loads: Sequence[int], waits: Sequence[float]) -> Judged:
    """Steps that wait for their data, all of them or some (stalls)."""
    share, workers = sum(loads) / facts.window_ns, facts.workers
    stalls = stalls_of(waits, workers or 0)
    at = repeated([stalls.get(number, 0.0) for number in range(len(waits))])
    is_stalling = bool(at)
    lasted = sum(stalls.values())
    total = sum(waits)
    if total - (0.0 if is_stalling else lasted) < SHARE * facts.window_ns:
        return None
    why = unclear(facts)
    if why and share < SATURATED:
        return Abstained(KIND, why)
    every = period_of(at)  # other work on the machine has no period
    # Workers wait for a CPU as long as the work of the steps does.
    delay = lasted if is_stalling else min(total, sum(step.work for step in facts.steps))
    may_be_starved = share < MOST and not every and (is_stalling or workers)
    if may_be_starved and facts.is_starved(delay, is_own_wait=not workers):
        return Abstained(KIND, STARVED)
    asleep = 1.0 if facts.asleep_share is None else facts.asleep_share
    if workers and not is_stalling and asleep < ASLEEP:
        return judge_sampler(facts, share)
    found = plan(facts, max(stalls.values()) if is_stalling else 0.0)
    saved = sum(step.wall for step in facts.steps) - max(found.left, facts.device_ns)
    if saved < MIN_GAIN * facts.window_ns:
        return None
    evidence = [
        f"data_load is {percent(share)} of the time: {ms(mean(loads))} of a step of"
        f" {ms(facts.window_ns / len(facts.steps))} (mean)"
    ]
    if workers is not None:
        evidence.append(f"the loader has {plural(workers, 'worker')}")
    if is_stalling:
        evidence.append(
            f"{len(at)} of {len(loads)} steps wait {ms(median(waits[one] for one in at))},"
            f" others {ms(median(loads))}" + (f"; every {every} steps" if every else "")
        )
    unsure = (
        "all cores are busy"
        if is_pegged(facts)
        else "the device's time is not known"
        if why
        else "it depends on when the stalls come"
        if is_stalling
        else found.unsure
    )
    return Finding(
        KIND,
        "the steps wait for their data" + (" now and then" if is_stalling else ""),
        share,
        *(lasting(facts, found.left) if not unsure else Prediction(None, unsure)),
        evidence,
        advice(facts, is_stalling, found),
        "data_load",
    )


def judge_sampler(facts: Facts, share: float) -> Judged:
    """Batches that are ready, and a sampler of the program's own, which no worker runs."""
    sampler = facts.loader.get("sampler")
    if sampler is None or sampler in SAMPLERS or facts.is_starved(share * facts.window_ns):
        return None
    return Finding(
        KIND,
        "the main process takes the time to load data",
        share,
        None,
        "the time of the sampler is not known",
        [
            f"data_load is {percent(share)} of the time, though the workers' batches are ready",
            f"{sampler} draws the batches in the main process",
        ],
        f"make {sampler} faster, such as by sorting once per epoch; more workers will not help",
        "data_load",
    )


def stalls_of(waits: Sequence[float], workers: int = 0) -> dict[int, float]:
    """The few long waits, by index, if they make up most of the waiting.

    n workers that cannot keep up finish n batches at once: one long wait, then n - 1 short ones.
    """
    limit = STALL * max(median(waits), 1)
    found = {at: wait for at, wait in enumerate(waits) if wait > limit}
    is_stalling = len(found) < 0.5 * len(waits) and sum(found.values()) > 0.5 * sum(waits)
    if is_stalling and workers:
        starts = range(0, len(waits), workers)
        is_stalling = bool(stalls_of([sum(waits[at : at + workers]) for at in starts]))
    return found if is_stalling else {}


def judge_beside(facts: Facts) -> Judged:
    """Data that a thread loads for TensorFlow's compiled steps.

    A thread that is ahead of the steps rests. If it never rests, the steps wait for it.
    """
    if len(facts.steps) < MIN_STEPS:
        return Abstained(KIND, "too few steps")
    each = facts.loading_ns / (facts.warm_up + len(facts.steps))
    usual = median(step.wall for step in facts.steps)
    if each < SATURATED * usual:
        return None
    return Finding(
        KIND,
        "the steps wait for their data",
        min(each * len(facts.steps) / facts.window_ns, 1.0),
        None,
        "the steps' own time is not known",
        [f"the loading thread needs {ms(each)} per batch; a step takes {ms(usual)} (median)"],
        advice(facts, False, Plan(min(facts.cores or 4, MAX_WORKERS), AHEAD, 0.0)),
        "in no phase",
    )


def judge_cold(facts: Facts, cold: float, late: Mapping[int, float], typical: float) -> Judged:
    """Epochs that start slowly."""
    share = cold / facts.window_ns
    workers, set_up = facts.workers, facts.account.get(SET_UP, 0)
    # Keeping the workers saves that time on a busy machine, too. A loader that is made for each
    # epoch cannot keep them.
    is_kept = facts.loader.get("persistent_workers") and set_up < UNSURE * cold
    is_anew = bool(workers) and not is_kept
    may_be_starved = share < MOST and not is_anew
    if may_be_starved and facts.is_starved(cold, is_own_wait=not workers):
        return Abstained(KIND, STARVED)
    wait = median(facts.steps[at].data_load or 0 for at in late)
    evidence = [
        f"{percent(share)} of the time is at the start of {plural(len(late), 'epoch')}",
        f"their first batch takes {ms(wait)} to arrive, others {ms(typical)}",
    ]
    if set_up:
        each = ms(set_up / len(late))
        evidence.append(
            f"starting and stopping {plural((workers or 0), 'worker')} takes {each} per epoch"
        )
    # Workers that are kept must still load the first batch. That takes at most the time in which
    # they load every other one.
    usual = mean(step.work for step in facts.steps)
    is_sure = is_anew and (workers or 0) * usual * len(late) < UNSURE * cold
    return Finding(
        KIND,
        "each epoch waits for its first batch",
        share,
        *(without(facts, cold, late) if is_sure else Prediction(None, FIRST_BATCH[is_anew])),
        evidence,
        "create the loader once, before the epochs, and keep its workers:"
        f" {settings(facts, {'persistent_workers': True})}"
        if is_anew
        else "check what the data set does when an epoch begins (opening files, shuffling,"
        " filling a buffer), and do it once",
        "data_load" if cold > 2 * set_up else SET_UP,
    )


def plan(facts: Facts, stall: float) -> Plan:
    """How many workers to try, and how long the steps would take; `stall` is the longest."""
    now = facts.workers or 0
    cores = facts.cores or max(4, 2 * now)
    work = [step.wall - (step.data_load or 0) for step in facts.steps]
    usual = max(mean(work), 1.0)
    if now and stall:
        typical = median(step.data_load or 0 for step in facts.steps)
        more = sum(max((step.data_load or 0) - typical, 0) for step in facts.steps)
        workers = 2 * now if has_waiting_workers(facts) else max(min(2 * now, cores), now)
        return Plan(workers, MAX_AHEAD // 4, sum(step.wall for step in facts.steps) - more)
    if now:
        load = now * facts.window_ns / len(facts.steps)
        loads = [load] * len(work)
        needed = min(max(math.ceil(load / usual) + 1, now + 1), max(MAX_WORKERS, 2 * now))
        is_waiting = has_waiting_workers(facts)
        has_cores = cores > now or bool(is_waiting)
        workers = min(needed, cores) if has_cores and not is_waiting else needed
        total = with_workers(loads, work, workers, AHEAD, HANDOVER_NS, facts.first_of_epochs)
        advised = workers if has_cores else now
        unsure = SHARED if is_waiting and now > 1 else "" if has_cores else BUSY_CORES
        return Plan(advised, AHEAD, total, unsure, needed, is_waiting)
    loads = [float(step.data_load or 0) for step in facts.steps]
    is_busy = busy_loading(facts) >= BUSY
    needed = min(math.ceil(mean(loads) / usual) + 1, MAX_WORKERS)
    workers = min(needed, cores) if is_busy else needed
    # A stall is hidden if the batches loaded before it last as long.
    ahead = min(max(math.ceil(stall / usual / workers) + 1, AHEAD), MAX_AHEAD)
    total = with_workers(loads, work, workers, ahead, HANDOVER_NS, facts.first_of_epochs)
    if is_busy and not is_pegged(facts):
        wall = sum(step.wall for step in facts.steps)
        total = max(total, (facts.cpu_share or 0.0) * wall / cores)
    # Two workers on the two threads of one core take longer, by an unknown factor.
    unsure = BUSY_CORES if is_busy and workers >= cores else ""
    if facts.loader.get("sampler", SAMPLERS[0]) not in SAMPLERS:
        unsure = f"{facts.loader['sampler']} may take the time, and no worker runs it"
    return Plan(workers, ahead, total, unsure, needed, not is_busy)


def busy_loading(facts: Facts) -> float:
    """The share of the loading in which the thread computes, if it computes in the rest."""
    wall = sum(step.wall for step in facts.steps)
    loading = sum(step.data_load or 0 for step in facts.steps)
    if facts.asleep_share is not None:
        return max(1 - facts.asleep_share * wall / loading, 0.0)
    if facts.cpu_share is None:
        return 1.0
    return min(max((facts.cpu_share * wall - (wall - loading)) / loading, 0.0), 1.0)


def has_waiting_workers(facts: Facts) -> bool | None:
    """Whether the workers, which cannot keep up, wait for a disk or a network; None: not known."""
    if facts.children_share is None or not facts.workers:
        return None
    busy = facts.children_share / facts.workers
    return None if WAITING <= busy < BUSY else busy < WAITING


def is_pegged(facts: Facts) -> bool:
    """Whether the process keeps all cores busy, so that none is left for workers."""
    if facts.cpu_share is None or facts.cores is None:
        return False
    return facts.cpu_share > PEGGED * facts.cores


def advice(facts: Facts, is_stalling: bool, found: Plan) -> str:
    workers = facts.workers
    if is_pegged(facts):
        return (
            "make loading cheaper (cache, smaller or pre-decoded samples): all cores are busy, so"
            " more workers will not help"
        )
    options: dict[str, int | bool] = {"num_workers": found.workers}
    if is_stalling:
        options["prefetch_factor"] = found.ahead
    if workers and is_stalling:
        return f"load further ahead: {settings(facts, options)}"
    if workers == found.workers:
        return (
            f"make __getitem__ cheaper (cache, pre-decoded samples): the loader has"
            f" {plural(workers, 'worker')} on {plural(facts.cores or 0, 'core')}; "
            + (
                "more will help only if they wait for a disk or a network"
                if found.is_waiting is None
                else "they compute, so more will not help"
            )
        )
    if workers:
        return (
            f"raise {option(facts, 'num_workers')} from {workers} to {found.workers}"
            f"{shortage(facts, found)}, or make __getitem__ cheaper"
        )
    if facts.is_on_gpu and not facts.loader.get("pin_memory"):
        options["pin_memory"] = True
    how = (
        "check what the data set does at those steps, and let workers do it in advance"
        if is_stalling
        else "load in workers"
    )
    # On torch, Keras wraps whatever it is given in a loader of its own.
    is_stream = "sampler" not in facts.loader
    if facts.framework == "keras" and is_stream:
        return (
            f"{how}: PyDataset(workers={found.workers}, use_multiprocessing=True); of a tf.data"
            f" pipeline: map(..., num_parallel_calls={found.workers}) and prefetch({found.ahead})"
            + shortage(facts, found)
        )
    if workers is None:
        at_once = f"load {found.workers} batches at once, in threads or processes"
        return f"{at_once}, while the model works{shortage(facts, found)}"
    shared = "; an IterableDataset must split its samples among workers: get_worker_info()"
    options["persistent_workers"] = True
    told = f"{how}: {settings(facts, options)}{shortage(facts, found)}"
    return told + (shared if is_stream else "")


def shortage(facts: Facts, found: Plan) -> str:
    """Why more workers than cores are advised, or that there are too few cores."""
    if facts.cores is None:
        return ""
    cores = plural(facts.cores, "core")
    if found.is_waiting and found.workers > facts.cores:
        return f" (more than the {cores}: loading waits for a disk, a network or a lock)"
    if found.needed > found.workers:
        computes = "loading computes and " if found.is_waiting is False else ""
        return f" ({found.needed} would keep up, but {computes}there are only {cores})"
    return ""


def option(facts: Facts, name: str) -> str:
    """The name of a DataLoader option in this framework."""
    return f"dataloader_{name}" if facts.framework == "transformers" else name


def settings(facts: Facts, options: Mapping[str, int | bool]) -> str:
    """The call that sets DataLoader options in this framework."""
    call = "TrainingArguments" if facts.framework == "transformers" else "DataLoader"
    given = (f"{option(facts, name)}={value}" for name, value in options.items())
    return f"{call}(..., {', '.join(given)})"
