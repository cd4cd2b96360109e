"""Small models that the tests of one-shot pruning share."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, scale=1.0):
        x = x + scale * self.attention(self.norm(x))
        return (x + self.down(torch.relu(self.up(self.norm2(x)))),)


class Model(nn.Module):
    """A small language model: embedding, blocks that give tuples, a tied head."""

    def __init__(self, width=16, layers=2, words=20):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.enter = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens, scale=1.0):
        x = self.enter(self.embed(tokens))
        for layer in self.layers:
            x = layer(x, scale=scale)[0]
        return self.lm_head(x)


class Loose(nn.Module):
    """No chain: two branches over one input."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.c(torch.relu(self.a(x)) + torch.tanh(self.b(x)))


def tokens(batches=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 20, (4, 9), generator=generator) for _ in range(batches)]


def make(kind=Model, seed=0):
    torch.manual_seed(seed)
    return kind()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
