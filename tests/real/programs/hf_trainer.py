# shape: transformers run_glue.py: Trainer, evaluated and saved each epoch, then predict
import numpy as np
import torch
from common import Counts, digest, result
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

counts = Counts()


class Count(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        counts["epoch"] += 1

    def on_step_end(self, args, state, control, **kwargs):
        counts["step"] += 1

    def on_prediction_step(self, args, state, control, **kwargs):
        counts["batch"] += 1

    def on_evaluate(self, args, state, control, **kwargs):
        counts["evaluation"] += 1

    def on_save(self, args, state, control, **kwargs):
        counts["checkpoint"] += 1


def texts(count):
    ids = torch.randint(1, 20, (count, 6))
    return [{"input_ids": one, "labels": int(one[0] > 9)} for one in ids]


def compute_metrics(predicted):
    return {"accuracy": (np.argmax(predicted.predictions, axis=1) == predicted.label_ids).mean()}


torch.set_num_threads(1)
set_seed(0)
config = BertConfig(
    vocab_size=20,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=8,
)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    num_train_epochs=2,
    learning_rate=1e-2,
    logging_steps=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
model = BertForSequenceClassification(config)
trainer = Trainer(
    model,
    arguments,
    train_dataset=texts(16),
    eval_dataset=texts(12),
    compute_metrics=compute_metrics,
    callbacks=[Count()],
)
trainer.train()
predicted = trainer.predict(texts(4)).predictions
values = [one.get("loss", one.get("eval_loss")) for one in trainer.state.log_history]
result(counts, values=values, predicted=digest(predicted), weights=digest(*model.parameters()))
