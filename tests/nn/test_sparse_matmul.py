"""SparseBatchMatMul is the masked product, whole or compressed, whatever kernel was chosen."""

# ruff: noqa: N803, N806

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, SpartaError, ValueRangeError
from sparta.nn import SparseBatchMatMul
from sparta.specialize.tuning.store import TuningStore
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, matmul_reference

M, K, N = 40, 48, 24
BLOCKS = {"_name": "blocks", "tile": (8, 8)}
CONFIGS = [None, {"_name": "dense"}, BLOCKS, {"_name": "blocks", "tile": (16, 16)}]
NAMES = ["untuned", "dense", "own tiles", "other tiles"]


def stored_shapes(transpose_A=False, transpose_B=False, sizes=(M, K, N)):
    m, k, n = sizes
    return {"A": (k, m) if transpose_A else (m, k), "B": (n, k) if transpose_B else (k, n), "C": (m, n)}


def run_and_compare(op, mask, which, A, B, **transposes):
    """Compare the result and both gradients with float64; A and B are whole."""
    indexes = op.indexes
    given = {"A": A, "B": B}
    if op.compressed and which != "C":
        given[which] = indexes.convert(given[which])
    leaves = [given[name].detach().requires_grad_() for name in "AB"]
    y = op(*leaves)
    exact = [x.detach().double().requires_grad_() for x in (A, B)]
    expected = matmul_reference(*exact, **{f"{which}_mask": mask}, **transposes)
    whole = indexes.inverse(y) if op.compressed and which == "C" else y
    assert whole.shape == expected.shape
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    passed = cotangent.to(y.dtype)
    y.backward(indexes.convert(passed) if op.compressed and which == "C" else passed)
    grads = {name: leaf.grad for name, leaf in zip("AB", leaves, strict=True)}
    if op.compressed and which != "C":
        grads[which] = indexes.inverse(grads[which])
    if whole.numel():
        check(whole, expected.detach(), reduction=max(1, A.shape[-1] * A.shape[-2]))
    for name, reference in zip("AB", exact, strict=True):
        if reference.numel():
            check(grads[name], reference.grad, reduction=10_000)
    if which != "C":
        pruned = ~mask.expand(grads[which].shape)
        assert torch.equal(grads[which][pruned], torch.zeros(int(pruned.sum()), dtype=y.dtype))
    else:
        pruned = ~mask.expand(whole.shape)
        assert torch.equal(whole[pruned], torch.zeros(int(pruned.sum()), dtype=y.dtype))


def built(config, mask, which, inputs, *, compressed, **transposes):
    op = SparseBatchMatMul(**{f"{which}_mask": mask}, compressed=compressed, **transposes)
    if config is not None:
        if compressed and which != "C":
            inputs = [op.indexes.convert(x) if name == which else x for name, x in zip("AB", inputs, strict=True)]
        op.build(inputs, config)
    return op


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("which", ["A", "B", "C"])
@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "whole"])
def test_every_mode_and_transposition(config, which, compressed):
    for transpose_A, transpose_B in itertools.product((False, True), repeat=2):
        transposes = {"transpose_A": transpose_A, "transpose_B": transpose_B}
        shapes = stored_shapes(**transposes)
        A, B = torch.randn(2, *shapes["A"]), torch.randn(2, *shapes["B"])
        mask = block_mask(shapes[which], (8, 8), 0.7, seed=3)
        op = built(config, mask, which, (A, B), compressed=compressed, **transposes)
        assert op.block == (8, 8)
        run_and_compare(op, mask, which, A, B, **transposes)


@st.composite
def problems(draw):
    sizes = tuple(draw(st.integers(0, 37)) for _ in range(3))
    which = draw(st.sampled_from("ABC"))
    transposes = {"transpose_A": draw(st.booleans()), "transpose_B": draw(st.booleans())}
    lead = draw(st.sampled_from([(), (3,), (2, 3)]))
    mask_lead = tuple(draw(st.sampled_from([1, size])) for size in lead[draw(st.integers(0, len(lead))) :])
    shape = stored_shapes(**transposes, sizes=sizes)[which]
    block, kept = draw(st.sampled_from([(1, 1), (3, 5), (8, 8)])), draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    grid = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    cells = torch.rand(*mask_lead, *grid, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < kept
    mask = cells.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : shape[0], : shape[1]]
    return sizes, which, transposes, lead, mask


@given(problems(), st.booleans(), st.sampled_from([None, "dense", "blocks"]), st.integers(0, 3))
@settings(max_examples=30)
def test_any_size_and_mask(problem, compressed, implement, tile):
    sizes, which, transposes, lead, mask = problem
    shapes = stored_shapes(**transposes, sizes=sizes)
    A, B = torch.randn(*lead, *shapes["A"]), torch.randn(*lead, *shapes["B"])
    if which != "C":
        x = A if which == "A" else B
        x.masked_fill_(~mask, float("nan"))  # what is pruned never matters
    op = SparseBatchMatMul(**{f"{which}_mask": mask}, compressed=compressed, **transposes)
    if implement is not None:
        inputs = [A, B]
        if compressed and which != "C":
            inputs["AB".index(which)] = op.indexes.convert(inputs["AB".index(which)])
        space = [config for config in op.get_search_space(inputs).samples() if config["_name"] == implement]
        if space:
            op.build(inputs, space[tile % len(space)])
    run_and_compare(op, mask, which, A, B, **transposes)


@pytest.mark.parametrize("which", ["A", "B"])
def test_compressed_values_without_a_batch_dim_run_by_blocks(which):
    mask = torch.tensor([[True, False], [True, True]])
    op = SparseBatchMatMul(**{f"{which}_mask": mask}, compressed=True)
    matrices = {"A": torch.randn(2, 2), "B": torch.randn(2, 2)}
    matrices[which] = torch.where(mask, matrices[which], 0.0)
    given = {**matrices, which: op.indexes.convert(matrices[which])}
    assert given[which].dim() == 1
    op.build((given["A"], given["B"]), {"_name": "blocks", "tile": (2, 2)})
    torch.testing.assert_close(op(given["A"], given["B"]), matrices["A"] @ matrices["B"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["A", "B", "C"])
def test_dtypes_and_strides(dtype, which):
    A, B = torch.randn(2, K, M, dtype=dtype).mT, torch.randn(2, K, 2 * N, dtype=dtype)[..., ::2]
    mask = block_mask(stored_shapes()[which], (8, 8), 0.6, seed=1)
    op = built(BLOCKS, mask, which, (A, B), compressed=False)
    y = op(A, B)
    assert y.dtype == dtype
    check(y, matmul_reference(A, B, **{f"{which}_mask": mask}), reduction=K)


def test_masks_that_differ_by_head_share_one_index():
    mask = block_mask((3, M, K), (8, 8), 0.8, seed=5)
    op = SparseBatchMatMul(A_mask=mask)
    assert torch.equal(op.indexes.get_mask(), mask.any(0))
    A, B = torch.randn(2, 3, M, K), torch.randn(2, 3, K, N)
    op.build((op.indexes.convert(A), B), BLOCKS)
    run_and_compare(op, mask, "A", A, B)


def test_any_batch_and_width_after_build():
    mask = block_mask((M, K), (8, 8), 0.7, seed=0)
    op = built(BLOCKS, mask, "A", (torch.randn(2, M, K), torch.randn(2, K, N)), compressed=False)
    for lead, width in (((), 5), ((7,), 24), ((2, 2), 1), ((0,), 3)):
        A, B = torch.randn(*lead, M, K), torch.randn(K, width)
        y = op(A, B)
        assert y.shape == (*lead, M, width)
        if y.numel():
            check(y, matmul_reference(A, B, A_mask=mask), reduction=K)


@pytest.mark.parametrize("which", ["A", "C"])
@pytest.mark.parametrize("compressed", [True, False])
def test_rows_of_many_different_lengths(which, compressed):
    cells = torch.ones(15, 15, dtype=torch.bool).tril()  # each row of tiles longer than the last
    mask = cells.repeat_interleave(16, 0).repeat_interleave(16, 1)
    A, B = torch.randn(2, 240, 240), torch.randn(2, 240, 240)
    op = built({"_name": "blocks", "tile": (16, 16)}, mask, which, (A, B), compressed=compressed)
    run_and_compare(op, mask, which, A, B)


def test_values_of_one_product_go_into_the_next():
    mask = block_mask((M, M), (8, 8), 0.6, seed=2)
    scores, out = SparseBatchMatMul(C_mask=mask, transpose_B=True), SparseBatchMatMul(A_mask=mask)
    q, v = torch.randn(2, M, 16), torch.randn(2, M, 8)
    scores.build((q, q), BLOCKS)
    values = scores(q, q)
    out.build((values, v), BLOCKS)
    expected = matmul_reference(matmul_reference(q, q, C_mask=mask, transpose_B=True), v)
    check(out(values, v), expected, reduction=16 * M)


def test_results_never_vary():
    mask = block_mask((M, K), (8, 8), 0.5, seed=0)
    A, B = torch.randn(4, M, K), torch.randn(4, K, N, requires_grad=True)
    op = built(BLOCKS, mask, "A", (A, B), compressed=False)
    runs = [torch.autograd.grad(op(A, B).square().sum(), B)[0] for _ in range(3)]
    assert all(torch.equal(runs[0], other) for other in runs)


def test_gradients_of_gradients():
    mask = block_mask((6, 8), (2, 2), 0.5, seed=0)
    A, B = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((6, 8), (8, 3)))
    op = SparseBatchMatMul(A_mask=mask, compressed=False)
    op.build((A, B), {"_name": "blocks", "tile": (6, 8)})
    assert torch.autograd.gradgradcheck(op, (A, B))


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("which", ["A", "C"])
def test_torch_compile_takes_it_whole(config, which):
    A, B = torch.randn(2, M, K, requires_grad=True), torch.randn(2, K, N)
    mask = block_mask(stored_shapes()[which], (8, 8), 0.6, seed=1)
    op = built(config, mask, which, (A, B), compressed=False)
    y = torch.compile(op, fullgraph=True, backend="aot_eager")(A, B)
    check(y, matmul_reference(A, B, **{f"{which}_mask": mask}), reduction=K)
    y.sum().backward()
    assert torch.isfinite(A.grad).all()
    torch._dynamo.reset()


def test_a_new_mask_runs_dense_again_and_may_change_the_mode():
    first, second = block_mask((M, K), (8, 8), 0.7, seed=0), block_mask((K, N), (4, 4), 0.5, seed=1)
    A, B = torch.randn(2, M, K), torch.randn(2, K, N)
    op = built(BLOCKS, first, "A", (A, B), compressed=False)
    twin = copy.deepcopy(op)
    op.update_mask(B_mask=second)
    assert (op.mode, op.block, op.ready) == ("dsd", (4, 4), False)
    check(op(A, B), matmul_reference(A, B, B_mask=second), reduction=K)
    assert twin.ready
    check(twin(A, B), matmul_reference(A, B, A_mask=first), reduction=K)


def test_state_dict_carries_the_mask():
    first, second = block_mask((M, K), (8, 8), 0.7, seed=0), block_mask((M, K), (4, 4), 0.5, seed=1)
    A, B = torch.randn(M, K), torch.randn(K, N)
    op, other = (
        built(BLOCKS, first, "A", (A, B), compressed=False),
        built({"_name": "blocks", "tile": (16, 16)}, second, "A", (A, B), compressed=False),
    )
    assert list(op.state_dict()) == ["A_mask"]
    same = built(BLOCKS, first, "A", (A, B), compressed=False)
    same.load_state_dict(op.state_dict())
    assert same.ready
    other.load_state_dict(op.state_dict())
    assert not other.ready  # it was built for another mask
    assert other.block == (8, 8)
    check(other(A, B), matmul_reference(A, B, A_mask=first), reduction=K)
    assert op.half()(A.half(), B.half()).dtype == torch.float16


@pytest.mark.parametrize("backward", [False, True])
def test_tuning_keeps_what_is_right(tmp_path, backward):
    mask = block_mask((2, M, K), (8, 8), 0.9, seed=0)
    op = SparseBatchMatMul(A_mask=TeSA.from_mask(mask))
    A, B = torch.randn(3, 2, M, K), torch.randn(3, 2, K, N)
    values, store = op.indexes.convert(A), TuningStore(tmp_path)
    choice = op.tune((values, B), max_trials=4, store=store, backward=backward)
    assert op.ready
    assert len(store) == 1
    assert op.tune((values, B), store=store, backward=backward).config["_name"] == choice.implement
    check(op(values, B), matmul_reference(A, B, A_mask=mask), reduction=K)


MASK = torch.ones(4, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (SparseBatchMatMul, ValueRangeError, "exactly one"),
        (lambda: SparseBatchMatMul(A_mask=MASK, C_mask=MASK), ValueRangeError, "exactly one"),
        (lambda: SparseBatchMatMul(A_mask=[[1]]), SpartaError, "A_mask"),
        (lambda: SparseBatchMatMul(A_mask=MASK * 0.5), ValueRangeError, "other than 0 and 1"),
        (lambda: SparseBatchMatMul(A_mask=MASK[0]), ShapeError, "A_mask of shape"),
        (lambda: SparseBatchMatMul(A_mask=MASK)(MASK.float(), torch.ones(6, 2)), ShapeError, "kept blocks"),
        (lambda: made()(torch.ones(5, 6), torch.ones(6, 2)), ShapeError, "A has shape"),
        (lambda: made()(torch.ones(4, 6), torch.ones(6)), ShapeError, "B has shape"),
        (lambda: made()(torch.ones(4, 6), torch.ones(5, 2)), ShapeError, "transpose_A"),
        (lambda: made()(torch.ones(3, 4, 6), torch.ones(2, 6, 2)), ShapeError, "leading dims"),
        (lambda: made("C")(torch.ones(4, 6), torch.ones(6, 5)), ShapeError, r"into \(4, 6\)"),
        (lambda: made().tune((torch.ones(4, 6),)), ValueRangeError, "tuple of 2"),
        (
            lambda: made().build((MASK.float(), MASK.T.float()), {"_name": "blocks", "tile": (3, 3)}),
            ValueRangeError,
            "space",
        ),
    ],
)
def test_wrong_inputs_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text):
        call()


def made(which="A"):
    return SparseBatchMatMul(**{f"{which}_mask": MASK}, compressed=False)


def test_it_prints_what_runs():
    assert "sdd, mask (4, 6) density 1, dense until tuned" in repr(made())
