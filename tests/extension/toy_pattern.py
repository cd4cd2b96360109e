"""A pattern of one's own: pairs of neighbours in a row are kept or pruned together, by name, with scores and counts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import sparta
from sparta.errors import ShapeError, message
from sparta.tesa.patterns.base import register


@register("pairs")
@dataclass(frozen=True)
class Pairs(sparta.Pattern):
    """Elements 2i and 2i + 1 of a row are both kept or both pruned."""

    unit: ClassVar[str] = "pair"
    spelling: ClassVar[str] = "pairs"
    example: ClassVar[str] = "pairs"

    def __str__(self):
        return "pairs"

    def check_shape(self, shape):
        if not shape or shape[-1] % 2:
            raise ShapeError(message(f"shape {tuple(shape)}", "an even last dim"))

    def unit_count(self, shape):
        return torch.Size(shape).numel() // 2

    def spread(self, kept, shape):
        return kept.reshape(*shape[:-1], -1).repeat_interleave(2, -1)

    @property
    def _rule(self):
        return "pairs that are kept or pruned together"

    def _unit_means(self, score):
        return score.unflatten(-1, (-1, 2)).mean(-1)

    def _broken_units(self, mask):
        self.check_shape(mask.shape)
        pairs = mask.unflatten(-1, (-1, 2))
        return pairs[..., 0] != pairs[..., 1]

    def _unit_steps(self, ndim):
        return [1] * (ndim - 1) + [2]


def main():
    model = nn.Linear(16, 8)
    spec = sparta.Spec.from_pattern(model, Pairs(), 0.5)
    spec.apply(model)
    mask = model.weight != 0
    assert mask.float().mean() == 0.5
    Pairs().validate(mask)
    assert sparta.tesa.parse_pattern("pairs") == Pairs()
    sparsifier = sparta.sparsify.Sparsifier(nn.Linear(16, 8), 0.5, pattern="pairs")
    assert sparsifier is not None
