"""The SparTA paper's models (BERT-base, MobileNet-v1, HuBERT-base, by published shapes) and what is pruned of them.

Channels are pruned by zeros alone: rows of the layers that one other layer reads, and the values of whole heads, from
which propagation finds that their queries and keys are not needed either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from networks import EncoderLayer, encoder, normed
from torch import Tensor, nn
from torch.nn import functional

import sparta

__all__ = ["MODELS", "PATTERNS", "Hubert", "mobilenet_v1", "pruned"]

_SEPARABLE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
_WINDOWS = ((10, 5), *[(3, 2)] * 4, (2, 2), (2, 2))  # kernel and stride of the layers that read samples
_BLOCK, _KEPT_BLOCKS, _KEPT_BESIDE = 16, 0.1, 0.02
PATTERNS = ("channels", "unstructured 95 %", "channels, int8", "int8 blocks and a remainder")


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


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Callable[[int, bool], Tensor]]] = {
    "BERT-base": (
        lambda: encoder(12, 768, 12),
        lambda: encoder(1, 64, 4),
        lambda b, quick: torch.randn(b, 16 if quick else 128, 64 if quick else 768),
    ),
    "MobileNet-v1": (
        mobilenet_v1,
        lambda: mobilenet_v1(0.25),
        lambda b, quick: torch.randn(b, 3, 64 if quick else 224, 64 if quick else 224),
    ),
    "HuBERT-base": (
        Hubert,
        lambda: Hubert(1, 64, 4, 32),
        lambda b, quick: torch.randn(b, 2000 if quick else 16000),
    ),
}
"""By name: the model, a small one, and inputs of so many examples."""


def pruned(dense: nn.Module, pattern: str) -> tuple[nn.Module, sparta.Spec | None]:
    """Return a pruned copy, and its spec where that says more than its zeros."""
    model = copy.deepcopy(dense)
    if pattern.startswith("channels"):
        _prune_channels(model)
        return model, None
    layers = [name for name, module in model.named_modules() if _wide(module)]
    if pattern.startswith("unstructured"):
        spec = sparta.Spec.from_pattern(
            model, sparta.Unstructured(), 0.95, include=[f"{name}.weight" for name in layers]
        )
    else:
        spec = sparta.Spec({f"{name}.weight": sparta.TeSA.from_mask(_mixed(model, name)) for name in layers})
    spec.apply(model)
    return model, spec


def _prune_channels(model: nn.Module) -> None:
    """Set half of the channels to zero that one other layer reads, and the values of half of the heads."""
    names = [name for name, module in model.named_modules() if _first_of_a_pair(name, module)]
    spec = sparta.Spec.from_pattern(model, sparta.Channel(0), 0.5, include=[f"{name}.weight" for name in names])
    spec.apply(model)
    with torch.no_grad():
        for name in names:
            module = model.get_submodule(name)
            bias = getattr(module, "bias", None)
            if bias is not None:
                bias.mul_(module.weight.flatten(1).any(1))  # type: ignore[union-attr,operator]
        for layer in (module for module in model.modules() if isinstance(module, EncoderLayer)):
            heads = layer.value.weight.view(layer.heads, -1)
            lost = heads.square().sum(1).argsort()[: layer.heads // 2]
            heads[lost] = 0.0
            layer.value.bias.view(layer.heads, -1)[lost] = 0.0


def _first_of_a_pair(name: str, module: nn.Module) -> bool:
    """Whether a layer's output channels are read by one other layer alone, so that pruned ones can be cut."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.out_channels % 8 == 0
    return name.endswith(".up") or (isinstance(module, nn.Conv1d) and module.groups == 1)


def _wide(module: nn.Module) -> bool:
    layer = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))
    return layer and getattr(module, "groups", 1) == 1 and min(module.weight.shape[:2]) >= _BLOCK  # type: ignore[union-attr]


def _mixed(model: nn.Module, name: str) -> Tensor:
    """Return a mask: the largest blocks, and of the rest the largest single weights."""
    weight = model.get_submodule(name).weight.detach().abs()  # type: ignore[union-attr,operator]
    size = weight.flatten(1)
    rows, columns = (-(-n // _BLOCK) * _BLOCK for n in size.shape)
    whole = torch.zeros(rows, columns)
    whole[: size.shape[0], : size.shape[1]] = size
    blocks = whole.view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK).sum((1, 3))
    kept = blocks >= blocks.flatten().kthvalue(max(1, int((1 - _KEPT_BLOCKS) * blocks.numel()))).values
    inside = kept.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[: size.shape[0], : size.shape[1]]
    rest = torch.where(inside, 0.0, size)
    beside = rest > rest.flatten().kthvalue(max(1, int((1 - _KEPT_BESIDE) * rest.numel()))).values
    return (inside | beside).view(weight.shape)
