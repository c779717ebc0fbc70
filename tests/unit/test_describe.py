"""Settings that explain speed: what is said of a loader, of a model, of the precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from cirron.hooks.torch import describe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = TensorDataset(torch.zeros(10, 2))


class Own(Dataset[int]):
    """A data set of the program's, which nobody may ask for its length."""

    def __len__(self) -> int:
        raise AssertionError("asked")

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)

    def __len__(self) -> int:
        raise AssertionError("asked")


class TestLoaders:
    """`of_loader`."""

    def test_all_loader_arguments_are_described(self) -> None:
        """Everything that a loader was made with, by its name."""
        loader = DataLoader(
            ROWS,
            batch_size=4,
            shuffle=True,
            num_workers=2,
            prefetch_factor=3,
            persistent_workers=True,
            drop_last=True,
        )

        assert {
            "loader_workers": 2,
            "loader_pin_memory": False,
            "loader_prefetch_factor": 3,
            "loader_persistent_workers": True,
            "loader_batch_size": 4,
            "loader_drop_last": True,
            "loader_sampler": "RandomSampler",
            "loader_dataset": "TensorDataset",
            "loader_batches": 2,
        } == describe.of_loader(loader)

    @pytest.mark.parametrize(
        ("loader", "batches"),
        [
            (DataLoader(ROWS, batch_size=3), 4),
            (DataLoader([1, 2, 3], batch_size=None), 3),  # type: ignore[arg-type]
            (DataLoader(Subset(Own(), range(6)), batch_size=2), 3),
            (DataLoader(Own(), sampler=range(4)), None),
            (DataLoader(Own(), sampler=SequentialSampler(Own())), None),
            (
                DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(Own()), 2, False)),
                None,
            ),
            (DataLoader(Stream()), None),
        ],
    )
    def test_only_library_lengths_are_asked_for(self, loader: Any, batches: int | None) -> None:
        """A length is told where a library knows it; the program's own code is not asked."""
        assert batches == describe.of_loader(loader)["loader_batches"]

    def test_a_batch_sampler_is_described(self) -> None:
        """Of a batch sampler of the program's, the class and the size that it says it has."""

        class Buckets(BatchSampler):
            pass

        buckets = Buckets(RandomSampler(ROWS), batch_size=5, drop_last=False)
        found = describe.of_loader(DataLoader(ROWS, batch_sampler=buckets))

        assert ("Buckets", 5) == (found["loader_sampler"], found["loader_batch_size"])

    def test_a_loader_made_from_a_batch_sampler_has_its_settings(self) -> None:
        """accelerate, the Trainer and Keras make such loaders; their own values are unused."""
        batches = BatchSampler(RandomSampler(ROWS), batch_size=5, drop_last=True)
        found = describe.of_loader(DataLoader(ROWS, batch_sampler=batches))

        assert ("RandomSampler", 5, True) == (
            found["loader_sampler"],
            found["loader_batch_size"],
            found["loader_drop_last"],
        )

    def test_a_stream_has_no_sampler(self) -> None:
        """A stream has no sampler."""
        found = describe.of_loader(DataLoader(Stream(), batch_size=2))

        assert (None, "Stream", 2) == (
            found["loader_sampler"],
            found["loader_dataset"],
            found["loader_batch_size"],
        )

    def test_broken_loaders_are_described_as_far_as_possible(self) -> None:
        """What is like no loader, or fails when it is asked, is described by what there is."""

        class Strange:
            num_workers = 3

            @property
            def dataset(self) -> Any:
                raise RuntimeError

        found = describe.of_loader(Strange())

        assert {"loader_workers": 3} == {
            name: one for name, one in found.items() if one is not None
        }


class TestModels:
    """`of_model`."""

    def test_a_model_is_described_and_shared_parameters_count_once(self) -> None:
        """Class, parameters, types and device; parameters that are shared count once."""
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.LayerNorm(4))
        model[0].weight = model[1].weight
        model[1].bias.requires_grad = False
        model[2].to(torch.bfloat16)

        assert {
            "model_class": "Sequential",
            "model_parameters": 16 + 4 + 8,
            "model_trainable": 16 + 8,
            "model_tensors": 4,
            "model_dtype": "bfloat16,float32",
            "model_device": "cpu",
            "model_checkpointing": None,
            "model_compiled": False,
            "model_threads": torch.get_num_threads(),
            "model_strategy": None,
        } == describe.of_model(model)

    def test_compiled_models(self) -> None:
        """A compiled model is described by the one inside."""
        inner, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
        in_place.compile()
        for model in (torch.compile(inner), in_place):
            found = describe.of_model(model)

            assert ("Linear", 6, True) == (
                found["model_class"],
                found["model_parameters"],
                found["model_compiled"],
            )

    def test_what_cannot_be_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A model that is not all there, or too large, has no count rather than a wrong one."""
        lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
        assert describe.of_model(lazy)["model_parameters"] is None

        monkeypatch.setattr(describe, "MAX_PARTS", 3)
        assert describe.of_model(nn.Sequential(nn.ReLU(), nn.ReLU()))["model_parameters"] == 0
        large = describe.of_model(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
        assert (None, "float32") == (large["model_parameters"], large["model_dtype"])

    def test_gradient_checkpointing_is_detected(self) -> None:
        """Gradient checkpointing is seen where a part of the model says so."""
        model: Any = nn.Sequential(nn.Linear(2, 2))
        model[0].gradient_checkpointing = True  # as transformers does

        assert describe.of_model(model)["model_checkpointing"] is True

    def test_tensors_of_other_classes(self) -> None:
        """A tensor that wants to know of every operation does not hear of this."""

        class Loud(torch.Tensor):
            @classmethod
            def __torch_function__(
                cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                raise AssertionError(func)

        model = nn.Linear(2, 2, bias=False)
        with torch._C.DisableTorchFunction():
            model._parameters["weight"] = torch.zeros(2, 3).as_subclass(Loud)  # type: ignore[assignment]

        assert 6 == describe.of_model(model)["model_parameters"]

    def test_data_parallel_is_detected(self) -> None:
        """DataParallel is told, and the model inside described."""
        found = describe.of_model(nn.DataParallel(nn.Linear(2, 2)))

        assert ("Linear", "DataParallel") == (found["model_class"], found["model_strategy"])

    def test_the_wrapper_of_fabric_is_taken_off(self) -> None:
        """Lightning's Fabric wraps every model."""
        fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)

        assert "Linear" == describe.of_model(fabric.setup(nn.Linear(2, 2)))["model_class"]

    def test_ddp_and_fsdp_are_detected(self, tmp_path: Path) -> None:
        """DDP and FSDP are told, and how many processes there are."""
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        try:
            wrapped = describe.of_model(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
            mesh = init_device_mesh("cpu", (1,))
            sharded = describe.of_model(fully_shard(nn.Linear(2, 2), mesh=mesh))
        finally:
            distributed.destroy_process_group()

        assert ("Linear", "DDP", 1) == (
            wrapped["model_class"],
            wrapped["model_strategy"],
            wrapped["world_size"],
        )
        assert ("FSDP2", 6) == (sharded["model_strategy"], sharded["model_parameters"])

    def test_what_is_no_model(self) -> None:
        """Anything else has a class, and no parameters."""
        found = describe.of_model(object())

        assert ("object", 0) == (found["model_class"], found["model_parameters"])


def test_the_precision() -> None:
    """`of_mode` names the type that autocast computes in, where it is on."""
    assert {"autocast": None} == describe.of_mode()
    with torch.autocast("cpu", torch.bfloat16):
        assert {"autocast": "bfloat16"} == describe.of_mode()
        with torch.autocast("cpu", enabled=False):
            assert {"autocast": None} == describe.of_mode()
