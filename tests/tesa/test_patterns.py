"""Patterns: exact counts, one pruning order, masks that obey, text and dictionary forms that come back."""

import itertools
import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, PatternError, ShapeError, ValueRangeError
from sparta.tesa.patterns import NM, VNM, Block, Channel, Pattern, Unstructured, parse_pattern
from sparta.tesa.select import pruned_count

SPARSITIES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1))
ALL = [Unstructured(), Block(2, 3), Block(1, 4, axes=(-2, -1)), NM(2, 4), NM(1, 3, axis=0), VNM(2, 1, 4), Channel(1)]


@st.composite
def tied_scores(draw, min_dims=1, max_dims=4):
    """Integer-valued scores with many ties, of several types and strides."""
    shape = draw(st.lists(st.integers(1, 6), min_size=min_dims, max_size=max_dims))
    spread = draw(st.sampled_from([0, 1, 3, 100]))
    numel = math.prod(shape)
    values = draw(st.lists(st.integers(-spread, spread), min_size=numel, max_size=numel))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32]))
    score = torch.tensor(values).view(shape).to(dtype)
    if draw(st.booleans()):
        score = score.movedim(0, -1).contiguous().movedim(-1, 0)
    return score


def zeros(mask):
    return mask.numel() - int(mask.sum())


def lines(score, axis):
    """Positions of the elements along `axis`, one list a line."""
    others = [range(size) for dim, size in enumerate(score.shape) if dim != axis % score.ndim]
    for rest in itertools.product(*others):
        yield [(*rest[: axis % score.ndim], i, *rest[axis % score.ndim :]) for i in range(score.shape[axis])]


def groups(score, m, axis):
    """Positions of the elements of each group of `m` along `axis`: none crosses a line."""
    for line in lines(score, axis):
        yield from (line[start : start + m] for start in range(0, len(line), m))


def naive_prune(score, positions, count):
    """The first `count` of `positions` in pruning order: smaller score first, then row-major order."""
    return sorted(positions, key=lambda p: (score[p].item(), p))[: max(count, 0)]


def naive_units(score, units, sparsity):
    """Prune whole units by mean score; `units` in row-major order of their first elements."""
    means = [sum(Fraction(score[p].item()) for p in unit) / len(unit) for unit in units]
    order = sorted(range(len(units)), key=lambda i: (means[i], i))
    mask = torch.ones(score.shape, dtype=torch.bool)
    for i in order[: pruned_count(len(units), sparsity)]:
        for p in units[i]:
            mask[p] = False
    return mask


def naive_full_nm(score, n, m, axis):
    mask = torch.ones(score.shape, dtype=torch.bool)
    for group in groups(score, m, axis):
        for p in naive_prune(score, group, max(len(group) - n, 0)):
            mask[p] = False
    return mask


def naive_sparser_or_denser(score, full, sparsity):
    """What a quota pattern makes of its full mask at another sparsity."""
    pruned = [tuple(p) for p in (~full).nonzero().tolist()]
    kept = [tuple(p) for p in full.nonzero().tolist()]
    count = pruned_count(score.numel(), sparsity)
    chosen = naive_prune(score, pruned, count) + naive_prune(score, kept, count - len(pruned))
    mask = torch.ones(score.shape, dtype=torch.bool)
    for p in chosen:
        mask[p] = False
    return mask


# --- projection against naive references


@given(tied_scores(), SPARSITIES)
def test_unstructured_prunes_the_first_in_pruning_order(score, sparsity):
    positions = list(itertools.product(*map(range, score.shape)))
    mask = Unstructured().project(score, sparsity)
    pruned = [tuple(p) for p in (~mask).nonzero().tolist()]
    assert set(pruned) == set(naive_prune(score, positions, pruned_count(score.numel(), sparsity)))


@given(tied_scores(min_dims=2), SPARSITIES, st.data())
def test_block_prunes_whole_blocks_by_mean(score, sparsity, data):
    axes = data.draw(st.permutations(range(-score.ndim, score.ndim)))
    axes = tuple(next((a, b) for a in axes for b in axes if a % score.ndim != b % score.ndim))
    h, w = (data.draw(st.integers(1, score.shape[axis])) for axis in axes)
    steps = [1] * score.ndim
    steps[axes[0]], steps[axes[1]] = h, w
    starts = itertools.product(*(range(0, size, step) for size, step in zip(score.shape, steps, strict=True)))
    units = [
        list(
            itertools.product(
                *(range(a, min(a + step, size)) for a, step, size in zip(start, steps, score.shape, strict=True))
            )
        )
        for start in starts
    ]
    pattern = Block(h, w, axes=axes)
    mask = pattern.project(score, sparsity)
    assert torch.equal(mask, naive_units(score, units, sparsity))
    pattern.validate(mask)


@given(tied_scores(), SPARSITIES, st.data())
def test_channel_prunes_whole_slices_by_mean(score, sparsity, data):
    axis = data.draw(st.integers(-score.ndim, score.ndim - 1))
    positions = list(itertools.product(*map(range, score.shape)))
    units = [[p for p in positions if p[axis] == i] for i in range(score.shape[axis])]
    pattern = Channel(axis)
    mask = pattern.project(score, sparsity)
    assert torch.equal(mask, naive_units(score, units, sparsity))
    pattern.validate(mask)


@given(tied_scores(), st.integers(1, 12), st.data())
def test_full_nm_keeps_the_last_n_of_each_group_in_pruning_order(score, m, data):
    axis = data.draw(st.integers(-score.ndim, score.ndim - 1))
    pattern = NM(data.draw(st.integers(1, m)), m, axis)
    mask = pattern.project(score)
    assert torch.equal(mask, naive_full_nm(score, pattern.n, m, axis))
    assert int(mask.sum()) / mask.numel() == pattern.capacity(score.shape)
    pattern.validate(mask)


@given(tied_scores(min_dims=2), st.integers(1, 4), st.integers(1, 3), st.integers(0, 6), st.data())
def test_full_vnm_agrees_on_columns_and_then_keeps_n_in_each_row(score, v, n, extra, data):
    axis = data.draw(st.integers(-score.ndim, score.ndim - 1))
    m = 2 * n + extra
    row_axis = 0 if axis % score.ndim else 1
    expected = torch.zeros(score.shape, dtype=torch.bool)
    for group in groups(score, m, axis):
        if group[0][row_axis] % v:
            continue
        # one block: the group in the first of v rows, and the same columns in the rows that follow
        height = min(v, score.shape[row_axis] - group[0][row_axis])
        column = {p: [tuple(c + r * (d == row_axis) for d, c in enumerate(p)) for r in range(height)] for p in group}
        by_sum = sorted(group, key=lambda p: (sum(score[q].item() for q in column[p]), p))
        agreed = [column[p] for p in by_sum[max(len(group) - 2 * n, 0) :]]
        for row in zip(*agreed, strict=True):
            for p in set(row) - set(naive_prune(score, row, len(row) - n)):
                expected[p] = True
    pattern = VNM(v, n, m, axis)
    mask = pattern.project(score)
    assert torch.equal(mask, expected)
    assert int(mask.sum()) / mask.numel() == pattern.capacity(score.shape)
    pattern.validate(mask)
    NM(n, m, axis).validate(mask)


@given(
    tied_scores(min_dims=2), st.sampled_from([NM(2, 4), NM(1, 3, axis=0), VNM(2, 1, 4), VNM(3, 2, 5, 0)]), SPARSITIES
)
def test_quota_patterns_prune_less_or_more_than_full_exactly(score, pattern, sparsity):
    full = pattern.project(score)
    mask = pattern.project(score, sparsity)
    assert zeros(mask) == pruned_count(score.numel(), sparsity)
    assert torch.equal(mask, naive_sparser_or_denser(score, full, sparsity))
    assert bool((mask & ~full).any()) == (zeros(mask) < zeros(full))
    if zeros(mask) >= zeros(full):
        pattern.validate(mask)


# --- properties of all patterns


@given(tied_scores(min_dims=2, max_dims=3), st.sampled_from(ALL), st.lists(SPARSITIES, min_size=2, max_size=4))
def test_masks_of_rising_sparsity_are_nested(score, pattern, sparsities):
    score = score.repeat([6] * score.ndim)  # large enough for all of them
    masks = [pattern.project(score, sparsity) for sparsity in sorted(sparsities)]
    for denser, sparser in itertools.pairwise(masks):
        assert not bool((sparser & ~denser).any())


@pytest.mark.parametrize("pattern", ALL, ids=str)
def test_a_constant_score_is_never_pruned_all_at_once(pattern):
    mask = pattern.project(torch.zeros(12, 12), 0.5)
    assert zeros(mask) == 72
    assert torch.equal(mask, pattern.project(torch.full((12, 12), -7.0), 0.5))


@pytest.mark.parametrize("pattern", ALL, ids=str)
def test_strides_do_not_matter(pattern):
    score = torch.randn(12, 10)
    mask = pattern.project(score, 0.6)
    assert torch.equal(pattern.project(score.t().contiguous().t(), 0.6), mask)
    assert torch.equal(pattern.project(torch.stack([score, score], -1)[..., 1], 0.6), mask)
    assert mask.is_contiguous()
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("pattern", ALL, ids=str)
def test_extreme_sparsities_keep_all_or_nothing(pattern):
    score = torch.randn(8, 9)
    assert bool(pattern.project(score, 0).all())
    assert not bool(pattern.project(score, 1).any())


@pytest.mark.parametrize("pattern", ALL, ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0, 3)])
def test_empty_tensors_have_empty_masks(pattern, shape):
    mask = pattern.project(torch.empty(shape), 0.5)
    assert mask.shape == shape
    assert mask.dtype == torch.bool
    assert pattern.holds(mask)
    assert pattern.capacity(shape) == 1.0


@pytest.mark.parametrize("pattern", ALL, ids=str)
def test_nan_in_a_score_is_refused_and_counted(pattern):
    score = torch.zeros(8, 8)
    score[1, 2:5] = math.nan
    with pytest.raises(ValueRangeError, match="3 NaN among 64 elements"):
        pattern.project(score, 0.5)


@pytest.mark.parametrize("pattern", ALL, ids=str)
@pytest.mark.parametrize("sparsity", [-0.5, 1.5, math.nan, True, "0.5"])
def test_what_is_no_sparsity_is_refused(pattern, sparsity):
    with pytest.raises(ValueRangeError, match=r"a real number in \[0, 1\]"):
        pattern.project(torch.zeros(8, 8), sparsity)


@pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2), Channel(0)], ids=str)
def test_patterns_without_a_sparsity_of_their_own_ask_for_one(pattern):
    with pytest.raises(ValueRangeError, match="sparsity is None"):
        pattern.project(torch.zeros(8, 8))


@pytest.mark.parametrize("pattern", ALL, ids=str)
def test_infinite_scores_are_ordered(pattern):
    score = torch.ones(12, 12)
    score[0, 0] = math.inf
    assert bool(pattern.project(score, 0.5)[0, 0])
    score[0, 0] = -math.inf
    assert not bool(pattern.project(score, 0.5)[0, 0])


@pytest.mark.parametrize(
    ("pattern", "unit"), [(Block(2, 2), "block"), (Channel(0), "slice"), (VNM(2, 1, 4), "column")], ids=str
)
def test_units_with_infinities_of_both_signs_are_refused(pattern, unit):
    score = torch.ones(4, 4)
    score[0, 0], score[0, 1], score[1, 0] = math.inf, -math.inf, -math.inf
    with pytest.raises(ValueRangeError, match=rf"1 {unit}s of the score hold both \+inf and -inf"):
        pattern.project(score, 0.5)


def test_integers_are_averaged_without_overflow():
    score = torch.full((2, 4), 120, dtype=torch.int8)
    score[0, 0] = 119
    assert Block(1, 4).project(score, 0.5).tolist() == [[False] * 4, [True] * 4]
    assert Channel(0).project(score, 0.5).tolist() == [[False] * 4, [True] * 4]


def test_double_scores_are_averaged_in_double():
    score = torch.ones(2, 2, dtype=torch.float64)
    score[1] -= 1e-12
    for pattern in (Block(1, 2), Channel(0)):
        assert pattern.project(score, 0.5).tolist() == [[True, True], [False, False]]


def test_scores_are_used_as_given_not_by_magnitude():
    assert Unstructured().project(torch.tensor([-5.0, 1.0]), 0.5).tolist() == [False, True]


# --- validation


def masks_by_hand(*rows):
    return torch.tensor([[c == "#" for c in row] for row in rows])


VIOLATIONS = [
    (
        Block(2, 2),
        masks_by_hand("##..", "##.#", "....", "#..."),
        "2 of 4 blocks, first in the block that starts at [0, 2]",
    ),
    (Channel(1), masks_by_hand("#.#.", "#..."), "1 of 4 slices, first in the slice that starts at [0, 2]"),
    (Channel(0), masks_by_hand("####", "#..."), "1 of 2 slices, first in the slice that starts at [1, 0]"),
    (NM(1, 2), masks_by_hand("#.#.##", ".#..##"), "2 of 6 groups, first in the group that starts at [0, 4]"),
    (
        NM(1, 2, axis=0),
        masks_by_hand("#.", "..", "##", ".#"),
        "1 of 4 groups, first in the group that starts at [2, 1]",
    ),
    (NM(1, 3), masks_by_hand("#..##"), "1 of 2 groups, first in the group that starts at [0, 3]"),
    (VNM(2, 1, 4), masks_by_hand("...#....", "#.....##"), "1 of 2 blocks, first in the block that starts at [0, 4]"),
    (VNM(2, 1, 4), masks_by_hand("#...", ".#..", "#...", "..#.", "...#"), None),
    (
        VNM(3, 1, 4),
        masks_by_hand("#...", ".#..", "#...", "#...", "..#.", "...#"),
        "1 of 2 blocks, first in the block that starts at [3, 0]",
    ),
]


@pytest.mark.parametrize(("pattern", "mask", "where"), VIOLATIONS, ids=range(len(VIOLATIONS)))
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_violations_are_located_and_counted(pattern, mask, where, dtype):
    mask = mask.to(dtype)
    assert pattern.holds(mask) == (where is None)
    if where is None:
        pattern.validate(mask)
    else:
        with pytest.raises(PatternError, match=re.escape(f"breaks {pattern} in {where}")):
            pattern.validate(mask)


def test_every_mask_is_unstructured():
    Unstructured().validate(torch.rand(3, 4, 5) > 0.5)
    Unstructured().validate(torch.tensor(0))


@pytest.mark.parametrize("pattern", ALL, ids=str)
@pytest.mark.parametrize("value", [2.0, -1.0, 0.5, math.nan])
def test_masks_are_bool_or_zeros_and_ones(pattern, value):
    mask = torch.ones(12, 12)
    mask[3, 4] = value
    with pytest.raises(ValueRangeError, match="0 and 1"):
        pattern.validate(mask)
    with pytest.raises(ValueRangeError, match="0 and 1"):
        pattern.holds(mask)


def test_large_groups_are_counted_without_overflow():
    assert not NM(100, 300).holds(torch.ones(1, 300))
    assert not NM(10, 256).holds(torch.ones(1, 256))


# --- shapes that do not fit


@pytest.mark.parametrize(
    ("pattern", "shape", "words"),
    [
        (NM(2, 4), (8,), "lies along axis 1"),
        (NM(2, 4, axis=-3), (8, 8), "3 or more axes"),
        (Channel(2), (8, 8), "3 or more axes"),
        (Block(2, 2), (8,), "2 or more axes"),
        (Block(2, 2, axes=(0, 2)), (8, 8), "3 or more axes"),
        (Block(2, 2, axes=(1, -1)), (8, 8), "one and the same"),
        (Block(9, 2), (8, 8), "h up to 8, w up to 8"),
        (Block(2, 9), (8, 8), "larger than the tensor"),
        (VNM(2, 1, 4), (8,), "lies along axis 1"),
        (VNM(2, 1, 4, axis=0), (8,), "rows and columns"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(pattern, shape, words):
    for call in (
        lambda: pattern.project(torch.zeros(shape), 0.5),
        lambda: pattern.validate(torch.zeros(shape)),
        lambda: pattern.holds(torch.zeros(shape)),
        lambda: pattern.capacity(shape),
    ):
        with pytest.raises(ShapeError, match=words):
            call()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NM(5, 4), "n is 5 and m is 4"),
        (lambda: NM(0, 4), "n is 0"),
        (lambda: NM(2, -4), "m is -4"),
        (lambda: NM(2.0, 4), "n is 2.0"),
        (lambda: NM(True, 4), "n is True"),
        (lambda: NM(2, 4, axis=None), "axis is None"),
        (lambda: VNM(0, 2, 8), "v is 0"),
        (lambda: VNM(64, 2, 3), "m >= 2 n"),
        (lambda: VNM(64, 0, 3), "n is 0"),
        (lambda: Block(0, 4), "h is 0"),
        (lambda: Block(4, "4"), "w is '4'"),
        (lambda: Block(4, 4, axes=(1, 1)), "two different axes"),
        (lambda: Block(4, 4, axes=(1,)), "two axes"),
        (lambda: Block(4, 4, axes="01"), "two axes"),
        (lambda: Block(4, 4, axes=(0, 1.5)), "an axis is 1.5"),
        (lambda: Channel(0.5), "axis is 0.5"),
    ],
)
def test_impossible_parameters_are_refused(make, words):
    with pytest.raises(ValueRangeError, match=re.escape(words)):
        make()


def test_capacity_counts_the_ragged_tail():
    assert NM(2, 4).capacity((3, 8)) == 0.5
    assert NM(2, 4).capacity((3, 9)) == pytest.approx(5 / 9)
    assert NM(2, 4).capacity((3, 1)) == 1.0
    assert NM(2, 4, axis=0).capacity((7, 3)) == pytest.approx(4 / 7)
    assert VNM(64, 2, 8).capacity((128, 16)) == 0.25
    assert Block(2, 2).capacity((4, 4)) == Unstructured().capacity((3,)) == Channel(0).capacity((2,)) == 1.0


# --- names, text and dictionaries

patterns = st.one_of(
    st.just(Unstructured()),
    st.builds(Block, st.integers(1, 99), st.integers(1, 99), st.sampled_from([(0, 1), (1, 0), (-2, -1), (0, 2)])),
    st.builds(lambda n, extra, axis: NM(n, n + extra, axis), *[st.integers(1, 32)] * 2, st.integers(-3, 3)),
    st.builds(lambda v, n, extra, axis: VNM(v, n, 2 * n + extra, axis), *[st.integers(1, 99)] * 3, st.integers(-3, 3)),
    st.builds(Channel, st.integers(-3, 3)),
)


@given(patterns)
def test_text_and_dictionary_forms_come_back(pattern):
    assert parse_pattern(str(pattern)) == pattern
    assert Pattern.from_dict(json.loads(json.dumps(pattern.to_dict()))) == pattern
    assert type(pattern)(**pattern.params) == pattern
    assert hash(type(pattern)(**pattern.params)) == hash(pattern)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("2:4", NM(2, 4)),
        (" 1:16 axis 0 ", NM(1, 16, axis=0)),
        ("block:32x16", Block(32, 16)),
        ("32x32", Block(32, 32)),
        ("Block 32×8 axes -2,-1", Block(32, 8, axes=(-2, -1))),
        ("channel", Channel(0)),
        ("channel:-1", Channel(-1)),
        ("UNSTRUCTURED", Unstructured()),
        ("64:2:8", VNM(64, 2, 8)),
    ],
)
def test_short_texts_are_understood(text, pattern):
    assert parse_pattern(text) == pattern


def test_patterns_print_shortly():
    texts = ["unstructured", "block 32×32", "2:4", "64:2:8", "channel axis 0"]
    assert [str(p) for p in (Unstructured(), Block(32, 32), NM(2, 4), VNM(64, 2, 8), Channel(0))] == texts


def test_dictionaries_hold_the_name_and_the_parameters():
    assert NM(2, 4).to_dict() == {"pattern": "nm", "n": 2, "m": 4, "axis": 1}
    assert Block(2, 3).to_dict() == {"pattern": "block", "h": 2, "w": 3, "axes": [0, 1]}
    assert VNM(64, 2, 8).params == {"v": 64, "n": 2, "m": 8, "axis": 1}
    assert Unstructured().to_dict() == {"pattern": "unstructured"}


def test_numpy_integers_become_plain_integers():
    pattern = NM(np.int64(2), np.int32(4))
    assert json.loads(json.dumps(pattern.to_dict())) == NM(2, 4).to_dict()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("blok:32x32", "did you mean 'block:4x4'"),
        ("chanel", "did you mean 'channel:0'"),
        ("unstructred", "did you mean 'unstructured'"),
        ("2-4", "2:4"),
        ("", "known: 2:4, 64:2:8, block4, block:4x4, channel:0, filter, tensorrt, unstructured"),
    ],
)
def test_unknown_texts_are_refused_with_what_is_known(text, words):
    with pytest.raises(NameNotFoundError, match=re.escape(words)):
        parse_pattern(text)


def test_texts_with_impossible_numbers_are_refused():
    with pytest.raises(ValueRangeError, match="n is 4 and m is 2"):
        parse_pattern("4:2")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pattern": "blck"}, "did you mean 'block'"),
        ({"pattern": ["nm"]}, "unknown pattern"),
        ({"n": 2, "m": 4}, 'add a "pattern" key'),
        ({"pattern": "nm", "n": 2}, "pattern 'nm' lacks m"),
        ({"pattern": "channel", "axes": 0}, "did you mean 'axis'"),
    ],
)
def test_wrong_dictionaries_are_refused(fields, words):
    with pytest.raises(NameNotFoundError, match=re.escape(words)):
        Pattern.from_dict(fields)


def test_wrong_values_in_dictionaries_are_refused():
    with pytest.raises(ValueRangeError, match="n is '2'"):
        Pattern.from_dict({"pattern": "nm", "n": "2", "m": 4})
