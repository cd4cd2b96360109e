"""A CNN and a transformer, both small, with batches for them; shared by the tests of quantization."""

import torch
from torch import nn


def make_cnn():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


class SmallTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def make_transformer():
    torch.manual_seed(1)
    return SmallTransformer()


NETS = {
    "cnn": (make_cnn, lambda n, seed: torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))),
    "transformer": (
        make_transformer,
        lambda n, seed: torch.randint(0, 20, (n, 6), generator=torch.Generator().manual_seed(seed)),
    ),
}


def train(model, batch_of, optimizer, steps, first=0):
    """Train on made-up data, the same at the same step."""
    model.train()
    for step in range(first, first + steps):
        optimizer.zero_grad()
        outputs = model(batch_of(8, step))
        targets = torch.randint(0, 4, (8,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(outputs.float(), targets).backward()
        optimizer.step()
