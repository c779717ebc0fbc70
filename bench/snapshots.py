"""How long a snapshot of weights and gradients holds the loop, of whichever `cirron` is importable.

For the shapes of ResNet-50 (161 tensors, 25.6 M parameters) and of a GPT-2 (148 tensors, 124 M).
What an epoch of two tiny steps takes longer when the model is watched is the time that the loop is
held; `copied` is what ours says of itself, `finished` is when the records are there. `DEVICE=cuda`
for a GPU.
"""

import itertools
import json
import os
import statistics
import tempfile
import time

os.chdir(tempfile.mkdtemp())
import torch  # noqa: E402

import cirron as ci  # noqa: E402  the folder is changed first: profiling writes where it starts

DEVICE = os.environ.get("DEVICE", "cpu")
EPOCHS = int(os.environ.get("EPOCHS", "6"))


def resnet50():
    yield from ((64, 3, 7, 7), (64,), (64,))
    inner = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, inner, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                yield from (shape, shape[:1], shape[:1])
            if not block:
                yield from ((4 * width, inner, 1, 1), (4 * width,), (4 * width,))
            inner = 4 * width
    yield from ((1000, 2048), (1000,))


def gpt2(layers=12, width=768):
    yield from ((50257, width), (1024, width))
    for _ in range(layers):
        yield from ((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width))
        yield (width,)
    yield from ((width,), (width,))


class Model(torch.nn.Module):
    """Parameters of these shapes; only the smallest takes part in a forward."""

    def __init__(self, shapes):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(shape) * 0.02 for shape in shapes)

    def forward(self, x):
        return (x.to(DEVICE) * self.weights[-1].mean()).sum()


def wait():
    if DEVICE == "cuda":
        torch.cuda.current_stream().synchronize()  # the loop's own; the worker has another


def measure(shapes):
    torch.manual_seed(0)
    model = Model(shapes).to(DEVICE)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.SGD([model.weights[-1]], lr=0.0)
    data = torch.utils.data.TensorDataset(torch.randn(4, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=2)

    def epoch():
        began = time.perf_counter()
        for (x,) in loader:
            model(x).backward()
            optimizer.step()
        wait()
        return (time.perf_counter() - began) * 1e3

    def plain_epoch():
        time.sleep(0.05)  # about as long as `flush` takes below: an idle core needs time to wake
        return epoch()

    ci.profile(snapshots="stats", output="none")
    plain = [plain_epoch() for _ in range(EPOCHS)]
    ci.watch(model)
    ci.flush()  # what is made ready behind the loop: a real first epoch takes longer than that
    held, finished, copied = [], [], []
    for _ in range(EPOCHS):
        began = time.perf_counter()
        held.append(epoch())
        copied.append(ci.health().get("snapshot_held_ns", 0) / 1e6)
        ci.flush()
        finished.append((time.perf_counter() - began) * 1e3)
    ci.shutdown()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "held_ms": round(statistics.median(held) - statistics.median(plain), 2),
        "held_worst_ms": round(max(held) - statistics.median(plain), 2),
        "copied_ms": round(statistics.median(copied), 2),
        "finished_ms": round(statistics.median(finished), 2),
    }


if __name__ == "__main__":
    found = {"resnet50": measure(resnet50()), "gpt2": measure(gpt2())}
    if DEVICE == "cuda":
        found["device"] = torch.cuda.get_device_name()
    assert found["resnet50"]["parameters"] == 25_557_032
    assert len(list(itertools.chain(gpt2()))) == 148
    print(json.dumps(found))
