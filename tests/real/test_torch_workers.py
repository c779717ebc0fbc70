"""PyTorch DataLoaders with workers: the loop is seen as without them, and so are their scopes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import cirron as ci

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.conftest import Scripts, Traced

STEP = "data_load forward:train backward optimizer_step"
STEPS = f"step[0]({STEP}) step[1]({STEP})"


class Ones(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with ci.scope("item", index):
            return torch.ones(2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        return iter([torch.ones(2)] * (4 if info is None else 4 // info.num_workers))


def train(loader: DataLoader[Any], most: int = 100) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, batch in enumerate(loader):
        if index == most:
            break
        model(batch).sum().backward()
        optimizer.step()


OPTIONS: dict[str, dict[str, Any]] = {
    "fork": {"multiprocessing_context": "fork"},
    "spawn": {"multiprocessing_context": "spawn"},
    "persistent": {"multiprocessing_context": "fork", "persistent_workers": True},
}


@pytest.mark.parametrize("data", [Ones, Stream])
@pytest.mark.parametrize("kind", OPTIONS)
def test_epochs_with_workers(traced: Traced, data: Any, kind: str) -> None:
    """Each pass is an epoch, with the start of its workers and their end, if they end with it."""
    loader = DataLoader(data(), batch_size=2, num_workers=2, **OPTIONS[kind])
    for _ in range(2):
        train(loader)

    if kind == "persistent":
        assert f"epoch[0](data_setup {STEPS}) epoch[1]({STEPS})" == traced()
    else:
        epoch = f"data_setup {STEPS} data_teardown"
        assert f"epoch[0]({epoch}) epoch[1]({epoch})" == traced()


def test_workers_that_start_inside_ci_epochs(traced: Traced) -> None:
    """Their start and their end are next to the steps, in the epoch."""
    loader = DataLoader(Ones(), batch_size=2, num_workers=1)
    for _ in ci.epochs(range(1)):
        train(loader)

    assert f"epoch[0](data_setup {STEPS} data_teardown)" == traced()


def test_leaving_persistent_workers_early(traced: Traced) -> None:
    """A loop over persistent workers that breaks is over when another pass begins."""
    options: dict[str, Any] = OPTIONS["persistent"]
    loader = DataLoader(Ones(), batch_size=1, num_workers=1, **options)
    train(loader, most=1)
    train(loader, most=1)
    train(DataLoader(Stream(), batch_size=2))

    left = f"step[0]({STEP}) skipped(data_load)"
    assert f"epoch[0](data_setup {left}) epoch[1]({left}) epoch[2]({STEPS})" == traced()


def test_other_passes_while_persistent_workers_go_on(traced: Traced) -> None:
    """An iterator that is still in its loop is not over when another pass begins."""
    options: dict[str, Any] = OPTIONS["persistent"]
    model = nn.Linear(2, 1)
    for batch in DataLoader(Ones(), batch_size=2, num_workers=1, **options):
        model(batch).sum().backward()
        for _ in DataLoader(Stream(), batch_size=4):
            pass

    body = "data_load forward:train backward data_load"
    assert f"epoch[0](data_setup step[0]({body} {body})) data_teardown" == traced()


DATA = """
    import torch
    import cirron as ci

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            with ci.scope("item", index):
                ci.mark("value", index)
                return torch.ones(2)

    def begin(worker):
        ci.profile()

    if __name__ == "__main__":
        ci.profile()
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=2, num_workers=2, multiprocessing_context=HOW,
            worker_init_fn=begin if HOW == "spawn" else None,
        )
        for epoch in range(2):
            for batch in loader:
                model(batch).sum().backward()
                optimizer.step()
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_scopes_inside_workers(scripts: Scripts, how: str) -> None:
    """What a dataset records in a worker is on disk, a spawned one's if it calls `profile`."""
    ended = scripts.run(f"    HOW = {how!r}\n{DATA}")

    assert (0, "") == (ended.status, ended.err)

    spans = [span for run in scripts.sessions() for span in run.spans]
    items = [span for span in spans if span.name == "item"]
    assert [0, 0, 1, 1, 2, 2, 3, 3] == sorted(span.index or 0 for span in items)
    epochs = [span for span in spans if span.name == "epoch"]
    assert [0, 1] == [span.index for span in epochs]
    assert not {span.pid for span in items} & {span.pid for span in epochs}
    assert 4 == sum(span.name == "step" for span in spans)
