"""Lightning: one line, and each epoch, step, validation and checkpoint is a span."""

import lightning
import torch

import cirron as ci

ci.profile()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        )

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.log("accuracy", (self.layers(inputs).argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
training, validation = torch.utils.data.random_split(data, [48, 16])
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    log_every_n_steps=1,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    Classifier(),
    torch.utils.data.DataLoader(training, batch_size=8),
    torch.utils.data.DataLoader(validation, batch_size=8),
)

ci.trace(name="epoch")
