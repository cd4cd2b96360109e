"""Packed weights hold what was rounded, each value where the CUDA kernels look for it."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.specialize.linear.cuda_24_resident import ResidentTile
from sparta.specialize.linear.cuda_gather import GatherTile
from sparta.specialize.linear.cuda_gather_layout import GatherLayout, spread_of
from sparta.specialize.scaled_linear.cuda_24 import ScaledResident, ScaledTwoFour, bytes_in_order, nibbles_in_order
from sparta.specialize.scaled_linear.cuda_gather import ScaledGather
from sparta.specialize.scaled_linear.packed import packed_codes
from sparta.specialize.scaled_linear.spec import FP8, codes_of, rounded_weight, scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA


def walked(layout, weight):
    """Return the dense weight that lanes find when they walk around the ring as the kernel does, and the banks."""
    values, distances, places = layout.pack(weight)
    blocks, rows, inputs = layout.grid[0], layout.rows, weight.shape[1]
    if layout.nibbles:
        distances = torch.stack([distances & 15, distances >> 4], 3).flatten(2)
    values, distances = values.tolist(), distances.tolist()
    offsets = places[: blocks + 1].tolist()
    outputs = places[blocks + 1 : blocks + 1 + blocks * rows].view(blocks, rows).tolist()
    starts = places[blocks + 1 + blocks * rows :].view(blocks, layout.parts, rows).tolist()
    spread, around = spread_of(inputs), 128 * spread_of(inputs) - 4
    dense = torch.zeros(weight.shape, dtype=torch.float64)
    looks = []
    for block in range(blocks):
        steps = offsets[block + 1] - offsets[block]
        for part in range(layout.parts):
            for row in range(rows):
                at, output, path = starts[block][part][row], outputs[block][row], []
                assert at < around
                for step in range(steps * part // layout.parts, steps * (part + 1) // layout.parts):
                    for i in range(layout.step):
                        at += 128 * distances[offsets[block] + step][row][i]
                        at -= around if at >= around else 0
                        assert at < around  # once around at most
                        path.append(at // 4 % 32)
                        value = values[offsets[block] + step][row][i]
                        assert value == 0 or output >= 0
                        if value:
                            dense[output, at % 128 // 4 * spread + at // 128] += value  # by bank, then by row
                looks.append(path)
    return dense, looks


@settings(max_examples=12, deadline=None)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 700)),
    st.sampled_from([0.0, 0.003, 0.1, 1.0]),
    st.sampled_from([(8, 4), (16, 2), (32, 3), (64, 1)]),
    st.booleans(),
)
def test_lanes_that_walk_find_every_live_value(shape, density, cut, nibbles):
    mask = torch.rand(shape) < density
    weight = torch.randint(1, 100, shape, dtype=torch.uint8)
    layout = GatherLayout(TeSA.from_mask(mask), *cut, nibbles)
    dense, _ = walked(layout, weight if nibbles else weight.short())
    assert torch.equal(dense, torch.where(mask, weight, 0).double())


@pytest.mark.parametrize(("density", "nibbles"), [(0.3, True), (0.1, False)])
def test_lanes_look_into_different_banks(density, nibbles):
    torch.manual_seed(0)
    mask = torch.rand(32, 8192) < density
    layout = GatherLayout(TeSA.from_mask(mask), 32, 8, nibbles)
    _, looks = walked(layout, torch.ones(32, 8192, dtype=torch.uint8 if nibbles else torch.int16))
    waits = [
        max(Counter(banks).values())
        for part in range(8)
        for banks in zip(*looks[32 * part : 32 * part + 32], strict=True)
    ]
    assert sum(waits) / len(waits) < 2.9  # at random it would be 3.5


def test_codes_of_eight_bits_stand_beside_their_distances():
    mask = torch.rand(33, 500) < 0.2
    layout = GatherLayout(TeSA.from_mask(mask), 32, 4)
    codes = torch.randint(1, 255, (33, 500), dtype=torch.uint8)
    records, _, places = layout.pack(codes)
    wide, distances, same = layout.pack(codes.short())
    assert torch.equal(places, same)
    assert torch.equal(records[:, :, 0], distances)
    assert torch.equal(records[:, :, 1].short(), wide)
    with pytest.raises(ShapeError):
        layout.pack(torch.zeros(33, 500))
    with pytest.raises(ShapeError, match="8 bits"):
        GatherLayout(TeSA.from_mask(mask), 32, 4, nibbles=True).pack(codes.short())
    with pytest.raises(ValueRangeError, match="divide 32"):
        GatherLayout(TeSA.from_mask(mask), 12, 4)


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
