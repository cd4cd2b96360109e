"""`sparta.prune` given what it does not take: every error names what is wrong."""

import math

import pytest
import torch
from torch import nn

import sparta
from oneshot.models import Loose, make, same, tokens
from sparta.errors import (
    ArgumentError,
    NameNotFoundError,
    ShapeError,
    ValueRangeError,
)
from sparta.oneshot import prune
from sparta.oneshot.targets import Target


def test_data_that_is_no_batches():
    with pytest.raises(ValueRangeError, match="no batch"):
        prune(make(), [], "2:4")
    spent = iter(tokens())
    list(spent)
    with pytest.raises(ValueRangeError, match="used before"):
        prune(make(), spent, "2:4")
    with pytest.raises(ArgumentError, match="list with the batch"):
        prune(make(), tokens()[0], "2:4")
    with pytest.raises(ArgumentError):
        prune(make(), 5, "2:4")


def test_batches_that_the_model_does_not_take():
    with pytest.raises(ValueRangeError, match=r"batch 0 .*tuple of 3"):
        prune(make(), [(tokens()[0], 1.0, 2)], "2:4")
    with pytest.raises(ValueRangeError, match=r"batch 1 .*dict of words"):
        prune(make(), [tokens()[0], {"words": tokens()[0]}], "2:4")
    with pytest.raises(ArgumentError, match="batch 0 is a str"):
        prune(make(), ["text"], "2:4")


def test_activations_that_are_not_finite_name_the_layer():
    model = make()
    model.layers[1].norm.weight.data[0] = math.nan
    with pytest.raises(ValueRangeError, match=r"layers\.1\.attention\.q\.weight"):
        prune(model, tokens(), "2:4")


def test_a_pattern_that_does_not_fit_names_the_layer_before_anything_runs():
    model, dense = make(), make()
    with pytest.raises(ShapeError, match=r"enter\.weight"):
        prune(model, tokens(), "32x1", 0.5)
    assert same(model, dense)


def test_names_that_are_unknown():
    for arguments in ({"method": "alsp"}, {"allocation": "unifrom"}, {"refine": "blok"}, {"ignore": "layer.*"}):
        with pytest.raises(NameNotFoundError):
            prune(make(), tokens(), "2:4", **arguments)
    with pytest.raises(NameNotFoundError, match="no weight to prune"):
        prune(nn.LayerNorm(4), None)


def test_methods_that_need_data_and_sparsities_that_do_not_fit():
    with pytest.raises(ValueRangeError, match="without data"):
        prune(make(), None, method="wanda")
    with pytest.raises(ValueRangeError, match="without data"):
        prune(make(), None, refine="block")
    with pytest.raises(ValueRangeError, match="no sparsity"):
        prune(make(), None, "4x1")
    with pytest.raises(ValueRangeError):
        prune(make(), None, "2:4", 0.9)
    with pytest.raises(ValueRangeError, match="allocation"):
        prune(make(), None, "2:4", allocation="erk")
    with pytest.raises(ValueRangeError, match="chain of blocks"):
        prune(make(Loose), [torch.randn(4, 8)], refine="block")


def test_methods_name_the_layer_they_cannot_prune():
    with pytest.raises(sparta.errors.PatternError, match=r"enter\.weight: method 'obc'"):
        prune(make(), tokens(), "4:1:4", method="obc")


def test_a_target_says_what_it_was_called_with():
    target = Target("a.weight", nn.Linear(2, 2))
    with pytest.raises(ShapeError, match=r"a\.weight was called with"):
        target.inputs((), {"x": 3})
