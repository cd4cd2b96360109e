"""On CUDA, the Triton products and softmax over kept tiles are what the masked dense ones are, inside PyTorch too."""

# ruff: noqa: N806 -- A and B are the operands' names

import math

import pytest
import torch

from gpu.cases import draw
from sparta.nn import SparseBatchMatMul, SparseLinear, SparseSoftmax
from sparta.specialize.blocks.sparse_plan import ProductTile, SoftmaxTile
from sparta.specialize.matmul.triton_block import TritonBlockMatmul
from sparta.specialize.softmax.triton_block import TritonBlockSoftmax
from sparta.testing import attention_reference, block_mask, check, matmul_reference, softmax_reference
from specialize.unit_cases import ProductCase, run_product, run_softmax

MODES = ["sdd", "dsd", "dds"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RAGGED = [((300, 500, 130), (64, 64), 0.7), ((129, 257, 333), (32, 64), 0.5), ((77, 1000, 65), (16, 16), 0.9)]


@pytest.fixture(autouse=True)
def _fresh_data(request):
    torch.manual_seed(len(request.node.name))


def tuned(op, inputs, implement):
    """Build a module with the implement's first guess."""
    op.build({"_name": "triton-block", **implement.default(op._spec(inputs))}, inputs)
    return op


# ---------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("sizes", "block", "sparsity"), RAGGED)
def test_ragged_shapes(sizes, block, sparsity, mode, dtype):
    case = ProductCase(mode, transpose_B=mode == "dds", compressed=True, dtype=dtype, sizes=sizes, lead=(2,),
                       block=block, sparsity=sparsity, seed=sizes[0])  # fmt: skip
    run_product(case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("compressed", "block", "sizes"),
    [
        (True, (64, 64), (256, 320, 384)),
        (True, (128, 128), (200, 328, 392)),
        (True, (32, 32), (72, 88, 104)),
        (False, (16, 16), (256, 320, 384)),
        (False, (64, 64), (200, 328, 136)),
    ],
)
def test_every_candidate_is_right(mode, compressed, block, sizes):
    case = ProductCase(mode, compressed=compressed, dtype=torch.bfloat16, sizes=sizes, block=block, lead=(2,),
                       sparsity=0.7)  # fmt: skip
    mask, shapes = case.mask(), case.shapes
    op = SparseBatchMatMul(**{f"{'ABC'[MODES.index(mode)]}_mask": mask}, compressed=compressed)
    inputs = [draw(2, *shapes[name]) for name in "AB"]
    if compressed and mode != "dds":
        inputs[MODES.index(mode)] = op.indexes.convert(inputs[MODES.index(mode)])
    for tile in TritonBlockMatmul().space(op._spec(inputs))["tile"].domain.values:
        # The gradients of the first mode are the other two.
        run_product(case, params={"tile": tile}, mask=mask, gradients=mode == "sdd")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask_lead", [(3,), (2, 1), (2, 3)])
@pytest.mark.parametrize("compressed", [True, False])
def test_masks_by_batch_and_head(mode, mask_lead, compressed):
    case = ProductCase(mode, compressed=compressed, dtype=torch.float16, sizes=(160, 192, 96), lead=(2, 3),
                       mask_lead=mask_lead, block=(32, 32), sparsity=0.8)  # fmt: skip
    run_product(case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["all live", "all dead", "one block", "empty rows", "elements"])
def test_extreme_masks(mode, kind):
    case = ProductCase(mode, dtype=torch.bfloat16, sizes=(130, 200, 70), lead=(2,))
    mask = torch.zeros(case.shapes["ABC"[MODES.index(mode)]], dtype=torch.bool, device="cuda")
    if kind == "all live":
        mask[:] = True
    elif kind == "one block":
        mask[32:64, 16:48] = True
    elif kind == "empty rows":
        mask[::3, 20:] = True
    elif kind == "elements":
        mask = torch.rand(mask.shape, device="cuda") < 0.01
    run_product(case, params={"tile": str(ProductTile(32, 32, 64, 32))}, mask=mask)


@pytest.mark.parametrize("mode", MODES)
def test_strided_broadcast_and_misaligned_operands(mode):
    case = ProductCase(mode, dtype=torch.float16, sizes=(128, 192, 64), lead=(3,), block=(32, 32), sparsity=0.5)
    for A, B in (
        (draw(3, 192, 128, dtype=torch.float16).mT, draw(3, 192, 128, dtype=torch.float16)[..., ::2]),
        (draw(3, 128, 193, dtype=torch.float16)[..., 1:], draw(3, 64, 192, dtype=torch.float16).mT),
        (draw(1, 128, 192, dtype=torch.float16).expand(3, 128, 192), draw(3, 192, 65, dtype=torch.float16)[..., 1:]),
    ):
        run_product(case, operands=(A, B))


def test_one_sparse_weight_for_a_whole_batch():
    mask = block_mask((192, 160), (32, 32), 0.7, seed=1, device="cuda")
    A, B = draw(2, 3, 50, 192).requires_grad_(), draw(192, 160).requires_grad_()
    op = tuned(SparseBatchMatMul(B_mask=mask, compressed=False), (A, B), TritonBlockMatmul())
    y = op(A, B)
    exact = [x.detach().double().requires_grad_() for x in (A, B)]
    expected = matmul_reference(*exact, B_mask=mask)
    check(y, expected.detach(), reduction=192)
    y.sum().backward()
    expected.sum().backward()
    for leaf, reference in zip((A, B), exact, strict=True):
        check(leaf.grad, reference.grad, reduction=1200, dtype=torch.bfloat16)


def test_nan_and_inf_spread_only_through_kept_tiles():
    mask = torch.zeros(256, 256, dtype=torch.bool, device="cuda")
    mask[:128, :128], mask[128:, 128:] = True, True
    A, B = draw(256, 256), draw(256, 64)
    A[~mask] = math.nan
    B[3, 1], B[200, 2] = math.nan, math.inf
    op = tuned(SparseBatchMatMul(A_mask=mask, compressed=False), (A, B), TritonBlockMatmul())
    halves = [matmul_reference(A[part, part], B[part]) for part in (slice(0, 128), slice(128, 256))]
    check(op(A, B), torch.cat(halves), reduction=128)
    scores = SparseBatchMatMul(C_mask=mask, transpose_B=True, compressed=False)
    q, k = draw(256, 64), draw(256, 64)
    q[5], k[:, 7] = math.inf, 1.0
    tuned(scores, (q, k), TritonBlockMatmul())
    y = scores(q, k)
    assert not y[~mask].any()
    assert not y[5, :128].isfinite().any()
    assert y[6:].isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_every_time(mode):
    case = ProductCase(mode, dtype=torch.bfloat16, sizes=(512, 512, 512), lead=(2,), block=(64, 64), sparsity=0.6)
    mask = case.mask()
    op = SparseBatchMatMul(**{f"{'ABC'[MODES.index(mode)]}_mask": mask}, compressed=False)
    leaves = [draw(2, *case.shapes[name]).requires_grad_() for name in "AB"]
    tuned(op, leaves, TritonBlockMatmul())
    runs = []
    for _ in range(3):
        y = op(*leaves)
        runs.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("name", ["input_mask", "output_mask"])
def test_linear_layers_with_sparse_inputs_or_outputs(name):
    dense = torch.nn.Linear(256, 192).cuda().bfloat16()
    mask = block_mask((128, 256 if name == "input_mask" else 192), (32, 32), 0.7, seed=1, device="cuda")
    layer, x = SparseLinear(dense, **{name: mask}), draw(2, 128, 256)
    layer.build({"_name": "triton-block", **TritonBlockMatmul().default(layer._spec((x,)))}, (x,))
    plain, leaf, other = SparseLinear(dense, **{name: mask}), x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = layer(leaf), plain(other)
    check(y, expected.detach().double(), reduction=256)
    grads = torch.autograd.grad(y.sum(), [leaf, dense.weight, dense.bias])
    right = torch.autograd.grad(expected.sum(), [other, dense.weight, dense.bias])
    for grad, reference in zip(grads, right, strict=True):
        check(grad, reference.double(), reduction=2048, dtype=torch.bfloat16)


# ---------------------------------------------------------------------- softmax


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(
    ("shape", "block"), [((200, 300), (8, 8)), ((512, 4096), (64, 64)), ((130, 20000), (32, 128)), ((65, 77), (16, 32))]
)
def test_softmax_of_any_shape(shape, block, compressed, dtype):
    mask = block_mask(shape, block, 0.7, seed=1, device="cuda")
    x = draw(2, *shape, dtype=dtype).masked_fill(~mask, math.nan)
    run_softmax(mask, x, 2.5, compressed=compressed)


@pytest.mark.parametrize("lead", [(3,), (2, 1)])
@pytest.mark.parametrize("compressed", [True, False])
def test_softmax_under_masks_by_batch_and_head(lead, compressed):
    mask = block_mask((*lead, 150, 260), (16, 16), 0.8, seed=1, device="cuda")
    run_softmax(mask, draw(2, 3, 150, 260).masked_fill(~mask, math.nan), 1.0, compressed=compressed)


def test_every_candidate_of_softmax_is_right():
    for block, compressed in (((32, 32), True), ((8, 16), True), ((1, 1), False)):
        mask = block_mask((256, 512), block, 0.8, seed=2, device="cuda")
        op, x = SparseSoftmax(mask, compressed=compressed), draw(2, 256, 512)
        spec = op._spec((op.indexes.convert(x) if compressed else x,))
        for tile in TritonBlockSoftmax().space(spec)["tile"].domain.values:
            run_softmax(mask, x, 1.0, compressed=compressed, params={"tile": tile})


def test_softmax_treats_nan_and_inf_as_pytorch_does():
    mask = (torch.rand(64, 96, device="cuda") < 0.5) & block_mask((64, 96), (16, 16), 0.5, seed=1, device="cuda")
    mask[9], mask[:8, 0] = False, True
    x = draw(64, 96, dtype=torch.float32)
    x[1, 0], x[2, 0], x[3], x[4, 0] = math.nan, math.inf, -math.inf, -math.inf
    op = tuned(SparseSoftmax(mask), (x,), TritonBlockSoftmax())
    expected = torch.where(mask, torch.where(mask, x, -math.inf).softmax(-1), 0.0)
    torch.testing.assert_close(op(x), expected, equal_nan=True)
    assert not op(x)[9].any()


@pytest.mark.parametrize("height", [-2e4, 2e4])
def test_the_maximum_is_that_of_kept_elements(height):
    mask = block_mask((128, 256), (16, 16), 0.5, seed=1, device="cuda")
    x = torch.where(mask, draw(128, 256, dtype=torch.float32) + height, 1e30)
    op = tuned(SparseSoftmax(mask), (x,), TritonBlockSoftmax())
    check(op(x), softmax_reference(x, mask), reduction=256)


# ---------------------------------------------------------------------- inside PyTorch


class Trio(torch.nn.Module):
    """Attention in three steps over compressed scores."""

    def __init__(self, mask, width):
        super().__init__()
        self.scores = SparseBatchMatMul(C_mask=mask, transpose_B=True)
        self.softmax = SparseSoftmax(mask, math.sqrt(width), compressed=True)
        self.out = SparseBatchMatMul(A_mask=mask)

    def build(self, q, k, v):
        with torch.no_grad():
            tuned(self.scores, (q, k), TritonBlockMatmul())
            scores = self.scores(q, k)
            tuned(self.softmax, (scores,), TritonBlockSoftmax())
            tuned(self.out, (scores, v), TritonBlockMatmul())
        return self

    def forward(self, q, k, v):
        return self.out(self.softmax(self.scores(q, k)), v)


@pytest.fixture
def trio():
    mask = block_mask((256, 384), (32, 32), 0.7, seed=3, device="cuda")
    q, k, v = draw(2, 4, 256, 64), draw(2, 4, 384, 64), draw(2, 4, 384, 64)
    return Trio(mask, 64).build(q, k, v), (q, k, v), mask


def test_three_steps_are_attention(trio):
    module, inputs, mask = trio
    leaves = [x.detach().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y, expected = module(*leaves), attention_reference(*exact, mask)
    check(y, expected.detach(), reduction=8 * 384)
    slope = draw(*y.shape)
    y.backward(slope)
    expected.backward(slope.double())
    for leaf, reference in zip(leaves, exact, strict=True):
        check(leaf.grad, reference.grad, reduction=32 * 384, dtype=torch.bfloat16, atol=1e-4)


def test_torch_compile_takes_it_whole(trio):
    module, inputs, _ = trio
    leaves = [x.detach().requires_grad_() for x in inputs]
    y, eager = torch.compile(module, fullgraph=True)(*leaves), module(*leaves)
    assert torch.equal(y, eager)
    for a, b in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True):
        assert torch.equal(a, b)


def test_a_cuda_graph_captures_forward_and_backward(trio):
    module, inputs, mask = trio
    leaves, slope = [x.detach().requires_grad_() for x in inputs], draw(2, 4, 256, 64)
    torch.autograd.grad(module(*leaves), leaves, slope)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(*leaves)
        grads = torch.autograd.grad(y, leaves, slope)
    for _ in range(2):
        with torch.no_grad():
            for leaf in leaves:
                leaf.normal_()
        graph.replay()
        check(y, attention_reference(*(x.detach() for x in leaves), mask), reduction=8 * 384)
        eager = torch.autograd.grad(module(*leaves), leaves, slope)
        assert all(torch.equal(a, b) for a, b in zip(grads, eager, strict=True))


def test_calls_do_not_wait_for_the_device(trio):
    module, inputs, _ = trio
    leaves = [x.detach().requires_grad_() for x in inputs]
    module(*leaves).sum().backward()
    torch.cuda.set_sync_debug_mode("error")  # the folder's fixture puts it back
    module(*leaves).sum().backward()


def test_tuning_finds_them(trio):
    pytest.importorskip("optuna")
    module, (q, k, _), mask = trio
    choice = module.scores.tune((q, k), max_trials=8, budget_s=20, backward=True)
    assert "triton-block" not in choice.refused
    expected = module.scores.indexes.convert(matmul_reference(q, k, C_mask=mask, transpose_B=True))
    check(module.scores(q, k), expected, reduction=64)


def test_a_tile_that_does_not_fit_is_an_error_of_ours():
    case = ProductCase("sdd", dtype=torch.float32, sizes=(256, 256, 256), block=(64, 64))
    with pytest.raises(ValueError, match="needs more than the GPU has"):
        run_product(case, params={"tile": str(ProductTile(128, 128, 128, 128, 8, 8))}, gradients=False)
    mask = block_mask((64, 64), (16, 16), 0.5, device="cuda")
    run_softmax(mask, draw(64, 64), 1.0, compressed=True, params={"tile": str(SoftmaxTile(16, 16, 1, 1))})
