# shape: accelerate examples: prepare, accumulate, gather_for_metrics, save_state
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import Counts, digest, points, result
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

counts = Counts()


def training_function(epochs=2):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    train_loader = DataLoader(points(56), batch_size=8, shuffle=True)
    eval_loader = DataLoader(points(24, seed=1), batch_size=8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=epochs * len(train_loader))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    criterion = nn.CrossEntropyLoss()
    values = []
    for epoch in range(epochs):
        counts["epoch"] += 1
        model.train()
        total_loss = 0.0
        for x, y in train_loader:
            with accelerator.accumulate(model):
                loss = criterion(model(x), y)
                total_loss += loss.detach().item()
                accelerator.backward(loss)
                counts["backward"] += 1
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    counts["step"] += 1
                    counts["optimizer_step"] += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        counts["evaluation"] += 1
        model.eval()
        correct = 0
        for x, y in eval_loader:
            counts["batch"] += 1
            with torch.no_grad():
                outputs = model(x)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(-1), y))
            correct += (predictions == references).sum().item()
        values += [total_loss, correct]
        counts["checkpoint"] += 1
        accelerator.save_state(f"epoch_{epoch}")
    accelerator.end_training()
    return values, accelerator.unwrap_model(model)


torch.set_num_threads(1)
values, model = training_function()
result(counts, values=values, weights=digest(*model.parameters()))
