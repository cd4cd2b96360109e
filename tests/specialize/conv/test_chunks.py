"""Convolutions of one tap that copy channels chunk by chunk: against float64, whatever the strides and the threads."""

import copy

import pytest
import torch
from torch.nn import functional

from sparta.specialize.conv.cpu_chunks import CHUNKS
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.spec import ConvGeometry, dense_conv
from sparta.specialize.cpu import runnable_isas
from sparta.specialize.cpu.tile import Tile
from sparta.testing import check

ONE_TAP = ConvGeometry.make(2)
TILES = (
    Tile(),
    Tile(mv=4, interleave=2, k_chunk=16),
    Tile(mv=7, interleave=4, k_chunk=5),
    Tile(mv=5, interleave=4),
    Tile(block=4, mv=3, k_chunk=9),
    Tile(block=8, mv=2, prefetch=4),
)


def problem(channels, size, density=0.3):
    """An input, a weight, and its mask, with dead rows and dead channels."""
    mask = (torch.rand(10, channels, 1, 1) < density).repeat_interleave(4, 0)
    mask[8:12], mask[:, 1] = False, False
    return torch.randn(2, channels, *size), torch.randn(40, channels, 1, 1), mask


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("channels", "size"), [(18, (14, 14)), (35, (7, 7)), (6, (1, 3)), (8, (16, 15)), (4, (1, 1))])
def test_chunks_give_what_the_dense_convolution_gives(isa, tile, channels, size):
    x, weight, mask = problem(channels, size)
    x[:, 1] = torch.nan  # copied, and multiplied with nothing
    bias, residual = torch.randn(40), torch.randn(2, 40, *size)
    packed = PackedConv(weight, mask, ONE_TAP, image=CHUNKS, isa=isa, **tile.to_dict())
    assert packed._plan((1, size[0] * size[1]), 1, contiguous=True).image.by_chunks
    known = x.nan_to_num(0.0).double()
    exact = dense_conv(known, torch.where(mask, weight.double(), 0.0), bias.double(), ONE_TAP)
    for activation, after in ((None, lambda y: y), ("relu_last", functional.relu), ("gelu", None)):
        truth = functional.gelu(exact) + residual.double() if after is None else after(exact + residual.double())
        results = [packed(x, bias, activation, residual, threads=threads) for threads in (1, 2, 3)]
        check(results[0], truth, reduction=128)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("layout", ["channels last", "off the line", "every second image", "no image"])
def test_other_strides_and_addresses(layout):
    x, weight, mask = problem(16, (14, 14))
    packed = PackedConv(weight, mask, ONE_TAP, image=CHUNKS, mv=5, interleave=4, k_chunk=7)
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "off the line":
        x = torch.cat([torch.zeros(3), x.reshape(-1)])[3:].view(x.shape)
    elif layout == "no image":
        x = x[:0]
    else:
        x = torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0]
    check(packed(x), dense_conv(x.double(), torch.where(mask, weight.double(), 0.0), None, ONE_TAP), reduction=128)


def test_layers_with_several_taps_groups_or_strides_are_copied_as_bands():
    for geometry in (ConvGeometry.make(2, padding=1), ConvGeometry.make(2, stride=2), ConvGeometry.make(2, groups=2)):
        weight, x = torch.randn(8, 8 // geometry.groups, 3, 3), torch.randn(1, 8, 9, 9)
        packed = PackedConv(weight, weight > 0, geometry, image=CHUNKS, mv=4, interleave=2)
        assert not packed._plan((9, 9), 1, contiguous=True).image.by_chunks
        check(packed(x), dense_conv(x.double(), weight.clamp_min(0.0).double(), None, geometry), reduction=128)


def test_values_of_another_weight_and_copies():
    x, weight, mask = problem(16, (14, 14))
    packed = PackedConv(None, mask, ONE_TAP, image=CHUNKS, block=4, mv=2, k_chunk=8)
    other = torch.where(mask, torch.randn_like(weight), torch.nan)
    truth = dense_conv(x.double(), torch.where(mask, other.double(), 0.0), None, ONE_TAP)
    for each in (packed, copy.deepcopy(packed)):
        check(each(x, values=each.pack(other)), truth, reduction=128)
    assert packed.fixed((14, 14), 1).numbers["direct"] == 0
