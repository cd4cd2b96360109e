"""Exact selection: always `count` elements, always the same ones, for any type, stride and distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.tesa import select
from sparta.tesa.select import check_sparsity, comparable, lowest, lowest_per_row, pruned_count

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
STRIDES = {
    "contiguous": lambda t: t.contiguous(),
    "permuted": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "every second": lambda t: torch.stack([t, t], -1)[..., 0],
    "offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}
LIBRARIES = [np, torch]


def naive_lowest(values, count, candidates=None):
    """Indices of the first `count` in pruning order: smaller value first, then lower index."""
    candidates = range(len(values)) if candidates is None else candidates
    return set(sorted(candidates, key=lambda i: (values[i], i))[:count])


def true_positions(mask):
    return set(mask.flatten().nonzero().flatten().tolist())


def in_library(xp, rows, count, among=None):
    """Run the core with one of its two array libraries, whatever the device would choose."""
    core = select._chosen_in_row if len(rows) == 1 else select._chosen_in_rows
    convert = (lambda t: t.numpy()) if xp is np else (lambda t: t)
    return torch.as_tensor(core(xp, convert(rows), count, None if among is None else convert(among)))


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(STRIDES)),
    st.data(),
)
def test_lowest_is_the_first_in_pruning_order(shape, dtype, stride, data):
    numel = math.prod(shape)
    low = -3 if dtype.is_signed else 0
    values = data.draw(st.lists(st.integers(low, 3), min_size=numel, max_size=numel))
    values = [float(bool(v)) if dtype == torch.bool else float(v) for v in values]
    count = data.draw(st.integers(0, numel))
    score = STRIDES[stride](torch.tensor(values).view(shape).to(dtype))
    mask = lowest(score, count)
    assert mask.dtype == torch.bool
    assert mask.shape == score.shape
    assert mask.is_contiguous()
    assert true_positions(mask) == naive_lowest(values, count)


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=40), st.data())
def test_lowest_orders_all_floats_with_infinities(values, data):
    count = data.draw(st.integers(0, len(values)))
    assert true_positions(lowest(torch.tensor(values), count)) == naive_lowest(values, count)


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), min_size=1, max_size=40), st.data())
def test_lowest_among_candidates(pairs, data):
    # the largest integer ties with what the selection puts in the place of other elements
    values = [torch.iinfo(torch.int64).max if v == 2 else v for v, _ in pairs]
    candidates = [i for i, (_, allowed) in enumerate(pairs) if allowed]
    count = data.draw(st.integers(0, len(candidates)))
    among = torch.tensor([allowed for _, allowed in pairs])
    assert true_positions(lowest(torch.tensor(values), count, among)) == naive_lowest(values, count, candidates)


def test_negative_zero_equals_zero():
    assert lowest(torch.tensor([0.0, -0.0, -0.0, 0.0]), 2).tolist() == [True, True, False, False]


def test_signed_integers_beyond_float_precision_are_told_apart():
    score = torch.tensor([2**53 + 1, 2**53, -(2**63), 2**63 - 1])
    assert true_positions(lowest(score, 2)) == {1, 2}
    assert true_positions(lowest(score, 3)) == {0, 1, 2}


@pytest.mark.parametrize("xp", LIBRARIES)
@given(st.integers(2, 6), st.integers(1, 20), st.booleans(), st.sampled_from([torch.float32, torch.int16]), st.data())
def test_rows_are_selected_independently(xp, height, width, limited, dtype, data):
    top = math.inf if dtype == torch.float32 else torch.iinfo(dtype).max
    values = st.sampled_from([-1, 0, 1, 2, top])
    rows = data.draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=height, max_size=height))
    per_row = data.draw(st.integers(1, width)) if limited else width
    count = data.draw(st.integers(1, per_row))
    orders = [data.draw(st.permutations(range(width))) for _ in rows]
    among = torch.zeros(height, width, dtype=torch.bool)
    for row, order in enumerate(orders):
        among[row, list(order[:per_row])] = True
    mask = in_library(xp, torch.tensor(rows, dtype=dtype), count, among if limited else None)
    for row, order in enumerate(orders):
        assert true_positions(mask[row]) == naive_lowest(rows[row], count, order[:per_row])


def test_many_rows_do_not_leak_into_each_other():
    score = torch.randint(0, 4, (30_000, 5))
    mask = lowest_per_row(comparable(score), 2)
    expected = torch.zeros_like(mask).scatter(1, score.argsort(dim=1, stable=True)[:, :2], value=True)
    assert torch.equal(mask, expected)


def distributions():
    size = 300_000
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(size, generator=generator)
    misleading = normal.abs() + 10
    # the positions that are sampled first hold nothing typical
    misleading[np.random.default_rng(0).integers(size, size=select._SAMPLE)] = normal[: select._SAMPLE].abs()
    return {
        "normal": normal,
        "constant": torch.ones(size),
        "five values": torch.randint(0, 5, (size,), generator=generator),
        "half zeros": normal.abs() * (normal > 0),
        "ascending": torch.arange(size),
        "descending doubles": torch.arange(size, 0, -1, dtype=torch.float64),
        "infinities": torch.where(normal.abs() < 1, normal * torch.inf, normal),
        "sample too low": misleading,
        "sample too high": -misleading,
    }


@pytest.mark.parametrize("xp", LIBRARIES)
@pytest.mark.parametrize("name", distributions())
def test_large_tensors_are_selected_exactly(xp, name):
    values = distributions()[name]
    ranking = values.argsort(stable=True)
    for count in (1, 1000, 70_000, 150_000, 299_999, 300_000):
        expected = torch.zeros(len(values), dtype=torch.bool)
        expected[ranking[:count]] = True
        assert torch.equal(in_library(xp, values.view(1, -1), count)[0], expected)


@pytest.mark.parametrize("xp", LIBRARIES)
@pytest.mark.parametrize("fraction", [0.001, 0.5, 1.0])
def test_large_tensors_are_selected_exactly_among_candidates(xp, fraction):
    values = torch.randint(0, 50, (300_000,)) + torch.rand(300_000).round(decimals=2)
    among = torch.rand(300_000) < fraction
    candidates = int(among.sum())
    ranking = torch.where(among, values, torch.inf).argsort(stable=True)
    for count in (1, candidates // 3, candidates - 1, candidates):
        expected = torch.zeros(300_000, dtype=torch.bool)
        expected[ranking[:count]] = True
        assert torch.equal(in_library(xp, values.view(1, -1), count, among.view(1, -1))[0], expected)


def test_selection_leaves_the_random_state_alone():
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    lowest(torch.rand(300_000, generator=torch.Generator()), 1000)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002


def test_selection_does_not_change_its_input_and_takes_parameters():
    score = torch.nn.Parameter(torch.tensor([2.0, 1.0]))
    mask = lowest(score, 1)
    assert mask.tolist() == [False, True]
    assert not mask.requires_grad
    assert score.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_empty_tensors_select_nothing(shape):
    assert lowest(torch.empty(shape), 0).shape == shape


def test_a_scalar_can_be_selected():
    assert lowest(torch.tensor(3.0), 1).item() is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_is_refused_and_counted(dtype):
    score = torch.tensor([1.0, math.nan, 2.0, math.nan], dtype=dtype)
    with pytest.raises(ValueRangeError, match="2 NaN among 4 elements"):
        lowest(score, 0)


@pytest.mark.parametrize(
    "score", [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()], ids=["complex", "sparse"]
)
def test_what_has_no_order_is_refused(score):
    with pytest.raises(ValueRangeError, match="a strided tensor of floats, integers or bools"):
        lowest(score, 1)


def test_unsigned_integers_too_large_to_compare_are_refused():
    with pytest.raises(ValueRangeError, match=r"exceeds 2\*\*63 - 1"):
        lowest(torch.tensor([2**63, 1], dtype=torch.uint64), 1)


@pytest.mark.parametrize("count", [-1, 4])
def test_impossible_counts_are_refused(count):
    with pytest.raises(ValueRangeError, match=f"count is {count}; allowed: 0 to 3"):
        lowest(torch.zeros(3), count)


def test_more_than_the_candidates_is_refused():
    with pytest.raises(ValueRangeError, match="allowed: 0 to 1, the number of candidates"):
        lowest(torch.zeros(3), 2, torch.tensor([True, False, False]))


@pytest.mark.parametrize("among", [torch.ones(2, dtype=torch.bool), torch.ones(3)], ids=["shape", "dtype"])
def test_candidates_must_be_a_mask_of_the_scores_shape(among):
    with pytest.raises(ShapeError, match=r"torch\.bool of the score's shape \(3,\)"):
        lowest(torch.zeros(3), 1, among)


@given(st.integers(0, 10**9), st.floats(0, 1))
def test_pruned_count_is_the_nearest_integer(numel, sparsity):
    count = pruned_count(numel, sparsity)
    assert 0 <= count <= numel
    assert abs(count - sparsity * numel) <= 0.5


@pytest.mark.parametrize("sparsity", [0, 1, 0.5, np.float32(0.5), np.float64(0.5)])
def test_real_numbers_from_zero_to_one_are_sparsities(sparsity):
    assert check_sparsity(sparsity) == float(sparsity)


@pytest.mark.parametrize(
    "sparsity", [-0.1, 1.0001, math.nan, math.inf, True, None, "0.5", 0.5j, torch.tensor(0.5)], ids=repr
)
def test_everything_else_is_no_sparsity(sparsity):
    with pytest.raises(ValueRangeError, match=r"a real number in \[0, 1\]"):
        pruned_count(10, sparsity)
