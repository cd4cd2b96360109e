"""The lists of a mask say exactly what the mask says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ValueRangeError
from sparta.specialize.attention.tile import AttentionTile
from sparta.specialize.blocks.attention_lists import attention_lists, covered


def mask_of(bounds, entries, patterns, shape, tile, *, by_key):
    """Walk over the lists and write down what they keep; queries beyond the last may be anything."""
    groups, rows, columns = (shape[0], *(-(-size // t) for size, t in zip(shape[1:], tile, strict=True)))
    kept = torch.zeros(groups, rows * tile[0], columns * tile[1], dtype=torch.bool)
    lines = columns if by_key else rows
    for place, (own, begin, whole, end) in enumerate(bounds.tolist()):
        for at in range(begin, end):
            met, number = entries[at].tolist()
            i, j = (met, own) if by_key else (own, met)
            content = patterns[number].bool() if at >= whole else torch.ones(tile, dtype=torch.bool)
            target = kept[place // lines, i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
            assert not target.any()  # no tile twice
            target |= content
    return kept[:, : shape[1]]


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 3), st.integers(0, 50), st.integers(0, 50)),
    st.sampled_from([(16, 16), (32, 16), (16, 64)]),
    st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]),
    st.sampled_from([1, 16]),
)
def test_both_walks_keep_what_the_mask_keeps(shape, tile, density, block):
    coarse = torch.rand(shape[0], -(-shape[1] // block), -(-shape[2] // block)) < density
    mask = coarse.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, : shape[1], : shape[2]]
    lists = attention_lists(mask, tile)
    for bounds, entries, by_key in (
        (lists.query_bounds, lists.query_entries, False),
        (lists.key_bounds, lists.key_entries, True),
    ):
        kept = mask_of(bounds, entries, lists.patterns, shape, tile, by_key=by_key)
        assert torch.equal(kept[:, :, : shape[2]], mask)
        assert not kept[:, :, shape[2] :].any()
    assert lists.longest == max((end - begin for _, begin, _, end in lists.query_bounds.tolist()), default=0)


def test_a_causal_mask_of_any_length_has_one_pattern():
    for size in (64, 100, 256):
        lists = attention_lists(torch.ones(1, size, size, dtype=torch.bool).tril(), (16, 16))
        assert len(lists.patterns) == 1 + (size % 16 > 0)
        assert lists.unclean == 0


def test_longest_lists_come_first():
    lists = attention_lists(torch.ones(2, 80, 80, dtype=torch.bool).tril(), (16, 16))
    lengths = (lists.query_bounds[:, 3] - lists.query_bounds[:, 1]).reshape(2, 5)
    assert lengths.tolist() == [[5, 4, 3, 2, 1]] * 2


def test_what_nobody_sees_is_noted_only_where_it_is_read():
    mask = torch.ones(1, 64, 64, dtype=torch.bool)
    mask[:, :, 32:] = False  # whole tiles: never read
    assert attention_lists(mask, (16, 16)).unclean == 0
    mask[:, :, 3] = False
    assert attention_lists(mask, (16, 16)).unclean == 1
    mask[:, 5] = False
    assert attention_lists(mask, (16, 16)).unclean == 3


def test_covered_counts_tiles_with_anything_live():
    mask = torch.zeros(1, 64, 64, dtype=torch.bool)
    mask[0, 20, 20] = True
    assert covered(mask, (16, 16)) == 1 / 16
    assert covered(mask, (64, 32)) == 1 / 2
    assert covered(mask[:, :0], (16, 16)) == 0


@pytest.mark.parametrize(
    "text", ["queries=24", "keys=8", "warps=3", "tma=2", "stages=0", "size=3", "queries=x", "queries"]
)
def test_a_wrong_tile_says_what_is_allowed(text):
    with pytest.raises(ValueRangeError):
        AttentionTile.parse(text)
