"""Fits a line with plain Python: a loop, a bar, an early stop, a history. No framework.

python examples/ciclo_plain.py
"""

import random

import ciclo


def train_step(line, batch):
    """One step of gradient descent for y = slope * x + offset."""
    slope, offset = line["slope"], line["offset"]
    errors = [slope * x + offset - y for x, y in batch]
    slope -= 0.1 * sum(error * x for error, (x, _) in zip(errors, batch, strict=True)) / len(batch)
    offset -= 0.1 * sum(errors) / len(batch)
    loss = sum(error**2 for error in errors) / len(batch)
    return {"metrics": {"loss": loss}}, {"slope": slope, "offset": offset}


def batches(count, size=16):
    random.seed(0)
    for _ in range(count):
        yield [(x, 3 * x - 1) for x in (random.uniform(-1, 1) for _ in range(size))]


def main():
    line, history, elapsed = ciclo.loop(
        {"slope": 0.0, "offset": 0.0},
        batches(2000),
        {
            ciclo.every(1): train_step,
            ciclo.every(50): ciclo.early_stopping("loss", looks=2, min_delta=1e-9),
            **ciclo.keras_bar(),
        },
        stop=2000,
    )
    print(f"y = {line['slope']:.3f} x + {line['offset']:.3f} after {elapsed.samples} samples")
    steps, loss = history.collect("steps", "loss")
    print(f"loss {loss[0]:.4f} at step {steps[0]}, {loss[-1]:.2e} at step {steps[-1]}")


if __name__ == "__main__":
    main()
