"""Modules in the place of dense ones: the state stays that of the dense model, unless zeros do not tell the mask."""

import pytest
import torch
from torch import nn

import sparta
from sparta.nn import SparseConv2d, SparseLinear, swap


def pruned():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 6))
    sparta.Spec.from_pattern(model, sparta.Unstructured(), 0.75).apply(model)
    return model


def test_the_state_of_a_swapped_model_is_that_of_the_dense_one():
    model, same = pruned(), pruned()
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert sorted(swap(model)) == ["0", "3"]
    assert list(model.state_dict()) == list(dense)
    same.load_state_dict(model.state_dict())
    again = pruned()
    masks = [layer.weight_mask for layer in swap(again).values()]
    again.load_state_dict(dense)
    x = torch.randn(2, 4, 4, 4)
    assert torch.equal(again(x), model(x))
    assert torch.equal(same(x), model(x))
    for layer, before in zip((again[0], again[3]), masks, strict=True):
        assert torch.equal(layer.weight_mask, layer.weight != 0)
        assert not torch.equal(layer.weight_mask, before)


@pytest.mark.parametrize(
    "made",
    [
        lambda mask: SparseLinear(nn.Linear(6, 5), weight_mask=mask),
        lambda mask: SparseConv2d(nn.Conv2d(6, 5, 1), mask[:, :, None, None]),
    ],
)
def test_a_live_weight_that_is_zero_stays_live(made):
    mask = torch.rand(5, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    layer, other = made(mask), made(~mask)
    with torch.no_grad():
        layer.weight[layer.weight_mask] = 0.0
    assert "weight_mask" in layer.state_dict()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight_mask, layer.weight_mask)


def test_another_mask_than_the_tuned_one_undoes_tuning_and_the_same_does_not():
    mask = torch.rand(5, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    layer, other = (SparseLinear(nn.Linear(6, 5), weight_mask=kept) for kept in (mask, ~mask))
    layer.build(torch.randn(3, 6), {"_name": "dense"})
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
    assert layer.ready
    layer.load_state_dict(other.state_dict())
    assert not layer.ready
    assert torch.equal(layer.weight_mask, ~mask)


def test_an_older_state_that_has_the_mask_is_read():
    mask = torch.rand(5, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    layer, other = (SparseLinear(nn.Linear(6, 5), weight_mask=kept) for kept in (mask, ~mask))
    other.load_state_dict({**layer.state_dict(), "weight_mask": mask})
    assert torch.equal(other.weight_mask, mask)


def test_a_mask_that_does_not_fit_leaves_the_module_as_it_was():
    mask = torch.ones(5, 6, dtype=torch.bool)
    layer = SparseLinear(nn.Linear(6, 5), weight_mask=mask)
    with pytest.raises(sparta.errors.ShapeError):
        layer.update_mask(input_mask=torch.ones(3, 5))
    assert torch.equal(layer.weight_mask, mask)
    assert layer(torch.randn(2, 6)).shape == (2, 5)
