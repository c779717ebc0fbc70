"""What a step of about 10 ms costs more under profiling, in the Trainer and in Lightning.

Plain and profiled runs alternate in one process, as do the orders of two neighbours, and every step
is timed from its end to the end of the next, with whatever the framework does between them; each
step is logged. `ratio` is the median over the rounds of that of the median steps, in time;
`cpu_ratio` in CPU time of the training thread, which other programs on the machine change less; the
errors are standard errors. Prints one JSON line.
"""

import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from itertools import pairwise

os.chdir(tempfile.mkdtemp())
warnings.simplefilter("ignore")
import lightning  # noqa: E402  the folder is changed first: profiling writes where it starts
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

torch.set_num_threads(1)
import cirron as ci  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "15"))
STEPS, WIDTH, BATCH, LAYERS = 100, 256, 232, 8
now = time.perf_counter_ns


def layers():
    torch.manual_seed(0)
    parts = [
        part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*parts, torch.nn.Linear(WIDTH, 1))


class Times:
    """The ends of the steps, whoever tells."""

    def __init__(self):
        self.ends = []
        self.cpu = []

    def on_step_end(self, *args, **kwargs):
        self.ends.append(now())
        self.cpu.append(time.thread_time_ns())

    on_train_batch_end = on_step_end


def each_us(ends):
    return [(end - began) / 1000 for began, end in pairwise(ends[10:])]


class TrainerTimes(Times, TrainerCallback):
    pass


class LightningTimes(Times, lightning.Callback):
    pass


class ForTrainer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x, labels):
        logits = self.layers(x).squeeze(-1)
        return {"loss": ((logits - labels) ** 2).mean(), "logits": logits}


class ForLightning(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def training_step(self, batch, batch_idx):
        loss = ((self.layers(batch["x"]).squeeze(-1) - batch["labels"]) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


rows = [{"x": torch.randn(WIDTH), "labels": torch.tensor(1.0)} for _ in range(BATCH * STEPS)]


def run_trainer():
    times = TrainerTimes()
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(ForTrainer(), arguments, train_dataset=rows, callbacks=[times])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return times


def run_lightning():
    times = LightningTimes()
    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[times],
    ).fit(ForLightning(), torch.utils.data.DataLoader(rows, batch_size=BATCH))
    return times


def measure(run):
    run()
    wall, cpu = [], []  # medians of a plain and a profiled run, by round
    for number in range(ROUNDS):
        found = {}
        for is_profiled in ((False, True), (True, False))[number % 2]:
            if is_profiled:
                ci.profile()
            times = run()
            ci.shutdown()
            found[is_profiled] = [
                statistics.median(each_us(ends)) for ends in (times.ends, times.cpu)
            ]
        for kept, *pair in zip((wall, cpu), found[False], found[True], strict=True):
            kept.append(pair)
    return {
        "plain_us": round(statistics.median(plain for plain, _ in wall), 1),
        "added_us": round(statistics.median(other - plain for plain, other in wall), 1),
        **ratio("ratio", wall),
        "added_cpu_us": round(statistics.median(other - plain for plain, other in cpu), 1),
        **ratio("cpu_ratio", cpu),
    }


def ratio(name, pairs):
    found = [profiled / plain for plain, profiled in pairs]
    error = statistics.stdev(found) / len(found) ** 0.5
    return {name: round(statistics.median(found), 4), f"{name}_error": round(error, 4)}


transformers.logging.set_verbosity_error()
for name in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)
print(json.dumps({"trainer": measure(run_trainer), "lightning": measure(run_lightning)}))
