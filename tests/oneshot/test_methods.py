"""Methods against direct float64 solutions on small layers, exact counts, and what each of them promises."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, PatternError, ShapeError, ValueRangeError
from sparta.oneshot.methods import (
    alps,
    exact_fit,
    find_method,
    improve,
    magnitude,
    method_names,
    obc,
    obc_path,
    refit,
    ria,
    sparsegpt,
    swaps,
    wanda,
)
from sparta.oneshot.problem import Problem
from sparta.tesa.patterns import NM, VNM, Block, Channel, Unstructured, as_pattern

PATTERNS = [
    (Unstructured(), 0.5),
    (Unstructured(), 0.7),
    (NM(2, 4), None),
    (NM(1, 4), None),
    (Block(4, 1), 0.5),
    (Block(1, 4), 0.5),
    (Block(3, 2), 0.6),
    (VNM(4, 2, 8), None),
    (Channel(0), 0.5),
    (Channel(1), 0.5),
]
IDS = [f"{pattern} {sparsity}" for pattern, sparsity in PATTERNS]


def problem(pattern, sparsity=None, shape=(12, 16), seed=0, tokens=200, correlated=True, groups=1):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    columns = math.prod(shape[1:])
    grams = []
    for _ in range(groups):
        x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
        if correlated:
            x = x @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
        grams.append(x.T @ x)
    return Problem.of(weight, torch.stack(grams), pattern, sparsity, groups)


def damped_loss(task, weight):
    """Return what methods minimise: the loss with the damped Gram matrix."""
    change = weight - task.weight
    return float(((change @ task.hessian) * change).sum())


def fit(task, mask):
    """Return the least-squares weights on a support by the normal equations, written out row by row."""
    result = torch.zeros_like(task.weight)
    for g, h in enumerate(task.hessian):
        for r in range(mask.shape[1]):
            kept = mask[g, r].nonzero().flatten()
            if len(kept):
                right = (h @ task.weight[g, r])[kept]
                result[g, r, kept] = torch.linalg.solve(h[kept][:, kept], right)
    return result


@pytest.mark.parametrize("shape", [(12, 16), (12, 16, 2, 2)], ids=["linear", "convolution"])
@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS, ids=IDS)
@pytest.mark.parametrize("name", ["magnitude", "wanda", "ria", "sparsegpt", "alps", "obc", "swaps"])
def test_masks_obey_the_pattern_with_exact_counts(name, pattern, sparsity, shape):
    task = problem(pattern, sparsity, shape=shape)
    if name in {"obc", "swaps"} and task.units is None:
        with pytest.raises(PatternError, match="method 'alps'"):
            find_method(name).solve(task)
        return
    solution = find_method(name).solve(task)
    mask = task.layout.to_weight(solution.mask)
    pattern.validate(mask)
    expected = magnitude(task).mask.sum()
    if not (isinstance(pattern, Block) and pattern.h == 3):  # blocks at a ragged edge are smaller
        assert solution.mask.sum() == expected
    if task.count is not None:
        kept_units = int((pattern.unit_scores(mask.double()) > 0.5).sum())
        assert kept_units == pattern.unit_count(mask.shape) - task.count
    assert bool((solution.weight[~solution.mask] == 0).all())


def test_all_methods_are_registered():
    assert {"alps", "magnitude", "obc", "ria", "sparsegpt", "swaps", "wanda"} <= set(method_names())
    with pytest.raises(NameNotFoundError, match="did you mean 'wanda'"):
        find_method("wanada")


def test_a_method_that_reads_inputs_says_that_there_is_no_data():
    with pytest.raises(ShapeError, match="without data"):
        wanda(Problem.of(torch.ones(4, 4), None, NM(2, 4)))


def test_wanda_compares_within_each_row():
    task = problem(Unstructured(), 0.5, shape=(6, 10))
    scores = (task.weight * task.gram.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(1)).abs()
    kept = wanda(task).mask[0]
    for row, mask in zip(scores[0], kept, strict=True):
        assert set(mask.nonzero().flatten().tolist()) == set(row.argsort()[5:].tolist())


def test_wanda_of_an_odd_number_differs_by_one_between_rows():
    task = problem(Unstructured(), 0.5, shape=(5, 7))
    per_row = (~wanda(task).mask[0]).sum(1).tolist()
    assert sum(per_row) == 18
    assert max(per_row) - min(per_row) == 1


def test_wanda_of_nm_compares_within_each_group():
    task = problem(NM(2, 4), shape=(4, 8))
    scores = task.weight[0].abs() * task.norms[0]
    mask = wanda(task).mask[0]
    for row in range(4):
        for start in (0, 4):
            assert set(mask[row, start : start + 4].nonzero().flatten().tolist()) == set(
                scores[row, start : start + 4].argsort()[2:].tolist()
            )


def test_ria_is_its_formula():
    task = problem(Unstructured(), 0.5, shape=(6, 8))
    size = task.weight[0].abs()
    score = torch.empty_like(size)
    for i, j in itertools.product(range(6), range(8)):
        score[i, j] = (size[i, j] / size[:, j].sum() + size[i, j] / size[i].sum()) * task.norms[0, 0, j] ** 0.5
    assert torch.equal(ria(task).mask[0], Unstructured().project(score, 0.5))


@pytest.mark.parametrize("seed", range(4))
def test_sparsegpt_of_one_column_is_the_closed_form(seed):
    """When only the first column goes, the sweep's update is the optimal one: least squares on all other columns."""
    task = problem(Channel(1), 1 / 8, shape=(5, 8), seed=seed)
    weight = task.weight.clone()
    weight[:, :, 0] = 1e-6  # so that this column is the one that goes
    small = Problem.of(weight[0], task.gram, Channel(1), 1 / 8)
    solution = sparsegpt(small)
    assert not solution.mask[:, :, 0].any()
    assert torch.allclose(solution.weight, fit(small, solution.mask), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS[:6], ids=IDS[:6])
def test_sparsegpt_lies_between_the_masked_weights_and_the_least_squares_on_its_support(pattern, sparsity):
    task = problem(pattern, sparsity)
    solution = sparsegpt(task)
    best = damped_loss(task, fit(task, solution.mask))
    found = damped_loss(task, solution.weight)
    assert best <= found * (1 + 1e-9)
    assert found < damped_loss(task, task.weight * solution.mask)


def test_sparsegpt_of_each_column_is_least_squares_on_the_columns_after_it():
    """The last kept columns get the exact solution given all before: fixing those, nothing is left to gain."""
    task = problem(NM(2, 4), shape=(3, 16))
    solution = sparsegpt(task)
    h = task.hessian[0]
    for row in range(3):
        change = (solution.weight - task.weight)[0, row]
        # A weight that is kept may be changed by columns before it alone: the gradient of the loss with respect to
        # the columns after the last pruned one is zero.
        last = int((~solution.mask[0, row]).nonzero().max())
        assert torch.allclose((h @ change)[last + 1 :], torch.zeros(15 - last, dtype=torch.float64), atol=1e-8)


def test_exact_fit_and_refit_solve_the_normal_equations():
    task = problem(NM(2, 4), shape=(6, 12))
    mask = magnitude(task).mask
    assert torch.allclose(exact_fit(task, mask), fit(task, mask), rtol=1e-9, atol=1e-12)
    assert torch.allclose(refit(task, mask, task.weight, steps=60), fit(task, mask), rtol=1e-6, atol=1e-9)


def test_refit_never_raises_the_loss():
    task = problem(Unstructured(), 0.6, shape=(8, 24), tokens=30)
    mask = magnitude(task).mask
    losses = [damped_loss(task, refit(task, mask, task.weight, steps=steps)) for steps in (0, 1, 3, 10)]
    assert losses == sorted(losses, reverse=True)
    assert math.isclose(losses[0], damped_loss(task, task.weight * mask), rel_tol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS[:8], ids=IDS[:8])
def test_alps_is_no_worse_than_sparsegpt_on_correlated_inputs(pattern, sparsity, seed):
    task = problem(pattern, sparsity, shape=(24, 32), seed=seed)
    assert task.loss(alps(task).weight) <= task.loss(sparsegpt(task).weight)


@pytest.mark.parametrize("seed", range(3))
def test_alps_of_uncorrelated_inputs_is_magnitude_weighted_by_norms(seed):
    """With a diagonal Gram matrix the answer is known: keep the largest of w² G_jj, unchanged."""
    diagonal = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1
    weight = problem(NM(2, 4), shape=(5, 12), seed=seed).weight[0]
    task = Problem.of(weight, torch.diag(diagonal), Unstructured(), 0.5)
    solution = alps(task)
    damped = task.hessian[0].diagonal()
    assert torch.equal(solution.mask[0], Unstructured().project(weight.square() * damped, 0.5))
    assert torch.allclose(solution.weight, task.weight * solution.mask)


@pytest.mark.parametrize("seed", range(5))
def test_obc_of_one_weight_is_the_brute_force_optimum(seed):
    task = problem(Unstructured(), 1 / 8, shape=(1, 8), seed=seed)
    losses = {}
    for gone in range(8):
        mask = torch.ones(1, 1, 8, dtype=torch.bool)
        mask[0, 0, gone] = False
        losses[gone] = damped_loss(task, fit(task, mask))
    solution = obc(task)
    assert (~solution.mask).nonzero()[0, 2] == min(losses, key=losses.get)
    assert math.isclose(damped_loss(task, solution.weight), min(losses.values()), rel_tol=1e-8)


@pytest.mark.parametrize(("pattern", "sparsity"), [(Unstructured(), 0.5), (NM(2, 4), None), (Block(1, 2), 0.5)])
def test_obc_is_the_greedy_that_tries_everything(pattern, sparsity):
    """One row of 8 weights: at each step every unit is removed on trial and all others are fitted."""
    task = problem(pattern, sparsity, shape=(1, 8), seed=3)
    units = task.units
    mask = torch.ones(1, 1, 8, dtype=torch.bool)
    while bool(mask.sum() > 4):
        trials = {}
        for unit in range(units.count):
            trial = mask.clone()
            trial[0, 0, units.column_unit == unit] = False
            if not bool((trial != mask).any()):
                continue
            if units.quota and bool((trial.view(2, 4).sum(1) < units.quota).any()):
                continue
            trials[unit] = (damped_loss(task, fit(task, trial)), trial)
        mask = min(trials.values(), key=lambda found: found[0])[1]
    assert torch.equal(obc(task).mask, mask)


def test_obc_is_near_the_best_of_all_supports_of_8_weights():
    for seed in range(5):
        task = problem(Unstructured(), 0.5, shape=(1, 8), seed=seed)
        best = math.inf
        for kept in itertools.combinations(range(8), 4):
            mask = torch.zeros(1, 1, 8, dtype=torch.bool)
            mask[0, 0, list(kept)] = True
            best = min(best, damped_loss(task, fit(task, mask)))
        found = damped_loss(task, obc(task).weight)
        plain = magnitude(task).mask
        assert best <= found * (1 + 1e-9)
        assert found <= damped_loss(task, fit(task, plain)) * (1 + 1e-9)


@pytest.mark.parametrize("pattern", [Unstructured(), Block(1, 2), Block(2, 1), Channel(1)], ids=str)
def test_one_pass_of_obc_gives_every_density(pattern, monkeypatch):
    task = problem(pattern, 0.0, shape=(4, 8))
    counts = range(pattern.unit_count((4, 8)) + 1)
    factored, invert = [], torch.cholesky_inverse
    alone = [obc(dataclasses.replace(task, count=count)) for count in counts]
    monkeypatch.setattr(torch, "cholesky_inverse", lambda x: factored.append(x) or invert(x))
    path = obc_path(task, counts)
    assert len(factored) == 1
    for count, one, found in zip(counts, alone, path, strict=True):
        assert torch.equal(one.mask, found.mask)
        assert torch.equal(one.weight, found.weight)
        assert int((~found.mask).sum()) == count * 32 // len(counts[1:])
    for denser, sparser in itertools.pairwise(path):
        assert bool((denser.mask | ~sparser.mask).all()), "what goes first stays away"


@pytest.mark.parametrize(
    ("pattern", "groups", "most"),
    [
        *((Unstructured(), 1, 192), (NM(1, 4), 1, 144), (NM(2, 4), 1, 96), (Block(5, 1), 1, 48), (Channel(1), 1, 16)),
        *((Block(1, 4), 1, 48), (Block(4, 2), 2, 48), (Unstructured(), 2, 384), (NM(2, 4), 2, 192)),
    ],
    ids=str,
)
def test_a_path_has_no_more_units_than_the_layer_which_is_known_before_any_trace(pattern, groups, most, monkeypatch):
    shape = (12 * groups, 16)
    task = problem(pattern, None if isinstance(pattern, NM) else 0.5, shape, groups=groups)
    (sparsest,) = obc_path(task, [most])
    assert torch.equal(sparsest.mask, obc_path(task, [None])[0].mask)
    monkeypatch.setattr(torch, "cholesky_inverse", lambda _: pytest.fail("traced"))
    for wrong in (most + 1, -1):
        with pytest.raises(ValueRangeError, match=f"{wrong} units of {most}"):
            obc_path(task, [1, wrong])


def test_obc_gives_more_where_it_costs_less():
    task = problem(Unstructured(), 0.5, shape=(2, 8))
    weight = task.weight[0].clone()
    weight[1] *= 1e-3
    per_row = obc(Problem.of(weight, task.gram, Unstructured(), 0.5)).mask[0].sum(1)
    assert per_row.tolist() == [8, 0]


@pytest.mark.parametrize("start", [magnitude, wanda, ria])
@pytest.mark.parametrize("pattern_text", ["unstructured", "2:4", "4x1", "1x4", "2x2", "channel:1"])
def test_swaps_never_raise_the_error_and_end_where_no_swap_helps(start, pattern_text):
    pattern = as_pattern(pattern_text)
    task = problem(pattern, None if pattern_text == "2:4" else 0.5, shape=(8, 12))
    before = start(task).mask
    after = improve(task, before)
    pattern.validate(task.layout.to_weight(after))
    assert after.sum() == before.sum()
    assert damped_loss(task, task.weight * after) <= damped_loss(task, task.weight * before) * (1 + 1e-12)
    assert torch.equal(improve(task, after), after)


def test_no_single_swap_lowers_the_error_after_swaps():
    task = problem(Unstructured(), 0.5, shape=(2, 8))
    mask = improve(task, magnitude(task).mask)
    reached = damped_loss(task, task.weight * mask)
    for row, back, drop in itertools.product(range(2), range(8), range(8)):
        if mask[0, row, drop] and not mask[0, row, back]:
            trial = mask.clone()
            trial[0, row, back], trial[0, row, drop] = True, False
            assert damped_loss(task, task.weight * trial) >= reached * (1 - 1e-9)


def test_swaps_with_fitted_values_beat_magnitude():
    for seed in range(5):
        task = problem(Unstructured(), 0.6, seed=seed)
        mask = improve(task, magnitude(task).mask)
        assert damped_loss(task, refit(task, mask, task.weight)) <= damped_loss(task, magnitude(task).weight)
        assert task.loss(swaps(task).weight) < task.loss(wanda(task).weight)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 11),
    st.sampled_from(["unstructured", "2:4", "1:2", "2:1:4", "2x1", "1x2", "2x2", "channel:0", "channel:1"]),
    st.floats(0, 1),
    st.sampled_from(["magnitude", "wanda", "ria", "sparsegpt", "alps"]),
    st.integers(0, 5),
)
def test_any_shape_and_pattern(rows, columns, text, sparsity, name, tokens):
    pattern = as_pattern(text)
    try:
        pattern.check_shape((rows, columns))
    except ShapeError:
        return
    own = pattern.own_sparsity() is not None
    task = problem(pattern, None if own else sparsity, shape=(rows, columns), tokens=tokens)
    solution = find_method(name).solve(task)
    mask = task.layout.to_weight(solution.mask)
    pattern.validate(mask)
    if task.count is not None:
        kept_units = int((pattern.unit_scores(mask.double()) > 0.5).sum())
        assert kept_units == pattern.unit_count(mask.shape) - task.count
    assert bool(solution.weight.isfinite().all())
    assert bool((solution.weight[~solution.mask] == 0).all())


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 11),
    st.sampled_from(["unstructured", "2:4", "1:2", "2:1:4", "2x1", "1x2", "2x2", "channel:0", "channel:1"]),
    st.floats(0, 1),
    st.sampled_from(["alps", "swaps"]),
    st.integers(1, 30),
    st.integers(0, 99),
)
@example(4, 5, "1x2", 0.91, "alps", 17, 0)
@example(3, 7, "2x1", 0.68, "alps", 18, 0)
def test_the_error_after_refinement_is_never_above_that_of_magnitude(rows, columns, text, sparsity, name, tokens, seed):
    pattern = as_pattern(text)
    own = pattern.own_sparsity() is not None
    try:
        pattern.check_shape((rows, columns))
        task = problem(pattern, None if own else sparsity, shape=(rows, columns), tokens=tokens, seed=seed)
        found = find_method(name).solve(task)
    except (ShapeError, PatternError):
        return
    assert task.loss(found.weight) <= task.loss(magnitude(task).weight)


@pytest.mark.parametrize("name", ["wanda", "sparsegpt", "alps", "obc", "swaps"])
@pytest.mark.parametrize(("pattern", "sparsity"), [(Unstructured(), 0.5), (NM(2, 4), None), (Block(2, 1), 0.5)])
def test_groups_are_solved_each_with_its_own_inputs(name, pattern, sparsity):
    """Two groups with one Gram matrix are one layer with twice the rows."""
    one = problem(pattern, sparsity, shape=(8, 4, 1, 2))
    two = Problem.of(one.layout.to_weight(one.weight), one.gram.repeat(2, 1, 1), pattern, sparsity, groups=2)
    solve = find_method(name).solve
    a, b = solve(one), solve(two)
    assert torch.equal(one.layout.to_weight(a.mask), two.layout.to_weight(b.mask))
    assert torch.allclose(one.layout.to_weight(a.weight), two.layout.to_weight(b.weight), rtol=1e-6)


def test_a_dead_input_is_pruned_first_and_nothing_breaks():
    task = problem(Unstructured(), 0.25, shape=(6, 8))
    gram = task.gram.clone()
    gram[:, 3], gram[:, :, 3] = 0, 0
    gram[:, 5], gram[:, :, 5] = 0, 0
    dead = Problem.of(task.weight[0], gram, Unstructured(), 0.25)
    for solve in (wanda, sparsegpt, alps, obc):
        solution = solve(dead)
        assert dead.relative_error(solution.weight) < 0.05
    zero = Problem.of(task.weight[0], torch.zeros_like(gram), Unstructured(), 0.25)
    assert bool(alps(zero).weight.isfinite().all())
    assert zero.relative_error(zero.weight * 0) == 0
