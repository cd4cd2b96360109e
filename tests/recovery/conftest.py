"""Small pruned models with their dense selves."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import sparta


class Residual(nn.Module):
    """A block of a chain."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """An embedding, three blocks and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Residual(16) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, ids, attention_mask=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


@pytest.fixture
def pruned():
    """Return a model pruned to 2:4, its dense self, its spec and batches."""
    torch.manual_seed(0)
    teacher = Blocks()
    model = deepcopy(teacher)
    spec = sparta.Spec.from_pattern(model, "2:4", include="blocks.*.weight", ignore="*norm*")
    spec.apply(model)
    batches = [{"ids": torch.randint(0, 32, (4, 8))} for _ in range(6)]
    return model, teacher, spec, batches
