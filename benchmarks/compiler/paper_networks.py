"""Networks of the SparTA paper that `networks` does not have: MobileNet-v1 and HuBERT-base, by published shapes."""

from __future__ import annotations

import torch
from networks import EncoderLayer, normed
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Hubert", "mobilenet_v1"]

_SEPARABLE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
_WINDOWS = ((10, 5), *[(3, 2)] * 4, (2, 2), (2, 2))  # kernel and stride of the layers that read samples


def mobilenet_v1(scale: float = 1.0) -> nn.Module:
    """Return a MobileNet-v1."""
    inputs = int(32 * scale)
    parts = normed(nn.Conv2d(3, inputs, 3, 2, 1, bias=False), nn.ReLU())
    for channels, stride in _SEPARABLE:
        outputs = int(channels * scale)
        parts += normed(nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False), nn.ReLU())
        parts += normed(nn.Conv2d(inputs, outputs, 1, bias=False), nn.ReLU())
        inputs = outputs
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Hubert(nn.Module):
    """HuBERT: convolutions over samples, positions by a grouped convolution, and encoder layers."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, channels: int = 512) -> None:
        super().__init__()
        inputs = [1, *[channels] * (len(_WINDOWS) - 1)]
        self.windows = nn.ModuleList(
            nn.Conv1d(before, channels, kernel, stride, bias=False)
            for before, (kernel, stride) in zip(inputs, _WINDOWS, strict=True)
        )
        self.group_norm, self.norm = nn.GroupNorm(channels, channels), nn.LayerNorm(channels)
        self.project = nn.Linear(channels, width)
        self.positions = nn.Conv1d(width, width, 128, padding=64, groups=16)
        self.first = nn.LayerNorm(width)
        self.layers = nn.Sequential(*[EncoderLayer(width, heads, 4 * width) for _ in range(layers)])

    def forward(self, samples: Tensor) -> Tensor:
        """Return (B, T, width) for (B, samples)."""
        x = samples.unsqueeze(1)
        for number, window in enumerate(self.windows):
            x = window(x)
            x = functional.gelu(self.group_norm(x) if number == 0 else x)
        x = self.project(self.norm(x.transpose(1, 2)))
        places = functional.gelu(self.positions(x.transpose(1, 2))[:, :, :-1])
        y: Tensor = self.layers(self.first(x + places.transpose(1, 2)))
        return y


def samples(batch: int, count: int) -> Tensor:
    """Return noise as it comes from a microphone."""
    return torch.randn(batch, count)
