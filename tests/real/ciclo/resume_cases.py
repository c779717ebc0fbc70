"""Runs that are killed and started again: `python resume_cases.py torch 50` kills one 50 times.

Each case trains with `resume=` and says at its end what came out: state, history, what fired. A
process that is forked from this one does it, so that the framework is imported once; it is killed
after a random time, until it was killed often enough, and then left to its end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import ciclo

CLOCKS = ("time", "date")


def outcome(result: Any, state: Any) -> dict[str, Any]:
    """What must be the same, however often the run was killed."""
    table = result.history.to_dict()
    table = {name: column for name, column in table.items() if name not in CLOCKS}
    elapsed = result.elapsed
    counts = (elapsed.steps, elapsed.samples)
    return {"state": state, "history": table, "elapsed": counts}


def plain(directory: str) -> dict[str, Any]:
    """A loop of plain Python that draws random numbers and fires on schedules of all kinds."""
    random.seed(7)

    def step(state: Any, batch: list[int]) -> Any:
        drawn, seen = random.random(), state["seen"][-9:]
        state = {**state, "sum": state["sum"] + batch[0] * drawn, "seen": [*seen, batch[0]]}
        return {"metrics": {"drawn": drawn}}, state

    def fired(elapsed: Any) -> Any:
        return {"fired": {"steps": elapsed.steps, "samples": elapsed.samples}}

    return _out(
        ciclo.loop(
            {"sum": 0.0, "seen": []},
            [[number] * (1 + number % 5) for number in range(250)],
            {
                ciclo.every(1): step,
                ciclo.every(samples=50): fired,
                ciclo.after(steps=30).every(samples=70) & ~ciclo.at(steps=120): fired,
                ciclo.every(7): ciclo.checkpoint(directory, keep=2, monitor="drawn"),
            },
            resume=directory,
        )
    )


def numpy(directory: str) -> dict[str, Any]:
    """`train_loop` over a stream, with arrays that change in place and both kinds of generators."""
    import numpy as np

    np.random.seed(3)

    class Model:
        def __init__(self) -> None:
            self.weights = np.zeros((4, 3))
            self.rng = np.random.default_rng(5)
            self.count = 0

        def reset_step(self) -> None:
            self.count = 0

        def train_step(self, batch: Any) -> Any:
            self.count += 1
            self.weights += batch[:, None] * self.rng.normal(size=3) + np.random.random()
            return {"losses": {"loss": float(np.abs(self.weights).mean())}}

        def test_step(self, batch: Any) -> Any:
            return {"metrics": {"size": float(np.abs(self.weights).max() * batch)}}

    data = [np.arange(4.0) + n for n in range(250)]
    stop = ciclo.early_stopping("loss_never", patience=1000)
    model = Model()
    result = ciclo.train_loop(
        model,
        data,
        epoch_duration=30,
        test_dataset=[1.0, 2.0],
        callbacks=[{ciclo.every(6): ciclo.checkpoint(directory)}, {ciclo.never(): stop}],
        resume=directory,
    )
    return _out(result, [result.state.weights.tolist(), result.state.rng.random(), model.count])


def torch(directory: str) -> dict[str, Any]:
    """`fit` with a shuffling DataLoader, dropout, an optimizer, EMA and early stopping."""
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)

    def train_step(state: Any, batch: Any) -> Any:
        model.train()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        rates.step()
        return {"losses": {"loss": loss}}

    def test_step(batch: Any) -> Any:
        model.eval()
        with torch.no_grad():
            return {"metrics": {"error": torch.nn.functional.mse_loss(model(batch[0]), batch[1])}}

    average = ciclo.ema(0.9, select=lambda state: state["model"])
    result = ciclo.fit(
        {"model": model, "optimizer": optimizer, "rates": rates},
        loader,
        loader,
        epochs=6,
        train_step=train_step,
        test_step=test_step,
        callbacks=[
            ciclo.early_stopping("error_valid", looks=4, restore_best_weights=True),
            {ciclo.every(1): average},
            {ciclo.every(5): ciclo.checkpoint(directory, keep=1, monitor="error_valid")},
        ],
        resume=directory,
    )
    weights = [value.tolist() for value in model.state_dict().values()]
    averages = [value.tolist() for value in average.value.values()]
    return _out(result, [weights, averages, torch.rand(1).item()])


def jax(directory: str) -> dict[str, Any]:
    """A jitted step that donates its state, keys in it; an optimizer, EMA, early stopping."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adam(0.05)

    def begin() -> Any:
        key = jax.random.key(0)
        weights = {"w": jax.random.normal(key, (4, 2))}
        return {"weights": weights, "moments": optimizer.init(weights), "key": key}

    @jax.jit
    def loss_of(weights: Any, batch: Any, key: Any) -> Any:
        noise = jax.random.normal(key, batch.shape) * 0.1
        return jnp.mean(((batch + noise) @ weights["w"] - 1.0) ** 2)

    def step(state: Any, batch: Any) -> Any:
        key, used = jax.random.split(state["key"])
        loss, gradient = jax.value_and_grad(loss_of)(state["weights"], batch, used)
        updates, moments = optimizer.update(gradient, state["moments"])
        weights = optax.apply_updates(state["weights"], updates)
        return loss, {"weights": weights, "moments": moments, "key": key}

    jitted = jax.jit(step, donate_argnums=0)

    def train(state: Any, batch: Any) -> Any:
        loss, state = jitted(state, batch)
        return {"losses": {"loss": loss}}, state

    stop = ciclo.early_stopping("loss", patience=1000, restore_best_weights=True)
    average = ciclo.ema(0.9)
    result = ciclo.loop(
        begin(),
        [jnp.full((2, 4), n % 7 / 7) for n in range(30)],
        [
            (ciclo.every(1), train),
            (ciclo.every(1), average),
            (ciclo.every(5), stop),
            (ciclo.every(3), ciclo.checkpoint(directory, monitor="loss")),
        ],
        resume=directory,
    )
    key = jax.random.key_data(result.state["key"]).tolist()
    moments = jax.tree.map(lambda leaf: leaf.tolist(), result.state["moments"])
    kind = type(result.state["moments"][0]).__name__
    ema = average.value["weights"]["w"].tolist()
    return _out(result, [result.state["weights"]["w"].tolist(), moments, key, kind, ema])


def _out(result: Any, state: Any = None) -> dict[str, Any]:
    return outcome(result, result.state if state is None else state)


CASES = {"plain": plain, "numpy": numpy, "torch": torch, "jax": jax}


def newest(directory: str) -> str:
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return max((one for one in names if one.startswith("step-")), default="nothing")


def attempt(
    name: str, directory: str, out: str, kill_after_s: float | None, is_patient: bool = False
) -> bool:
    """Runs a case in a process of its own; whether it came to its end.

    is_patient: whether the time until the kill begins when there is another checkpoint
    """
    before = newest(directory)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            found = CASES[name](directory)
            with open(out, "w") as file:
                json.dump(found, file)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    if kill_after_s is not None:
        while is_patient and newest(directory) == before:
            if os.waitpid(pid, os.WNOHANG) != (0, 0):
                return True
            time.sleep(0.001)
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if status not in (0, signal.SIGKILL):
        raise SystemExit(f"{name} ended with {status}")
    return status == 0


def main(name: str, kills: int, seed: int) -> None:
    if name in ("numpy", "torch", "jax"):
        __import__(name)
    if name == "torch":
        import torch._dynamo  # noqa: F401  the first optimizer does
    if name == "jax":
        import optax  # noqa: F401
        import orbax.checkpoint  # noqa: F401
    began = time.monotonic()
    attempt(name, "whole", "whole.json", None)
    length_s = time.monotonic() - began
    dice = random.Random(seed)
    killed, points = 0, set()
    while killed < kills:
        # Half of them in the time until a run is set up, the others between checkpoints.
        is_patient = dice.random() < 0.5
        after_s = dice.uniform(0, length_s * (0.1 if is_patient else 0.8))
        is_done = attempt(name, "killed", "killed.json", after_s, is_patient)
        killed += 1
        points.add(newest("killed"))
        if is_done:  # it was quicker than the kill: begin again
            check()
            os.rename("killed", f"done-{killed}")
    attempt(name, "killed", "killed.json", None)
    check()
    print(json.dumps({"kills": killed, "points": len(points), "length_s": round(length_s, 2)}))


def check() -> None:
    with open("whole.json") as whole, open("killed.json") as killed:
        expected, found = json.load(whole), json.load(killed)
    for part, value in expected.items():
        if value != found[part]:
            raise SystemExit(f"{part} differs:\n{value}\n{found[part]}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int((sys.argv[3:] or ["0"])[0]))
