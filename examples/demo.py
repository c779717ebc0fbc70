"""A training run small enough to read: a line is fitted to points, and the tree is printed."""

import random

import cirron as ci

EPOCHS, BATCHES, BATCH_SIZE, RATE = 5, 200, 32, 0.05


def make_batch(random_numbers: random.Random) -> list[tuple[float, float]]:
    """Points near y = 3 x - 1."""
    inputs = [random_numbers.uniform(-1, 1) for _ in range(BATCH_SIZE)]
    return [(x, 3 * x - 1 + random_numbers.gauss(0, 0.1)) for x in inputs]


def main() -> None:
    ci.profile()
    slope, offset = 0.0, 0.0
    random_numbers = random.Random(0)

    for _ in ci.epochs(range(EPOCHS)):
        losses = []
        for _ in ci.batches(range(BATCHES)):
            with ci.scope("data"):
                batch = make_batch(random_numbers)
            with ci.scope("forward"):
                errors = [slope * x + offset - y for x, y in batch]
                loss = sum(error * error for error in errors) / BATCH_SIZE
            with ci.scope("update"):
                slopes = [e * x for e, (x, _) in zip(errors, batch, strict=True)]
                slope -= RATE * 2 * sum(slopes) / BATCH_SIZE
                offset -= RATE * 2 * sum(errors) / BATCH_SIZE
            ci.mark("loss", loss)
            losses.append(loss)
        ci.mark("epoch_loss", sum(losses) / len(losses), kind="summary")

    ci.trace()
    ci.shutdown()
    print(f"\nfitted y = {slope:.2f} x {offset:+.2f}")
    print("The same tree, from disk, at any later time: .venv/bin/cirron show")


if __name__ == "__main__":
    main()
