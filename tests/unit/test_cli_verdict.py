"""`cirron report`, `diff` and `why`: what they print, and how they exit."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner

import cirron as ci
from cirron import wire
from cirron.cli import main
from cirron.verdict import findings
from cirron.verdict.endings import Ending
from cirron.verdict.why import last_collective, why

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Made


def cirron(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


def as_json(*arguments: str) -> Any:
    return json.loads(cirron(*arguments, "--json")[1])


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two runs of the same program, the second of which has another loss from step 3 on."""
    monkeypatch.chdir(tmp_path)
    found = []
    for number in range(2):
        ci.profile()
        found.append(ci.health()["run_id"])
        for _ in ci.epochs(range(1)):
            for step in ci.batches(range(40)):
                ci.mark("loss", 1.0 + (number if step >= 3 else 0))
        ci.shutdown()
    return found


def test_report_prints_the_verdict(runs: list[str]) -> None:
    """`cirron report` prints the verdict, and as JSON also the rules that abstained."""
    report = as_json("report", runs[0])

    assert (1, runs[0]) == (report["schema"], report["run"]["id"])
    assert {"class", "summary"} == set(report["verdict"])
    assert "uneven-steps" in {one["class"] for one in report["abstained"]}
    assert "VERDICT" in cirron("report")[1]


def test_the_next_command_is_about_this_run(runs: list[str]) -> None:
    """What a report names to type next shows the steps of the run that it is about."""
    following = cirron("report", runs[0])[1].rpartition("next: cirron ")[2].split()

    code, shown = cirron(*following)
    assert (0, f"run {runs[0]}") == (code, shown.partition("\n")[0])
    assert "batch[39]" in shown


@pytest.mark.parametrize("command", ["report", "why"])
def test_the_exception_and_where_it_was_raised(tmp_path: Path, command: str) -> None:
    """Who asks why a run died is told the exception, and the innermost span that it left."""
    program = """
import cirron as ci
ci.profile()
for epoch in ci.epochs(range(2)):
    for batch in ci.batches(range(3)):
        try:
            with ci.scope("load"):
                raise ValueError("shapes")
        except ValueError:
            pass
        with ci.scope("train"), ci.scope("forward"):
            if epoch:
                raise ValueError("shapes")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=60
    )

    assert 1 == ended.returncode
    _, told = cirron(command, "--dir", str(tmp_path))
    assert "ValueError: shapes" in told
    assert "epoch[1] > batch[0] > train > forward" in told


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, "input-bound"), (signal.SIGKILL, "died")]
)
def test_the_advice_about_speed_outlives_the_run(
    tmp_path: Path, number: signal.Signals, kind: str
) -> None:
    """Ctrl-C leaves the verdict about speed, and says where it came; a death leaves its advice."""
    program = f"""
import os, time
import cirron as ci
ci.profile(flush_interval=0.1)
def slowly():
    for number in range(40):
        time.sleep(0.02)
        yield number
for epoch in ci.epochs(range(2)):
    for batch in ci.batches(slowly()):
        time.sleep(0.002)
    if epoch:
        with ci.scope("save"):
            time.sleep(0.5)
            os.kill(os.getpid(), {number.value})
            time.sleep(9)
"""
    subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    code, said = cirron("report", "--dir", str(tmp_path))

    assert (0, True) == (code, f"VERDICT  {kind}: " in said)
    assert ("  do     " if kind == "input-bound" else "    do   ") + "load 8 batches" in said
    assert (number == signal.SIGINT) == ("stopped by Ctrl-C in epoch[1] > save" in said)
    assert "epoch[1] > save" in cirron("why", "--dir", str(tmp_path))[1]


def test_the_last_step_of_a_clean_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the last one of the training, not a batch of the evaluation after it."""
    monkeypatch.chdir(tmp_path)
    ci.profile()
    for _ in ci.epochs(range(2)):
        for index in range(7):
            with ci.scope("step", index=index):
                pass
    with ci.scope("evaluation"):
        list(ci.batches(range(5)))
    ci.shutdown()

    assert "the process (clean, last step 6)" in cirron("why")[1]


def test_a_run_without_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be mended by waiting: the report says what gives it steps."""
    monkeypatch.chdir(tmp_path)
    ci.profile()
    with ci.scope("fit"):
        pass
    ci.shutdown()
    report = ci.open().report()

    assert "not-enough-data" == report.verdict.kind
    assert "no training steps were recorded" in report.verdict.summary
    assert "ci.batches" in report.verdict.advice


def test_a_run_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report and `cirron show` say so and why, instead of advice about the loop."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cirron").mkdir()
    (tmp_path / ".cirron" / "spool").touch()
    ci.profile()
    with ci.scope("fit"):
        pass
    ci.shutdown()
    verdict = ci.open(".").report().verdict

    assert "records could not be written: cannot write to" in verdict.summary
    assert "CIRRON_OUTPUT_DIR" in verdict.advice
    assert "records_lost=" in cirron("show")[1]


@pytest.mark.parametrize("command", ["report", "why", "tail", "tensors", "export", "sql", "diff"])
def test_run_is_not_an_option(command: str) -> None:
    """A command that takes the id as an argument says so if it is given with --run."""
    code, said = cirron(command, "--run", "4b5ed2d0")

    assert 2 == code
    assert "Give the id of the run alone" in said


def test_more_runs_before(runs: list[str]) -> None:
    """`--baseline` adds runs to the side before."""
    ci.profile()
    third = ci.health()["run_id"]
    ci.shutdown()
    alone = as_json("diff", runs[0], third)
    several = as_json("diff", runs[0], third, "--baseline", runs[1])

    assert [1, 2] == [len(one["runs"]["before"]) for one in (alone, several)]


def test_what_if_predicts_the_step_time(made: Made) -> None:
    """Of steps of 10 ms, 4 of them forward; the second half of which is a hundredth longer."""
    session = made()
    at = 0
    epoch = session.span("epoch", 0, 402_000_000, index=0)
    for number in range(40):
        took = 10_000_000 if number < 20 else 10_100_000
        step = session.span("step", at, at + took, epoch, number)
        session.span("forward", at, at + 4_000_000, step, mode="train")
        at += took
    session.write()

    gain = as_json("report", "--what-if", "forward=0.5x")["gain"]

    assert pytest.approx(80 / 402) == gain["share"]
    assert pytest.approx(0.01, rel=0.02) == gain["replay_error"]
    assert (
        "39.8% of the time, 160.00ms of these steps more"
        in cirron("report", "--what-if", "forward=2x")[1]
    )
    assert (
        "fewer than 20 steps have data_load" in cirron("report", "--what-if", "data_load=0.5x")[1]
    )
    assert 2 == cirron("report", "--what-if", "nonsense")[0]


def test_diff_shows_where_marks_differ(runs: list[str]) -> None:
    """Where the marks part is said; what cannot be told has an exit code of its own."""
    found = as_json("diff", *runs)

    assert {"epoch": 0, "step": 3} == found["marks"][0]["parts_at"] == found["marks"][0]["far_at"]
    assert "loss: first differs in epoch 0, step 3; last value 1 -> 2" in cirron("diff", *runs)[1]
    assert cirron("diff", *runs, "--fail-on", "900%")[0] in (0, 5)
    assert 2 == cirron("diff", *runs, "--fail-on", "much")[0]
    assert 2 == cirron("diff", *runs, "--fail-on", "5")[0], "5% or 500%?"
    assert 3 == cirron("diff", runs[0], "nope")[0]


def test_marks_outside_any_epoch_are_compared_one_by_one() -> None:
    """A validation accuracy that is marked after each epoch differs where its n-th value does."""
    for accuracies in ([0.5, 0.6, 0.9], [0.5, 0.3, 0.9]):
        ci.profile()
        for accuracy in accuracies:
            for step in ci.batches(range(3)):
                ci.mark("loss", 1.0 / (1 + step))
            ci.mark("val_acc", accuracy)
        ci.shutdown()
    ids = list(ci.open().runs)

    found = {one["name"]: one for one in as_json("diff", *ids)["marks"]}

    assert {"epoch": -1, "step": -1, "value": 1} == found["val_acc"]["parts_at"]
    assert 3 == found["val_acc"]["compared"]
    assert 9 == found["loss"]["compared"]
    said = "val_acc: first differs in the session itself, value 1; last value 0.9 -> 0.9"
    assert said in cirron("diff", *ids)[1]


def test_the_first_and_the_last_value_of_a_mark_are_by_time() -> None:
    """A final evaluation outside the epochs comes after those inside them."""
    for worse in (0.0, 0.1):
        ci.profile()
        for epoch in ci.epochs(range(3)):
            ci.mark("eval_loss", 0.9 - epoch / 10 + (worse if epoch else 0))
        ci.mark("eval_loss", 0.2 + worse)
        ci.shutdown()
    ids = list(ci.open().runs)

    (found,) = as_json("diff", *ids)["marks"]

    assert {"epoch": 1, "step": -1} == found["parts_at"] == found["far_at"]
    assert (0.2, pytest.approx(0.3)) == (found["before"], found["after"])


def test_diff_of_two_folders(runs: list[str], tmp_path: Path) -> None:
    """Runs in two folders are compared by naming the folders."""
    shutil.copytree(tmp_path / ".cirron", tmp_path / "other" / ".cirron")
    found = as_json("diff", "other", runs[0])

    assert {"before": [runs[1]], "after": [runs[0]]} == found["runs"]


def test_why_reads_flight_recorder_dumps_safely(runs: list[str], tmp_path: Path) -> None:
    """Dumps of others are read, and never run."""

    class Evil:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").touch, ()

    dumps = tmp_path / "dumps"
    dumps.mkdir()
    (dumps / "rank_0").write_bytes(pickle.dumps(Evil()))

    found = as_json("why", "--flight-recorder", str(dumps))

    assert ["clean"] == [group["state"] for group in found["groups"]]
    assert "contains more than plain values" in found["problems"][0]
    assert not (tmp_path / "ran").exists()


def test_a_dump_that_asks_for_more_memory_than_there_is(runs: list[str], tmp_path: Path) -> None:
    """Nine bytes, with a memo of 4 billion places."""
    (tmp_path / "rank_0").write_bytes(b"\x80\x04Nr\xff\xff\xff\xff.")

    problems = as_json("why", "--flight-recorder", str(tmp_path))["problems"]

    assert any("is not a readable dump" in one for one in problems)


def test_a_dump_that_doubles_itself(runs: list[str], tmp_path: Path) -> None:
    """A tuple that contains another one twice, 60 times over: to print or hash it takes years."""
    doubled = b")q\x00" + b"".join(
        b"h%ch%c\x86q%c" % (number, number, number + 1) for number in range(60)
    )
    entry = (
        b"\x80\x04}X\x07\x00\x00\x00entries]}(X\x01\x00\x00\x00x](%be"
        b"X\x0e\x00\x00\x00profiling_nameh<uas."
    )
    (tmp_path / "rank_0").write_bytes(entry % doubled)
    (tmp_path / "rank_1").write_bytes(b"\x80\x04}" + doubled + b"Ns.")
    (tmp_path / "rank_2").write_bytes(b"\x80\x04\x8f(" + doubled + b"\x90.")

    problems = as_json("why", "--flight-recorder", str(tmp_path))["problems"]

    told = "\n".join(problems)
    assert "rank_0" not in told
    assert "rank_1: is not a readable dump (a key is neither a string nor a number)" in told
    assert "rank_2: contains more than plain values" in told


def test_the_collective_that_a_rank_is_in() -> None:
    """The first that is not done, or the last of all."""
    done = [{"state": "completed", "profiling_name": "all_reduce", "seq_id": n} for n in (1, 2)]
    open_ = [{"state": "started", "profiling_name": "barrier", "seq_id": n} for n in (3, 4)]

    assert "barrier #3 (started)" == last_collective({"entries": [*done, *open_]})
    assert "all_reduce #2 (completed)" == last_collective({"entries": done})
    assert "no collective" == last_collective({"entries": []})


def test_the_process_that_died_first_is_told_first() -> None:
    """Of groups that are as large: the others fail when they miss it."""
    ranks = [
        SimpleNamespace(attempt=0, rank=rank, state=state, box=None, last_ns=at, info=None)
        for rank, state, at in ((0, "signal", 7), (1, "exception", 9), (2, "killed", 8))
    ]
    run: Any = SimpleNamespace(sessions=ranks, attempts=[0], id="run", state="killed")

    assert [[2], [1], [0]] == [group.ranks for group in why(run).groups]


def test_the_rank_that_the_others_wait_for_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher kills the rank that hangs in backward, after a signal has ended the late one."""
    ends = [
        Ending(0, "killed", "epoch[0] > step[30] > backward", 30, 49.0, "", 1, epoch=0),
        Ending(1, "signal", "", 29, None, "SIGTERM", 2, epoch=0),
    ]
    monkeypatch.setattr("cirron.verdict.why.endings", lambda run: ends)
    info = SimpleNamespace(world_size=4)
    ranks = [SimpleNamespace(attempt=0, rank=one.rank, box=None, info=info) for one in ends]
    run: Any = SimpleNamespace(sessions=ranks, attempts=[0], id="run", state="killed")

    found = why(run)
    assert [[1], [0]] == [group.ranks for group in found.groups]
    assert "no records of rank 2, 3" in found.problems[0]


def test_a_rank_in_a_collective_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are at the same place: the one that sleeps comes first."""
    ends = [Ending(rank, "running", "setup", None, 30.0) for rank in range(2)]
    calls = "/lib/torch/distributed/c10d_logger.py:83 in wrapper", "train.py:4 in prepare"
    monkeypatch.setattr("cirron.verdict.why.endings", lambda run: ends)
    ranks = [
        SimpleNamespace(
            attempt=0,
            rank=rank,
            info=None,
            box=SimpleNamespace(content={"stacks": [{"name": "MainThread", "frames": [call]}]}),
        )
        for rank, call in enumerate(calls)
    ]
    run: Any = SimpleNamespace(sessions=ranks, attempts=[0], id="run", state="running")

    assert [[1], [0]] == [group.ranks for group in why(run).groups]


def test_a_rank_in_an_earlier_epoch_never_arrived() -> None:
    """Each epoch counts its steps anew: step 99 of epoch 0 is before step 0 of epoch 1."""
    behind = Ending(1, "signal", "", 99, None, epoch=0)
    ahead = Ending(0, "signal", "epoch[1] > step[0] > backward", 0, 30.0, epoch=1)

    assert behind.position < ahead.position


def test_why_names_the_error_that_ended_a_process(tmp_path: Path) -> None:
    """With the spans that it cut short, and the calls in which it was raised."""
    script = tmp_path / "train.py"
    script.write_text(
        "import cirron as ci\n"
        "ci.profile()\n"
        "def load():\n"
        "    raise MemoryError('too large')\n"
        "for epoch in ci.epochs(range(3)):\n"
        "    for step in range(5):\n"
        "        with ci.scope('step', index=step):\n"
        "            try:\n"
        "                with ci.scope('forward'):\n"
        "                    raise KeyError('caught')\n"
        "            except KeyError:\n"
        "                pass\n"
        "            if step == 3:\n"
        "                with ci.scope('data_load'):\n"
        "                    load()\n"
    )
    subprocess.run([sys.executable, script], cwd=tmp_path, check=False, capture_output=True)

    (group,) = as_json("why")["groups"]
    verdict = as_json("report")["findings"][0]

    assert ("exception", "MemoryError: too large") == (group["state"], group["error"])
    assert "epoch[0] > step[3] > data_load" == group["where"]
    assert group["frame"].endswith("train.py:4 in load")
    assert "died" == verdict["class"]
    assert (
        "in epoch[0] > step[3] > data_load; last step 3 of epoch 0: Mem" in verdict["evidence"][0]
    )


def test_a_run_beside_its_predecessors(made: Made) -> None:
    """`cirron report` says how the steps compare with those of the same script before."""
    ids = ("first", "second")
    for number, run_id in enumerate(ids):
        session = made(run_id=run_id, start=number * 10**12)
        program = wire.Program(script="train.py")
        session.info = msgspec.structs.replace(session.info, program=program)
        took = (10_000_000, 20_000_000)[number]
        root = session.span("cirron.session", 10**12 * number, 10**12 * number + 60 * took)
        for step in range(60):
            at = 10**12 * number + step * took
            session.span("batch", at, at + took - step % 7 * 10_000, root, step)
        session.write()

    first, second = (as_json("report", one) for one in ids)

    assert first["before"] is None
    assert ["first"] == second["before"]["runs"]
    assert "slower" == second["before"]["change"]["outcome"]
    assert pytest.approx(2, rel=0.01) == second["before"]["change"]["ratio"]
    assert f"cirron diff {' '.join(ids)}" in cirron("report", "second")[1]
    assert 4 == cirron("diff", *ids, "--fail-on", "5%")[0]
    assert 0 == cirron("diff", *reversed(ids), "--fail-on", "5%")[0]


@pytest.mark.parametrize("slower", [(1.25,) * 3, (1.0, 5.0, 1.0)], ids=["all phases", "one phase"])
def test_report_and_diff_agree_on_the_previous_run(made: Made, slower: tuple[float, ...]) -> None:
    """With one run before, all phases 25 % slower at once are unknown in both; one phase is not."""
    for number, (run_id, count) in enumerate((("short", 84), ("long", 600))):
        session, at = made(run_id=run_id, start=number * 10**12), 10**12 * number
        program = wire.Program(script="train.py")
        session.info = msgspec.structs.replace(session.info, program=program)
        for step in range(count):
            begins, times = at, [10_000 + step * 7919 % 13 * 1_000] * 3
            for nth, usual in enumerate((1_000_000, 2_000_000, 1_500_000)):
                times[nth] += int(usual * (slower[nth] if number else 1))
            batch = session.span("batch", at, at + sum(times) + 10_000, None, step)
            for name, took in zip(("forward", "backward", "optimizer_step"), times, strict=True):
                session.span(name, at, at + took, batch)
                at += took
            at = begins + sum(times) + 20_000
        session.write()

    told = as_json("report", "long")["before"]["change"]["outcome"]
    found = {one["name"]: one["outcome"] for one in as_json("diff", "short", "long")["changes"]}

    assert ("unknown" if slower[0] > 1 else "slower") == told == found["batch"]


@pytest.mark.parametrize(("runs_before", "status"), [(1, 5), (3, 0)])
def test_equal_runs_are_the_same_or_inconclusive(made: Made, runs_before: int, status: int) -> None:
    """One run on each side cannot tell a change of 5 %; three can. Both print the times."""
    ids = [f"run{number}" for number in range(runs_before + 1)]
    for number, run_id in enumerate(ids):
        session = made(run_id=run_id, start=number * 10**12)
        for step in range(60):
            at = 10**12 * number + step * 10_000_000
            session.span("batch", at, at + 9_000_000 + step % 7 * 10_000, None, step)
        session.write()
    baseline = [text for one in ids[1:-1] for text in ("--baseline", one)]
    found = cirron("diff", ids[0], ids[-1], *baseline)

    assert status == found[0]
    assert ("inconclusive" if status else "no change") in found[1]
    assert "batch" in found[1]


@pytest.mark.parametrize(("wait", "own", "named"), [(4, 0, "data_load"), (0, 4, "in no phase")])
def test_parts_of_steps_without_a_span_are_compared(
    made: Made, wait: int, own: int, named: str
) -> None:
    """The wait between the batches of `ci.batches`, and the time in no phase of a step."""
    for number, run_id in enumerate(("before", "after")):
        session, at = made(run_id=run_id, start=number * 10**12), 10**12 * number
        for step in range(100):
            noise = step * 7919 % 13 * 10_000
            at += (1 + wait * number) * 1_000_000 + noise
            end = at + (10 + own * number) * 1_000_000 + noise
            batch = session.span("batch", at, end, None, step)
            session.span("forward", at, at + 4_000_000, batch, mode="train")
            session.span("backward", at + 4_000_000, at + 9_000_000, batch)
            at = end
        session.write()

    found = as_json("diff", "before", "after")["changes"]

    changed = {one["name"]: one["outcome"] for one in found if one["name"] != "batch"}
    assert "slower" == changed.pop(named)
    assert {"same", "unknown"} >= set(changed.values())


def test_phases_with_too_few_spans_are_named(made: Made) -> None:
    """Phases of only 20 of 60 steps cannot be compared, which the output says."""
    for number, run_id in enumerate(("before", "after")):
        session = made(run_id=run_id, start=number * 10**12)
        for step in range(60):
            at = 10**12 * number + step * 10_000_000
            batch = session.span("batch", at, at + 9_000_000, None, step)
            for name in ("forward", "backward")[: 2 * (step < 20)]:
                session.span(name, at, at + 4_000_000, batch)
        session.write()

    assert ["backward", "forward"] == as_json("diff", "before", "after")["not_compared"]
    assert "not compared: backward, forward (too few spans)" in cirron("diff", "before", "after")[1]


def test_batches_of_an_evaluation_are_no_training_batches(made: Made) -> None:
    """Keras calls both `batch`: 60 of the training and 60 quick ones of an evaluation."""
    for number, run_id in enumerate(("before", "after")):
        session, at = made(run_id=run_id, start=number * 10**12), 10**12 * number
        epoch = session.span("epoch", at, at + 60 * 10_000_000 + 60_000_000, index=0)
        for step in range(60):
            batch = session.span("batch", at, at + 10_000_000, epoch, step)
            session.span("data_load", at, at + 3_000_000, batch)
            at += 10_000_000
        evaluation = session.span("evaluation", at, at + 60_000_000, epoch)
        for step in range(60):
            batch = session.span("batch", at, at + 1_000_000, evaluation, step)
            session.span("data_load", at, at + 500_000, batch)
            at += 1_000_000
        session.write()

    found = {one["name"]: one for one in as_json("diff", "before", "after")["changes"]}

    assert (10_000_000, [60, 60]) == (found["batch"]["before_ns"], found["batch"]["spans"])
    assert (3_000_000, [60, 60]) == (found["data_load"]["before_ns"], found["data_load"]["spans"])


def test_evaluations_that_are_more_frequent_are_a_difference(made: Made) -> None:
    """Each takes as long as before, so no time by name has changed; the last step ends it."""
    ids = ("rarely", "often", "again")
    for number, run_id in enumerate(ids):
        session, at = made(run_id=run_id, start=number * 10**12), 10**12 * number
        for step in range(100):
            session.span("step", at, at + 10_000_000, None, step)
            at += 10_000_000
            if step % (50, 10, 10)[number] == 9:
                session.span("evaluation", at, at + 30_000_000)
                at += 30_000_000
        session.write()

    more, same = (as_json("diff", one, "often")["differences"] for one in ("rarely", "again"))

    assert ["evaluation: 2 in 100 steps before, 9 in 100 steps after"] == more
    assert [] == same


def test_too_little_to_compare() -> None:
    """Inconclusive has an exit code of its own, and prints what there is."""
    for _ in range(2):
        ci.profile()
        for _ in ci.batches(range(3)):
            ci.mark("loss", 1.0)
        ci.shutdown()

    status, said = cirron("diff", *ci.open().runs)

    assert 5 == status
    assert "no span name has enough spans in both runs" in said
    assert "loss: identical" in said


def test_json_says_why_no_gain_is_predicted() -> None:
    """A finding about time without a gain has the reason in `no_gain`."""
    finding = findings.Finding("host-bound", "Python takes time", 0.3, None, "varies", [], "")

    assert (None, "varies") == (finding.as_dict()["gain"], finding.as_dict()["no_gain"])
