"""What each tool adds to the same small PyTorch training, used as its own documentation says.

python bench/tools.py --peer PYTHON [--rounds 5]

Each round runs the training in fresh processes: without a tool, with `cirron run`, with the
published `cirron-sdk`, and with `traceml run`. The figure is the median step, the best of the
rounds, less the same without a tool. The model has 5 modules, as in `steps.py`. Prints one JSON
line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = os.path.abspath(__file__)
EPOCHS, STEPS, BATCH, FEATURES, WIDTH, CLASSES = 30, 50, 8, 32, 16, 4
TOOLS = ("none", "cirron", "cirron-sdk", "traceml")


def train(tool: str) -> None:
    """The training. TraceML wants each step marked; the others find the steps themselves."""
    import contextlib

    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(BATCH * STEPS, FEATURES), torch.randint(0, CLASSES, (BATCH * STEPS,))
    )
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.Sequential(
        linear(FEATURES, WIDTH), relu(), linear(WIDTH, WIDTH), relu(), linear(WIDTH, CLASSES)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = contextlib.nullcontext
    if tool == "traceml":
        import traceml_ai

        traceml_ai.init(mode="auto")
        step = lambda: traceml_ai.trace_step(model)  # noqa: E731
    elif tool == "cirron-sdk":
        import cirron

        cirron.profile()
    times = []
    for _ in range(EPOCHS):
        began = time.perf_counter_ns()
        for inputs, labels in loader:
            with step():
                optimizer.zero_grad(set_to_none=True)
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            ended = time.perf_counter_ns()
            times.append((ended - began) / 1000)
            began = ended
    Path(os.environ["TOOLS_OUT"]).write_text(str(statistics.median(times[STEPS:])))


def measure(tool: str, peer: str) -> float:
    """The median step in microseconds, in a process of its own."""
    python = sys.executable if tool in ("none", "cirron") else peer
    commands = {
        "cirron": [str(Path(python).parent / "cirron"), "run", HERE, "--train", tool],
        "traceml": [
            *(str(Path(python).parent / "traceml"), "run", HERE),
            *("--args", "--train", tool),
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "median"
        subprocess.run(
            commands.get(tool, [python, HERE, "--train", tool]),
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOOLS_OUT": str(out)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=300,
            check=True,
        )
        return float(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", help="python of a venv with cirron-sdk and traceml-ai")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", choices=TOOLS, help="run the training itself")
    given = parser.parse_args()
    if given.train:
        train(given.train)
        return
    tools = TOOLS if given.peer else TOOLS[:2]
    peer = os.path.abspath(given.peer or "")
    medians: dict[str, list[float]] = {tool: [] for tool in tools}
    for _ in range(given.rounds):
        for tool in tools:
            medians[tool].append(measure(tool, peer))
    best = {tool: min(times) for tool, times in medians.items()}
    found = {
        tool: {"step_us": round(us, 1), "added_us": round(us - best["none"], 1)}
        for tool, us in best.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
