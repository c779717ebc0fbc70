# shape: Lightning: validation, test, accumulated gradients, sanity check, checkpoints
import lightning as L
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x):
        return self.net(x)

    def on_train_epoch_start(self):
        counts["epoch"] += 1

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer):
        counts["step"] += 1

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        counts["batch"] += 1
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def on_validation_epoch_start(self):
        counts["evaluation"] += 1

    def test_step(self, batch, batch_idx):
        x, y = batch
        counts["batch"] += 1
        self.log("test_acc", (self(x).argmax(1) == y).float().mean())

    def on_test_epoch_start(self):
        counts["evaluation"] += 1

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


torch.set_num_threads(1)
L.seed_everything(0)
train_loader = DataLoader(points(48), batch_size=8, shuffle=True)
val_loader = DataLoader(points(24, seed=1), batch_size=8)
model = Classifier()
trainer = L.Trainer(
    max_epochs=2,
    accumulate_grad_batches=2,
    accelerator="cpu",
    logger=False,
    log_every_n_steps=1,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, train_loader, val_loader)
values = {name: value.item() for name, value in trainer.callback_metrics.items()}
tested = trainer.test(model, val_loader, verbose=False)
result(counts, values=values, tested=tested, weights=digest(*model.parameters()))
