"""Packed weights hold what was rounded, each value where the CUDA kernels look for it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError
from sparta.specialize.linear.cuda_24_resident import ResidentTile
from sparta.specialize.linear.cuda_gather import GatherTile
from sparta.specialize.linear.cuda_gather_layout import GatherLayout
from sparta.specialize.scaled_linear.cuda_24 import ScaledResident, ScaledTwoFour, bytes_in_order, nibbles_in_order
from sparta.specialize.scaled_linear.cuda_gather import ScaledGather
from sparta.specialize.scaled_linear.packed import packed_codes
from sparta.specialize.scaled_linear.spec import FP8, codes_of, rounded_weight, scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA


def walked(layout, weight):
    """Return the dense weight that lanes find when they walk over what was packed, and each share's first input."""
    values, distances, places = layout.pack(weight)
    blocks, rows = layout.grid[0], layout.rows
    offsets = places[: blocks + 1]
    outputs = places[blocks + 1 : blocks + 1 + blocks * rows].view(blocks, rows)
    starts = places[blocks + 1 + blocks * rows :].view(blocks, layout.parts, rows)
    dense = torch.zeros(weight.shape, dtype=torch.float64)
    for block in range(blocks):
        steps = int(offsets[block + 1] - offsets[block])
        for part in range(layout.parts):
            for row in range(rows):
                at, output = int(starts[block, part, row]), int(outputs[block, row])
                for step in range(steps * part // layout.parts, steps * (part + 1) // layout.parts):
                    for i in range(8):
                        at += int(distances[int(offsets[block]) + step, row, i])
                        value = float(values[int(offsets[block]) + step, row, i])
                        assert value == 0 or output >= 0
                        if output >= 0:
                            dense[output, at] += value
    return dense


@settings(max_examples=15)
@given(
    st.tuples(st.integers(1, 20), st.integers(1, 700)),
    st.sampled_from([0.0, 0.003, 0.1, 1.0]),
    st.sampled_from([(8, 2), (4, 3), (16, 1)]),
)
def test_lanes_that_walk_find_every_live_value(shape, density, cut):
    mask = torch.rand(shape) < density
    weight = torch.randn(shape).half()
    layout = GatherLayout(TeSA.from_mask(mask), *cut)
    assert torch.equal(walked(layout, weight), torch.where(mask, weight, 0).double())


def test_codes_of_eight_bits_stand_beside_their_distances():
    mask = torch.rand(33, 500) < 0.2
    layout = GatherLayout(TeSA.from_mask(mask), 16, 4)
    codes = torch.randint(1, 255, (33, 500), dtype=torch.uint8)
    records, _, places = layout.pack(codes)
    wide, distances, same = layout.pack(codes.short())
    assert torch.equal(places, same)
    assert torch.equal(records[:, :, 0], distances)
    assert torch.equal(records[:, :, 1].short(), wide)
    with pytest.raises(ShapeError):
        layout.pack(torch.zeros(33, 500))


def test_lanes_find_bytes_and_nibbles():
    values = torch.randint(0, 16, (2, 3, 4, 32, 8), dtype=torch.uint8)
    words = bytes_in_order(values).view(torch.int32).to(torch.int64) & 0xFFFFFFFF  # slab, chunk, piece, lane, 4
    nibbles = nibbles_in_order(values).view(torch.int32).to(torch.int64) & 0xFFFFFFFF  # slab, chunk, lane, 4
    for multiply in range(4):
        for pair in range(4):
            word = words[:, :, multiply // 2, :, multiply % 2 * 2 + pair // 2]
            word = word << (8 * (pair % 2))
            low, high = word >> 8 & 0xFF, word >> 24 & 0xFF
            assert torch.equal(low, values[:, :, multiply, :, 2 * pair].long())
            assert torch.equal(high, values[:, :, multiply, :, 2 * pair + 1].long())
            word = nibbles[..., multiply] >> (4 * pair)
            assert torch.equal(word & 0xF, values[:, :, multiply, :, 2 * pair].long())
            assert torch.equal(word >> 16 & 0xF, values[:, :, multiply, :, 2 * pair + 1].long())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", [FP8, "int8"])
def test_widening_in_registers_gives_the_rounded_weight(format, dtype):
    """What ``native/few_bits.cuh`` does to a byte, here by the same bits and the same multiplication."""
    weight = torch.randn(8, 64) * torch.logspace(-4, 1, 64)
    tesa = scaled_weight(weight, format=format)
    codes, scales = packed_codes(weight, tesa, dtype)
    half = dtype == torch.float16
    shift = 8 if format == "int8" else 1 if half else 4
    mask = 0x007F if format == "int8" else 0x3F80 if half else 0x07F0
    power = 2.0**15 if half and format == "int8" else 2.0**8 if half else 2.0**120
    upper = codes.to(torch.int32) << 8
    bits = (upper & 0x8000) | (upper >> shift & mask)
    signed = torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(dtype)
    widened = (signed.double() * power).to(dtype)
    assert torch.equal((widened.double() * scales.double()).float(), rounded_weight(weight, tesa))


def test_a_row_with_a_nan_has_it_as_its_scale():
    weight = torch.randn(4, 16)
    weight[1, 3], weight[2, 4] = torch.nan, torch.inf
    tesa = scaled_weight(weight)
    codes, scales = packed_codes(weight, tesa, torch.bfloat16)
    assert scales.isnan()[:, 0].tolist() == [False, True, True, False]
    assert not (codes & 0x7F == 0x7F).any()
    assert codes_of(weight, tesa)[0].float().isnan().sum() == 2


def test_what_does_not_fit_is_refused_with_a_reason():
    weight = torch.randn(32, 256)
    mask = torch.tensor([True, False, True, False]).repeat(32, 64)
    two_four = TeSA.from_mask(mask)

    def reason(implement, tesa, rows=1, dtype=torch.bfloat16, **given):
        answer = implement.supports(scaled_linear_spec(tesa, rows, dtype, **given))
        assert not answer
        return answer.reason

    assert "groups of 64" in reason(ScaledTwoFour(), scaled_weight(weight, two_four, group=64))
    assert "100 tokens" in reason(ScaledTwoFour(), scaled_weight(weight, two_four), 100)
    assert "more than 2" in reason(ScaledTwoFour(), scaled_weight(weight))
    assert "fp32" in reason(ScaledTwoFour(), scaled_weight(weight, two_four), dtype=torch.float32)
    assert "too few to share" in reason(ScaledResident(), scaled_weight(weight, two_four))
    assert "whole rows" in reason(ScaledGather(), scaled_weight(weight, two_four, group=128))
    assert "int4" in reason(ScaledGather(), scaled_weight(weight, two_four, "int4"))
    assert "0.50 of the weight is live" in reason(ScaledGather(), scaled_weight(weight, two_four))
    assert not ResidentTile(16, warps=16).fits(14336)
    assert GatherTile(4).shared_bytes(30000) > 227 * 1024 > GatherTile(2).shared_bytes(30000)
