"""What the torch hooks cost and measure on a real GPU. Writes one JSON, of all sections.

python bench/gpu.py [--sections overhead,accuracy] [--save FILE]

Each section is a function that returns its figures; one that fails says so and the rest go on.
"""

import argparse
import glob
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums each time
CALLED_IN = os.getcwd()
os.chdir(tempfile.mkdtemp())
import torch  # noqa: E402  the folder is changed first: profiling writes where it starts
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import cirron as ci  # noqa: E402
from cirron import guard  # noqa: E402
from cirron.hooks.torch.gpu import Cuda, the_cuda  # noqa: E402

DEVICE = "cuda"
now = time.perf_counter_ns


def mlp(width=32, hidden=16):
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 4),
    )


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """GPT-2 small: 124 million parameters, input and output embedding shared."""

    def __init__(self, width=768, layers=12, heads=12, words=50_304, length=1024):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.words(tokens) + self.places(places)))
        return functional.linear(x, self.words.weight)


def spans(name=None):
    """The wire records of the session's closed spans, read back from the spool."""
    ci.flush()
    found = []
    for path in sorted(glob.glob(".cirron/spool/*.json")):
        with open(path) as file:
            found += json.load(file)["spans"]
    return [span for span in found if name is None or span["name"] == name]


def fresh():
    os.chdir(tempfile.mkdtemp())
    torch.manual_seed(0)


def medians(plain, profiled):
    p, q = statistics.median(plain), statistics.median(profiled)
    return {
        "plain_us": round(p, 2),
        "profiled_us": round(q, 2),
        "added_us": round(q - p, 2),
        "ratio": round(q / p, 5),
    }


def alternate(epoch, rounds, change=lambda: None):
    """Plain and profiled epochs in turn; the first profiled one of each round is not counted."""
    for _ in range(3):
        epoch()
    plain, profiled = [], []
    for _ in range(rounds):
        plain.append(epoch())
        ci.profile(frameworks=["torch"])
        change()
        epoch()
        profiled.append(epoch())
        ci.shutdown()
    return medians(plain, profiled)


# -- sections ----------------------------------------------------------------------------------


def costs():
    """Microseconds of what is done at each span, and of what the background thread does."""
    torch.zeros(1, device=DEVICE)
    cuda = Cuda()
    key = cuda.current_stream(-1)
    stream = cuda.new_stream(key)
    first, second = cuda.new_event(), cuda.new_event()
    first.record(stream)
    second.record(stream)
    torch.cuda.synchronize()
    loss = torch.ones((), device=DEVICE)

    def scope():
        with ci.scope("x"):
            pass

    def timed(call, count=2000):
        call()
        rounds = []
        for _ in range(5):
            began = now()
            for _ in range(count):
                call()
            rounds.append((now() - began) / count / 1000)
            torch.cuda.synchronize()
        return round(min(rounds), 3)

    found = {
        "is_capturing": timed(cuda.is_capturing),
        "current_stream": timed(lambda: cuda.current_stream(-1)),
        "torch_current_stream": timed(torch.cuda.current_stream),
        "record": timed(lambda: first.record(stream)),
        "query": timed(second.query),
        "beside_captures": timed(lambda: cuda.beside_captures(int)),
        "peak_bytes": timed(lambda: cuda.peak_bytes(0)),
        "torch_max_memory_allocated": timed(torch.cuda.max_memory_allocated, 200),
        "read_of_a_scalar": timed(lambda: cuda.read([loss]), 200),
        "item": timed(loss.item, 200),
        "kernel_launch": timed(lambda: loss.add_(0)),
    }
    ci.profile(frameworks=[], output="none")
    found["scope"] = timed(scope)
    ci.shutdown()
    ci.profile(frameworks=["torch"], output="none")
    found["scope_with_gpu_time"] = timed(scope)
    found["mark_of_a_device_scalar"] = timed(lambda: ci.mark("loss", loss), 200)
    ci.shutdown()
    found["clone"] = timed(lambda: loss.detach().clone())
    return found


def small_epoch():
    """Steps of the 5-module MLP, in which the device waits for the host."""
    items = torch.randn(200, 8, 32, device=DEVICE), torch.randint(0, 4, (200, 8), device=DEVICE)
    loader = DataLoader(list(zip(*items, strict=True)), batch_size=None)
    model = mlp().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def epoch():
        began = now()
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        issued = now()
        torch.cuda.synchronize()
        return (issued - began) / len(loader) / 1000

    return epoch


def large_epoch():
    """Steps of about 10 ms, in which the host waits for the device."""
    loader = DataLoader(list(torch.randn(40, 4096, 2048, device=DEVICE)), batch_size=None)
    layers = [layer for _ in range(5) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def epoch():
        began = now()
        for x in loader:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        return (now() - began) / len(loader) / 1000

    return epoch


def overhead():
    """Added time a step: the 5-module MLP, where the host decides, and a step of about 10 ms."""
    fresh()
    found = {"mlp": alternate(small_epoch(), 9)}
    found["step_of_10_ms"] = alternate(large_epoch(), 9)
    added_us = found["mlp"]["added_us"]
    found["host_time_to_10_ms"] = round(added_us / 10_000, 5)
    return found


def breakdown():
    """Of the time that the MLP's step takes more: the hooks, the events, and asking for them."""
    from cirron.hooks.torch import gpu
    from cirron.record import hot

    fresh()
    epoch = small_epoch()
    found = {"hooks": alternate(epoch, 5, lambda: hot.use_device_clock(None))["added_us"]}

    def make_up(elapsed):
        elapsed.value = 1
        elapsed.is_ready = True
        elapsed.give_back()

    read, gpu.Elapsed.read = gpu.Elapsed.read, make_up
    try:
        found["hooks_and_events"] = alternate(epoch, 5)["added_us"]
    finally:
        gpu.Elapsed.read = read
    found["all"] = alternate(epoch, 5)["added_us"]
    return found


def no_sync():
    """Profiled steps under torch's own detector of synchronisations, set to raise."""
    fresh()
    model = mlp(512, 512).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(64, 512, device=DEVICE) for _ in range(200)]
    loader = DataLoader(batches, batch_size=None)
    ci.profile(overhead=1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        until = now() + 3_000_000_000
        steps = 0
        while now() < until:
            for x in loader:
                with ci.scope("mine"):
                    loss = model(x).square().mean()
                ci.mark("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        ci.flush()
        ci.trace(format="dict", last=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    dropped = ci.health()["mark_drop_count"]
    ci.shutdown()
    timed = ("step", "forward", "backward", "optimizer_step", "mine", "epoch")
    without = [span for span in spans() if span["name"] in timed and span["gpu_ns"] is None]
    return {
        "steps": steps,
        "spans_without_gpu_time": len(without),
        "marks_lost": dropped,
        "errors": dict(guard.errors),
    }


def accuracy():
    """`gpu_ns` of forward and backward beside the kernels' time by torch.profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    fresh()
    model = Transformer().to(DEVICE, torch.bfloat16)
    tokens = torch.randint(0, 50_000, (24, 1024), device=DEVICE)

    def forward():
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    for _ in range(5):
        forward().backward()
        model.zero_grad()
    torch.cuda.synchronize()

    ci.profile()
    for _ in range(25):
        with ci.scope("forward_and_loss"):
            loss = forward()
        loss.backward()
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    ci.shutdown()
    found = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    for name in ("forward_and_loss", "forward", "backward"):
        times = [span["gpu_ns"] / 1e6 for span in spans(name)][-20:]
        found[f"{name}_gpu_ms"] = round(statistics.median(times), 3)

    phases = {"forward": [], "forward_and_loss": [], "backward": []}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            with record_function("phase:forward"):
                logits = model(tokens)
                torch.cuda.synchronize()
            with record_function("phase:loss"):
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
                torch.cuda.synchronize()
            with record_function("phase:backward"):
                loss.backward()
                torch.cuda.synchronize()
            del logits, loss
            model.zero_grad(set_to_none=True)
    events = profiler.events()
    kernels = [
        (event.time_range.start, event.time_range.elapsed_us())
        for event in events
        if event.device_type.name == "CUDA" and not event.name.startswith("phase:")
    ]

    def kernel_ms(phase):
        sums = []
        for event in events:
            if event.name == phase and event.device_type.name == "CPU":
                first, last = event.time_range.start, event.time_range.end
                sums.append(sum(took for start, took in kernels if first <= start < last))
        return sums

    forward_us, loss_us = kernel_ms("phase:forward"), kernel_ms("phase:loss")
    phases["forward"] = forward_us
    phases["forward_and_loss"] = [
        one + other for one, other in zip(forward_us, loss_us, strict=True)
    ]
    phases["backward"] = kernel_ms("phase:backward")
    for name, sums in phases.items():
        kernel = statistics.median(sums[1:]) / 1000
        found[f"{name}_kernel_ms"] = round(kernel, 3)
        found[f"{name}_ratio"] = round(found[f"{name}_gpu_ms"] / kernel, 4)
    return found


def graphs():
    """Captures of CUDA graphs while spans are open and their times are asked for."""
    fresh()
    torch.manual_seed(0)
    model = mlp(256, 256).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 256, device=DEVICE)

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    def captured_steps():
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # The default way to capture, which forbids most calls to all threads.
        with torch.cuda.graph(graph), ci.scope("inside"):
            step()
        for _ in range(10):
            with ci.scope("replay"):
                graph.replay()
        torch.cuda.synchronize()
        return [parameter.detach().clone() for parameter in model.parameters()]

    wanted = captured_steps()
    ci.profile()
    captures = asked = 0
    is_same = True
    is_over = threading.Event()

    def ask():
        nonlocal asked
        cuda, event = the_cuda(), torch.cuda.Event()
        event.record()
        while not is_over.is_set():
            cuda.beside_captures(event.query)
            asked += 1
            time.sleep(0.0001)

    asker = threading.Thread(target=ask)
    asker.start()
    until = now() + 4_000_000_000
    while now() < until:
        for _ in range(20):
            step()  # leaves events to be asked for
        found = captured_steps()
        is_same &= all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
        captures += 1
    is_over.set()
    asker.join()
    callables = torch.cuda.make_graphed_callables(mlp(256, 256).to(DEVICE), (x,))
    callables(x).sum().backward()
    ci.shutdown()
    inside = {span["id"] for span in spans("inside")}
    of_capture = [span for span in spans() if span["parent_id"] in inside or span["id"] in inside]
    replays = [span["gpu_ns"] for span in spans("replay")]
    return {
        "captures": captures,
        "asked_meanwhile": asked,
        "would_fail_without_care": fails_without_care(),
        "same_results": is_same,
        "spans_in_captures": len(of_capture),
        "of_them_with_gpu_time": sum(span["gpu_ns"] is not None for span in of_capture),
        "replays": len(replays),
        "replays_without_gpu_time": replays.count(None),
        "errors": dict(guard.errors),
    }


def fails_without_care():
    """Whether a capture is ended by another thread that asks for an event as usual."""
    _, done = script("""
        import threading, torch
        event = torch.cuda.Event()
        x = torch.zeros(4, device="cuda")
        event.record()
        torch.cuda.synchronize()
        def ask():
            try:
                event.query()
            except Exception as error:
                print("asking failed")
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x + 1
                thread = threading.Thread(target=ask)
                thread.start()
                thread.join()
                x + 1
        except Exception as error:
            print("the capture failed")
    """)
    return done.stdout.split("\n")[:-1]


def same_results():
    """Training on a GPU, bit for bit with and without profiling."""
    torch.use_deterministic_algorithms(True)

    def plain(model, x):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    def in_backward(model, x):
        owners = {
            parameter: torch.optim.Adam([parameter], foreach=False)
            for parameter in model.parameters()
        }

        def update(parameter):
            owners[parameter].step()
            owners[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(5):
            model(x).square().mean().backward()

    def amp(model, x):
        optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler(DEVICE)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def compiled(model, x):
        torch._dynamo.reset()
        plain(torch.compile(model), x)

    def reduced(model, x):
        torch._dynamo.reset()
        plain(torch.compile(model, mode="reduce-overhead"), x)

    def parallel(model, x):
        plain(nn.DataParallel(model, device_ids=[0]), x)

    def threaded(model, x):
        others = [mlp(64, 64).to(DEVICE) for _ in range(2)]

        def train(other):
            with torch.cuda.stream(torch.cuda.Stream()):
                plain(other, x)
                torch.cuda.current_stream().synchronize()

        workers = [threading.Thread(target=train, args=(other,)) for other in others]
        for worker in workers:
            worker.start()
        plain(model, x)
        for worker in workers:
            worker.join()

    found = {}
    ways = (plain, in_backward, amp, compiled, reduced, parallel, threaded)
    try:
        for train in ways:
            try:
                found[train.__name__] = is_same(train)
            except Exception as error:  # the others are still of interest
                found[train.__name__] = f"{type(error).__name__}: {error}"[:300]
    finally:
        torch.use_deterministic_algorithms(False)
    found["errors"] = dict(guard.errors)
    return found


def is_same(train):
    def weights():
        fresh()
        model = mlp(64, 64).to(DEVICE)
        train(model, torch.randn(16, 64, device=DEVICE))
        torch.cuda.synchronize()
        return [parameter.detach().clone() for parameter in model.parameters()]

    wanted = weights()
    ci.profile(output="none")
    found = weights()
    names = [span["name"] for span in flat(ci.trace(format="dict")["roots"])]
    ci.shutdown()
    assert "forward" in names
    return all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def flat(nodes):
    for node in nodes:
        yield node
        yield from flat(node["children"])


def memory():
    """`memory_peak_bytes` beside torch's own figure, which nobody but the program resets."""
    fresh()
    torch.cuda.reset_peak_memory_stats()
    model = mlp(512, 512).to(DEVICE)
    ci.profile()
    with ci.scope("epoch"):
        model(torch.randn(4096, 512, device=DEVICE)).sum().backward()
        wanted = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with ci.scope("epoch"):
        after_reset = torch.cuda.max_memory_allocated()
    ci.shutdown()
    found = [span["memory_peak_bytes"] for span in spans("epoch")]
    return {"torch": [wanted, after_reset], "spans": found, "same": found == [wanted, after_reset]}


def copies():
    """A scope of the program's own round a copy to the device: time, as bandwidth."""
    fresh()
    pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    pinned.to(DEVICE, non_blocking=True)
    torch.cuda.synchronize()
    ci.profile()
    for _ in range(5):
        with ci.scope("copy"):
            pinned.to(DEVICE, non_blocking=True)
    ci.shutdown()
    times = [span["gpu_ns"] for span in spans("copy")]
    walls = [span["end_ns"] - span["start_ns"] for span in spans("copy")]
    return {
        "gpu_ms": statistics.median(times) / 1e6,
        "host_ms": statistics.median(walls) / 1e6,
        "gb_per_s": round(2**28 / statistics.median(times), 1),
    }


HANGING = """
    import time, torch, cirron as ci
    torch.zeros(1, device="cuda")
    ci.profile()
    with ci.scope("long"):
        torch.cuda._sleep({cycles})
    began = time.perf_counter()
    {then}
    print(time.perf_counter() - began, flush=True)
"""


def endings():
    """Programs that end, ask or fail while the device has not answered."""
    found = {}
    cycles = 20_000_000_000  # about 10 s
    for name, then in {
        "trace": "ci.trace(format='dict')",
        "flush": "ci.flush()",
        "shutdown": "ci.shutdown()",
    }.items():
        folder, done = script(HANGING.format(cycles=cycles, then=then))
        found[name] = {**ended(folder, done), "waited_s": last_number(done)}
    folder, done = script("""
        import torch, cirron as ci
        ci.profile()
        x = torch.zeros(4, device="cuda")
        for _ in range(3):
            with ci.scope("before"):
                x + 1
        try:
            with ci.scope("fault"):
                x[torch.tensor([99], device="cuda")] + 1
                torch.cuda.synchronize()
        except RuntimeError as error:
            print(type(error).__name__)
        for _ in range(1000):
            with ci.scope("after"):
                pass
        print(ci.health()["errors"])
    """)
    found["device_fault"] = {**ended(folder, done), "out": done.stdout[-300:]}
    folder, done = script("""
        import torch, cirron as ci
        ci.profile()
        x = torch.zeros(4, device="cuda")
        for _ in range(1000):
            with ci.scope("short"):
                x + 1
    """)
    found["plain_exit"] = ended(folder, done)
    return found


def script(body):
    folder = tempfile.mkdtemp()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
        timeout=120,
    )
    return folder, done


def ended(folder, done):
    records = []
    for path in glob.glob(f"{folder}/.cirron/spool/*.json"):
        with open(path) as file:
            records += json.load(file)["spans"]
    own = [span for span in records if span["name"] != "cirron.session"]
    return {
        "status": done.returncode,
        "spans": len(own),
        "with_gpu_time": sum(span["gpu_ns"] is not None for span in own),
        "said": done.stderr[-400:],
    }


def last_number(done):
    try:
        return round(float(done.stdout.split()[-1]), 2)
    except (IndexError, ValueError):
        return None


SECTIONS = (
    costs,
    overhead,
    breakdown,
    no_sync,
    accuracy,
    graphs,
    same_results,
    memory,
    copies,
    endings,
)


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sections", help="names, with commas; all without it")
    arguments.add_argument("--save", help="a file for the figures")
    given = arguments.parse_args()
    wanted = given.sections.split(",") if given.sections else [one.__name__ for one in SECTIONS]
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "cpus": os.cpu_count(),
    }
    for section in SECTIONS:
        if section.__name__ not in wanted:
            continue
        began = time.perf_counter()
        try:
            found[section.__name__] = section()
        except Exception:  # the other sections are still of interest
            found[section.__name__] = {"failed": traceback.format_exc()[-1500:]}
            ci.shutdown()
        took = round(time.perf_counter() - began, 1)
        print(section.__name__, took, json.dumps(found[section.__name__]), flush=True)
        if given.save:
            with open(os.path.join(CALLED_IN, given.save), "w") as file:
                json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
