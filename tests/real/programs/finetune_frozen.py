# shape: the transfer learning tutorial of PyTorch: phases train and val, frozen features, best kept
import os
from tempfile import TemporaryDirectory

import torch
from common import Counts, digest, points, result
from torch import nn, optim
from torch.utils.data import DataLoader

counts = Counts()


def train_model(model, criterion, optimizer, scheduler, num_epochs):
    with TemporaryDirectory() as tempdir:
        best_model_params_path = os.path.join(tempdir, "best_model_params.pt")
        counts["checkpoint"] += 1
        torch.save(model.state_dict(), best_model_params_path)
        best_acc = 0.0
        for _epoch in range(num_epochs):
            for phase in ["train", "val"]:
                if phase == "train":
                    model.train()
                else:
                    model.eval()
                counts["epoch" if phase == "train" else "evaluation"] += 1
                running_corrects = 0
                for inputs, labels in dataloaders[phase]:
                    counts["step" if phase == "train" else "batch"] += 1
                    optimizer.zero_grad()
                    with torch.set_grad_enabled(phase == "train"):
                        outputs = model(inputs)
                        loss = criterion(outputs, labels)
                        if phase == "train":
                            loss.backward()
                            optimizer.step()
                    values.append(loss.item())
                    running_corrects += torch.sum(outputs.argmax(1) == labels.data).item()
                if phase == "train":
                    scheduler.step()
                if phase == "val" and running_corrects > best_acc:
                    best_acc = running_corrects
                    counts["checkpoint"] += 1
                    torch.save(model.state_dict(), best_model_params_path)
        model.load_state_dict(torch.load(best_model_params_path, weights_only=True))
    return model


torch.manual_seed(0)
torch.set_num_threads(1)
dataloaders = {
    "train": DataLoader(points(32), batch_size=8, shuffle=True),
    "val": DataLoader(points(16, seed=1), batch_size=8),
}
model = nn.Sequential()
model.add_module("features", nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()))
for param in model.parameters():
    param.requires_grad = False
model.add_module("fc", nn.Linear(16, 4))
values = []
optimizer = optim.SGD(model.fc.parameters(), lr=0.1, momentum=0.9)
scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
model = train_model(model, nn.CrossEntropyLoss(), optimizer, scheduler, num_epochs=3)
result(counts, values=values, weights=digest(*model.state_dict().values()))
