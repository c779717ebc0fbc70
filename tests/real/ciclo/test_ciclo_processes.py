"""What needs a process of its own: imports, memory, Ctrl-C, TensorBoard's files."""

from __future__ import annotations

import csv
import importlib.util
import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

import ciclo

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import Scripts

CORE = """
for elapsed, batch in ciclo.elapse(range(5), stop=ciclo.at(samples=3)):
    assert (ciclo.every(2) & ~ciclo.at(2))(elapsed) in (True, False)
logs = ciclo.logs()
logs.add_metric("a", 1.0)
history = ciclo.history()
history.commit(elapsed, logs)
assert [1.0] == history.collect("a")
result = ciclo.loop(
    0,
    range(10),
    {ciclo.every(1): lambda state, batch: ({"metrics": {"x": state}}, state + batch)},
    stop=5,
)
assert (10, 5) == (result.state, result.elapsed.steps)
class Model:
    def train_step(self, batch):
        return {"metrics": {"loss": 1.0}}
    test_step = train_step
ciclo.fit(Model(), [1, 2], [3], epochs=2, callbacks=[
    ciclo.keras_bar(), ciclo.early_stopping("loss_valid", looks=3), ciclo.nan_guard(),
    ciclo.throughput(), ciclo.console_logger(),
])
"""


def test_the_core_needs_no_framework(scripts: Scripts) -> None:
    """Time, schedules, logs, loops and callbacks work where no framework is installed."""
    ended = scripts.run(
        """
        import sys
        class Absent:
            def find_spec(self, name, *rest):
                if name.partition(".")[0] in ("jax", "torch", "numpy", "pandas", "tqdm", "rich"):
                    raise ModuleNotFoundError(name, name=name)
        sys.meta_path.insert(0, Absent())
        import ciclo
        """
        + CORE.replace("\n", "\n        ")
    )

    assert (0, "") == (ended.status, ended.err)


def test_no_framework_is_imported(scripts: Scripts) -> None:
    """Where they are installed, none is imported by a loop of plain Python."""
    ended = scripts.run(
        """
        import sys
        import ciclo
        """
        + CORE.replace("\n", "\n        ")
        + """
        found = {"jax", "torch", "numpy", "pandas", "tqdm", "rich", "tensorboard"}
        print("imported:", *sorted(found & set(sys.modules)))
        """
    )

    assert ended.out.endswith("imported:\n"), ended.out + ended.err


def test_the_check_can_fail(scripts: Scripts) -> None:
    """The check above sees a framework that is there."""
    ended = scripts.run(
        """
        import sys
        import numpy
        print("imported:", *sorted({"numpy", "torch"} & set(sys.modules)))
        """
    )

    assert "imported: numpy\n" == ended.out


def test_a_million_iterations_do_not_grow(scripts: Scripts) -> None:
    """Without logs memory stays; with a float a step it grows by the columns and no more."""
    ended = scripts.run(
        """
        import gc, json, resource
        import ciclo

        def peak():
            gc.collect()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        def noop():
            pass
        ciclo.loop(0, range(1000), {ciclo.every(1): noop, ciclo.every(samples=3): noop})
        before = peak()
        ciclo.loop(0, range(1_000_000), {ciclo.every(1): noop, ciclo.every(samples=3): noop})
        quiet = peak()
        result = ciclo.loop(0, range(300_000), {ciclo.every(1): lambda: {"metrics": {"x": 0.5}}})
        logged = peak()
        print(json.dumps([quiet - before, (logged - quiet) / 300_000]))
        """,
        timeout_s=100,
    )
    quiet_bytes, bytes_a_step = json.loads(ended.out)

    assert quiet_bytes < 2e6
    # Seven columns of eight bytes, which grow by an eighth at a time, and what pages round up.
    assert bytes_a_step < 120


def test_ctrl_c(scripts: Scripts) -> None:
    """A real Ctrl-C lets the step finish, runs the end, and the program goes on."""
    script = scripts.start(
        """
        import time
        import ciclo
        def step(state):
            print("step", state, flush=True)
            time.sleep(0.05)
            return state + 1
        result = ciclo.loop(0, range(100_000), {ciclo.every(1): step}, on_end=lambda: print("end"))
        assert result.is_interrupted
        assert result.state == result.elapsed.steps
        print("went on")
        """
    )
    script.wait_for("step 3")
    script.kill(signal.SIGINT)
    ended = script.end()

    assert 0 == ended.status
    assert ["end", "went on"] == ended.out.splitlines()[-2:]
    assert "stopping after this step" in ended.err


def test_ctrl_c_twice(scripts: Scripts) -> None:
    """The second Ctrl-C stops at once, with the end run and a KeyboardInterrupt."""
    script = scripts.start(
        """
        import time
        import ciclo
        def step():
            print("waiting", flush=True)
            time.sleep(600)
        ciclo.loop(0, range(9), {ciclo.every(1): step}, on_end=lambda: print("end", flush=True))
        """
    )
    script.wait_for("waiting")
    script.kill(signal.SIGINT)
    scripts.wait_until(lambda: "stopping after this step" in script.err, "the first Ctrl-C")
    script.kill(signal.SIGINT)
    ended = script.end()

    assert ended.status != 0
    assert "end" == ended.out.splitlines()[-1]
    assert ended.err.rstrip().splitlines()[-1].startswith(("KeyboardInterrupt", "ciclo"))


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    """TensorBoard's own reader finds every step with its values, evaluation included."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    class Model:
        loss = 8.0

        def train_step(self, batch: Any) -> Any:
            self.loss /= 2
            return {"metrics": {"loss": self.loss}}

        def test_step(self, batch: Any) -> Any:
            return {"metrics": {"loss": self.loss + 1}}

    logger = ciclo.tensorboard_logger(str(tmp_path / "logs"))
    ciclo.fit(Model(), [1, 2], [1], steps=3, callbacks=[logger])
    found = accumulators.EventAccumulator(str(tmp_path / "logs"))
    found.Reload()

    assert [(0, 4.0), (1, 2.0), (2, 1.0)] == [(e.step, e.value) for e in found.Scalars("loss")]
    assert [(1, 3.0), (2, 2.0)] == [(e.step, e.value) for e in found.Scalars("loss_valid")]


def test_a_real_keras_callback(scripts: Scripts) -> None:
    """Keras's own EarlyStopping and CSVLogger work in a loop of plain Python."""
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    ended = scripts.run(
        """
        import warnings
        warnings.simplefilter("ignore")
        import keras
        import ciclo
        losses = iter([3.0, 2.0, 2.5, 2.6, 1.0])
        result = ciclo.train_loop(
            0,
            range(5),
            {ciclo.on_train_step: lambda: {"metrics": {"loss": next(losses)}}},
            epoch_duration=1,
            callbacks=[
                keras.callbacks.EarlyStopping(monitor="loss", patience=2),
                keras.callbacks.CSVLogger("log.csv"),
            ],
        )
        print(result.elapsed.steps)
        """,
        timeout_s=100,
        KERAS_BACKEND="torch",
    )

    assert "4" == ended.out.strip(), ended.err
    with open(scripts.folder / "log.csv") as file:
        rows = [(row["epoch"], row["loss"]) for row in csv.DictReader(file)]
    assert [("0", "3.0"), ("1", "2.0"), ("2", "2.5"), ("3", "2.6")] == rows


def test_a_bar_in_a_notebook() -> None:
    """In a real notebook the bar is one line, drawn over, and ends at its last step."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    code = "import ciclo\n_ = ciclo.loop(0, range(50), {**ciclo.keras_bar()}, stop=50)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
    text = "".join(output["text"] for output in notebook.cells[0].outputs)

    assert text.startswith("\r 1/50 ")
    assert text.rstrip(" \n").split("\r")[-1].startswith("50/50 ━━━━━━━━━━━━━━━━━━━━ ")
    assert 1 == text.count("\n")
