# shape: Lightning's GAN: manual optimization, two optimizers in one training_step
import lightning as L
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch, batch_idx):
        counts["step"] += 1
        real, _ = batch
        g_opt, d_opt = self.optimizers()
        z = torch.randn(len(real), 4)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(g_opt)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), ones)
        self.manual_backward(g_loss)
        g_opt.step()
        g_opt.zero_grad()
        self.untoggle_optimizer(g_opt)
        counts["optimizer_step"] += 1

        self.toggle_optimizer(d_opt)
        real_loss = self.adversarial_loss(self.discriminator(real), ones)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), zeros)
        d_loss = (real_loss + fake_loss) / 2
        self.manual_backward(d_loss)
        d_opt.step()
        d_opt.zero_grad()
        self.untoggle_optimizer(d_opt)
        counts["optimizer_step"] += 1
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        counts["epoch"] += 1

    def configure_optimizers(self):
        g_opt = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        d_opt = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return [g_opt, d_opt], []


torch.set_num_threads(1)
L.seed_everything(0)
model = GAN()
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    log_every_n_steps=2,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(points(32), batch_size=8, shuffle=True))
values = {name: value.item() for name, value in trainer.callback_metrics.items()}
result(counts, values=values, weights=digest(*model.parameters()))
