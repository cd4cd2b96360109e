"""Joining and meeting TeSAs: a lattice, stated law by law."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import ShapeError
from sparta.tesa.attribute import TeSA
from strategies import shapes_with_empty, tesas

pairs = shapes_with_empty.flatmap(lambda s: st.tuples(tesas(s), tesas(s)))
triples = shapes_with_empty.flatmap(lambda s: st.tuples(tesas(s), tesas(s), tesas(s)))


@given(pairs)
def test_commutative(pair):
    a, b = pair
    assert a | b == b | a
    assert a & b == b & a
    assert (a | b).digest == (b | a).digest


@given(triples)
def test_associative(triple):
    a, b, c = triple
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)


@given(tesas())
def test_idempotent(a):
    assert a | a == a
    assert a & a == a


@given(pairs)
def test_absorbing(pair):
    a, b = pair
    assert a | (a & b) == a
    assert a & (a | b) == a


@given(triples)
def test_monotone(triple):
    a, b, c = triple
    lower = a & b
    assert lower <= a
    assert a <= a | b
    assert lower | c <= a | c
    assert lower & c <= a & c


@given(pairs)
def test_join_is_the_union_of_the_pruned_and_the_minimum_of_the_bits(pair):
    a, b = pair
    joined, met = a | b, a & b
    assert torch.equal(joined.mask(), a.mask() & b.mask())
    assert torch.equal(joined.code.dense(), torch.minimum(a.code.dense(), b.code.dense()))
    assert torch.equal(met.code.dense(), torch.maximum(a.code.dense(), b.code.dense()))
    assert not bool((met.mask() & ~(a.mask() | b.mask()) & (a.conflicts(b) == 0)).any())


@given(pairs)
def test_elements_follow_the_order_live_constant_dead(pair):
    a, b = pair
    both = zip(a.states().flatten().tolist(), b.states().flatten().tolist(), strict=True)
    values = zip(a.values().flatten().tolist(), b.values().flatten().tolist(), strict=True)
    joined = (a | b).states().flatten().tolist()
    for (s, t), (v, w), result in zip(both, values, joined, strict=True):
        clash = s == t == 1 and v != w
        assert result == (2 if clash else max(s, t))


def test_two_constants_join_to_dead_and_meet_to_live_and_are_a_conflict():
    zero, one = TeSA.constant((2, 3), 0), TeSA.constant((2, 3), 1)
    assert zero | one == TeSA.dead((2, 3))
    assert zero & one == TeSA.dense((2, 3))
    assert zero.conflicts(one) == 6
    assert zero.conflicts(zero) == 0
    assert zero.conflicts(TeSA.dead((2, 3))) == 0


def test_nan_is_one_constant():
    nan = TeSA.constant((2,), math.nan)
    assert nan == TeSA.constant((2,), math.nan)
    assert nan | nan == nan


def test_known_scales_win_over_unknown_and_different_ones_are_a_conflict():
    plain = TeSA.dense((4, 8)).with_format("int8")
    coarse, fine = plain.with_format("int8", scale=0.5), plain.with_format("int8", scale=0.25)
    assert plain | coarse == coarse
    assert plain.conflicts(coarse) == 0
    assert coarse | fine == fine
    assert coarse.conflicts(fine) == 32


def test_other_shapes_and_other_dynamic_dims_are_refused():
    with pytest.raises(ShapeError, match="one tensor"):
        TeSA.dense((2, 3)) | TeSA.dense((3, 2))
    with pytest.raises(ShapeError, match="dynamic"):
        TeSA.dense((2, 3), dynamic=[0]) & TeSA.dense((2, 3))
