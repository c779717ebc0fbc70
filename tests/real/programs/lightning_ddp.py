# shape: Lightning on DDP, with a validation after each epoch
# heavy
import lightning as L
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch.utils.data import DataLoader

counts = Counts()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
        )

    def training_step(self, batch, batch_idx):
        counts["step"] += 1
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        counts["batch"] += 1
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self):
        counts["epoch"] += 1

    def on_validation_epoch_start(self):
        counts["evaluation"] += 1


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(model, DataLoader(points(), batch_size=16), DataLoader(points(32), batch_size=16))
    result(counts, weights=digest(*model.state_dict().values()))
