"""What the torch hooks add to a training step, of whichever `cirron` is importable.

Plain and profiled epochs alternate in one process, and every step is timed; the figures are those
of the median step, for models of 5, 50 and 500 modules. What a submodule adds is measured on the
forward alone: in a whole step of 10 ms it is lost in the noise. So is a module without parameters
that is called outside of a model, as the transforms of images are. Prints one JSON line.
`DEVICE=cuda` for a GPU: what is timed then is the host, which issues the work and does not wait.
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

DEVICE = os.environ.get("DEVICE", "cpu")
ROUNDS = int(os.environ.get("ROUNDS", "9"))
STEPS = {5: 50, 50: 30, 500: 15}  # in an epoch, by modules
FEATURES, WIDTH, BATCH, CLASSES = 32, 16, 8, 4
now = time.perf_counter_ns


def make(modules):
    torch.manual_seed(0)
    count = BATCH * STEPS[modules]
    data = torch.utils.data.TensorDataset(
        torch.randn(count, FEATURES, device=DEVICE),
        torch.randint(0, CLASSES, (count,), device=DEVICE),
    )
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    layers = [torch.nn.Linear(FEATURES, WIDTH)]
    while len(layers) < modules - 1:
        layers += [torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    layers = [*layers[: modules - 1], torch.nn.Linear(WIDTH, CLASSES)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
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


def forwards(model, inputs, count=40):
    times = []
    for _ in range(count):
        began = now()
        model(inputs)
        times.append((now() - began) / 1000)
    return times


def measure_submodule(few=5, many=500):
    models = [make(modules)[1] for modules in (few, many)]
    inputs = torch.randn(BATCH, FEATURES, device=DEVICE)
    plain, profiled = ([], []), ([], [])
    for _ in range(ROUNDS):
        for model, times in zip(models, plain, strict=True):
            times += forwards(model, inputs)
        ci.profile(frameworks=["torch"])
        for model, times in zip(models, profiled, strict=True):
            forwards(model, inputs, 5)
            times += forwards(model, inputs)
        ci.shutdown()
    of_few, of_many = (
        statistics.median(q) - statistics.median(p) for p, q in zip(plain, profiled, strict=True)
    )
    return round((of_many - of_few) / (many - few), 3)


def measure_transform(count=1000):
    """Of a module without parameters that is called by itself."""
    transform, inputs = torch.nn.Identity(), torch.randn(1)

    def least():
        times = []
        for _ in range(ROUNDS):
            began = now()
            for _ in range(count):
                transform(inputs)
            times.append((now() - began) / 1000 / count)
        return min(times)

    plain = least()
    ci.profile(frameworks=["torch"])
    profiled = least()
    ci.shutdown()
    return round(profiled - plain, 3)


found = {f"modules_{modules}": measure(modules) for modules in STEPS}
found["a_submodule_us"] = measure_submodule()
found["a_transform_us"] = measure_transform()
print(json.dumps(found))
