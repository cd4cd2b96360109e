"""The networks of the model benchmark: encoders, ResNet, MobileNetV2 and an MLP, written out once.

Shapes are those of the published networks. Weights are random, except those of MiniLM where its file is given; times
depend on shapes and masks, not on values.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


class EncoderLayer(nn.Module):
    """A transformer encoder layer, normalised after each half."""

    def __init__(self, width: int, heads: int, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.first, self.second = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, C) for (B, T, C)."""
        b, t, c = x.shape
        q, k, v = (f(x).reshape(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        x = self.first(x + self.out(y))
        z: Tensor = self.second(x + self.down(functional.gelu(self.up(x))))
        return z


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *normed(nn.Conv2d(inputs, width, 1, bias=False), nn.ReLU()),
            *normed(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.ReLU()),
            *normed(nn.Conv2d(width, outputs, 1, bias=False)),
        )
        self.side = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(*normed(nn.Conv2d(inputs, outputs, 1, stride, bias=False)))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways, rectified."""
        return functional.relu(self.body(x) + self.side(x))


class Inverted(nn.Module):
    """An inverted residual of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        first = normed(nn.Conv2d(inputs, hidden, 1, bias=False), nn.ReLU6()) if expand > 1 else []
        self.body = nn.Sequential(
            *first,
            *normed(nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.ReLU6()),
            *normed(nn.Conv2d(hidden, outputs, 1, bias=False)),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of x, plus x where the shapes allow."""
        y: Tensor = self.body(x)
        return x + y if self.adds else y


def normed(conv: nn.Conv2d, *after: nn.Module) -> list[nn.Module]:
    """Return a convolution with its BatchNorm and what follows."""
    return [conv, nn.BatchNorm2d(conv.out_channels), *after]


def encoder(layers: int, width: int, heads: int) -> nn.Module:
    """Return a stack of encoder layers."""
    return nn.Sequential(*[EncoderLayer(width, heads, 4 * width) for _ in range(layers)])


def resnet(blocks: tuple[int, ...], width: int) -> nn.Module:
    """Return a ResNet of bottlenecks."""
    parts: list[nn.Module] = [*normed(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            parts.append(Bottleneck(inputs, width << stage, 2 if stage and block == 0 else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def mobilenet(scale: float) -> nn.Module:
    """Return a MobileNetV2."""
    settings = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    inputs = int(32 * scale)
    parts = normed(nn.Conv2d(3, inputs, 3, 2, 1, bias=False), nn.ReLU6())
    for expand, channels, count, stride in settings:
        for block in range(count):
            outputs = int(channels * scale)
            parts.append(Inverted(inputs, outputs, stride if block == 0 else 1, expand))
            inputs = outputs
    last = int(1280 * scale)
    parts += normed(nn.Conv2d(inputs, last, 1, bias=False), nn.ReLU6())
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 1000))


def mlp(width: int, layers: int) -> nn.Module:
    """Return a chain of linear layers with ReLU."""
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])


class SentenceEncoder(nn.Module):
    """A sentence encoder as all-MiniLM-L6-v2 is one: embeddings, encoder layers, the mean of all tokens, length 1."""

    def __init__(self, layers: int, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(512, width))
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.Sequential(*[EncoderLayer(width, heads, 4 * width, 1e-12) for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (B, C), of length 1, for the numbers of words (B, T)."""
        x = self.layers(self.norm(self.words(tokens) + self.places[: tokens.shape[1]]))
        return functional.normalize(x.mean(1), dim=1)


# Where the parts of a layer stand in the file of a BERT.
_BERT_PARTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "first": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "second": "output.LayerNorm",
}


def load_minilm(model: SentenceEncoder, folder: Path) -> Path:
    """Give a sentence encoder the weights of all-MiniLM-L6-v2 from the first safetensors file below a folder."""
    from safetensors.torch import load_file

    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no .safetensors file below {folder}")
    given = load_file(files[0])
    state = {
        "words.weight": given["embeddings.word_embeddings.weight"],
        # All tokens are of the first type, so its embedding is part of their place's.
        "places": given["embeddings.position_embeddings.weight"] + given["embeddings.token_type_embeddings.weight"][0],
    }
    for kind in ("weight", "bias"):
        state[f"norm.{kind}"] = given[f"embeddings.LayerNorm.{kind}"]
        for number in range(len(model.layers)):
            for name, theirs in _BERT_PARTS.items():
                state[f"layers.{number}.{name}.{kind}"] = given[f"encoder.layer.{number}.{theirs}.{kind}"]
    model.load_state_dict(state)
    return files[0]


def pruned_layers(model: nn.Module) -> list[str]:
    """Return the names of the pruned weights: of whole blocks, not depthwise, not the first of an image model."""
    return [
        f"{name}.weight"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
        and getattr(layer, "groups", 1) == 1
        and all(size % 8 == 0 for size in layer.weight.shape[:2])
    ]
