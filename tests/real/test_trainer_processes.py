"""The Trainer and Lightning in processes of their own: two ranks, and every framework at once."""

from __future__ import annotations

import os
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

TRAINER = """
    import torch
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, x, labels):
            logits = self.linear(x).squeeze(-1)
            return {"loss": ((logits - labels) ** 2).mean(), "logits": logits}

    def train():
        rows = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(8)]
        arguments = TrainingArguments(
            output_dir="out", per_device_train_batch_size=2, per_device_eval_batch_size=2,
            num_train_epochs=2, report_to=[], disable_tqdm=True, use_cpu=True,
            eval_strategy="epoch", save_strategy="epoch",
        )
        Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows).train()
"""
LIGHTNING = """
    import torch
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return (self.linear(batch[0]) ** 2).mean()

        validation_step = training_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(**options):
        data = torch.utils.data.TensorDataset(torch.randn(8, 4))
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir="out", **options
        ).fit(Model(), loader, loader)
"""
TWO_RANKS = {
    "transformers": TRAINER + "\n    import cirron as ci\n    ci.profile()\n    train()\n",
    "lightning": LIGHTNING
    + "\n    import cirron as ci\n    ci.profile()\n    train(devices=2, strategy='ddp')\n",
}

LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    # On CPUs it would want MPI; what it does for GPUs works there as well.
    "accelerate": [
        *("accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2"),
        *("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
    ],
}


def children(spans: list[wire.Span], parent: wire.Span) -> list[wire.Span]:
    found = [span for span in spans if span.parent_id == parent.id]
    return sorted(found, key=lambda span: span.start_ns)


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [("transformers", "torchrun"), ("transformers", "accelerate"), ("lightning", "torchrun")],
)
def test_two_ranks(tmp_path: Path, kind: str, launcher: str) -> None:
    """Under a launcher each rank has its epochs, its half of the steps, and its evaluations."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TWO_RANKS[kind]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *LAUNCHERS[launcher], str(script)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert 0 == done.returncode, done.stderr
    assert "internal error" not in done.stderr

    ranks = {run.spans[0].rank: run.spans for run in spools.read(tmp_path / ".cirron")}
    assert {0, 1} == set(ranks)
    for spans in ranks.values():
        (root,) = (span for span in spans if span.parent_id is None)
        epochs = [span for span in children(spans, root) if span.name == "epoch"]
        assert [0, 1] == [span.index for span in epochs]
        assert 2 == sum(span.name == "epoch" for span in spans)
        for epoch in epochs:
            names = [span.name for span in children(spans, epoch)]
            assert ["step", "step", "evaluation", "checkpoint"] == names
            evaluation = children(spans, epoch)[2]
            assert ["batch", "batch"] == [span.name for span in children(spans, evaluation)]


def test_every_framework_at_once(scripts: Scripts) -> None:
    """With all of them imported, each way to train has its own epochs and steps, and no more."""
    ended = scripts.run(
        f"""
        import os, warnings
        os.environ["KERAS_BACKEND"] = "torch"
        warnings.simplefilter("ignore")
        import cirron as ci
        ci.profile(output="none")
        import jax, keras, sklearn, pytorch_lightning

        def show(name):
            epochs = ci.trace(format="dict", name="epoch")["roots"]
            steps = [
                sum(one["name"] in ("step", "batch") for one in epoch["children"])
                for epoch in epochs
            ]
            print(name, [epoch["index"] for epoch in epochs], steps)
            ci.shutdown()
            ci.profile(output="none")

        def part_transformers():
{textwrap.indent(textwrap.dedent(TRAINER), " " * 12)}
            train()

        def part_lightning():
{textwrap.indent(textwrap.dedent(LIGHTNING), " " * 12)}
            train()

        def part_keras():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile(optimizer="sgd", loss="mse")
            x = torch.randn(8, 4).numpy()
            model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, validation_data=(x, x[:, :1]))

        def part_torch():
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
            for _ in range(2):
                for batch in loader:
                    model(batch).mean().backward()
                    optimizer.step()

        import torch
        for part in (part_torch, part_transformers, part_lightning, part_keras, part_torch):
            part()
            show(part.__name__)
        """,
        timeout_s=100,
    )
    said = [line for line in ended.out.splitlines() if line.startswith("part_")]

    assert 0 == ended.status, ended.err
    names = ("torch", "transformers", "lightning", "keras", "torch")
    assert [f"part_{name} [0, 1] [4, 4]" for name in names] == said


@pytest.mark.parametrize("name", ["transformers", "lightning", "pytorch_lightning"])
def test_nothing_is_imported(scripts: Scripts, name: str) -> None:
    """A session imports no framework, not even one that was asked for by name."""
    ended = scripts.run(f"""
        import sys
        import cirron as ci

        ci.profile(output="none", frameworks=["{name}"])
        print([name for name in ("transformers", "lightning", "pytorch_lightning", "torch")
               if name in sys.modules], ci.health()["frameworks_installed"])
    """)

    assert (0, "", "[] []\n") == (ended.status, ended.err, ended.out)


def test_a_framework_that_trains_nothing(scripts: Scripts) -> None:
    """Transformers without its Trainer is no framework that trains: the loop is torch's."""
    ended = scripts.run("""
        import warnings
        warnings.simplefilter("ignore")
        import torch
        from transformers import BertConfig, BertModel
        import cirron as ci

        ci.profile(output="none")
        model = BertModel(BertConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
            intermediate_size=8,
        ))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in torch.utils.data.DataLoader(torch.ones(4, 3, dtype=int), batch_size=2):
            model(batch).last_hidden_state.mean().backward()
            optimizer.step()
        print(ci.health()["frameworks_installed"])
        ci.flush()
        (root,) = ci.trace(format="dict")["roots"]
        print(root["attrs"]["framework"], [one["name"] for one in root["children"]])
    """)

    assert (0, "['torch']\ntorch ['epoch']\n") == (ended.status, ended.out), ended.err
