"""The verdict: pure rules from facts to findings, each of which names its fault and no other."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from cirron.verdict import judge, ratios
from cirron.verdict.endings import Ending
from cirron.verdict.facts import Facts, RankStep, Step, Value, settled_from
from cirron.verdict.rules import compiling, ranks
from cirron.verdict.whatif import error_of, with_workers

MS = 1_000_000


def step(at: int, number: int, **given: int | None) -> Step:
    """A step of 10 ms: 0.3 to load, 3 forward, 5 backward, 1 optimizer, 0.7 in no phase."""
    parts: dict[str, Any] = {
        "data_load": 3 * MS // 10,
        "forward": 3 * MS,
        "backward": 5 * MS,
        "optimizer": MS,
        "beside": 0,
        "own": 7 * MS // 10,
        "gpu": None,
        "memory": None,
    } | given
    timed = ("data_load", "forward", "backward", "optimizer", "beside", "own")
    return Step(0, number, at, sum(parts[one] or 0 for one in timed), **parts)


def facts(
    changes: dict[int, dict[str, int]] | None = None, count: int = 300, seed: int = 1, **given: Any
) -> Facts:
    """A run of steps with noise of 3 %, some of which differ."""
    noise = random.Random(seed)
    steps, at = [], 0
    account: dict[str, int] = {}
    for number in range(count):
        usual = step(0, 0)
        parts = {
            name: round((getattr(usual, name) or 0) * noise.gauss(1, 0.03))
            for name in ("data_load", "forward", "backward", "optimizer", "own")
        } | (changes or {}).get(number, {})
        one = step(at, number, **parts)
        steps.append(one)
        at += one.wall
        for name, part in (
            ("optimizer", "optimizer_step"),
            ("own", "in no phase"),
            ("beside", "evaluation"),
        ):
            account[part] = account.get(part, 0) + (getattr(one, name) or 0)
        for name in ("data_load", "forward", "backward"):
            account[name] = account.get(name, 0) + (getattr(one, name) or 0)
    made = Facts(device="cpu", world_size=1, steps=steps, window_ns=at, account=account, cores=8)
    made.endings = [Ending(None, "clean", "", None, None)]
    return replace(made, **given)


def every(count: int, of: int = 1, **given: int) -> dict[int, dict[str, int]]:
    return {number: dict(given) for number in range(0, count, of)}


def test_a_healthy_run_raises_no_alarm() -> None:
    """Over 200 seeds: no finding but that the model's own work takes the time."""
    for seed in range(200):
        verdict, findings, _ = judge(facts(seed=seed))
        assert "compute-bound" == verdict.kind, seed
        assert [verdict] == findings, seed


def test_three_steps_are_not_judged() -> None:
    """A run with three steps gets no verdict."""
    verdict, findings, abstained = judge(facts(count=3))

    assert "not-enough-data" == verdict.kind
    assert [] == findings
    assert {"input-bound", "host-bound", "uneven-steps"} <= {one.kind for one in abstained}


def test_steps_of_microseconds_are_not_judged() -> None:
    """200 steps of 2 us are 0.4 ms in all: too little, whatever the shares are."""
    tiny = {"data_load": 1_000, "forward": 200, "backward": 200, "optimizer": 100, "own": 500}
    verdict, findings, _ = judge(facts(every(200, **tiny), count=200))

    assert ("not-enough-data", []) == (verdict.kind, findings)
    assert "the steps compared take 0.4 ms; 10 ms are needed" in verdict.summary


def test_the_gain_of_workers_is_the_overlapped_loading() -> None:
    """The gain is what workers give: loading goes on beside the work, but for taking a batch."""
    verdict, *_ = judge(facts(every(300, data_load=10 * MS), loader={"workers": 0}))

    assert "input-bound" == verdict.kind
    assert "num_workers=3" in verdict.advice
    assert verdict.gain is not None
    assert pytest.approx(9.7 / 19.7, abs=0.01) == verdict.gain.share  # 9.7 + 0.3 ms are left


@pytest.mark.parametrize(
    ("cpu_share", "cores", "workers", "left"),
    [(1.0, 2, 2, None), (1.0, 8, 5, 10.0), (0.3, 2, 5, 10.0)],
    ids=["it computes", "it has cores to compute on", "it waits"],
)
def test_workers_that_compute_need_a_core_each(
    cpu_share: float, cores: int, workers: int, left: float | None
) -> None:
    """30 ms of loading and 9.7 of work need 5, also on 2 cores if they wait for a disk. No number
    if all cores compute: two may be one."""
    slow = every(300, data_load=30 * MS)
    verdict, *_ = judge(facts(slow, loader={"workers": 0}, cpu_share=cpu_share, cores=cores))

    assert f"num_workers={workers}" in verdict.advice
    short = "5 would keep up, but loading computes and there are only 2 cores"
    assert (short in verdict.advice) == (workers == 2)
    assert ("more than the 2 cores: loading waits" in verdict.advice) == (cpu_share < 1)
    if left is None:
        assert verdict.gain is None
    else:
        assert verdict.gain is not None
        assert pytest.approx(1 - left / 39.7, abs=0.02) == verdict.gain.share


@pytest.mark.parametrize(("each", "kind"), [(30, "host-bound"), (3, "healthy")])
def test_a_scope_beside_the_phases_takes_the_time(each: int, kind: str) -> None:
    """The phases are known, and they are not what takes the time."""
    made = facts(count=300)
    made.steps = [
        one._replace(start=one.start + number * each * MS, wall=one.wall + each * MS)
        for number, one in enumerate(made.steps)
    ]
    made.window_ns += 300 * each * MS
    made.scopes = {"augmentation": (300, 300 * each * MS)}
    made.account["augmentation"] = 300 * each * MS
    verdict, *_ = judge(made)

    assert kind == verdict.kind
    assert (kind == "host-bound") == ("augmentation takes 75%" in verdict.summary)
    assert verdict.gain is None


def test_a_scope_that_has_most_of_the_time_is_named() -> None:
    """What the program does there may be as it should be: no fault, but where to look."""
    made = facts(every(300, own=0), scopes={"rollout": (300, 300 * 8 * MS)})
    made.account = {"rollout": made.window_ns}
    made.steps = [one._replace(forward=None, backward=None, optimizer=None) for one in made.steps]

    verdict, *_ = judge(made)

    assert "healthy" == verdict.kind
    assert "but rollout, with 86% of the time" in verdict.summary


def test_one_worker_that_cannot_keep_up() -> None:
    """A batch takes it 20 ms: two of them need 10 a step."""
    verdict, *_ = judge(facts(every(300, data_load=10 * MS), loader={"workers": 1}, cores=2))

    assert "raise num_workers from 1 to 2" in verdict.advice
    assert verdict.gain is not None
    assert pytest.approx(0.49, abs=0.02) == verdict.gain.share


def test_a_worker_for_each_core_that_cannot_keep_up() -> None:
    """More of them would not compute faster: torch itself warns of more workers than cores."""
    verdict, *_ = judge(facts(every(300, data_load=10 * MS), loader={"workers": 4}, cores=4))

    assert "input-bound" == verdict.kind
    assert "4 workers on 4 cores" in verdict.advice
    assert verdict.gain is None


@pytest.mark.parametrize(
    ("children_share", "said"),
    [
        (0.4, "raise num_workers from 4 to 8 (more than the 4 cores: loading waits"),
        (3.6, "4 workers on 4 cores; they compute, so more will not help"),
    ],
)
def test_more_workers_than_cores_for_a_disk_or_a_network(children_share: float, said: str) -> None:
    """Workers that cannot keep up and use no processor wait: more of them wait at once."""
    slow = every(300, data_load=10 * MS)
    made = facts(slow, loader={"workers": 4}, cores=4, children_share=children_share)
    verdict, *_ = judge(made)

    assert said in verdict.advice
    assert verdict.gain is None
    assert (children_share < 2) == ("for a lock, or the same disk" in verdict.no_gain)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_of_the_program_may_be_slow(workers: int) -> None:
    """No worker runs it. With workers, a main process that never sleeps has nothing to wait for."""
    slow = every(300, data_load=10 * MS)
    loader = {"workers": workers, "sampler": "ByLength"}
    own, known = (
        judge(facts(slow, loader=loader | more, starved_share=0.0, asleep_share=0.0))[0]
        for more in ({}, {"sampler": "RandomSampler"})
    )

    assert ("input-bound", None) == (own.kind, own.gain)
    assert "ByLength" in own.no_gain + own.advice
    assert "ByLength" not in known.no_gain + known.advice


def test_a_loader_with_many_workers_is_advised_more() -> None:
    """A loader whose workers cannot keep up is advised more workers."""
    slow = every(300, data_load=10 * MS)
    verdict, *_ = judge(facts(slow, loader={"workers": 16}, cores=64))

    assert "raise num_workers from 16 to 32" in verdict.advice


@pytest.mark.parametrize(
    ("framework", "loader", "said"),
    [
        ("torch", {"workers": 0, "sampler": "S"}, "DataLoader(..., num_workers=3, persist"),
        ("torch", {"workers": 0}, "get_worker_info()"),
        ("transformers", {"workers": 0, "sampler": "S"}, "(..., dataloader_num_workers=3"),
        ("transformers", {"workers": 1, "sampler": "S"}, "raise dataloader_num_workers from 1"),
        ("keras", {}, "PyDataset(workers=3"),
        ("keras", {"workers": 0}, "PyDataset(workers=3"),
        ("keras", {"workers": 0, "sampler": "S"}, "DataLoader(..., num_workers=3"),
        ("jax", {}, "load 3 batches at once"),
    ],
)
def test_advice_in_the_words_of_the_framework(
    framework: str, loader: dict[str, Any], said: str
) -> None:
    """The advice names the arguments of the framework in use."""
    slow = every(300, data_load=10 * MS)

    assert said in judge(facts(slow, loader=loader, framework=framework))[0].advice


@pytest.mark.parametrize("workers", [0, 4])
def test_more_workers_do_not_help_a_busy_processor(workers: int) -> None:
    """If all cores are busy, the advice does not recommend more workers."""
    slow = every(300, data_load=10 * MS)
    verdict, *_ = judge(facts(slow, loader={"workers": workers}, cpu_share=7.9))

    assert "more workers will not help" in verdict.advice
    assert verdict.gain is None


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_cost_no_more_than_a_worker_are_no_fault(workers: int) -> None:
    """The threads of a tiny model keep all cores busy: loading 0.11 of 0.7 ms is not the cause."""
    tiny = {"data_load": MS // 9, "forward": MS // 10, "backward": MS // 5, "optimizer": MS // 5}
    made = facts(every(300, own=MS // 11, **tiny), loader={"workers": workers}, cores=2)
    _, findings, _ = judge(replace(made, cpu_share=1.9))

    assert "input-bound" not in {one.kind for one in findings}


@pytest.mark.parametrize(("load", "kind"), [(9.5, "input-bound"), (6.0, "compute-bound")])
def test_data_that_is_loaded_beside_compiled_steps(load: float, kind: str) -> None:
    """A thread that needs as long for a batch as a step takes has none in advance."""
    made = facts(framework="keras", loading_ns=int(300 * load * MS), cores=2)
    made.steps = [step._replace(data_load=None) for step in made.steps]

    verdict, *_ = judge(made)

    assert kind == verdict.kind
    assert ("PyDataset(workers=2" in verdict.advice) == (kind == "input-bound")


def test_stalls_with_their_period() -> None:
    """Stalls at a regular interval are reported with their period."""
    verdict, *_ = judge(facts(every(300, 10, data_load=80 * MS), loader={"workers": 2}))

    assert "input-bound" == verdict.kind
    assert "every 10 steps" in verdict.evidence[-1]
    assert "prefetch_factor" in verdict.advice


def test_small_stalls_between_do_not_hide_the_period() -> None:
    """Small stalls in between do not hide the period of the large ones."""
    noise = random.Random(1)
    small = {number: {"data_load": 3 * MS} for number in noise.sample(range(300), 60)}
    verdict, *_ = judge(facts(small | every(300, 10, data_load=80 * MS), loader={"workers": 0}))

    assert "every 10 steps" in verdict.evidence[-1]


def test_one_or_two_long_waits_are_no_stalls() -> None:
    """They may be anything; three or more are a pattern."""
    two, three = (
        judge(facts(every(count, data_load=900 * MS), count=100))[0].kind for count in (2, 3)
    )

    assert ("healthy", "input-bound") == (two, three)


def test_stalls_are_hidden_by_what_was_loaded_before() -> None:
    """A stall of 80 ms is as long as 8.2 steps: two workers have to be 6 batches ahead each.

    No gain is promised: on real loaders less of a stall was hidden than a replay says.
    """
    verdict, *_ = judge(facts(every(300, 10, data_load=80 * MS), loader={"workers": 0}))

    assert "num_workers=2, prefetch_factor=6" in verdict.advice
    assert verdict.gain is None


def test_workers_as_a_data_loader_has_them() -> None:
    """Batches are taken in order, and only so many are loaded in advance."""
    loads, work = [0.0] * 40, [10.0] * 40
    loads[20] = 100.0

    assert 400 == with_workers([0.0] * 40, work, 2, 2, 0)
    assert 440 == with_workers([0.0] * 40, work, 2, 2, 1)
    assert 400 == with_workers(loads, work, 2, 6, 0), "12 ahead are enough for 100"
    assert 400 + 100 - 40 == with_workers(loads, work, 2, 2, 0), "4 ahead last 40"
    assert pytest.approx(40 * 15, rel=0.1) == with_workers([30.0] * 40, work, 2, 2, 0)


def test_the_error_of_a_replay_is_measured_on_the_unchanged_run() -> None:
    """One half of the steps has to tell the time of the other half; else no number is given."""
    steady = facts(every(300, own=6 * MS))
    drifting = facts(every(300, own=6 * MS) | {n: {"own": 9 * MS} for n in range(200, 300)})

    error = error_of(steady.steps)
    assert error is not None
    assert 0 < error < 0.01
    verdict, *_ = judge(drifting)
    assert "host-bound" == verdict.kind
    assert verdict.gain is None


def test_parts_that_go_on_at_once_are_an_error_of_the_replay() -> None:
    """Parts of 16.6 ms in a step of 10."""
    made = facts()
    steps = [one._replace(wall=10 * MS, backward=12 * MS) for one in made.steps]

    error = error_of(steps)

    assert error is not None
    assert pytest.approx(0.7, abs=0.01) == error


def test_python_in_the_step() -> None:
    """Time in a step outside its phases is host-bound."""
    verdict, *_ = judge(facts(every(300, own=6 * MS)))

    assert "host-bound" == verdict.kind
    assert verdict.gain is not None
    assert pytest.approx((6 - 9 * 0.07) / 15.3, abs=0.01) == verdict.gain.share


@pytest.mark.parametrize(("own", "kinds"), [(10, []), (40, ["host-bound"])])
def test_time_between_the_forward_passes_of_a_step(own: int, kinds: list[str]) -> None:
    """An agent's environment needs it; if it takes nearly all of the time, it is named."""
    found = facts(every(300, own=own * MS))
    found.gap = "between forward and forward", 300 * own * MS
    _, findings, abstained = judge(found)

    assert kinds == [one.kind for one in findings]
    assert [None] * len(kinds) == [one.gain for one in findings]
    assert kinds or "between forward and forward" in "".join(one.why for one in abstained)


@pytest.mark.parametrize(("own", "found"), [(1600, "healthy"), (6000, "host-bound")])
def test_what_a_trainer_does_itself_is_no_fault(own: int, found: str) -> None:
    """Steps of 3 ms, and some of a Trainer's own calls: no more than 2 ms is theirs."""
    small = {"forward": MS, "backward": 3 * MS // 2, "optimizer": MS // 2, "own": own * 1000}
    verdict, *_ = judge(facts(every(300, **small), framework="transformers"))

    assert found == verdict.kind
    if verdict.gain is not None:
        assert pytest.approx((own / 1000 - 2) / (3.3 + own / 1000), abs=0.01) == verdict.gain.share


@pytest.mark.parametrize(
    ("gpu", "found", "said"),
    [
        (2 * MS, "host-bound", ""),
        (9 * MS, "host-bound", ""),
        (14 * MS, "compute-bound", "the device is busy"),
        (None, "healthy", "was not measured"),
    ],
)
def test_a_gpu_that_waits(gpu: int | None, found: str, said: str) -> None:
    """6 of 15.3 ms in no phase are the host's only if kernels fill less than 70 % of the steps."""
    made = facts(every(300, own=6 * MS), device="NVIDIA H200")
    made.steps = [one._replace(gpu=gpu) for one in made.steps]
    verdict, _, abstained = judge(made)

    assert found == verdict.kind
    assert said in " ".join(one.why for one in abstained if one.kind == "host-bound")


def test_no_gain_is_larger_than_what_the_device_leaves() -> None:
    """Of 15.3 ms it works for 10: however quick the host gets, a step takes those."""
    in_python = facts(every(300, own=6 * MS), device="NVIDIA H200")
    loading = facts(every(300, data_load=10 * MS), device="NVIDIA H200", loader={"workers": 0})
    for made, wall in ((in_python, 15.3), (loading, 19.7)):
        made.steps = [one._replace(gpu=10 * MS) for one in made.steps]
        verdict, *_ = judge(made)
        assert verdict.gain is not None
        assert pytest.approx(1 - 10 / wall, abs=0.02) == verdict.gain.share


def test_a_gpu_that_waits_for_calls() -> None:
    """On a GPU small operations are the host's time in any batch; large ones are the device's."""
    calls, large = (
        facts(device="NVIDIA H200", model={"tensors": tensors}) for tensors in (100, 10)
    )

    assert "calling them" in judge(calls)[0].summary
    assert "compute-bound" == judge(large)[0].kind


@pytest.mark.parametrize(
    ("size", "tensors", "found"),
    [(2, 100, "host-bound"), (64, 100, "compute-bound"), (2, 10, "compute-bound")],
)
def test_operations_that_are_too_small(size: int, tensors: int, found: str) -> None:
    """Two samples a step, and 90 us for each tensor of the model."""
    made = facts(loader={"batch_size": size}, model={"tensors": tensors})
    verdict, *_ = judge(made)

    assert found == verdict.kind
    assert verdict.gain is None


def test_operations_that_are_too_small_blame_the_longest_phase() -> None:
    """The marked line of the report is not one of the short ones."""
    made = facts(loader={"batch_size": 2}, model={"tensors": 100})

    assert "backward" == judge(made)[0].blames


def test_evaluation_and_others_beside() -> None:
    """Evaluations and checkpoints that take too much time are the verdict."""
    made = facts(every(300, 10, beside=50 * MS), asides={"evaluation": 30})
    verdict, *_ = judge(made)

    assert "evaluation-heavy" == verdict.kind
    assert verdict.gain is not None
    assert pytest.approx(0.9 * 5 / 15, abs=0.01) == verdict.gain.share


@pytest.mark.parametrize("part", ["evaluation", "checkpoint", "snapshot", "logging"])
def test_what_is_beside_the_training_is_named(part: str) -> None:
    """The verdict names the kind of work that takes time besides the training."""
    made = facts(every(300, 10, beside=50 * MS), asides={part: 30})
    made.account[part] = made.account.pop("evaluation")

    assert f"{part}-heavy" == judge(made)[0].kind


@pytest.mark.parametrize(
    ("wall", "awaited", "kinds"),
    [
        (MS // 10, None, []),
        (MS // 10, 95 * MS // 10, []),
        (MS // 10, MS, ["evaluation-heavy"]),
        (4 * MS, None, ["evaluation-heavy"]),
    ],
    ids=["unknown", "the evaluation waits for the steps", "it takes long itself", "steps wait"],
)
def test_an_evaluation_that_waits_for_steps_of_jax(
    wall: int, awaited: int | None, kinds: list[str]
) -> None:
    """JAX issues steps and computes them later: 10 steps take up to 95 ms of each evaluation."""
    none = dict.fromkeys(("data_load", "forward", "backward", "optimizer"))
    steps = [step(at * 10 * MS, at, own=wall, awaited=awaited, **none) for at in range(300)]
    account = {"in no phase": 300 * wall, "evaluation": 300 * (10 * MS - wall)}
    found = Facts("cpu", 1, "jax", steps, "batch", account=account, window_ns=3000 * MS)
    found.asides = {"evaluation": 30}
    _, findings, abstained = judge(found)

    assert kinds == [one.kind for one in findings]
    reasons = {one.kind: one.why for one in abstained}
    assert (awaited is None and not kinds) == ("mark the loss" in reasons.get("host-bound", ""))
    assert (wall < MS) == ("after they have ended" in reasons.get("uneven-steps", ""))


def test_compiles_again_and_again() -> None:
    """Compilations in several steps are a compile storm; many at once are not."""
    apart = facts(compiles=[(100 * MS * number, 100 * MS, "") for number in range(5)])
    at_once = facts(compiles=[(number, 100 * MS, "") for number in range(5)])

    first = facts(compiles=[(start, ns, "first call") for start, ns, _ in apart.compiles])

    assert "compile-storm" == judge(apart)[0].kind
    assert "compute-bound" == judge(at_once)[0].kind, "a first evaluation, with all its functions"
    assert "compute-bound" == judge(first)[0].kind, "each of them for the first time"


def test_uneven_steps_are_found() -> None:
    """Long steps at a regular interval are uneven steps, with their period."""
    verdict, *_ = judge(facts(every(300, 25, backward=80 * MS)))

    assert "uneven-steps" == verdict.kind
    assert "one every 25" in verdict.summary


def test_uneven_steps_of_a_short_run_need_a_period() -> None:
    """Each tenth of 60 steps is long: no chance. A few of them may be."""
    assert "uneven-steps" == judge(facts(every(60, 10, own=80 * MS), count=60))[0].kind
    long = {number: {"own": 80 * MS} for number in (3, 5, 31, 50)}
    verdict, _, abstained = judge(facts(long, count=60))

    assert "uneven-steps" != verdict.kind
    assert "uneven-steps" in {one.kind for one in abstained}


def test_steps_that_do_more_passes_by_design_are_not_uneven() -> None:
    """A GAN trains its generator in every fifth step, four times: more of every phase."""
    passes = {"forward": 15 * MS, "backward": 25 * MS, "optimizer": 5 * MS, "forwards": 4}
    verdict, _, abstained = judge(facts(every(300, 5, **passes)))

    assert "compute-bound" == verdict.kind
    assert "more forward passes" in next(one.why for one in abstained if one.kind == "uneven-steps")


def test_the_time_of_the_models_work_is_labelled_as_a_mean() -> None:
    """The header shows the median, which one long step does not move."""
    verdict, *_ = judge(facts({9: {"backward": 5_000 * MS}}))

    assert ["forward, backward and optimizer: 25.7 ms per step (mean)"] == verdict.evidence


def test_more_threads_than_cores() -> None:
    """They delay each other: the advice is as many as there are cores."""
    verdict, *_ = judge(facts(model={"threads": 32}))

    assert ("compute-bound", True) == (verdict.kind, "torch.set_num_threads(8)" in verdict.advice)


def test_a_model_in_float64() -> None:
    """It computes twice as long as in float32, and the report says so."""
    verdict, *_ = judge(facts(model={"dtype": "float64"}))

    assert ("compute-bound", True) == (verdict.kind, "use float32" in verdict.advice)


def test_time_in_no_phase_that_grows() -> None:
    """A history that each step goes through takes longer and longer."""
    verdict, *_ = judge(facts({number: {"own": number * MS // 2} for number in range(300)}))

    assert ("host-bound", True) == (verdict.kind, "it grows from" in " ".join(verdict.evidence))


def test_workers_finish_their_batches_at_once() -> None:
    """Four workers that take 120 ms each: one wait of 110 ms, then none in three steps."""
    bursts = {number: {"data_load": 0 if number % 4 else 110 * MS} for number in range(300)}
    loader = {"workers": 4}

    verdict, *_ = judge(facts(bursts, loader=loader, children_share=0.1, cores=2))

    assert ("input-bound", "the steps wait for their data") == (verdict.kind, verdict.summary)
    assert "num_workers from 4 to " in verdict.advice


def test_one_long_step_is_no_pattern_and_hides_none() -> None:
    """A machine that stood still once; beside short hiccups, and beside a pattern."""
    once = {7: {"backward": 5_000 * MS}}
    verdict, *_ = judge(facts(once | {9: {"own": 40 * MS}, 50: {"own": 40 * MS}}))
    assert "uneven-steps" != verdict.kind

    verdict, *_ = judge(facts(once | every(300, 10, backward=250 * MS)))
    assert "one every 10" in verdict.summary


def test_a_machine_that_does_other_work_is_not_the_programs_fault() -> None:
    """Steps that are long, or wait for workers, because others have the processor."""
    chance = random.Random(1)
    at_random = {chance.randrange(300): {"backward": 80 * MS} for _ in range(12)}
    uneven = facts(at_random, cpu_share=0.3)
    waiting = facts(every(300, data_load=4 * MS), loader={"workers": 2}, cpu_share=0.1)

    for made, kind in ((uneven, "uneven-steps"), (waiting, "input-bound")):
        _, findings, abstained = judge(made)
        assert kind not in {one.kind for one in findings}
        assert "other work" in next(one.why for one in abstained if one.kind == kind)


def test_what_comes_with_a_period_is_not_other_work() -> None:
    """On a busy machine, too: hiccups and stalls every 25 steps are the program's."""
    uneven = facts(every(300, 25, backward=80 * MS), starved_share=0.9)
    stalls = facts(every(300, 25, data_load=200 * MS), starved_share=0.9)

    assert "one every 25" in judge(uneven)[0].summary
    assert "backward" == judge(uneven)[0].blames
    assert "every 25 steps" in judge(stalls)[0].evidence[-1]


def test_a_thread_that_sleeps_does_not_wait_for_the_processor() -> None:
    """Stalls without a period, of a loader without workers, on a busy machine."""
    chance = random.Random(1)
    stalls = {chance.randrange(300): {"data_load": 200 * MS} for _ in range(12)}
    made = facts(stalls, loader={"workers": 0}, starved_share=0.5)

    assert "input-bound" != judge(made)[0].kind
    assert "input-bound" == judge(replace(made, asleep_share=0.4))[0].kind


def test_a_machine_that_was_busy_after_a_quiet_warm_up() -> None:
    """The warm-up slept for 9 of 12 s, so all waits for a CPU may have been in the 3 s after it."""
    slow = {number: {"data_load": 100 * MS} for number in (7, 30, 31, 99, 150, 230, 260)}
    quiet = facts(slow, loader={"workers": 1}, starved_share=0.05, asleep_share=0.75)
    kinds = [judge(replace(quiet, warm_up_ns=ns))[0].kind for ns in (0, 9_000 * MS)]

    assert ["input-bound", "compute-bound"] == kinds


def test_memory_that_grows_with_the_steps_however_long_they_take() -> None:
    """Peaks are taken by the clock: where steps are slow, there are more of them."""
    made = facts()
    often = [*range(0, 200, 20), *range(200, 240, 2), *range(240, 299, 20)]
    for at in often:
        made.steps[at] = made.steps[at]._replace(memory=2**28 + at * 2**20)

    assert "memory-growth" == judge(made)[0].kind


def test_memory_that_grows() -> None:
    """Memory that grows through the whole run is reported."""
    grows = [(number, 10**9, 2**30 + number * 2**28) for number in range(8)]
    stays = [(number, 10**9, 2**30 + (number > 0) * 2**29) for number in range(8)]

    settles = [(n, 10**9, round(2**30 * (2 - 0.5**n))) for n in range(8)]
    # A program that does nothing but record: what grows is the records in memory.
    records = [(n, 10**9, 20 * 2**20 + n * 4 * 2**20) for n in range(8)]

    assert "memory-growth" == judge(facts(epochs=grows))[0].kind
    killed = judge(facts(epochs=grows, endings=[Ending(0, "killed", "", 3, None)]))[0]
    assert ("died", True) == (killed.kind, "may have run out of memory" in killed.advice)
    assert "compute-bound" == judge(facts(epochs=settles))[0].kind
    assert "compute-bound" == judge(facts(epochs=stays))[0].kind
    assert "compute-bound" == judge(facts(epochs=records))[0].kind


def test_memory_that_grows_for_a_few_steps() -> None:
    """In so short a run, memory that grows by a third may settle: the report says so."""
    grows = {number: {"memory": 2**30 + number * 2**25} for number in range(12)}
    *_, abstained = judge(facts(grows))
    why = next(one.why for one in abstained if one.kind == "memory-growth")

    assert why.startswith("memory grew by 2")
    assert "12 steps" in why


@pytest.mark.parametrize(("each", "kind"), [(3, "compile-storm"), (100, "memory-growth")])
def test_memory_that_compiled_functions_take(each: int, kind: str) -> None:
    """A compile in each step keeps 3 MiB; 100 MiB a step are something else."""
    made = facts(compiles=[(10 * MS * n, 5 * MS, "") for n in range(300)])
    for at in range(0, 299, 4):
        made.steps[at] = made.steps[at]._replace(memory=2**28 + at * each * 2**20)
    verdict, findings, _ = judge(made)

    assert kind == verdict.kind
    assert {"compile-storm", "memory-growth"} == {one.kind for one in findings}


@pytest.mark.parametrize(
    ("error", "is_growing", "said"),
    [
        ("RuntimeError: can't allocate memory", True, "kept growing"),
        ("OutOfMemoryError: CUDA out of memory", False, "smaller batches"),
        ("ValueError: no", True, "fix the error"),
    ],
)
def test_a_run_that_fails_without_memory(error: str, is_growing: bool, said: str) -> None:
    """The advice names what filled the memory, if that is known."""
    grows = [(number, 10**9, 2**30 + number * 2**28) for number in range(8)] if is_growing else []
    died = [Ending(0, "exception", "", 3, None, error=error)]

    assert said in judge(facts(epochs=grows, endings=died))[0].advice


@pytest.mark.parametrize(
    ("values", "said"),
    [([1.0] * 60 + [float("nan")], "loss is nan"), ([1.0] * 60 + [50.0], "loss jumps to 50")],
)
def test_numerics_come_before_speed(values: list[float], said: str) -> None:
    """It comes before all that is about speed."""
    marks = [Value("loss", number, 0, number, value) for number, value in enumerate(values)]
    verdict, *_ = judge(facts(every(300, own=6 * MS), values={"loss": marks}))

    assert "ci.watch(model)" in verdict.advice  # there are no tensors to look at
    assert "numerics" == verdict.kind
    assert said in verdict.evidence[0]


def test_numbers_that_float16_cannot_hold() -> None:
    """The advice names the type that the model computes in, where it is the likely cause."""
    marks = {"loss": [Value("loss", 1, 0, 1, float("inf"))]}

    assert "bfloat16" in judge(facts(values=marks, model={"autocast": "float16"}))[0].advice
    assert "float16" not in judge(facts(values=marks))[0].advice


def test_a_jump_below_where_the_loss_began_is_well() -> None:
    """A batch that was learned by heart, with 0.001, and one that was not."""
    values = [2.3] * 20 + [0.001] * 60 + [0.9]
    marks = [Value("loss", n, 0, n, value) for n, value in enumerate(values)]

    assert "compute-bound" == judge(facts(values={"loss": marks}))[0].kind


def test_gradients_that_vanish_from_the_first_epoch_on() -> None:
    """Layer by layer; not one part of a model beside another, and not for one epoch only."""
    layers = {f"{at}.weight.grad": 0.1**at for at in range(9)}
    parts = {"value.grad": 10.0, "body.grad": 1.0, "policy.grad": 1e-6, "1.bias.grad": 1e-9}
    sick = judge(facts(gradients={0: layers, 3: layers}))[0]

    assert "numerics" == sick.kind
    assert "gradients vanish: 1 in 0.weight.grad, 1e-08 in 8.weight.grad" in sick.evidence[0]
    assert "learning rate" not in sick.advice
    for well in ({0: parts, 3: parts}, {3: layers}, {0: parts, 3: layers}):
        assert "compute-bound" == judge(facts(gradients=well))[0].kind


def test_layers_without_gradients_need_no_smaller_learning_rate() -> None:
    """Dead layers do not lead to the advice to lower the learning rate."""
    dead, exploding = (
        judge(facts(sick=[("0.weight.grad", 0, what)]))[0] for what in ("dead", "exploding")
    )

    assert "learning rate" not in dead.advice
    assert "learning rate" in exploding.advice


def test_a_falling_loss_is_well() -> None:
    """A falling loss is healthy."""
    noise = random.Random(1)
    marks = [Value("loss", n, 0, n, 5 / (1 + n / 10) * noise.uniform(0.5, 2)) for n in range(500)]

    assert "compute-bound" == judge(facts(values={"loss": marks}))[0].kind


def of_ranks(late: Any, world: int = 4, seed: int = 1, phase: str = "data_load") -> list[RankStep]:
    """Ranks that wait for each other at the end of backward; `late(step)` takes 2 ms longer."""
    noise, rows = random.Random(seed), []
    for number in range(100):
        parts = [
            {
                name: round(ns * noise.gauss(1, 0.03))
                for name, ns in (("data_load", MS), ("forward", 3 * MS), ("backward", 5 * MS))
            }
            for _ in range(world)
        ]
        if (whose := late(number)) is not None:
            parts[whose][phase] += 2 * MS
        end = max(sum(one.values()) for one in parts)
        for rank, one in enumerate(parts):
            waits = end - one["data_load"] - one["forward"]
            rows.append(
                RankStep(rank, 0, number, end + MS, one["data_load"], one["forward"], waits, MS, 0)
            )
    return rows


@pytest.mark.parametrize("phase", ["data_load", "forward"])
def test_a_slow_rank_is_no_matter_of_chance(phase: str) -> None:
    """All steps take the same time, since all wait for it."""
    verdict, *_ = judge(facts(ranks=of_ranks(lambda _: 2, phase=phase)))

    assert ("slow-rank", "rank 2 slows the others down") == (verdict.kind, verdict.summary)
    assert phase == verdict.blames
    if phase == "forward":
        assert "late in backward too" in verdict.no_gain
    else:
        assert verdict.gain is not None
        assert pytest.approx(2 / 12, abs=0.01) == verdict.gain.share


@pytest.mark.parametrize(
    ("load", "kinds"),
    [(2, ["slow-rank", "input-bound"]), (30, ["input-bound", "slow-rank"])],
    ids=["one rank loads slowly", "all do"],
)
def test_a_slow_rank_is_blamed_if_it_has_most_of_the_delay(load: int, kinds: list[str]) -> None:
    """Its delay is saved once, and the findings stay in the order of their gains."""
    slow = every(300, data_load=load * MS)
    _, findings, _ = judge(facts(slow, loader={"workers": 0}, ranks=of_ranks(lambda _: 2)))

    assert kinds == [one.kind for one in findings]
    gains = [one.gain.share for one in findings if one.gain]
    assert gains == sorted(gains, reverse=True)


def test_ranks_that_are_slow_by_turns() -> None:
    """No rank is blamed, and the work has to be done by somebody: 2 ms become a quarter of them."""
    turns = random.Random(1)
    verdict, *_ = judge(facts(ranks=of_ranks(lambda _: turns.randrange(4))))

    assert "slow-rank" == verdict.kind
    assert "in turn" in verdict.summary
    assert verdict.gain is not None
    assert pytest.approx(0.75 * 2 / 12, abs=0.015) == verdict.gain.share


@pytest.mark.parametrize("phase", ["backward", None])
def test_a_delay_inside_backward_cannot_be_told(phase: str | None) -> None:
    """Nor can a rank be blamed that is as quick as the others."""
    rows = of_ranks(lambda _: None if phase is None else 2, phase=phase or "")
    verdict, _, abstained = judge(facts(ranks=rows))

    assert "compute-bound" == verdict.kind
    assert "cannot tell" in next(one.why for one in abstained if one.kind == "slow-rank")


def test_a_rank_that_has_the_only_steps_is_not_compared() -> None:
    """The others died before they had any."""
    rows = [one for one in of_ranks(lambda _: 2) if one.rank == 0]
    _, findings, abstained = judge(facts(ranks=rows))

    assert "slow-rank" not in {one.kind for one in findings}
    assert "0 steps in common" in next(one.why for one in abstained if one.kind == "slow-rank")


def test_equal_ranks_raise_no_alarm() -> None:
    """Over 100 seeds, with 2 and with 64 ranks."""
    for seed in range(100):
        verdict, *_ = judge(facts(ranks=of_ranks(lambda _: None, 2 + 62 * (seed % 10 == 0), seed)))
        assert "compute-bound" == verdict.kind, seed


def test_the_binomial_tail() -> None:
    """The binomial tail matches known values."""
    assert pytest.approx(1.0) == ranks.tail(0, 10, 0.5)
    assert pytest.approx(11 / 1024) == ranks.tail(9, 10, 0.5)


@pytest.mark.parametrize("state", ["killed", "signal", "exception"])
def test_a_run_that_died(state: str) -> None:
    """A run that died gets the verdict `died`."""
    verdict, *_ = judge(facts(endings=[Ending(0, state, "epoch[1] > step[3] > backward", 3, None)]))

    assert "died" == verdict.kind
    assert "backward" in verdict.summary


def test_ctrl_c_is_no_fault_of_the_run() -> None:
    """The user stopped it, so the verdict is about speed; whatever else ended it comes first."""
    where = "epoch[1] > step[3] > data_load"
    stopped = Ending(0, "signal", where, 3, None, "SIGINT", 5)
    ended = Ending(1, "signal", where, 3, None, "SIGTERM", 6)
    slow = every(300, data_load=10 * MS)

    def kinds(*endings: Ending) -> list[str]:
        return [one.kind for one in judge(facts(slow, endings=list(endings)))[1]]

    assert ["input-bound"] == kinds(stopped) == kinds(ended, stopped)
    assert ["died", "input-bound"] == kinds(ended)
    assert ["died", "input-bound"] == kinds(stopped, ended._replace(state="killed"))
    assert ["hung", "input-bound"] == kinds(stopped._replace(silent_s=90.0))


def test_the_rank_that_died_first_is_named() -> None:
    """The launcher ends the others by a signal, and some fail when they miss it."""
    where = "step[3] > backward"
    ended = [
        Ending(0, "signal", where, 3, None, last_ns=7),
        Ending(1, "exception", where, 3, None, "ConnectionError: reset by peer", last_ns=9),
        Ending(2, "killed", "step[3]", 3, None, last_ns=8),
        Ending(3, "clean", "", 3, None, last_ns=1),
    ]
    verdict, *_ = judge(facts(endings=ended))

    assert (
        "rank 2 was killed or crashed, last seen in step[3]; 3 of 4 processes died, this one first"
        == verdict.summary
    )
    assert ["rank 2", "rank 1", "rank 0"] == [one[:6] for one in verdict.evidence]


def test_only_one_rank_died() -> None:
    """It is not called the first of one."""
    ended = [Ending(0, "killed", "step[3]", 3, None), Ending(1, "clean", "", 3, None)]
    verdict, *_ = judge(facts(endings=ended))

    assert verdict.summary.endswith("last seen in step[3]; 1 of 2 processes died")


def test_an_error_in_the_body_of_a_loop() -> None:
    """It closes the batch of `ci.batches`, so the report names the last one."""
    verdict, *_ = judge(
        facts(endings=[Ending(0, "exception", "", 30, None, "ValueError: bad", step_name="batch")])
    )

    assert "the run failed with ValueError: bad during or after batch 30" == verdict.summary


def test_a_run_that_hangs() -> None:
    """A run that hangs gets the verdict `hung`."""
    silent = [Ending(0, "running", "step[3] > backward", 3, 300.0)]
    brief = [Ending(0, "running", "step[3] > backward", 3, None)]

    assert "hung" == judge(facts(endings=silent))[0].kind
    assert "compute-bound" == judge(facts(endings=brief))[0].kind


def test_a_run_that_hung_until_it_was_ended() -> None:
    """A signal that ends a hanging run is not the fault; an error after a silence is."""
    where = "epoch[1] > step[3] > backward"
    killed = [Ending(None, state, where, 3, 300.0, "SIGTERM") for state in ("signal", "killed")]
    failed = Ending(None, "exception", where, 3, 300.0, "TimeoutError: no answer")

    assert ["hung", "hung"] == [judge(facts(endings=[one]))[0].kind for one in killed]
    assert "died" == judge(facts(endings=[failed]))[0].kind


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    """It is stuck outside of backward, or has not come to the step of the others."""
    loads = Ending(1, "signal", "epoch[0] > step[9] > data_load", 9, 80.0, "SIGTERM", 5, "step", 0)
    waits = Ending(0, "signal", "epoch[0] > step[9] > backward", 9, 90.0, "SIGTERM", 5, "step", 0)
    ahead = waits._replace(where="epoch[1] > step[0] > backward", last_step=0, epoch=1)
    stuck = Ending(1, "signal", "", 9, None, "SIGTERM", 5, "step", 0)

    assert "rank 1: nothing happened for 1m 20s" in judge(facts(endings=[waits, loads]))[0].summary
    assert "rank 1 never got there" in judge(facts(endings=[ahead, stuck]))[0].summary


def test_ranks_with_fewer_batches_end_first() -> None:
    """A rank that has no batches left ends; the next collective fails on the others."""
    left = Ending(0, "exception", "epoch[0] > step[50]", 50, None, "RuntimeError: closed", 9)
    done = Ending(1, "clean", "", 49, None)

    verdict, *_ = judge(facts(endings=[left, done]))

    assert "the same number of batches" in verdict.advice
    assert "rank 1 ended by itself; last step 49" == verdict.evidence[1]


def test_a_loader_worker_that_hangs() -> None:
    """The process waits for its data, and there are workers: the advice is to look at them."""
    silent = [Ending(0, "running", "step[3] > data_load", 3, 300.0)]

    assert "timeout=60" in judge(facts(endings=silent, loader={"workers": 2}))[0].advice
    assert "timeout=60" not in judge(facts(endings=silent, loader={"workers": 0}))[0].advice


@pytest.mark.parametrize(
    ("framework", "number", "said"),
    [
        ("torch", 1, "the time is between the steps"),
        ("torch", 0, "the time is between the epochs"),
        ("xgboost", 1, "the time is between the boosting rounds"),
        ("lightgbm", 0, "the time is between the fits"),
    ],
)
def test_what_the_time_is_between(framework: str, number: int, said: str) -> None:
    """Steps and epochs of a loop; rounds and fits of a booster, which has no loader."""
    made = facts(framework=framework)
    at, steps = 0, []
    for one in made.steps:
        at += 4 * MS
        steps.append(one._replace(start=at, number=number, epoch=None))
        at += one.wall
    made = replace(made, steps=steps, window_ns=at, account={"between steps": 4 * MS * len(steps)})

    verdict, *_ = judge(made)

    assert said == verdict.summary
    assert ("ci.batches" in verdict.advice) == (said == "the time is between the steps")


@pytest.mark.parametrize(("framework", "said"), [("sklearn", "ci.wrap"), ("jax", "ci.batches")])
def test_advice_without_steps(framework: str, said: str) -> None:
    """An estimator has no loop to write; a framework without hooks has one."""
    verdict, *_ = judge(facts(count=0, framework=framework))

    assert "not-enough-data" == verdict.kind
    assert said in verdict.advice


@pytest.mark.parametrize(("every", "said"), [(60, "for each fold"), (50, "a new lambda")])
def test_compiles_of_each_training_and_of_a_step(every: int, said: str) -> None:
    """A model for each fold is compiled at its start; a new lambda in a step is compiled there."""
    made = facts()
    made.steps = [one._replace(epoch=at // 60, number=at % 60) for at, one in enumerate(made.steps)]
    cause = f"{compiling.SAME} as before"
    made.compiles = [(made.steps[at].start + 1, 100 * MS, cause) for at in range(every, 300, every)]
    verdict, *_ = judge(made)

    assert "compile-storm" == verdict.kind
    assert said in verdict.advice


def test_a_healthy_verdict_asks_for_nothing() -> None:
    """There is nothing to do: the report says so in words."""
    made = facts(every(300, own=0))
    made.account = {"other scopes": made.window_ns}

    verdict, *_ = judge(made)

    assert ("healthy", "nothing to fix") == (verdict.kind, verdict.advice)


@pytest.mark.parametrize(("name", "kind"), [("loss", "numerics"), ("kl_loss", "compute-bound")])
def test_a_loss_that_grows_slowly_is_seen(name: str, kind: str) -> None:
    """2 % in each step never jumps, and ends at 380 times the start. A term of a loss may grow."""
    made = facts()
    made.values[name] = [Value(name, at, 0, at, 1.02**at) for at in range(300)]

    verdict, *_ = judge(made)

    assert kind == verdict.kind
    assert (kind == "compute-bound") or "times its starting value" in verdict.evidence[0]


def test_two_losses_by_turns_are_no_spike() -> None:
    """A GAN's generator loses while its discriminator wins: both are marked as `loss`."""
    made = facts()
    made.values["loss"] = [
        Value("loss", at, 0, at, 0.7 * 1.006**at if at % 3 == 0 else 0.7 * 0.99**at)
        for at in range(300)
    ]
    assert "compute-bound" == judge(made)[0].kind


@pytest.mark.parametrize(("starved", "kind"), [(0.01, "host-bound"), (0.5, "healthy")])
def test_time_between_steps_on_a_crowded_machine(starved: float, kind: str) -> None:
    """What other work may be the cause of is not blamed on the program, nor is all called well."""
    made = facts(starved_share=starved)
    steps = [one._replace(start=one.start + 4 * MS * at) for at, one in enumerate(made.steps)]
    made.account = {"between steps": 4 * MS * len(steps)}
    made = replace(made, steps=steps, window_ns=made.window_ns + 4 * MS * len(steps))

    verdict, *_ = judge(made)

    assert kind == verdict.kind
    assert ("quiet machine" in verdict.advice) == (kind == "healthy")


def test_warm_up_is_cut_where_the_steps_settle() -> None:
    """Warm-up ends where the step times settle."""
    noise = random.Random(1)
    settled = [round(10 * MS * noise.gauss(1, 0.05)) for _ in range(200)]

    assert 0 == settled_from(settled)
    assert 1 == settled_from([1_000 * MS, *settled])
    assert 15 == pytest.approx(settled_from([30 * MS] * 15 + settled), abs=1)
    assert 0 == settled_from([*settled, *([30 * MS] * 50)]), "what gets slower is not warm-up"


def series(seed: int, count: int = 300, factor: float = 1.0) -> list[int]:
    """The times of spans of 1 ms, or so many times that."""
    noise, x, found = random.Random(seed), 0.0, []
    for _ in range(count):
        x = 0.5 * x + noise.gauss(0, 1)
        found.append(round(MS * factor * (1 + 0.03 * x)))
    return found


def outcomes(seed: int, factors: dict[str, float]) -> dict[str, str]:
    found = [
        ratios.compare(name, [[series(seed + 10 * at)]], [[series(seed + 10 * at + 5, factor=one)]])
        for at, (name, one) in enumerate(factors.items())
    ]
    return {one.name: one.outcome for one in ratios.judge(found)}


def test_a_change_is_found_and_none_is_made_up() -> None:
    """5 % in one phase of 300 steps; and nothing where nothing has changed."""
    for seed in range(0, 300, 30):
        equal = outcomes(seed, {"forward": 1.0, "backward": 1.0, "optimizer_step": 1.0})
        slower = outcomes(seed, {"forward": 1.05, "backward": 1.0, "optimizer_step": 1.0})
        assert "slower" == slower.pop("forward")
        assert not {"slower", "faster"} & {*equal.values(), *slower.values()}


def test_a_slower_machine_is_no_change_of_the_program() -> None:
    """All phases at once by about as much: with a run a side that is unknown. What stands out is
    a change, and so is what no machine does."""
    slower = {"data_load": 1.12, "forward": 1.08, "backward": 1.07, "optimizer_step": 1.15}

    assert {"unknown"} == set(outcomes(0, slower).values())
    assert "slower" == outcomes(0, slower | {"forward": 1.5})["forward"]
    assert {"slower"} == set(outcomes(0, dict.fromkeys(slower, 2.0)).values())


def test_cold_caches_are_no_change_of_the_program() -> None:
    """Short phases that take half as long again are unknown if the long ones took as many
    microseconds longer, and the step all of that. Five times as many in one of them stand out."""
    before = {"data_load": 4.2, "forward": 4.1, "backward": 0.12, "optimizer_step": 0.05}
    after = {"data_load": 4.27, "forward": 4.17, "backward": 0.19, "optimizer_step": 0.08}

    def judged(after: dict[str, float]) -> dict[str, str]:
        sides = [each | {"step": sum(each.values()) + 0.5} for each in (before, after)]
        found = [
            ratios.compare(
                name,
                [[series(at, factor=sides[0][name])]],
                [[series(10 + at, factor=sides[1][name])]],
            )
            for at, name in enumerate(sides[0])
        ]
        return {one.name: one.outcome for one in ratios.judge(found)}

    assert not {"slower", "faster"} & set(judged(after).values())
    assert "slower" == judged(after | {"data_load": 4.55})["data_load"]


def test_runs_that_differ_by_themselves_make_no_change() -> None:
    """What three runs of the same program differ by is not called slower in a fourth."""
    restless = [[series(seed, factor=factor)] for seed, factor in enumerate((0.9, 1.0, 1.1))]
    quiet = [[series(seed)] for seed in range(3)]
    new = [[series(9, factor=1.08)]]

    assert "unknown" == ratios.judge([ratios.compare("step", restless, new)])[0].outcome
    assert "slower" == ratios.judge([ratios.compare("step", quiet, new)])[0].outcome


def test_runs_that_waited_for_a_processor() -> None:
    """What waits of a fifth of the time may do is unknown; three runs tell by themselves."""
    found = [ratios.compare("step", [[series(1)]], [[series(6, factor=1.12)]])]

    assert 0.0 == ratios.starvation([0.02], [0.05]), "waits of a few steps do not move a median"
    assert "slower" == ratios.judge(found)[0].outcome
    assert "unknown" == ratios.judge(found, ratios.starvation([0.2], [0.2]))[0].outcome
    assert 0.0 == ratios.starvation([0.1, 0.2, 0.3], [0.3])
    assert ratios.starvation([0.1, 0.2, 0.3], [0.4]) > 0.05


@pytest.mark.parametrize(("starved", "outcome"), [(1.04, "unknown"), (0.05, "faster")])
def test_a_phase_of_starved_runs_has_not_changed_if_the_step_has_not(
    starved: float, outcome: str
) -> None:
    """Where waits for a processor hide a change of 8 times, the machine may change any phase."""
    after = {"step": 1 / 12, "backward": 1 / 300, "forward": 1 / 200, "optimizer_step": 0.5}
    found = [
        ratios.compare(name, [[series(at)]], [[series(at + 9, factor=one)]])
        for at, (name, one) in enumerate(after.items())
    ]

    judged = {one.name: one.outcome for one in ratios.judge(found, starved)}

    assert [outcome] * 3 == [judged[name] for name in ("step", "backward", "forward")]


@pytest.mark.parametrize(
    ("freedom", "expected"), [(2, 4.303), (3, 3.182), (10, 2.228), (30, 2.042)]
)
def test_students_distribution(freedom: float, expected: float) -> None:
    """Of few runs the interval is as wide as the tables say, and not four times that."""
    assert pytest.approx(expected, rel=0.05) == ratios.quantile(0.975, freedom)
    assert pytest.approx(0.05, rel=0.1) == ratios.chance(expected, freedom)
