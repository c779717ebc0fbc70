"""PyTorch tests that take long: two ranks under torchrun, and a real compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from tests import spools

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import Scripts

    from cirron import wire

TRAIN = """
    import torch
    import torch.distributed as dist
    import cirron as ci

    ci.profile()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    {wrap}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()
"""
WRAPS = {
    "DDP": "model = torch.nn.parallel.DistributedDataParallel(model)",
    "FSDP2": "from torch.distributed.fsdp import fully_shard; "
    "[fully_shard(part) for part in model if len(list(part.parameters()))]; fully_shard(model)",
}
PHASES = ["data_load", "forward", "backward", "optimizer_step"]


def children(spans: list[wire.Span], parent: wire.Span) -> list[wire.Span]:
    found = [span for span in spans if span.parent_id == parent.id]
    return sorted(found, key=lambda span: span.start_ns)


@pytest.mark.parametrize("kind", WRAPS)
def test_two_ranks(tmp_path: Path, kind: str) -> None:
    """Each of two ranks has its epochs, its steps and the four phases, tagged with its rank."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TRAIN.format(wrap=WRAPS[kind])))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert 0 == done.returncode, done.stderr
    assert "internal error" not in done.stderr

    runs = spools.read(tmp_path / ".cirron")
    ranks = {run.spans[0].rank: run.spans for run in runs}
    assert {0, 1} == set(ranks)
    for rank, spans in ranks.items():
        assert {rank} == {span.rank for span in spans}
        (root,) = (span for span in spans if span.parent_id is None)
        epochs = children(spans, root)
        assert [("epoch", 0), ("epoch", 1)] == [(span.name, span.index) for span in epochs]
        for epoch in epochs:
            steps = children(spans, epoch)
            assert [("step", 0), ("step", 1)] == [(span.name, span.index) for span in steps]
            for step in steps:
                assert PHASES == [span.name for span in children(spans, step)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(scripts: Scripts) -> None:
    """With the real compiler: one graph, no recompile as hooks come and go, the same weights."""
    ended = scripts.run(
        """
        import torch
        import cirron as ci
        from torch._dynamo.utils import counters

        def train(when):
            torch._dynamo.reset()
            counters.clear()
            torch.manual_seed(0)
            layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
            model = torch.nn.Sequential(*layers)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            compiled = torch.compile(model)
            for step in range(4):
                if when == step:
                    ci.profile(output="none")
                compiled(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if when is not None:
                found = []
                def walk(span):
                    found.append((span["name"], [one["name"] for one in span["children"]]))
                    for one in span["children"]:
                        walk(one)
                walk(ci.trace(format="dict")["roots"][0])
                ci.shutdown()
                print([name for name, inner in found if "compile" in inner])
            compiled(torch.ones(2, 4))
            print(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
            return list(model.parameters())

        plain, hooked, late = train(None), train(0), train(2)
        print(all(map(torch.equal, plain, hooked)), all(map(torch.equal, plain, late)))
        """,
        timeout_s=110,
        OMP_NUM_THREADS="1",
    )

    assert 0 == ended.status, ended.err
    first, compiles, hooked, nothing, late, same = ended.out.splitlines()
    assert ["1 0"] * 3 == [first, hooked, late]
    assert "forward" in compiles  # and the backward, unless inductor has it in its cache
    assert "[]" == nothing
    assert "True True" == same
