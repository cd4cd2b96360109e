"""A small CNN and a small transformer, their data, and steps of training that depend on nothing but their number."""

import torch
from torch import nn


class CNN(nn.Module):
    """Two convolutions with batch norm, two linear layers."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv1(x)))
        x = torch.relu(self.conv2(x)).mean((2, 3))
        return self.fc2(torch.relu(self.fc1(x)))

    @staticmethod
    def batch(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(6, 4, 5, 5, generator=generator), torch.randint(0, 4, (6,), generator=generator)


class Transformer(nn.Module):
    """An embedding, one encoder layer with attention, a head."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))

    @staticmethod
    def batch(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, 11, (6, 5), generator=generator), torch.randint(0, 4, (6,), generator=generator)


MODELS = {"cnn": CNN, "transformer": Transformer}


def loss_of(model, step=0, wrapped=None):
    inputs, targets = model.batch(step)
    return nn.functional.cross_entropy((wrapped or model)(inputs), targets)


def take_steps(model, optimizer, count, first=0, wrapped=None):
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss_of(model, step, wrapped).backward()
        optimizer.step()


def prunable(model):
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and "embedding" not in name
    }


def sparsity(model):
    weights = prunable(model).values()
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
