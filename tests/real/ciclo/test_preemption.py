"""SIGTERM and SLURM's signal before the end: the loop saves, leaves, and goes on in the next run.

Each test is a real process that gets real signals.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

import ciclo

if TYPE_CHECKING:
    from tests.real.conftest import Scripts

PROGRAM = """
import os, random, signal, sys, threading, time
import ciclo
random.seed(0)
is_slow = not os.path.exists("run")

def step(state, batch):
    print("step", batch, flush=True)
    if is_slow and batch >= 3:
        time.sleep(0.02)
    return {"metrics": {"drawn": random.random()}}, state + random.random()

def run():
    result = ciclo.loop(
        0.0,
        range(1000) if is_slow else range(60),
        {ciclo.every(1): step},
        stop=60,
        on_end=lambda: print("end", flush=True),
        resume="run",
    )
    print("finished", result.state, result.history.collect("drawn")[-1], len(result.history))
"""


def saved_steps(scripts: Scripts) -> list[int]:
    return ciclo.checkpoint(scripts.folder / "run").steps


@pytest.mark.parametrize(
    ("number", "status", "job"),
    [(signal.SIGTERM, 143, ""), (signal.SIGUSR1, 138, "1")],
)
def test_saves_and_leaves(scripts: Scripts, number: signal.Signals, status: int, job: str) -> None:
    """The step is finished and saved, the end runs, the exit status says which signal it was."""
    script = scripts.start(PROGRAM + "\nrun()", SLURM_JOB_ID=job)
    script.wait_for("step 5")
    script.kill(number)
    ended = script.end()
    last = int(ended.out.split("step ")[-1].split()[0])

    assert status == ended.status, ended.err
    assert "end" == ended.out.splitlines()[-1]
    assert [last + 1] == saved_steps(scripts)
    assert f"ciclo: {number.name}: saving after this step" in ended.err
    assert "Traceback" not in ended.err

    again = scripts.run(PROGRAM + "\nrun()", SLURM_JOB_ID=job)
    (scripts.folder / "run").rename(scripts.folder / "first")
    whole = scripts.run(PROGRAM + "\nis_slow = False\nrun()", SLURM_JOB_ID=job)

    assert f"step {last + 1}" == again.out.splitlines()[0]
    assert whole.out.splitlines()[-1].startswith("finished")
    assert whole.out.splitlines()[-1] == again.out.splitlines()[-1]


def test_outside_of_slurm_its_signal_is_nobodys(scripts: Scripts) -> None:
    """SIGUSR1 ends the process as ever where no job of SLURM runs."""
    script = scripts.start(PROGRAM + "\nrun()")
    script.wait_for("step 5")
    script.kill(signal.SIGUSR1)

    assert -signal.SIGUSR1 == script.end().status


def test_twice_means_now(scripts: Scripts) -> None:
    """The second SIGTERM ends the process in the middle of its step."""
    script = scripts.start(
        """
        import time
        import ciclo
        def step():
            print("waiting", flush=True)
            time.sleep(600)
        ciclo.loop(0, range(9), {ciclo.every(1): step}, resume="run")
        """
    )
    script.wait_for("waiting")
    script.kill(signal.SIGTERM)
    scripts.wait_until(lambda: "saving after this step" in script.err, "the first SIGTERM")

    def is_over() -> bool:  # what comes within a second is taken for the same
        if script.process.poll() is None:
            script.kill(signal.SIGTERM)
        return script.process.poll() is not None

    scripts.wait_until(is_over, "the end")
    assert -signal.SIGTERM == script.end().status
    assert [] == saved_steps(scripts)


def test_the_users_handler_runs_too(scripts: Scripts) -> None:
    """A handler that the program has set is called, and is its handler again afterwards."""
    script = scripts.start(
        """
        import signal
        def mine(number, frame):
            print("mine", number, flush=True)
        signal.signal(signal.SIGTERM, mine)
        """
        + PROGRAM.replace("\n", "\n        ")
        + """
        try:
            run()
        except ciclo.Preempted as preempted:
            print("preempted", preempted.signal, preempted.code, preempted.result.elapsed.steps)
        assert signal.getsignal(signal.SIGTERM) is mine
        """
    )
    script.wait_for("step 5")
    script.kill(signal.SIGTERM)
    ended = script.end()

    assert 0 == ended.status, ended.err
    assert "mine 15" in ended.out
    assert ended.out.splitlines()[-1].startswith("preempted 15 143 ")
    assert int(ended.out.split()[-1]) == saved_steps(scripts)[-1]


def test_a_loop_that_saves_nothing(scripts: Scripts) -> None:
    """SIGTERM ends it at once, as it does without ciclo."""
    script = scripts.start(
        """
        import time
        import ciclo
        def step():
            print("waiting", flush=True)
            time.sleep(600)
        ciclo.loop(0, range(9), {ciclo.every(1): step})
        """
    )
    script.wait_for("waiting")
    script.kill(signal.SIGTERM)

    assert -signal.SIGTERM == script.end().status


def test_not_in_the_main_thread(scripts: Scripts) -> None:
    """A loop in another thread sets no handlers, which Python would not let it, and runs."""
    ended = scripts.run(
        PROGRAM
        + """
is_slow = False
before = signal.getsignal(signal.SIGTERM)
thread = threading.Thread(target=run)
thread.start()
assert signal.getsignal(signal.SIGTERM) is before
thread.join()
"""
    )

    assert 0 == ended.status, ended.err
    assert "finished" in ended.out


@pytest.mark.parametrize("when", ["before", "amid"])
def test_while_cirron_profiles(scripts: Scripts, when: str) -> None:
    """The profiler's own handling of signals does not end the run before it is saved."""
    profile = "import cirron as ci; ci.profile(frameworks=[])"
    start = profile if when == "before" else ""
    script = scripts.start(
        PROGRAM.replace(
            '    print("step"',
            f'    if {when == "amid"} and batch == 2:\n        {profile}\n    print("step"',
            1,
        )
        + f"\n{start}\nrun()"
    )
    script.wait_for("step 5")
    script.kill(signal.SIGTERM)
    ended = script.end()
    last = int(ended.out.split("step ")[-1].split()[0])

    assert 143 == ended.status, ended.err
    assert [last + 1] == saved_steps(scripts)
    if when == "before":
        iterations = [span for span in scripts.spans("step") if span.index is not None]
        assert last + 1 == len(iterations)


def test_in_the_middle_of_an_evaluation(scripts: Scripts) -> None:
    """The evaluation belongs to the step: it is finished, and what is saved has it."""
    body = """
        import os, time
        import ciclo
        is_slow = not os.path.exists("run")
        class Model:
            total = 0.0
            def train_step(self, batch):
                self.total += batch
                return {"metrics": {"loss": self.total}}
            def test_step(self, batch):
                if is_slow and self.total > 3:
                    print("evaluating", batch, flush=True)
                    time.sleep(0.05)
                return {"metrics": {"loss": self.total * batch}}
        result = ciclo.fit(
            Model(), [1.0, 2.0], range(20), epochs=4, resume="run",
            callbacks=[ciclo.checkpoint("run")],
        )
        print(result.state.total, result.history.collect("steps", "loss_valid"))
        """
    script = scripts.start(body)
    script.wait_for("evaluating 3")
    script.kill(signal.SIGTERM)
    ended = script.end()

    assert 143 == ended.status, ended.err
    assert "evaluating 19" in ended.out
    assert [4] == saved_steps(scripts)
    assert "12.0 ([1, 3, 5, 7], [28.5, 57.0, 85.5, 114.0])" == scripts.run(body).out.strip()
