"""Convolutions of one tap that read channels by their phases: against float64, and without a byte beyond the image."""

import copy

import pytest
import torch
from torch.nn import functional

from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.cpu_phases import PHASES
from sparta.specialize.conv.spec import ConvGeometry, dense_conv
from sparta.specialize.cpu import runnable_isas
from sparta.specialize.cpu.tile import Tile
from sparta.testing import check

ONE_TAP = ConvGeometry.make(2)
TILES = (
    Tile(),
    Tile(mv=4, interleave=2),
    Tile(mv=7, interleave=4),
    Tile(block=4, mv=3),
    Tile(block=8, mv=2, prefetch=4),
)


def problem(channels, size, density=0.3):
    """An input, a weight, and its mask, with dead rows and dead channels."""
    mask = (torch.rand(10, channels, 1, 1) < density).repeat_interleave(4, 0)
    mask[8:12], mask[:, 1] = False, False
    return torch.randn(2, channels, *size), torch.randn(40, channels, 1, 1), mask


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("channels", "size", "phases"),
    [
        (8, (14, 14), True),
        (68, (6, 6), True),
        (4, (4, 4), True),
        (12, (2, 10), True),
        (8, (8, 8), True),  # all begin on lines
        (8, (2, 6), False),  # less than a line
        (8, (5, 5), False),
        (6, (14, 14), False),
    ],
)
def test_phases_give_what_the_dense_convolution_gives(isa, tile, channels, size, phases):
    x, weight, mask = problem(channels, size)
    bias, residual = torch.randn(40), torch.randn(2, 40, *size)
    packed = PackedConv(weight, mask, ONE_TAP, image=PHASES, isa=isa, **tile.to_dict())
    plan = packed._plan((1, size[0] * size[1]), 1, contiguous=True)
    assert plan.image.by_phases == phases
    exact = dense_conv(x.double(), torch.where(mask, weight.double(), 0.0), bias.double(), ONE_TAP)
    for activation, after in ((None, lambda y: y), ("relu_last", functional.relu), ("gelu", None)):
        truth = functional.gelu(exact) + residual.double() if after is None else after(exact + residual.double())
        results = [packed(x, bias, activation, residual, threads=threads) for threads in (1, 2, 3)]
        check(results[0], truth, reduction=128)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_read_early_or_late_reaches_no_pixel(value):
    x, weight, mask = problem(16, (14, 14))
    mask[:, 5] = False
    x[:, 5] = value  # before and behind channels that are read
    packed = PackedConv(weight, mask, ONE_TAP, image=PHASES, mv=7, interleave=4)
    truth = dense_conv(x.nan_to_num(0.0, 0.0).double(), torch.where(mask, weight.double(), 0.0), None, ONE_TAP)
    for _ in range(2):  # whatever the first call left behind
        check(packed(x), truth, reduction=128)
    x[0, 2, 3, 3] = value
    mask = mask.clone()
    y = packed(x)
    assert bool(y[0, :, 3, 3][mask[:, 2, 0, 0]].isfinite().logical_not().all())
    assert int(y.isfinite().logical_not().sum()) == int(mask[:, 2].sum())


@pytest.mark.parametrize("layout", ["channels last", "off the line", "every second image"])
def test_other_strides_and_addresses(layout):
    x, weight, mask = problem(16, (14, 14))
    packed = PackedConv(weight, mask, ONE_TAP, image=PHASES, mv=5, interleave=4)
    truth = dense_conv(x.double(), torch.where(mask, weight.double(), 0.0), None, ONE_TAP)
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "off the line":
        x = torch.cat([torch.zeros(3), x.reshape(-1)])[3:].view(x.shape)
    else:
        x = torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0]
    check(packed(x), truth, reduction=128)


def test_values_of_another_weight_and_copies():
    x, weight, mask = problem(16, (14, 14))
    packed = PackedConv(None, mask, ONE_TAP, image=PHASES, block=4, mv=2)
    other = torch.where(mask, torch.randn_like(weight), torch.nan)
    truth = dense_conv(x.double(), torch.where(mask, other.double(), 0.0), None, ONE_TAP)
    for each in (packed, copy.deepcopy(packed)):
        check(each(x, values=each.pack(other)), truth, reduction=128)
    fixed = packed.fixed((14, 14), 1)
    assert fixed.numbers["direct"] == 0  # elsewhere, the image is copied


def test_groups_that_no_quad_fits_take_narrower_tiles_of_two_rows():
    geometry, weight, x = ConvGeometry.make(2, groups=3), torch.randn(9, 2, 1, 1), torch.randn(1, 6, 12, 12)
    packed = PackedConv(weight, weight > 0, geometry, mv=7, interleave=4)
    assert (packed.tile.mv, packed.tile.interleave) == (4, 2)
    check(packed(x), dense_conv(x.double(), weight.clamp_min(0.0).double(), None, geometry), reduction=128)
