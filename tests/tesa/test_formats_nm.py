"""N:M and packed 2:4: exactly n distinct ascending positions a group, and the bit layout that is documented."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import PatternError, ShapeError, ValueRangeError
from sparta.tesa.formats import NMPacked, Packed24


@st.composite
def nm_masks(draw, n=None, m=None):
    m = draw(st.sampled_from([1, 2, 4, 5, 16, 256])) if m is None else m
    n = draw(st.integers(1, m)) if n is None else n
    rows, cols = draw(st.integers(0, 6)), draw(st.integers(0, 21))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    mask = np.zeros((rows, cols), bool)
    for row in mask:
        for start in range(0, cols, m):
            size = min(m, cols - start)
            row[start + rng.permutation(size)[: rng.integers(0, min(n, size) + 1)]] = True
    return torch.from_numpy(mask), n, m


@given(nm_masks())
def test_positions_are_the_live_ones_then_the_lowest_free_ones(case):
    mask, n, m = case
    rows, cols = mask.shape
    packed = NMPacked.pack(torch.ones(rows, cols), mask, n=n, m=m)
    groups = -(-cols // m)
    assert packed.positions.shape == (rows, groups, n)
    assert packed.positions.dtype == torch.uint8
    for row in range(rows):
        for group in range(groups):
            live = [p for p in range(m) if group * m + p < cols and mask[row, group * m + p]]
            free = [p for p in range(m) if p not in live]
            chosen = sorted(live + free[: n - len(live)])
            assert packed.positions[row, group].tolist() == chosen
            assert packed.values[row, group].tolist() == [float(p in live) for p in chosen]
            assert packed.columns()[row, group].tolist() == [group * m + p for p in chosen]


@given(nm_masks(n=2, m=4))
def test_2_4_is_n_m_with_four_bits_a_group(case):
    mask, _, _ = case
    rows, cols = mask.shape
    dense = torch.arange(1.0, 1 + 2 * rows * cols).view(2, rows, cols)
    nm = NMPacked.pack(dense, mask, n=2, m=4)
    packed = Packed24.pack(dense, mask)
    groups = -(-cols // 4)
    assert packed.values.shape == (2, rows, 2 * groups)
    assert packed.metadata.shape == (rows, -(-groups // 2))
    for row in range(rows):
        for group in range(groups):
            nibble = int(packed.metadata[row, group // 2]) >> (4 * (group % 2)) & 15
            assert [nibble & 3, nibble >> 2] == nm.positions[row, group].tolist()
        if groups % 2:
            assert int(packed.metadata[row, -1]) >> 4 == 0
    back = packed.to_nm()
    assert torch.equal(back.values, nm.values)
    assert torch.equal(back.positions, nm.positions)
    assert torch.equal(Packed24.from_nm(nm).metadata, packed.metadata)


def test_a_tail_shorter_than_n_is_filled_beyond_the_edge():
    packed = NMPacked.pack(torch.tensor([[7.0]]), torch.tensor([[True]]), n=2, m=4)
    assert packed.positions.tolist() == [[[0, 1]]]
    assert packed.values.tolist() == [[[7.0, 0.0]]]
    assert packed.unpack().tolist() == [[7.0]]
    assert packed.stored_mask().tolist() == [[True]]


def test_the_largest_group_uses_all_of_a_byte():
    mask = torch.ones(1, 256, dtype=torch.bool)
    packed = NMPacked.pack(torch.arange(256.0).view(1, 256), mask, n=256, m=256)
    assert packed.positions.flatten().tolist() == list(range(256))
    assert NMPacked.from_state(*packed.state()).sum(-1).tolist() == [255 * 128.0]


def test_a_mask_that_breaks_the_pattern_is_refused_where_it_does():
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[1, 4:7] = True
    with pytest.raises(PatternError, match="row 1 keeps 3 of columns 4 to 7; allowed: at most 2 of every 4"):
        NMPacked.pack(torch.ones(3, 10), mask, n=2, m=4)
    with pytest.raises(PatternError, match="row 1 keeps 3"):
        Packed24.pack(torch.ones(3, 10), mask)
    mask = torch.zeros(1, 6, dtype=torch.bool)
    mask[0, 4:] = True
    with pytest.raises(PatternError, match="row 0 keeps 2 of columns 4 to 5"):
        NMPacked.pack(torch.ones(1, 6), mask, n=1, m=4)


@pytest.mark.parametrize(("n", "m"), [(0, 4), (5, 4), (-1, 2), (2, 257), (1, 0)])
def test_n_and_m_are_checked(n, m):
    with pytest.raises(ValueRangeError, match=f"n is {n} and m is {m}"):
        NMPacked.pack(torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.bool), n=n, m=m)


def test_only_2_4_can_be_packed_24():
    packed = NMPacked.pack(torch.ones(1, 8), torch.zeros(1, 8, dtype=torch.bool), n=1, m=4)
    with pytest.raises(PatternError, match="packed 1:4"):
        Packed24.from_nm(packed)


def test_parts_that_do_not_fit_each_other_are_refused():
    with pytest.raises(ShapeError, match="positions have shape"):
        NMPacked(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.uint8), 4, 9)
    with pytest.raises(ShapeError, match="metadata has shape"):
        Packed24(torch.zeros(1, 4), torch.zeros(1, 2, dtype=torch.uint8), 8)
