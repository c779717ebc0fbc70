"""What the torch hooks add to a training step on the CPU, of whichever `cirron` is importable.

Plain and profiled epochs alternate in one process, and every step is timed; the figures are those
of the median step. Models of 5, 50 and 500 modules show what each submodule adds. Prints one JSON
line.
"""

import json
import os
import statistics
import tempfile
import time

os.chdir(tempfile.mkdtemp())
import torch  # noqa: E402  the folder is changed first: profiling writes where it starts

torch.set_num_threads(1)
import cirron as ci  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "9"))
STEPS = {5: 50, 50: 30, 500: 15}  # in an epoch, by modules
FEATURES, WIDTH, BATCH, CLASSES = 32, 16, 8, 4
now = time.perf_counter_ns


def make(modules):
    torch.manual_seed(0)
    count = BATCH * STEPS[modules]
    data = torch.utils.data.TensorDataset(
        torch.randn(count, FEATURES), torch.randint(0, CLASSES, (count,))
    )
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    layers = [torch.nn.Linear(FEATURES, WIDTH)]
    while len(layers) < modules - 1:
        layers += [torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    layers = [*layers[: modules - 1], torch.nn.Linear(WIDTH, CLASSES)]
    model = torch.nn.Sequential(*layers)
    return loader, model, torch.optim.SGD(model.parameters(), lr=0.01)


def epoch(loader, model, optimizer):
    """The time of each step, from one batch to the next."""
    times = []
    began = now()
    for inputs, labels in loader:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        ended = now()
        times.append((ended - began) / 1000)
        began = ended
    return times[1:]


def measure(modules):
    run = make(modules)
    for _ in range(3):
        epoch(*run)
    plain, profiled = [], []
    for _ in range(ROUNDS):
        plain += epoch(*run)
        ci.profile(frameworks=["torch"])
        epoch(*run)
        profiled += epoch(*run)
        ci.shutdown()
    p, q = statistics.median(plain), statistics.median(profiled)
    return {
        "plain_us": round(p, 1),
        "profiled_us": round(q, 1),
        "added_us": round(q - p, 1),
        "ratio": round(q / p, 4),
    }


found = {f"modules_{modules}": measure(modules) for modules in STEPS}
few, many = min(STEPS), max(STEPS)
added_us = found[f"modules_{many}"]["added_us"] - found[f"modules_{few}"]["added_us"]
found["a_submodule_us"] = round(added_us / (many - few), 3)
print(json.dumps(found))
