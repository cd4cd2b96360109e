"""Small models with every kind of layer that can be pruned, and a few steps of training."""

import torch
from torch import nn


class Everything(nn.Module):
    """Embedding, attention, convolutions of 1, 2 and 3 dims, transposed ones and linear layers, all trained."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv1 = nn.Conv1d(8, 8, 3, padding=1)
        self.up1 = nn.ConvTranspose1d(8, 12, 1)
        self.conv2 = nn.Conv2d(12, 8, 1)
        self.up2 = nn.ConvTranspose2d(8, 8, 1)
        self.conv3 = nn.Conv3d(8, 8, 1, groups=2)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.up1(self.conv1(x.transpose(1, 2)))
        x = self.up2(self.conv2(x.unsqueeze(-1)))
        x = self.conv3(x.unsqueeze(-1)).flatten(2).mean(2)
        return self.head(self.norm(x))


def tokens(seed=0):
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(seed))


def two_layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))


def train_step(model, optimizer, step=0, width=12):
    """One step on data that depends on nothing but the step's number."""
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
