"""Bit rounding loses nothing, and the parts of a split add up to the tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import ValueRangeError
from sparta.tesa.attribute import TeSA
from sparta.tesa.bits import bit_format
from sparta.tesa.rounding import round_bits, roundings, split_bits

widths = st.lists(st.sampled_from([0, 4, 7, 8, 16, 32]), min_size=6, max_size=6)


@st.composite
def mixed(draw):
    return TeSA.from_bits(torch.tensor(draw(widths)).reshape(2, 3))


@given(mixed())
def test_rounding_holds_every_element_and_moves_no_zero(tesa):
    rounded = round_bits(tesa, ["int8", "fp16", "fp32"])
    assert torch.equal(rounded.mask(), tesa.mask())
    for before, after in zip(tesa.code.dense().flatten(), rounded.code.dense().flatten(), strict=True):
        from sparta.tesa.bits import FORMATS

        if FORMATS[before].kind != "any":
            assert FORMATS[after].holds(FORMATS[before])
            assert FORMATS[after].name in {"int8", "fp16", "fp32"}


@given(mixed(), st.integers(0, 2**31))
def test_parts_have_one_format_and_sum_to_the_tensor(tesa, seed):
    parts = split_bits(tesa)
    assert all(len(p.formats()) <= 1 for p in parts)
    weight = tesa.apply(torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)))
    assert torch.equal(sum(p.apply(weight) for p in parts), weight)
    assert sum(p.count("live") for p in parts) == tesa.count("live")


def test_alternatives_are_every_useful_choice_of_formats():
    tesa = TeSA.from_bits(torch.tensor([[4, 8], [0, 4]]))
    ways = roundings(tesa, ["int4", "int8", "fp32"])
    names = [tuple(p.format.name for p in way) for way in ways]
    assert names == [("int8",), ("fp32",), ("int4", "int8"), ("int4", "fp32")]
    assert [len(way) for way in roundings(tesa, ["int8"], most=1)] == [1]
    assert roundings(TeSA.constant((2,), 0), ["int8"]) == [(TeSA.constant((2,), 0),)]


def test_constants_stay_in_one_part():
    tesa = TeSA.from_bits(torch.tensor([4, 8, 0])) | TeSA.from_mask(torch.tensor([1, 1, 0]))
    shifted = TeSA.cat([tesa, TeSA.constant((1,), 5.0)])
    parts = split_bits(shifted)
    assert sum(p.apply(torch.zeros(4)) for p in parts).tolist() == [0.0, 0.0, 0.0, 5.0]


def test_what_no_format_holds_is_refused():
    with pytest.raises(ValueRangeError, match="wider"):
        round_bits(TeSA.dense((2,), format="fp32"), ["int8", "fp16"])
    with pytest.raises(ValueRangeError, match="with_format"):
        round_bits(TeSA.dense((2,)), ["int8"])
    with pytest.raises(ValueRangeError, match="at least 1"):
        roundings(TeSA.dense((2,), format="fp32"), [bit_format("fp32")], most=0)
