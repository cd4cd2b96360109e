"""Tiles, layouts and candidates: packing loses nothing, and what is proposed fits the mask and the machine."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.specialize.linear.triton_block.candidates import candidates, coverage
from sparta.specialize.linear.triton_block.layout import BlockLayout, kept_grid
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask

CPU = torch.device("cpu")
SIZES = st.sampled_from([16, 32, 64, 128])


def unpacked(layout, values):
    """Put the blocks back by the index that the kernel reads."""
    tile, index = layout.tile, layout.index(CPU)
    rows, columns = layout.grid
    dense = torch.zeros(rows * tile.height, (columns + 1) * tile.width, dtype=values.dtype)
    for row, begin, end, first in index.schedule.tolist():
        assert begin == end or first == index.columns[begin * tile.blocks]
        for place in range(begin * tile.blocks, end * tile.blocks):
            k, lane = int(index.columns[place]), place % tile.blocks * tile.width
            block = values[place // tile.blocks, :, lane : lane + tile.width]
            dense[row * tile.height : (row + 1) * tile.height, k : k + tile.width] += block
    assert not dense[:, columns * tile.width :].any()
    return dense[: layout.weight.shape[0], : layout.weight.shape[1]]


@given(
    st.tuples(st.integers(1, 150), st.integers(1, 150)),
    st.tuples(SIZES, SIZES, st.sampled_from([1, 2, 4])),
    st.sampled_from([(1, 1), (16, 16), (32, 64), (7, 5)]),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_packing_keeps_every_live_weight_and_nothing_else(shape, tile, block, sparsity):
    mask = block_mask(shape, tuple(min(b, s) for b, s in zip(block, shape, strict=True)), sparsity)
    weight = torch.where(mask, torch.randn(shape), torch.nan)
    layout = BlockLayout(TeSA.from_mask(mask), BlockTile(16, *tile))
    assert torch.equal(unpacked(layout, layout.values(weight)), torch.where(mask, weight, 0.0))


def test_long_rows_are_scheduled_first_and_equal_ones_in_order():
    mask = block_mask((16 * 40, 16 * 40), (16, 16), 0.7, seed=3)
    schedule = BlockLayout(TeSA.from_mask(mask), BlockTile(16, 16, 16)).index(CPU).schedule
    lengths = schedule[:, 2] - schedule[:, 1]
    assert bool((lengths.diff() <= 0).all())
    assert sorted(schedule[:, 0].tolist()) == list(range(40))
    same = lengths.diff() == 0
    assert bool((schedule[:, 0].diff()[same] > 0).all())


def test_a_transposed_weight_is_packed_like_its_copy():
    mask = block_mask((96, 64), (32, 16), 0.5, seed=0)
    weight = torch.randn(64, 96).t()
    layout = BlockLayout(TeSA.from_mask(mask), BlockTile(16, 32, 16, 2))
    assert torch.equal(layout.values(weight), layout.values(weight.contiguous()))
    with pytest.raises(ShapeError, match="as when built"):
        layout.values(weight.t())


@given(st.integers(1, 100), st.integers(1, 100), st.sampled_from([0.0, 0.6, 0.97, 1.0]))
def test_coverage_is_what_the_kept_blocks_cover(rows, columns, sparsity):
    tesa = TeSA.from_mask(block_mask((rows, columns), (1, 1), sparsity))
    for block, covered in coverage(tesa, list(itertools.product((16, 64), (32, 128)))).items():
        assert covered == pytest.approx(float(kept_grid(tesa, block).float().mean()))


@pytest.mark.parametrize("tokens", [1, 16, 20, 64, 128, 1000, 16384])
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (64, 64), (128, 128), (64, 16), (1, 1)])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("tma", [True, False])
def test_candidates_are_few_fit_and_parse(tokens, block, itemsize, tma):
    tesa = TeSA.from_mask(block_mask((512, 1024), block, 0.9, seed=1))
    tiles = candidates(tesa, tokens, itemsize, tma=tma)
    assert 1 <= len(tiles) <= 12
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert BlockTile.parse(str(tile)) == tile
        assert tile.shared_bytes(itemsize) <= 227 * 1024
        assert tma or not tile.tma


@pytest.mark.parametrize("block", [32, 64, 128])
def test_for_many_tokens_the_first_guess_stores_the_masks_own_blocks(block):
    tesa = TeSA.from_mask(block_mask((1024, 1024), (block, block), 0.9, seed=1))
    first = candidates(tesa, 8192, 2, tma=True)[0]
    assert first.height == block
    assert coverage(tesa, [(first.height, first.width)])[first.height, first.width] == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tokens": 24}, "tokens is 24"),
        ({"height": 8}, "height is 8"),
        ({"blocks": 3}, "blocks is 3"),
        ({"warps": 3}, "warps is 3"),
        ({"tma": 3}, "tma is 3"),
        ({"stages": 0}, "stages=0"),
        ({"group": 0}, "group=0"),
    ],
)
def test_wrong_tiles_say_what_is_allowed(fields, text):
    with pytest.raises(ValueRangeError, match=text):
        BlockTile(**fields)


@pytest.mark.parametrize("text", ["", "tokens=x", "tokns=16", "tokens"])
def test_wrong_texts_are_no_tiles(text):
    with pytest.raises(ValueRangeError, match="the tile"):
        BlockTile.parse(text)
