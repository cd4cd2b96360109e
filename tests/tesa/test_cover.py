"""The cover is exactly the greedy one, covers everything, and sums back to the masked matrix without rounding."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.tesa import cover as cover_module
from sparta.tesa.attribute import TeSA
from sparta.tesa.cover import block_cover

# Few distinct prices, some of them proportional to the area, so that ties between sizes are common.
PRICES = [0.5, 1.0, 1.0 / 3.0, 2.0, 3.0, 4.0, 6.0, 0.1]


@st.composite
def problems(draw):
    """A small mask and a table of costs whose sizes all fit."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    bits = draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    mask = torch.tensor(bits).reshape(rows, columns)
    block = st.tuples(st.integers(1, min(rows, 5)), st.integers(1, min(columns, 5)))
    sizes = draw(st.lists(block, min_size=1, max_size=5, unique=True))
    by_area = draw(st.booleans())
    return mask, {(h, w): draw(st.sampled_from(PRICES)) * (h * w if by_area else 1) for h, w in sizes}


def naive_greedy(mask, costs):
    """Weighted set cover as the books have it, one block at a time."""
    rows, columns = mask.shape
    candidates = {}
    for h, w in costs:
        for top in range(0, rows, h):
            for left in range(0, columns, w):
                inside = {(i, j) for i in range(top, min(top + h, rows)) for j in range(left, min(left + w, columns))}
                candidates[h, w, top, left] = {(i, j) for i, j in inside if mask[i, j]}
    uncovered = set().union(*candidates.values())
    taken = set()
    while uncovered:
        new = {key: len(elements & uncovered) for key, elements in candidates.items() if elements & uncovered}
        ranks = [(costs[h, w] / new[h, w, i, j], -h * w, -h, i, j, (h, w, i, j)) for h, w, i, j in new]
        best = min(ranks)[-1]
        taken.add(best)
        uncovered -= candidates[best]
    return taken


def blocks_of(cover):
    """The executed blocks as (h, w, top, left)."""
    found = set()
    for part in cover.parts:
        h, w = part.block
        found |= {(h, w, h * i, w * j) for i, j in part.kept_blocks.nonzero().tolist()}
    return found


def times_covered(blocks, shape):
    times = torch.zeros(shape, dtype=torch.int64)
    for h, w, top, left in blocks:
        times[top : top + h, left : left + w] += 1
    return times


@given(problems())
@settings(max_examples=200)
def test_the_blocks_are_those_of_the_naive_greedy(problem):
    mask, costs = problem
    assert blocks_of(block_cover(mask, costs, prune_redundant=False)) == naive_greedy(mask, costs)


@given(problems())
def test_the_result_does_not_depend_on_how_much_is_worked_on_at_once(problem):
    mask, costs = problem
    whole = block_cover(mask, costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cover_module, "_ELEMENTS_AT_ONCE", 1)
        banded = block_cover(mask, costs)
    assert blocks_of(banded) == blocks_of(whole)
    assert all(torch.equal(a.owned, b.owned) for a, b in zip(whole.parts, banded.parts, strict=True))


@given(problems(), st.booleans())
def test_all_live_elements_are_covered(problem, prune_redundant):
    mask, costs = problem
    cover = block_cover(mask, costs, prune_redundant=prune_redundant)
    covered = times_covered(blocks_of(cover), mask.shape) > 0
    assert not bool((mask & ~covered).any())
    assert cover.cost == pytest.approx(sum(costs[h, w] for h, w, _, _ in blocks_of(cover)))
    wasted = int((covered & ~mask).sum()) / max(1, int(covered.sum()))
    assert cover.waste == pytest.approx(wasted)


@given(problems())
def test_pruning_never_costs_more_and_leaves_only_blocks_that_are_needed(problem):
    mask, costs = problem
    plain, pruned = block_cover(mask, costs, prune_redundant=False), block_cover(mask, costs)
    assert blocks_of(pruned) <= blocks_of(plain)
    assert pruned.cost <= plain.cost
    for block in blocks_of(pruned):
        others = times_covered(blocks_of(pruned) - {block}, mask.shape)
        assert bool((mask & (others == 0)).any()), f"{block} could be dropped"


def test_a_block_made_redundant_by_later_ones_is_dropped():
    # Column 0 is the best first block; then each row is needed for an element of its own, and column 0 no longer.
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]])
    costs = {(3, 1): 1.1, (1, 4): 1.0}
    assert block_cover(mask, costs, prune_redundant=False).cost == pytest.approx(4.1)
    assert blocks_of(block_cover(mask, costs)) == {(1, 4, 0, 0), (1, 4, 1, 0), (1, 4, 2, 0)}


@given(problems(), st.integers(0, 2**32))
def test_dropping_redundant_blocks_of_any_cover_leaves_a_cover_of_needed_blocks(problem, seed):
    mask, costs = problem
    ordered = cover_module._checked_costs(costs, tuple(mask.shape))
    atoms = cover_module._Atoms.of(mask, list(ordered))
    kept = cover_module._greedy(atoms, ordered)
    reached = atoms.blocks.unique().long()
    kept[reached] |= torch.rand(len(reached), generator=torch.Generator().manual_seed(seed)) < 0.5
    cover_module._drop_redundant(atoms, kept, ordered)
    times = kept[atoms.blocks].sum(0)
    assert bool((times > 0).all())
    covering_alone = atoms.blocks[kept[atoms.blocks] & (times == 1)]
    assert kept.nonzero().flatten().tolist() == covering_alone.unique().tolist()


@given(problems(), st.booleans())
def test_each_live_element_is_owned_by_the_largest_block_that_covers_it(problem, prune_redundant):
    mask, costs = problem
    cover = block_cover(mask, costs, prune_redundant=prune_redundant)
    order = [(h * w, h) for h, w in (part.block for part in cover.parts)]
    assert order == sorted(order, reverse=True)
    unowned = mask.clone()
    for part in cover.parts:
        assert torch.equal(part.owned, unowned & part.tesa.mask())
        unowned &= ~part.owned
    assert not bool(unowned.any())


@given(problems())
def test_the_tesa_of_a_part_is_live_in_exactly_its_blocks(problem):
    mask, costs = problem
    for part in block_cover(mask, costs).parts:
        h, w = part.block
        blocks = {(h, w, h * i, w * j) for i, j in part.kept_blocks.nonzero().tolist()}
        assert torch.equal(part.tesa.mask(), times_covered(blocks, mask.shape) > 0)
        assert torch.equal(part.tesa.kept_blocks(part.block), part.kept_blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@given(problem=problems())
@settings(max_examples=20)
def test_the_split_sums_to_the_masked_matrix(dtype, problem):
    mask, costs = problem
    dense = (torch.randn(mask.shape) * 10).to(dtype)
    if dtype.is_floating_point:
        dense[~mask] = math.nan  # pruned values must not leak, whatever they are
    cover = block_cover(mask, costs)
    pieces = cover.split(dense)
    total = sum(pieces, torch.zeros(mask.shape, dtype=dtype))
    assert torch.equal(total, torch.where(mask, dense, torch.zeros((), dtype=dtype)))
    assert all(part.tesa.violations(piece) == 0 for part, piece in zip(cover.parts, pieces, strict=True))


def test_a_block_and_scattered_elements_become_two_parts():
    mask = torch.zeros(96, 128, dtype=torch.bool)
    mask[32:64, 64:96] = True
    mask[0, 0] = mask[95, 127] = True
    cover = block_cover(mask, {(1, 1): 0.0064, (32, 32): 6.25, (32, 64): 8.59, (64, 64): 50.0})
    assert [(part.block, part.count) for part in cover.parts] == [((32, 32), 1), ((1, 1), 2)]
    assert cover.parts[0].kept_blocks.nonzero().tolist() == [[1, 2]]
    assert cover.cost == pytest.approx(6.25 + 2 * 0.0064)
    assert cover.waste == 0.0


def test_equal_cost_per_element_takes_the_larger_then_the_taller_block():
    mask = torch.ones(4, 4, dtype=torch.bool)
    per_area = {(h, w): float(h * w) for h, w in [(1, 1), (2, 4), (4, 2)]}
    assert [part.block for part in block_cover(mask, per_area).parts] == [(4, 2)]
    assert [part.block for part in block_cover(mask, per_area | {(4, 4): 16.0}).parts] == [(4, 4)]


def test_cut_off_blocks_cost_as_much_as_whole_ones():
    mask = torch.ones(5, 7, dtype=torch.bool)
    cover = block_cover(mask, {(4, 4): 3.0})
    assert cover.cost == 4 * 3.0
    assert cover.waste == 0.0
    assert torch.equal(cover.parts[0].owned, mask)


@pytest.mark.parametrize("shape", [(4, 6), (0, 4), (4, 0), (0, 0)])
def test_nothing_live_needs_no_blocks(shape):
    cover = block_cover(torch.zeros(shape, dtype=torch.bool), {(1, 1): 1.0})
    assert cover.parts == ()
    assert cover.cost == cover.waste == 0.0
    assert cover.split(torch.ones(shape)) == ()
    assert cover.shape == shape


def test_a_large_clustered_mask_uses_several_sizes():
    coarse = torch.rand(40, 40) > 0.7
    mask = coarse.repeat_interleave(16, 0).repeat_interleave(16, 1)[:630, :633] | (torch.rand(630, 633) > 0.97)
    costs = {(1, 1): 1.0} | {(h, w): float(h * w) ** 0.8 for h, w in [(16, 16), (32, 32), (64, 16), (7, 64), (1, 128)]}
    cover = block_cover(mask, costs)
    assert len(cover.parts) >= 3
    assert torch.equal(torch.stack([part.owned for part in cover.parts]).sum(0), mask.long())
    dense = torch.randn(mask.shape)
    assert torch.equal(sum(cover.split(dense)), dense * mask)
    assert cover.cost < float(mask.sum())  # cheaper than executing it all fine-grained


def test_many_coprime_heights_are_no_problem():
    mask = torch.rand(100, 3) > 0.5
    primes = [h for h in range(2, 100) if all(h % d for d in range(2, h))]  # their product has 37 digits
    cover = block_cover(mask, {(h, 3): h**0.5 for h in primes})
    assert torch.equal(torch.stack([part.owned for part in cover.parts]).any(0), mask)


def test_strides_and_integer_masks_make_no_difference():
    mask = torch.rand(24, 40) > 0.6
    costs = {(1, 1): 1.0, (4, 4): 8.0, (8, 2): 7.0}
    expected = blocks_of(block_cover(mask, costs))
    assert blocks_of(block_cover(mask.T.contiguous().T, costs)) == expected
    assert blocks_of(block_cover(mask.repeat_interleave(2, 0)[::2], costs)) == expected
    assert blocks_of(block_cover(mask.int(), costs)) == expected


def test_a_tesa_is_covered_as_its_mask_and_its_format_is_kept():
    mask = torch.rand(16, 16) > 0.5
    costs = {(1, 1): 1.0, (4, 4): 8.0}
    tesa = TeSA.from_mask(mask).with_format("int8", scale=torch.full((16,), 0.5))
    cover = block_cover(tesa, costs)
    assert blocks_of(cover) == blocks_of(block_cover(mask, costs))
    for part in cover.parts:
        assert part.tesa.format == tesa.format
        assert part.tesa.scale.same_as(tesa.scale)


def test_a_tesa_of_several_bit_formats_is_refused():
    mixed = TeSA.from_bits(torch.tensor([[0, 8], [4, 8]]))
    with pytest.raises(ValueRangeError, match=r"several bit formats.*split_bits"):
        block_cover(mixed, {(1, 1): 1.0})


def test_it_prints_as_a_table_and_its_summary_is_json():
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = mask[7, 7] = True
    cover = block_cover(mask, {(1, 1): 1.0, (4, 4): 8.0})
    text = str(cover)
    assert "cost 9" in text
    assert [line.split()[0] for line in text.splitlines()[3:]] == ["4×4", "1×1"]
    summary = json.loads(json.dumps(cover.to_dict()))
    assert summary["cost"] == 9.0
    assert [part["blocks"] for part in summary["parts"]] == [1, 1]
    assert sum(part["owned"] for part in summary["parts"]) == int(mask.sum())


def test_the_split_wants_a_tensor_of_the_shape_of_the_mask():
    cover = block_cover(torch.ones(4, 4, dtype=torch.bool), {(1, 1): 1.0})
    with pytest.raises(ShapeError, match=r"\(4, 5\)"):
        cover.split(torch.ones(4, 5))


@pytest.mark.parametrize("shape", [(4,), (2, 4, 4), ()])
def test_only_matrices_are_covered(shape):
    with pytest.raises(ShapeError, match="a matrix"):
        block_cover(torch.ones(shape, dtype=torch.bool), {(1, 1): 1.0})


@pytest.mark.parametrize("values", [[[2.0, 0.5]], [[-1, 0]]])
def test_weights_are_not_taken_for_a_mask(values):
    with pytest.raises(ValueRangeError, match="other than 0 and 1"):
        block_cover(torch.tensor(values), {(1, 1): 1.0})


@pytest.mark.parametrize(
    ("costs", "error", "match"),
    [
        ({}, ValueRangeError, "no block sizes"),
        ({(5, 2): 1.0}, ShapeError, "no larger than the matrix"),
        ({(2, 7): 1.0, (1, 1): 1.0}, ShapeError, "no larger than the matrix"),
        ({(0, 2): 1.0}, ValueRangeError, "at least 1"),
        ({(-1, 2): 1.0}, ValueRangeError, "at least 1"),
        ({(1.5, 2): 1.0}, ValueRangeError, "integers"),
        ({(True, 2): 1.0}, ValueRangeError, "integers"),
        ({(2,): 1.0}, ShapeError, r"\(h, w\)"),
        ({4: 1.0}, ShapeError, r"\(h, w\)"),
        ({(1, 1): 0.0}, ValueRangeError, "finite numbers > 0"),
        ({(1, 1): -2}, ValueRangeError, "finite numbers > 0"),
        ({(1, 1): math.nan}, ValueRangeError, "finite numbers > 0"),
        ({(1, 1): math.inf}, ValueRangeError, "finite numbers > 0"),
        ({(1, 1): "1"}, ValueRangeError, "finite numbers > 0"),
        ({(1, 1): True}, ValueRangeError, "finite numbers > 0"),
    ],
)
def test_impossible_costs_are_refused(costs, error, match):
    with pytest.raises(error, match=match):
        block_cover(torch.ones(4, 6, dtype=torch.bool), costs)


def test_measured_costs_may_be_numpy_numbers():
    cover = block_cover(torch.ones(4, 4, dtype=torch.bool), {(2, 2): np.float32(1.5)})
    assert cover.cost == 6.0
    assert type(cover.parts[0].block_cost) is float
