"""A training run that is killed twice, in the middle of a step, and does not notice.

The same program is started three times, as a scheduler would; it is killed with SIGKILL at a random
moment. Its last line is that of a run that nobody killed.
"""

import random
import signal
import subprocess
import sys
import time

import ciclo


def train(folder: str) -> None:
    random.seed(0)

    def step(state: dict, batch: int) -> tuple:
        time.sleep(0.002)
        gradient = 2 * (state["weight"] - 3.0) + random.gauss(0, 0.1)
        weight = state["weight"] - 0.01 * gradient
        return {"losses": {"loss": (weight - 3.0) ** 2}}, {**state, "weight": weight}

    state, history, elapsed = ciclo.loop(
        {"weight": 0.0},
        range(200),
        {
            ciclo.every(1): step,
            ciclo.every(10): ciclo.checkpoint(folder, keep=2, monitor="loss"),
        },
        resume=folder,
    )
    print(f"{elapsed.steps} steps, weight {state['weight']!r}, {len(history)} rows")


def main() -> None:
    program = [sys.executable, __file__]
    whole = subprocess.run([*program, "whole"], capture_output=True, text=True, check=True).stdout
    for _ in range(2):
        process = subprocess.Popen([*program, "killed"])
        time.sleep(random.uniform(0.2, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        print("killed; saved:", ciclo.checkpoint("killed").steps)
    killed = subprocess.run([*program, "killed"], capture_output=True, text=True, check=True).stdout
    print(whole, killed, sep="", end="")
    assert whole == killed


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()
