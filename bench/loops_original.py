"""The loops of `loops.py` with the original Ciclo, run as it is. Prints one JSON line.

Run by `loops.py --original PYTHON`, where PYTHON has `requirements-ciclo.txt` installed.
"""

import json
import time

import jax
import jax.numpy as jnp

import ciclo

COUNT, ROUNDS = 1000, 5
PARAMETERS = {"w": jnp.zeros(4)}


def noop():
    pass


def log():
    return {"metrics": {"loss": 0.5}}


@jax.jit
def jax_step(state, batch):
    return {"losses": {"loss": state["w"].sum()}}, {"w": state["w"] * 0.5}


def bare():
    for _ in range(COUNT):
        noop()


def jax_bare():
    state = PARAMETERS
    for _ in range(COUNT):
        _, state = jax_step(state, 1.0)


def looped(callback, tasks=1, state=0):
    return lambda: ciclo.loop(
        state, [1.0] * COUNT, {ciclo.every(1): [callback for _ in range(tasks)]}
    )


def timed(function):
    began = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - began) / COUNT / 1000


cases = {
    "bare": bare,
    "one_task": looped(noop),
    "four_tasks": looped(noop, 4),
    "one_task_logging": looped(log),
    "four_tasks_logging": looped(log, 4),
    "jax_bare": jax_bare,
    "jax_logging": looped(jax_step, state=PARAMETERS),
}
best = {}
for _ in range(ROUNDS):
    for name, function in cases.items():
        best[name] = min(timed(function), best.get(name, 1e9))
print(json.dumps({name: round(us, 3) for name, us in best.items()}))
