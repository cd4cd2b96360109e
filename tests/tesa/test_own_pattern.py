"""A pattern from outside the package: one class and one registration, and everything takes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from sparta.create.variables import RecipeVariables
from sparta.errors import NameNotFoundError, PatternError, ValueRangeError
from sparta.sparsify import Global, Magnitude, Sparsifier, find_layers, make_masks
from sparta.tesa import Pattern, Spec, TeSA, as_pattern
from sparta.tesa.patterns import Block, base, register


@dataclass(frozen=True)
class Stripes(Pattern):
    """Runs of `width` rows are kept or pruned as one."""

    width: int = 2
    unit: ClassVar[str] = "stripe"
    spelling: ClassVar[str] = r"stripes:(?P<width>\d+)"
    example: ClassVar[str] = "stripes:2"

    def __str__(self) -> str:
        return f"stripes:{self.width}"

    def check_shape(self, shape: Sequence[int]) -> None:
        assert shape[0] % self.width == 0

    def unit_count(self, shape: Sequence[int]) -> int:
        return shape[0] // self.width

    def spread(self, kept: Tensor, shape: Sequence[int]) -> Tensor:
        rows = kept.repeat_interleave(self.width)
        return rows.view(-1, *[1] * (len(shape) - 1)).expand(tuple(shape)).contiguous()

    @property
    def _rule(self) -> str:
        return "stripes that are kept whole or pruned whole"

    def _unit_means(self, score: Tensor) -> Tensor:
        return score.reshape(self.unit_count(score.shape), -1).mean(1)

    def _broken_units(self, mask: Tensor) -> Tensor:
        stripes = mask.reshape(self.unit_count(mask.shape), -1)
        return (stripes.any(1) ^ stripes.all(1)).view(-1, *[1] * (mask.dim() - 1))


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    register("stripes")(Stripes)


def test_it_has_a_text_form_and_a_dictionary():
    assert as_pattern("stripes:4") == Stripes(4) == as_pattern(Stripes(4))
    assert Pattern.from_dict(Stripes(4).to_dict()) == Stripes(4)
    with pytest.raises(NameNotFoundError, match="stripes:2"):
        as_pattern("unknown")


def test_it_projects_and_validates():
    mask = Stripes(2).project(torch.arange(24.0).reshape(6, 4), 1 / 3)
    assert mask.any(1).tolist() == [False, False, True, True, True, True]
    Stripes(2).validate(mask)
    with pytest.raises(PatternError, match="stripe"):
        Stripes(4).validate(torch.cat([mask, mask[:2]]))


def test_specs_masks_sparsifiers_and_recipes_take_it_by_name():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    assert Spec.from_pattern(model, "stripes:2", 0.5).density == 0.5
    assert TeSA.from_pattern("stripes:2", torch.rand(4, 4), 0.5).density == 0.5
    layers = find_layers(model)
    for name, mask in make_masks(layers, Magnitude(), "stripes:2", 0.5, Global()).items():
        assert Stripes(2).holds(mask), name
    sparsifier = Sparsifier(model, 0.5, pattern="stripes:2")
    sparsifier.update(0.5)
    assert all(Stripes(2).holds(mask) for mask in sparsifier.masks.to_dict().values())
    assert RecipeVariables(mask_type="stripes:2").pattern == Stripes(2)
    assert RecipeVariables(mask_type=Stripes(2)).pattern == Stripes(2)


def test_what_is_no_pattern_is_refused_with_the_forms_that_are():
    with pytest.raises(ValueRangeError, match=r"'block:4x4'.*'2:4'.*'stripes:2'"):
        as_pattern((4, 1))


@pytest.mark.parametrize("pattern", ["2:4", "16:2:8"])
@pytest.mark.parametrize("sparsity", [0.3, 0.9])
def test_a_spec_with_a_sparsity_that_the_pattern_cannot_have_is_an_error(pattern, sparsity):
    model = nn.Linear(16, 16)
    with pytest.raises(ValueRangeError, match="leave the sparsity out"):
        Spec.from_pattern(model, pattern, sparsity)


def test_the_pattern_s_own_sparsity_may_be_said():
    model = nn.Linear(16, 16)
    assert Spec.from_pattern(model, "2:4", 0.5) == Spec.from_pattern(model, "2:4")
    assert Spec.from_pattern(model, "4x1", 0.5) == Spec.from_pattern(model, Block(4, 1), 0.5)
