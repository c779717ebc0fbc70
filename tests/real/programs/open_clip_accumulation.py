# shape: open_clip: features of several batches without gradients, then each batch again with them
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

ACCUMULATE = 3
counts = Counts()
torch.manual_seed(0)
torch.set_num_threads(1)
loader = DataLoader(points(48), batch_size=8)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))

    def forward(self, x):
        return F.normalize(self.image(x)), F.normalize(self.text(x))


model = Clip()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _epoch in range(2):
    counts["epoch"] += 1
    model.train()
    inputs, images, texts = [], [], []
    for number, (x, _) in enumerate(loader):
        counts["data_load"] += 1
        with torch.no_grad():
            image, text = model(x)
            images.append(image)
            texts.append(text)
        inputs.append(x)
        if (number + 1) % ACCUMULATE:
            continue
        optimizer.zero_grad()
        for place, x in enumerate(inputs):
            image, text = model(x)
            all_images = torch.cat([*images[:place], image, *images[place + 1 :]])
            all_texts = torch.cat([*texts[:place], text, *texts[place + 1 :]])
            loss = F.cross_entropy(all_images @ all_texts.T, torch.arange(len(all_images)))
            loss.backward()
            counts["backward"] += 1
            losses.append(loss.item())
        optimizer.step()
        counts["step"] += 1
        counts["optimizer_step"] += 1
        inputs, images, texts = [], [], []
result(counts, losses=losses, weights=digest(*model.parameters()))
