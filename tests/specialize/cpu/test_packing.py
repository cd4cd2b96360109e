"""Layouts of masks, and the tiles that ask for them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, ShapeError, SpartaError, ValueRangeError
from sparta.specialize.cpu import candidates, default, runnable_isas
from sparta.specialize.cpu.packing import BLOCK_ROWS, QUAD_ROWS, pack_mask
from sparta.specialize.cpu.tile import Tile
from specialize.kernel_strategies import tiles, weight_masks

ISAS = st.sampled_from(runnable_isas())


@given(weight_masks(), tiles(), st.sampled_from([4, 8, 16]))
def test_every_live_weight_is_stored_once_and_no_pruned_one(mask, tile, lanes):
    layout = pack_mask(mask.contiguous(), tile, lanes)
    stored = layout.source[layout.source >= 0].sort().values
    assert torch.equal(stored.long(), mask.reshape(-1).nonzero().squeeze(1))
    assert layout.padded == bool((layout.source < 0).any())
    for name in ("costs",) if tile.interleave == QUAD_ROWS else ("starts", "costs"):
        assert bool((layout.arrays[name].diff() >= 0).all())
    # Work is shared by cost: a block without cost could not be found.
    assert bool((layout.arrays["costs"].diff() > 0).all())


@given(weight_masks(), st.integers(0, 9), st.booleans(), st.sampled_from([2, 7]))
def test_four_rows_share_the_columns_that_they_keep(mask, chunk, dense, mv):
    mask = mask | dense
    outputs, inputs = mask.shape
    tile = Tile(mv=mv, interleave=QUAD_ROWS, k_chunk=chunk)
    layout = pack_mask(mask.contiguous(), tile, 4)
    offsets, found = layout.arrays["offsets"], torch.zeros_like(mask)
    quads = -(-outputs // QUAD_ROWS)
    records = layout.arrays["starts"].view(-1, 6)
    chunks = len(layout.arrays["chunk_columns"]) - 1
    assert len(records) == quads * chunks
    orders = layout.arrays["rows"].view(chunks, outputs)
    for number, record in enumerate(records):
        at, value = int(record[0]), int(record[1])
        begin, end = (int(layout.arrays["chunk_columns"][number // quads + i]) for i in (0, 1))
        four = orders[number // quads].tolist()[number % quads * QUAD_ROWS :][:QUAD_ROWS]
        lengths = record[2:].view(torch.int16).tolist()
        for row in [0, 1, 2, 3] * lengths[0]:  # steps: a column of each row in turn
            place = four[row], int(offsets[at]) // (4 * mv * 4)
            assert begin <= place[1] < end
            assert not found[place]
            found[place] = True
            assert int(layout.source[value]) == place[0] * inputs + place[1]
            at, value = at + 1, value + 1
        for which, length in enumerate([0, *lengths[1:]]):
            rows = [four[row] for row in range(QUAD_ROWS) if length and which >> row & 1]
            assert len(rows) < 2 or length % 2 == 0
            assert len(rows) <= 2 or mv <= 4  # wide tiles have no registers for what more rows share
            columns = (offsets[at : at + length] // (4 * mv * 4)).tolist()
            assert columns == sorted(columns)
            for column in columns:
                assert begin <= column < end
                for row in rows:
                    assert not found[row, column]
                    found[row, column] = True
                    assert int(layout.source[value]) == row * inputs + column
                    value += 1
            at += length
    assert torch.equal(found, mask)


@given(weight_masks(), st.integers(0, 9))
def test_rows_of_about_the_same_length_stand_together_in_every_chunk(mask, chunk):
    outputs = len(mask)
    layout = pack_mask(mask.contiguous(), Tile(mv=2, interleave=QUAD_ROWS, k_chunk=chunk), 4)
    bounds = layout.arrays["chunk_columns"].tolist()
    for order, begin, end in zip(
        layout.arrays["rows"].view(len(bounds) - 1, outputs), bounds, bounds[1:], strict=False
    ):
        for first in range(0, outputs, BLOCK_ROWS):
            block = order[first : first + BLOCK_ROWS].long()
            assert torch.equal(block.sort().values, torch.arange(first, min(first + BLOCK_ROWS, outputs)))
            assert bool((mask[block, begin:end].sum(1).diff() <= 0).all())


def test_lists_of_four_rows_are_counted_in_16_bits():
    mask = torch.zeros(4, 70_000, dtype=torch.bool)
    mask[1] = True
    layout = pack_mask(mask, Tile(mv=1, interleave=QUAD_ROWS), 4)
    assert layout.arrays["chunk_columns"].tolist() == [0, 65_535, 70_000]
    assert torch.equal(layout.source.long().sort().values, mask.reshape(-1).nonzero().squeeze(1))


@given(weight_masks(), tiles())
def test_values_come_from_live_places_only(mask, tile):
    layout = pack_mask(mask.contiguous(), tile, 8)
    weight = torch.where(mask, torch.rand(mask.shape) + 1, torch.nan)
    values = layout.values(weight)[: len(layout.source)]
    assert torch.equal(values != 0, layout.source >= 0)
    assert torch.equal(
        values.sort(descending=True).values[: int(mask.sum())], weight[mask].sort(descending=True).values
    )


def test_whole_blocks_store_nothing_more():
    mask = torch.zeros(16, 32, dtype=torch.bool)
    mask[4:12, ::3] = True
    for tile in (
        Tile(block=4),
        Tile(block=1, interleave=2),
        Tile(block=1, interleave=4),
        Tile("columns", 4),
        Tile("permuted", 16),
        Tile("bitmap"),
        Tile("rows"),
    ):
        assert len(pack_mask(mask, tile, 16).source) == int(mask.sum())


def test_indices_are_narrow_where_they_can_be():
    for inputs, width in ((2**16, 2), (2**16 + 1, 4)):
        mask = torch.zeros(1, inputs, dtype=torch.bool)
        mask[0, -1] = True
        indices = pack_mask(mask, Tile("rows"), 16).arrays["indices"]
        assert indices.element_size() == width
        assert indices.numpy().view(f"u{width}")[0] == inputs - 1


def test_more_inputs_than_offsets_reach_are_refused():
    mask = torch.zeros(0, 2**23, dtype=torch.bool)
    with pytest.raises(ShapeError, match="smaller mv"):
        pack_mask(mask, Tile(mv=4), 16)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"form": "panels"}, NameNotFoundError, "did you mean 'panel'"),
        ({"block": 2}, ValueRangeError, "allowed: 1, 4, 8"),
        ({"form": "columns"}, ValueRangeError, "allowed: 4, 8, 16"),
        ({"form": "runs", "block": 32, "mv": 2}, ValueRangeError, "mv is 2"),
        ({"form": "runs", "block": 32, "prefetch": 1}, ValueRangeError, "prefetch is 1"),
        ({"mv": 5}, ValueRangeError, "mv is 5"),
        ({"block": 8, "mv": 4}, ValueRangeError, "allowed: 1, 2, 3"),
        ({"form": "rows", "mv": 2}, ValueRangeError, "mv is 2"),
        ({"interleave": 3}, ValueRangeError, "interleave is 3"),
        ({"block": 4, "interleave": 2}, ValueRangeError, "interleave is 2"),
        ({"k_chunk": -1}, ValueRangeError, "k_chunk is -1"),
        ({"form": "rows", "k_chunk": 8}, ValueRangeError, "k_chunk is 8"),
        ({"block": 4, "prefetch": 17}, ValueRangeError, "0 to 16"),
        ({"prefetch": 1}, ValueRangeError, "prefetch is 1"),
        ({"form": "rows", "prefetch": -1}, ValueRangeError, "prefetch is -1"),
    ],
)
def test_tiles_that_do_not_exist_are_refused(fields, error, says):
    with pytest.raises(error, match=says):
        Tile(**fields)


@given(
    tokens=st.sampled_from([0, 1, 2, 5, 16, 33, 128, 4096]),
    inputs=st.sampled_from([0, 64, 768, 4096]),
    density=st.sampled_from([0.0, 0.05, 0.6, 1.0]),
    height=st.sampled_from([1, 2, 3, 4, 8, 16, 32]),
    isa=ISAS,
)
def test_candidates_are_few_different_tiles(tokens, inputs, density, height, isa):
    found = candidates(tokens, 64, inputs, density, (height, 1), isa)
    assert 1 <= len(found) <= 15
    assert len({Tile(**fields) for fields in found}) == len(found)
    assert default(tokens, 64, inputs, density, (height, 1), isa) == found[0]
    if height % 4 == 0 and tokens > 4:
        assert all(fields["block"] > 1 for fields in found)


@pytest.mark.parametrize("density", [-0.1, 1.5, float("nan")])
def test_candidates_check_their_arguments(density):
    with pytest.raises(SpartaError, match="density"):
        candidates(1, 1, 1, density)
