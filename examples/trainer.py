"""The transformers Trainer: one line, and each epoch, step, evaluation and checkpoint is a span."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import cirron as ci

ci.profile()

model = BertForSequenceClassification(
    BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
)
texts = torch.randint(0, 100, (64, 8))
rows = [{"input_ids": text, "labels": int(text[0]) % 2} for text in texts]
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir="checkpoints",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        disable_tqdm=True,
        report_to=[],
    ),
    train_dataset=rows[:48],
    eval_dataset=rows[48:],
)
trainer.train()

ci.trace(name="epoch")
