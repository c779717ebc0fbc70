# shape: knowledge distillation: a teacher that is trained first, then frozen in eval mode
import torch
import torch.nn.functional as F
from common import Counts, digest, points, result
from torch import nn
from torch.utils.data import DataLoader

counts = Counts()


def train(model, train_loader, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    for _epoch in range(epochs):
        counts["epoch"] += 1
        for inputs, labels in train_loader:
            counts["step"] += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()


def train_knowledge_distillation(teacher, student, train_loader, epochs, T=2.0):  # noqa: N803
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    teacher.eval()
    student.train()
    for _epoch in range(epochs):
        counts["epoch"] += 1
        for inputs, labels in train_loader:
            counts["step"] += 1
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            soft_loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * T**2
            loss = 0.25 * soft_loss + 0.75 * F.cross_entropy(student_logits, labels)
            loss.backward()
            optimizer.step()
            values.append(loss.item())


def test(model, test_loader):
    model.eval()
    counts["evaluation"] += 1
    correct = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            counts["batch"] += 1
            correct += (model(inputs).argmax(1) == labels).sum().item()
    return correct


torch.manual_seed(0)
torch.set_num_threads(1)
train_loader = DataLoader(points(32), batch_size=8, shuffle=True)
test_loader = DataLoader(points(16, seed=1), batch_size=8)
teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
student = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
values = []
train(teacher, train_loader, epochs=2)
values.append(test(teacher, test_loader))
train_knowledge_distillation(teacher, student, train_loader, epochs=2)
values.append(test(student, test_loader))
result(counts, values=values, weights=digest(*student.parameters()))
