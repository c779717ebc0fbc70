"""`create_torch_state` on a real GPU: no step waits for it. Figures: `bench/managed_gpu.py`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ciclo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Has torch raise where the program would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", ["eager", "compile"])
def test_no_step_waits(strategy: str) -> None:
    """Batches travel, losses and metrics are computed and logged, and nobody waits."""
    module = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    state = ciclo.create_torch_state(
        module,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        losses={"fit": nn.CrossEntropyLoss(), "size": lambda outputs: outputs.square().mean()},
        metrics={
            "accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()
        },
        strategy=strategy,
        device="cuda",
        policy="bfloat16",
        clip_norm=1.0,
        ema_decay=0.9,
    )
    batch = (torch.randn(8, 16).pin_memory(), torch.randint(4, (8,)).pin_memory())
    for _ in range(3):  # compiles, and allocates what the optimizer keeps
        state.train_step(batch)
        state.test_step(batch)
    with no_waiting():
        logs, _ = state.train_step(batch)
        tested, _ = state.test_step(batch)
        state.predict_step(batch)

    assert "cuda" == logs.loss.device.type == tested.accuracy.device.type
    assert logs.loss.isfinite()


def test_no_logged_value_is_waited_for() -> None:
    """Of a loop of many steps all losses come to the host in time, in order, as plain floats."""
    weight = torch.ones((), device="cuda")

    def step(batch: int) -> dict[str, dict[str, torch.Tensor]]:
        return {"losses": {"loss": weight * batch}}

    with no_waiting():
        history = ciclo.loop(None, range(1000), {ciclo.every(1): step}).history

    assert [float(number) for number in range(1000)] == history.collect("loss")


def test_resume_to_the_bit(tmp_path: Path) -> None:
    """On a GPU, too, a run goes on with the same dropout, optimizer and weights."""
    batches = list(torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(1)))

    def run(folder: str, stop: int) -> Any:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 1))
        state = ciclo.create_torch_state(
            module,
            lambda parameters: torch.optim.AdamW(parameters, fused=True),
            losses=lambda outputs: outputs.square().mean(),
            device="cuda",
        )
        tasks = {ciclo.every(1): lambda state, batch: state.train_step(batch)}
        return ciclo.loop(state, batches, tasks, stop, resume=tmp_path / folder)

    whole = run("whole", 8)
    run("cut", 4)
    again = run("cut", 8)

    assert whole.history.collect("loss") == again.history.collect("loss")
    for one, other in zip(
        whole.state.module.parameters(), again.state.module.parameters(), strict=True
    ):
        assert "cuda" == other.device.type
        assert torch.equal(one, other)
