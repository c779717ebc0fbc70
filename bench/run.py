"""Runs every benchmark in fresh processes, ours and the peers' in turn, and prints one table.

python bench/run.py [--peer PYTHON] [--rounds 3]

A figure is the best of its rounds. The limits are the project's own promises.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

HERE = pathlib.Path(__file__).parent

# (script, figure, what to call it, limit)
PROMISES = [
    ("primitives", "scope.ratio", "with ci.scope(...), to a bare one", 3.0),
    ("primitives", "scope_with_attrs.ratio", "the same with index and attribute", None),
    ("primitives", "mark.ratio", "ci.mark, to a bare context manager", 1.5),
    ("primitives", "epochs.ratio", "ci.epochs, to a bare context manager", 2.5),
    ("primitives", "batches.ratio", "ci.batches, to a bare context manager", 2.5),
    ("primitives", "scope_off.ratio", "ci.scope when off, to a bare one", 0.5),
    ("primitives", "scope.ns", "with ci.scope(...), ns", None),
    ("primitives", "mark.ns", "ci.mark, ns", None),
    ("inference", "inference.ratio", "@ci.inference, added, to a scope", None),
    ("inference", "inference_items.ratio", "an item of its stream, to a scope", None),
    ("inference", "off.inference.ratio", "@ci.inference when off, to a scope", None),
    ("wrap", "predict.ratio", "a wrapped predict, to a plain one", None),
    ("wrap", "predict_off.ratio", "a wrapped predict when off, to a plain one", None),
    ("wrap", "nothing.added_us", "ci.wrap, added to a call, us", None),
    ("trainer", "trainer.ratio", "Trainer, a step of 10 ms, to a plain one", 1.02),
    ("trainer", "trainer.added_us", "the same, added us", None),
    ("trainer", "lightning.ratio", "Lightning, a step of 10 ms, to a plain one", 1.01),
    ("trainer", "lightning.added_us", "the same, added us", None),
    ("keras_fit", "torch.step.ratio", "Keras on torch, a step of 10 ms, to a plain one", 1.01),
    ("keras_fit", "torch.step.added_us", "the same, added us", None),
    ("keras_fit", "jax.step.ratio", "Keras on JAX, a step of 10 ms, to a plain one", 1.01),
    ("keras_fit", "jax.step.added_us", "the same, added us", None),
    ("jax_step", "step.ratio", "a jitted JAX step of 10 ms, to a plain one", 1.02),
    ("steps", "modules_5.added_us", "torch step, 5 modules, added us", 22),
    ("steps", "modules_50.added_us", "torch step, 50 modules, added us", None),
    ("steps", "modules_500.added_us", "torch step, 500 modules, added us", None),
    ("steps", "a_submodule_us", "torch step, added for a submodule, us", 0.2),
    ("steps", "a_transform_us", "a module without parameters, by itself, us", 0.5),
    ("snapshots", "resnet50.held_ms", "snapshot, ResNet-50, loop held, ms", 40),
    ("snapshots", "gpt2.held_ms", "snapshot, GPT-2 of 124 M, loop held, ms", None),
    ("shipped", "cpu_us", "span + mark on disk, us of CPU", 6.0),
    ("shipped", "memory_mb", "memory for 300,000 of them, MB", 150),
    ("shipped", "spans_lost", "spans lost", 0),
    ("shipped", "marks_lost", "marks lost", 0),
    ("shipped", "bytes", "bytes on disk for each", None),
    ("imports", "cirron", "import cirron, ms", 15),
    ("loops", "one_task.us", "ciclo.loop, one task, us an iteration", 3.0),
    ("loops", "four_tasks.us", "ciclo.loop, four tasks, us an iteration", 6.0),
    ("loops", "one_task.ratio", "ciclo.loop, one task, to a bare loop", None),
    ("loops", "four_tasks.ratio", "ciclo.loop, four tasks, to a bare loop", None),
    ("loops", "one_task_logging.us", "the same, logging a float, us", 2.1),
    ("loops", "logging.one_float.to_one_task", "logging a float, to logging nothing", None),
    ("loops", "four_tasks_logging.us", "four tasks that log a float each, us", 3.8),
    ("loops", "logging.numpy_scalar.us", "logging a NumPy scalar, us", 3.5),
    ("loops", "logging.torch_scalar.us", "logging a torch scalar, us", 3.5),
    ("loops", "jax_logging.us", "a jitted step that logs a scalar, us", 11.0),
    ("loops", "jax_logging.ratio", "a jitted step that logs a scalar, to a bare one", None),
    ("loops", "one_task_profiled.added_us_a_step_and_task", "profiled, added a step and task", 6.0),
    ("loops", "import_ms", "import ciclo, ms", 30),
    ("gil", "idle.p99_ms", "interpreter lock away, idle, p99 ms", None),
    ("gil", "busy.median_ms", "interpreter lock held, backlog, median ms", 2.0),
    ("gil", "busy.p99_ms", "interpreter lock held, backlog, p99 ms", None),
]
PEER_SCRIPTS = {"primitives", "shipped", "imports", "snapshots", "steps"}


def run(python, script, environment=None):
    """The figures that a script prints, flattened: {"scope.ratio": 2.5}; {} if it failed."""
    done = subprocess.run(
        [python, "-W", "ignore", str(HERE / f"{script}.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        check=False,
    )
    if done.returncode:
        print(f"{script} failed under {python}:\n{done.stderr[-500:]}", file=sys.stderr)
        return {}
    return dict(flat(json.loads(done.stdout.strip().splitlines()[-1])))


def flat(figures, prefix=""):
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)):
            yield prefix + name, value


def best_of(rounds, commands):
    """For each (who, script), the least of each figure over interleaved rounds."""
    best = {}
    for _ in range(rounds):
        for who, script, python in commands:
            into = best.setdefault((who, script), {})
            for name, value in run(python, script).items():
                into[name] = min(value, into.get(name, value))
    return best


def cell(value):
    return f"{'':>12}" if value is None else f"{value:>12.2f}"


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--peer", help="a Python that has cirron-sdk and opentelemetry-sdk")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--save", action="store_true", help="keep the figures in bench/results")
    given = arguments.parse_args()

    scripts = list(dict.fromkeys(script for script, *_ in PROMISES))
    commands = []
    for script in scripts:
        commands.append(("ours", script, sys.executable))
        if given.peer and script in PEER_SCRIPTS:
            commands.append(("peer", script, given.peer))
    if given.peer:
        commands.append(("otel", "otel", given.peer))
    best = best_of(given.rounds, commands)

    otel = best.get(("otel", "otel"), {})
    print(f"{'':<44}{'ours':>12}{'limit':>12}{'cirron-sdk':>12}{'otel':>12}")
    broken = []
    for script, figure, title, limit in PROMISES:
        ours = best["ours", script].get(figure)
        peer = best.get(("peer", script), {}).get(figure)
        holds = ours is not None and (limit is None or ours <= limit)
        if not holds:
            broken.append(title)
        other = otel.get(figure)
        mark = "" if holds else "  <-- does not hold"
        print(f"{title:<44}{cell(ours)}{cell(limit)}{cell(peer)}{cell(other)}{mark}")

    if given.save:
        save(best)
    if broken:
        sys.exit(f"{len(broken)} of the promises do not hold: {', '.join(broken)}")


def save(best):
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    written = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "figures": {f"{who} {script}": figures for (who, script), figures in best.items()},
    }
    (results / "core.json").write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
