"""The verdict on runs that are made by hand, from their records to what is said."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import cirron as ci

if TYPE_CHECKING:
    from tests.conftest import Made, MadeSession

MS = 1_000_000


def train(session: MadeSession, waits: list[int], epochs: int = 1, **loader: Any) -> None:
    """A loop of `ci.epochs` and `ci.batches`: each batch of 10 ms comes after a wait, in ms."""
    at = 0
    for number in range(epochs):
        began, work = at, []
        for wait in waits:
            at += wait * MS + 10 * MS
            work.append((at - 10 * MS, at, wait * MS))
        used: dict[str, Any] = {"starved_ns": 0, "asleep_ns": sum(waits) * MS}
        cpu_ns = len(waits) * 10 * MS
        epoch = session.span("epoch", began, at, index=number, cpu_ns=cpu_ns, **used, **loader)
        for index, (start, end, waited) in enumerate(work):
            loaded = {"data_load_ns": waited} if loader else {}
            batch = session.span("batch", start, end, epoch, index, **loaded)
            session.span("forward", start, start + 4 * MS, batch, mode="train")
            session.span("backward", start + 4 * MS, end - MS, batch)
            session.span("optimizer_step", end - MS, end, batch)
    session.write()


def test_a_slow_rank_that_waits_in_ci_batches(made: Made) -> None:
    """Its wait is between its batches, and counts as its loading; the others wait in backward."""
    for rank in range(4):
        session, at = made(rank=rank), 0
        epoch = session.span("epoch", 0, 60 * 40 * MS, index=0)
        for number in range(60):
            wait = 25 * MS if rank == 2 else MS
            start = at + wait
            at += 40 * MS
            batch = session.span("batch", start, at, epoch, number)
            session.span("forward", start, start + 5 * MS, batch, mode="train")
            session.span("backward", start + 5 * MS, at - MS, batch)
            session.span("optimizer_step", at - MS, at, batch)
        session.write()

    verdict = ci.open(".").report().verdict

    assert ("slow-rank", "rank 2 slows the others down") == (verdict.kind, verdict.summary)
    assert "data_load" == verdict.blames
    assert verdict.gain is not None
    assert pytest.approx(24 / 40, abs=0.02) == verdict.gain.share


def test_a_loader_that_starts_anew_in_each_epoch(made: Made) -> None:
    """The wait for the first batch is no stall that workers can load in advance."""
    loader = {"loader_workers": 2, "loader_persistent_workers": False}
    train(made(), [500] + [0] * 19, epochs=6, **loader)

    report = ci.open(".").report()

    assert "input-bound" == report.verdict.kind
    assert "at the start of 5 epochs" in report.verdict.evidence[0]
    assert "first batch takes 500 ms" in report.verdict.evidence[1]
    assert "persistent_workers=True" in report.verdict.advice
    assert report.verdict.gain is not None
    assert pytest.approx(5 * 500 / (5 * 500 + 1190), abs=0.01) == report.verdict.gain.share
    assert "between steps" not in {part for part, _, _ in report.account}


def test_workers_that_persist_are_not_advised_again(made: Made) -> None:
    """A loader that already has persistent workers is not advised to use them."""
    loader = {"loader_workers": 2, "loader_persistent_workers": True}
    train(made(), [500] + [0] * 19, epochs=6, **loader)

    verdict = ci.open(".").report().verdict

    assert "when an epoch begins" in verdict.advice
    assert verdict.gain is None


@pytest.mark.parametrize("is_in_step", [False, True])
def test_a_loader_that_is_made_for_each_epoch(made: Made, is_in_step: bool) -> None:
    """Workers that persist go with their loader: it starts new ones in each epoch, before the first
    step or, in Lightning, inside it."""
    session, at = made(), 0
    for number in range(6):
        settings: dict[str, Any] = {"loader_workers": 2, "loader_persistent_workers": True}
        session.span("epoch", at, at + 600 * MS, index=number, **settings)
        for index in range(40):
            start = at + (200 + 10 * index) * MS
            began = at if is_in_step and index == 0 else start
            step = session.span("step", began, start + 10 * MS, None, index)
            if index == 0:
                session.span("data_setup", at, at + 200 * MS, step if is_in_step else None)
            session.span("data_load", start, start + MS, step)
            session.span("forward", start + MS, start + 10 * MS, step, mode="train")
        at += 600 * MS
    session.write()

    report = ci.open(".").report()

    assert ["input-bound"] == [one.kind for one in report.findings]
    assert "create the loader once" in report.verdict.advice


def evaluating(session: MadeSession, evaluated: range, mode: str, forwards: int = 20) -> None:
    """200 steps of 10 ms, some of which run more forward passes, of 2 ms each."""
    at = 0
    epoch = session.span("epoch", 0, 10**12, index=0, loader_workers=0)
    for number in range(200):
        more = forwards if number in evaluated else 0
        step = session.span("step", at, at + (10 + 2 * more) * MS, epoch, number)
        session.span("data_load", at, at + MS, step)
        session.span("forward", at + MS, at + 4 * MS, step, mode="train")
        session.span("backward", at + 4 * MS, at + 9 * MS, step)
        session.span("optimizer_step", at + 9 * MS, at + 10 * MS, step)
        for one in range(more):
            start = at + (10 + 2 * one) * MS
            session.span("forward", start, start + 2 * MS, step, mode=mode)
        at += (10 + 2 * more) * MS
    session.write()


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_evaluations_inside_steps(made: Made, mode: str) -> None:
    """A loop over the validation set in every tenth step, with or without `model.eval()`."""
    evaluating(made(), range(5, 200, 10), mode)

    report = ci.open(".").report()

    assert "evaluation-heavy" == report.verdict.kind
    assert "20 times in 200 steps" in report.verdict.evidence[0]
    assert report.verdict.gain is not None
    assert pytest.approx(0.9 * 40 / 140, abs=0.02) == report.verdict.gain.share
    assert pytest.approx(1) == sum(share for *_, share in report.account)


def test_a_teacher_is_part_of_the_training(made: Made) -> None:
    """A model in eval mode in each step is no evaluation."""
    evaluating(made(), range(200), "eval", forwards=1)

    assert "compute-bound" == ci.open(".").report().verdict.kind


def test_the_gain_of_fewer_evaluations_between_steps(made: Made) -> None:
    """They take longer than all steps together."""
    session, at = made(), 0
    for number in range(5):
        session.span("epoch", at, at + 200 * MS, index=number)
        for index in range(20):
            start = at + index * 10 * MS
            step = session.span("step", start, start + 10 * MS, None, index)
            session.span("forward", start, start + 10 * MS, step, mode="train")
        session.span("evaluation", at + 200 * MS, at + 1_000 * MS)
        at += 1_000 * MS
    session.write()

    verdict = ci.open(".").report().verdict

    assert verdict.gain is not None
    assert pytest.approx(0.9 * 4 * 800 / 4200, abs=0.01) == verdict.gain.share


def test_forward_passes_outside_steps(made: Made, tmp_path: Path) -> None:
    """In eval mode they are an evaluation; else only the program knows what they are for."""
    for mode in ("eval", "train"):
        session, at = made(tmp_path / mode), 0
        root = session.span("cirron.session", 0, 1_500 * MS)
        for number in range(5):
            epoch = session.span("epoch", at, at + 200 * MS, root, number)
            for index in range(20):
                start = at + index * 10 * MS
                step = session.span("step", start, start + 10 * MS, epoch, index)
                session.span("forward", start, start + 10 * MS, step, mode="train")
            session.span("forward", at + 200 * MS, at + 300 * MS, root, mode=mode)
            at += 300 * MS
        session.write()

    reports = [ci.open(str(tmp_path / mode)).report() for mode in ("eval", "train")]

    assert ["evaluation-heavy", "host-bound"] == [one.verdict.kind for one in reports]
    assert "forward passes that no backward pass follows" in reports[1].verdict.summary


@pytest.mark.parametrize(("device_ms", "kinds"), [(9.5, []), (1, ["input-bound"])])
def test_loading_while_jax_computes(made: Made, device_ms: float, kinds: list[str]) -> None:
    """Batches that are loaded in the time that the device needs anyway cost nothing."""
    session = made()
    root = session.span("cirron.session", 0, 2000 * MS, framework="jax")
    for number in range(200):
        at = 10 * number * MS
        session.span("batch", at, at + MS // 10, root, number, device_ns=int(device_ms * MS))
    session.write()

    assert kinds == [one.kind for one in ci.open(".").report().findings]


def test_a_warm_up_that_compiles_in_many_steps_is_a_storm(made: Made) -> None:
    """A function that is compiled for each of 30 lengths, and traced before that."""
    session, at = made(), 0
    for number in range(100):
        took = 110 if number < 30 else 1
        step = session.span("step", at, at + took * MS, None, number)
        if number < 30:
            session.span("compile", at + 9 * MS, at + 109 * MS, step)
        at += took * MS
    session.write()

    verdict = ci.open(".").report().verdict

    assert ("compile-storm", True) == (verdict.kind, "in 29 of 99 steps" in verdict.evidence[0])


def test_the_first_compilation_is_warm_up(made: Made) -> None:
    """It is no part of the time of which a fix saves a share, though the step itself is short."""
    session = made()
    root = session.span("cirron.session", 0, 4000 * MS, framework="jax")
    for number in range(100):
        at = 1000 * MS + 30 * number * MS
        batch = session.span("batch", at - 990 * MS * (number == 0), at + MS, root, number)
        if number == 0:
            session.span("compile", 10 * MS, 990 * MS, batch, cause="first call")
    session.write()

    report = ci.open(".").report()

    assert "input-bound" == report.verdict.kind
    assert pytest.approx(29 / 30, abs=0.01) == report.verdict.share


def test_keras_that_was_only_imported(made: Made) -> None:
    """TensorBoard imports it: a loop of torch's steps is advised in torch's words."""
    session = made()
    root = session.span("cirron.session", 0, 60 * 40 * MS, framework="keras")
    epoch = session.span("epoch", 0, 60 * 40 * MS, root, 0, loader_workers=0, loader_sampler="S")
    for number in range(60):
        at = number * 40 * MS
        step = session.span("step", at, at + 40 * MS, epoch, number)
        session.span("data_load", at, at + 30 * MS, step)
        session.span("forward", at + 30 * MS, at + 40 * MS, step, mode="train")
    session.write()

    assert "DataLoader(..., num_workers=" in ci.open(".").report().verdict.advice


def test_short_epochs_get_less_from_workers(made: Made) -> None:
    """Nothing is loaded in advance for the first batch: of 5 loads of 20 ms, one is waited for."""
    train(made(), [20] * 5, epochs=20, loader_workers=0)

    verdict = ci.open(".").report().verdict

    assert "input-bound" == verdict.kind
    assert verdict.gain is not None
    assert pytest.approx(4 * 20 / 150, abs=0.02) == verdict.gain.share


def test_long_stalls_are_counted_without_the_short_ones(made: Made) -> None:
    """Only the long stalls count."""
    waits = [(300 if n % 20 == 19 else 3 if n % 7 == 3 else 0) for n in range(200)]
    train(made(), waits, loader_workers=0)

    verdict = ci.open(".").report().verdict

    assert "10 of 200 steps wait 300 ms, others 0 ms; every 20 steps" in verdict.evidence


def test_memory_that_grows_by_half_comes_before_speed(made: Made) -> None:
    """Peaks of a few steps are enough; the last one, after the end, does not count."""
    session = made()
    epoch = session.span("epoch", 0, 200 * 10 * MS, index=0)
    for number in range(200):
        at = number * 10 * MS
        memory = (300 + 2 * number) * 2**20 if number % 20 == 10 else None
        memory = 200 * 2**20 if number == 199 else memory
        step = session.span("step", at, at + 10 * MS, epoch, number, memory=memory)
        session.span("forward", at, at + 2 * MS, step, mode="train")
    session.write()

    report = ci.open(".").report()

    assert ["memory-growth", "host-bound"] == [one.kind for one in report.findings]


def test_what_is_inside_of_scopes_counts_once(made: Made) -> None:
    """Phases and checkpoints in a scope of the program are known, and the parts add up."""
    session, at = made(), 0
    epoch = session.span("epoch", 0, 60 * 20 * MS, index=0)
    for number in range(60):
        step = session.span("step", at, at + 20 * MS, epoch, number)
        scope = session.span("train", at, at + 15 * MS, step)
        session.span("forward", at, at + 4 * MS, scope, mode="train")
        session.span("backward", at + 4 * MS, at + 9 * MS, scope)
        inner = session.span("save", at + 9 * MS, at + 15 * MS, scope)
        session.span("checkpoint", at + 10 * MS, at + 15 * MS, inner)
        at += 20 * MS
    session.write()

    report = ci.open(".").report()

    assert {
        "forward": 0.2,
        "backward": 0.25,
        "checkpoint": 0.25,
        "train": 0.05,
        "in no phase": 0.25,
    } == {part: pytest.approx(share) for part, _, share in report.account}
    assert {"checkpoint-heavy", "host-bound"} == {one.kind for one in report.findings}


def test_a_scope_called_step_inside_a_step(made: Made) -> None:
    """Phases and the loss in it belong to the step around it, as in a scope of any other name."""
    session = made()
    epoch = session.span("epoch", 0, 600 * MS, index=0)
    for index in range(60):
        at = index * 10 * MS
        batch = session.span("batch", at, at + 10 * MS, epoch, index)
        step = session.span("step", at, at + 10 * MS, batch)
        session.span("forward", at, at + 4 * MS, step, mode="train")
        session.span("backward", at + 4 * MS, at + 9 * MS, step)
        session.span("optimizer_step", at + 9 * MS, at + 10 * MS, step)
    session.write()

    run = ci.open(".")
    report = run.report()

    assert "compute-bound" == report.verdict.kind
    assert "host-bound" not in {one.kind for one in report.abstained}
    steps = run.sql("SELECT DISTINCT step FROM spans WHERE name = 'forward'").fetch().rows
    assert set(range(60)) == {step for (step,) in steps}


def test_the_evaluation_of_ciclo_fit(made: Made) -> None:
    """It is in the last step of an epoch; what it loads is not what the step waits for."""
    session, at = made(), 0
    epoch = session.span("epoch", 0, 40 * 10 * MS + 4 * 50 * MS, index=0)
    for index in range(40):
        lasts = 60 * MS if index % 10 == 9 else 10 * MS
        step = session.span("step", at, at + lasts, epoch, index)
        session.span("forward", at, at + 9 * MS, step, mode="train")
        if index % 10 == 9:
            valid = session.span("evaluation", at + 10 * MS, at + lasts, step)
            inner = session.span("step", at + 10 * MS, at + lasts, valid, 0)
            session.span("data_load", at + 10 * MS, at + 50 * MS, inner)
        at += lasts
    session.write()

    report = ci.open(".").report()

    assert "evaluation-heavy" == report.verdict.kind
    assert "data_load" not in {part for part, ns, _ in report.account if ns}


def test_records_that_cannot_be_read(made: Made) -> None:
    """The report says that some are missing, and where they are listed."""
    train(made(), [1] * 40)
    (Path(".cirron") / "spool" / "1-x.json").write_bytes(b"rubbish")

    assert "some records could not be read (cirron show lists them)" in ci.open(".").report().basis


def test_a_first_evaluation_that_compiles_is_neither_a_storm_nor_heavy(made: Made) -> None:
    """A first evaluation that compiles is neither a compile storm nor evaluation-heavy."""
    session, at = made(), 0
    for number in range(3):
        began = at
        epoch = session.span("epoch", began, at + 1050 * MS, index=number)
        for index in range(100):
            step = session.span("step", at, at + 10 * MS, epoch, index)
            session.span("forward", at, at + 9 * MS, step, mode="train")
            at += 10 * MS
        compiles = 400 * MS if number == 0 else 0
        evaluation = session.span("evaluation", at, at + 50 * MS + compiles)
        for nth in range(4 if compiles else 0):
            session.span("compile", at + nth * 100 * MS, at + (nth + 1) * 100 * MS, evaluation)
        at += 50 * MS + compiles
    session.write()

    report = ci.open(".").report()

    assert "compute-bound" == report.verdict.kind
    shares = {part: share for part, _, share in report.account}
    assert pytest.approx(400 / 3500, abs=0.01) == shares["compile"]


@pytest.mark.parametrize(
    ("name", "kind"), [("tokenize", "host-bound"), ("validate", "evaluation-heavy")]
)
def test_scopes_between_the_steps_are_named(made: Made, name: str, kind: str) -> None:
    """Once: the evaluation and the checkpoint inside of them are no second one."""
    session, at = made(), 0
    for number in range(3):
        stage = session.span("stage", at, at + 1_000 * MS)
        epoch = session.span("epoch", at, at + 1_000 * MS, stage, number)
        for index in range(50):
            step = session.span("step", at, at + 10 * MS, epoch, index)
            session.span("forward", at, at + 9 * MS, step, mode="train")
            at += 10 * MS
        scope = session.span(name, at, at + 500 * MS, epoch)
        session.span("checkpoint", at, at + 50 * MS, scope)
        session.span("evaluation", at + 50 * MS, at + 100 * MS, scope)
        at += 500 * MS
    session.write()

    report = ci.open(".").report()

    # Two of them are in the window, which ends with the last step.
    assert kind == report.verdict.kind
    assert pytest.approx(2_500, abs=1) == sum(ns for _, ns, _ in report.account) / MS
    shares = {part: ns / MS for part, ns, _ in report.account}
    if name == "validate":
        assert pytest.approx(1_000) == shares["evaluation"]
        assert "2 times" in report.verdict.evidence[0]
    else:
        assert pytest.approx(100) == shares["checkpoint"]
        assert pytest.approx(800) == shares["tokenize"]
        assert "tokenize" == report.verdict.blames
