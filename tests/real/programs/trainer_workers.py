# shape: Trainer with dataloader_num_workers, whose workers stop in the last fetch of an epoch
import torch
from common import Counts, digest, result
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

counts = Counts()


class Count(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        counts["epoch"] += 1

    def on_step_end(self, args, state, control, **kwargs):
        counts["step"] += 1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}


torch.set_num_threads(1)
set_seed(0)
rows = [{"x": torch.randn(4), "labels": number % 2} for number in range(12)]
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    dataloader_num_workers=1,
    logging_strategy="no",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
model = Net()
Trainer(model, arguments, train_dataset=rows, callbacks=[Count()]).train()
result(counts, weights=digest(*model.parameters()))
