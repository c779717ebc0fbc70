# shape: Lightning: validation in the middle of an accumulated gradient; accumulation by hand
import lightning as L
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class Classifier(L.LightningModule):
    def __init__(self, *, by_hand):
        super().__init__()
        self.automatic_optimization = not by_hand
        self.net = nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            self.manual_backward(loss / 2)
            if (batch_idx + 1) % 2 == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()
                counts["optimizer_step"] += 1
        return loss

    def validation_step(self, batch, batch_idx):
        counts["batch"] += 1
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_start(self):
        counts["evaluation"] += 1

    def on_before_optimizer_step(self, optimizer):
        counts["optimizer_step"] += self.automatic_optimization

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model, **settings):
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(model, DataLoader(points(40), batch_size=8), DataLoader(points(16), batch_size=8))
    counts["epoch"] += 1


torch.set_num_threads(1)
L.seed_everything(0)
automatic, by_hand = Classifier(by_hand=False), Classifier(by_hand=True)
fit(automatic, accumulate_grad_batches=2, val_check_interval=3)
fit(by_hand)
weights = digest(*automatic.parameters(), *by_hand.parameters())
result(counts, weights=weights)
