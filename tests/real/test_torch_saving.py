"""What is saved is a `checkpoint`, where it is called; how memory grows is on the steps."""

from __future__ import annotations

import importlib
import io
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.conftest import Scripts


class Ones(Dataset[Any]):
    """Four items, each of which may do something when it is asked for."""

    def __init__(self, ask: Callable[[], None] = lambda: None) -> None:
        self.ask = ask

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> Any:
        self.ask()
        return torch.ones(3)


def train(save: Callable[[nn.Module], None], dataset: Dataset[Any] | None = None) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(dataset or Ones(), batch_size=2):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        save(model)


def checkpoints() -> list[str]:
    """The paths of all checkpoints."""
    found = []

    def visit(node: dict[str, Any], above: str) -> None:
        path = f"{above}/{node['name']}".lstrip("/")
        if node["name"] == "checkpoint":
            found.append(path + (" failed" if "error" in node["attrs"] else ""))
        for child in node["children"]:
            visit(child, path)

    for root in ci.trace(format="dict")["roots"]:
        visit(root, "")
    return found


IN_STEPS = ["cirron.session/epoch/step/checkpoint"] * 2


@pytest.mark.parametrize("where", ["file", "buffer"])
def test_a_save_is_a_checkpoint(tmp_path: Path, where: str) -> None:
    """Inside of the step whose loop waits for it; what is saved is the same."""
    ci.profile(output="none")
    buffer = io.BytesIO()

    def save(model: nn.Module) -> None:
        buffer.seek(0)
        torch.save(model.state_dict(), tmp_path / "m.pt" if where == "file" else buffer)

    train(save)

    assert IN_STEPS == checkpoints()
    saved = tmp_path / "m.pt" if where == "file" else io.BytesIO(buffer.getvalue())
    assert {"weight", "bias"} == set(torch.load(saved))


def test_the_outermost_call_counts(tmp_path: Path) -> None:
    """Of what saves by saving, and inside of a scope of the user's, there is one."""
    ci.profile(output="none")

    def save(model: nn.Module) -> None:
        with ci.scope("checkpoint"):
            torch.save(model.state_dict(), tmp_path / "m.pt")

    train(save)

    assert IN_STEPS == checkpoints()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_savers(tmp_path: Path) -> None:
    """safetensors, torch.distributed.checkpoint and accelerate, imported before or after."""
    ci.profile(output="none")
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from safetensors.torch import save_file

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 1))
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    accelerator.save_state(str(tmp_path / "state"))

    assert ["cirron.session/checkpoint"] * 3 == checkpoints()


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    """A dataset's cache, what a thread saves that nothing waits for, and what is pickled."""
    ci.profile(output="none")

    def cache() -> None:
        torch.save(torch.ones(1), tmp_path / "cache.pt")

    def save(model: nn.Module) -> None:
        thread = threading.Thread(target=cache)
        thread.start()
        thread.join()
        pickle.dumps(model)

    train(save, Ones(cache))

    assert [] == checkpoints()


def test_a_save_that_fails(tmp_path: Path) -> None:
    """It fails as ever, and the checkpoint says so."""
    ci.profile(output="none")

    with pytest.raises(RuntimeError, match="Parent directory"):
        train(lambda model: torch.save(model, tmp_path / "nowhere" / "m.pt"))

    assert ["cirron.session/epoch/step/checkpoint failed"] == checkpoints()


def test_functions_are_put_back() -> None:
    """After a shutdown torch has its own again."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    before = (torch.save, torch.serialization.save, dcp.save, dcp.state_dict_saver.save)
    ci.profile(output="none")
    hooked = (torch.save, torch.serialization.save, dcp.save, dcp.state_dict_saver.save)
    ci.shutdown()
    after = (torch.save, torch.serialization.save, dcp.save, dcp.state_dict_saver.save)

    assert before == after
    assert hooked[0] is hooked[1]
    assert not set(before) & set(hooked)


def test_a_leak_shows_within_one_epoch(scripts: Scripts) -> None:
    """Some steps of each second say how much memory the process has."""
    ended = scripts.run(
        """
        import time
        import cirron as ci

        ci.profile()
        kept = []
        for _ in ci.batches(range(60)):
            kept.append(bytearray(2**20))
            kept[-1][::4096] = b"x" * 256
            time.sleep(0.02)
        """
    )
    sizes = [span.memory_peak_bytes for span in scripts.spans("batch")]
    known = [size for size in sizes if size is not None]

    assert 0 == ended.status
    assert 3 <= len(known) <= 12
    assert known[-1] - known[0] > 10 * 2**20
    assert sorted(known) == known
