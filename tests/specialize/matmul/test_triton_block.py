"""The Triton products and softmax over kept tiles keep their contract, run by the interpreter."""

# ruff: noqa: N806 -- A and B are the operands' names

import dataclasses
import math

import pytest
import torch

from sparta.errors import MissingPackageError, ValueRangeError
from sparta.specialize.blocks.sparse_plan import ProductTile, SoftmaxTile, SparsePlan
from sparta.specialize.blocks.tile_lists import tile_lists
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.matmul import op as op_of_products
from sparta.specialize.matmul.op import sampled_product, sparse_product
from sparta.specialize.matmul.spec import Product
from sparta.specialize.matmul.triton_block import TritonBlockMatmul
from sparta.specialize.softmax import op
from sparta.specialize.softmax.op import tile_softmax
from sparta.specialize.softmax.spec import softmax_spec
from sparta.specialize.softmax.triton_block import TritonBlockSoftmax
from sparta.testing import block_mask, check, matmul_reference
from specialize.unit_cases import ProductCase, product_kernel, run_product, run_softmax

pytest.importorskip("triton", reason="Triton is not installed on this platform")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # NumPy's, in the interpreter
]

TILE = {"tile": str(ProductTile(16, 16, 16, 16))}
ROWS = {"tile": str(SoftmaxTile(16, 16, rows=16))}
SMALL = ProductCase("sdd", sizes=(20, 33, 18), lead=(), block=(16, 16), sparsity=0.5, device="cpu")


def small(mode, **changes):
    return dataclasses.replace(SMALL, mode=mode, **changes)


# ---------------------------------------------------------------------- lists


def test_lists_name_every_kept_tile_once_and_where_it_is():
    mask = torch.rand(2, 50, 70) < 0.02
    lists, plan = tile_lists(mask, (5, 7), (16, 32))
    found = torch.zeros(2, 4, 3, dtype=torch.bool)
    for group, (first, last) in enumerate(zip(lists.ends[:-1], lists.ends[1:], strict=True)):
        for column, pattern, _, row in lists.row_entries[first:last].tolist():
            assert not found[group, row, column]
            found[group, row, column] = True
            live = torch.zeros(16, 32, dtype=torch.bool)
            part = mask[group, row * 16 : row * 16 + 16, column * 32 : column * 32 + 32]
            live[: part.shape[0], : part.shape[1]] = part
            assert torch.equal(lists.patterns[pattern].bool() if pattern >= 0 else torch.ones_like(live), live)
    padded = torch.nn.functional.pad(mask, (0, 26, 0, 14)).reshape(2, 4, 16, 3, 32)
    assert torch.equal(found, padded.any(4).any(2))
    assert plan.most == int(found.sum((1, 2)).max())
    assert sorted(lists.column_entries[:-1, [3, 0]].tolist()) == sorted(lists.row_entries[:-1, [0, 3]].tolist())


def test_a_plan_says_how_tiles_are_found_and_whether_they_are_all():
    mask = block_mask((64, 64), (32, 32), 0.5, seed=1)
    plans = {tile: tile_lists(mask[None], (32, 32), tile)[1] for tile in ((16, 32), (32, 32), (64, 32))}
    assert [plan.address for plan in plans.values()] == [1, 1, 2]
    assert [plan.complete for plan in plans.values()] == [1, 1, 0]
    assert not tile_lists(mask[None], None, (16, 16))[1].complete
    assert tile_lists(torch.ones(1, 30, 30, dtype=torch.bool), None, (16, 16))[1].complete
    assert SparsePlan.parse(str(plans[16, 32])) == plans[16, 32]


# ---------------------------------------------------------------------- masks and shapes


@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_masks_of_their_own_for_every_head(mode):
    run_product(small(mode, compressed=True, lead=(2,), mask_lead=(2,), sizes=(32, 16, 32)), params=TILE)


@pytest.mark.parametrize("kept", [0.0, 0.02, 1.0], ids=["all dead", "elements", "all live"])
@pytest.mark.parametrize("mode", ["sdd", "dds"])
def test_any_mask(mode, kept):
    case = small(mode, sizes=(18, 17, 5))
    run_product(case, params=TILE, mask=torch.rand(case.shapes["A" if mode == "sdd" else "C"]) < kept)


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_empty_matrices(sizes):
    for mode in ("sdd", "dsd", "dds"):
        case = small(mode, sizes=sizes, biased=True)
        mask = torch.ones(case.shapes["ABC"[["sdd", "dsd", "dds"].index(mode)]], dtype=torch.bool)
        A, B, bias = torch.ones(case.shapes["A"]), torch.ones(case.shapes["B"]), torch.arange(float(sizes[2]))
        kernel, packed = product_kernel("triton-block", TILE, case, mask, A, B)
        y = kernel.run(packed, A, B, bias)
        assert torch.equal(y, bias.expand(sizes[0], sizes[2]) + sizes[1])


COPIED = [{"tile": str(ProductTile(*sides, 64, 16, tma=1))} for sides in ((16, 16), (16, 32), (64, 16))]


@pytest.mark.parametrize("params", COPIED, ids=["low", "wide", "high"])
@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
@pytest.mark.parametrize("compressed", [True, False])
def test_tiles_by_the_copy_engine(mode, compressed, params):
    sizes, block = ((192, 64, 72), (64, 32)) if compressed else ((72, 88, 40), (8, 8))
    case = small(mode, compressed=compressed, biased=True, lead=(2,), sizes=sizes, block=block, dtype=torch.float32)
    run_product(case, params=params)


def test_pipelines_of_copied_tiles_fit_on_chip_in_all_products_that_gradients_are_made_of(monkeypatch):
    monkeypatch.setattr("sparta.specialize.matmul.triton_block.bulk_copies", lambda: True)
    mask = block_mask((256, 256), (128, 128), 0.5, seed=1)
    A = torch.zeros(256, 256, dtype=torch.bfloat16)
    firsts = {}
    for mode in ("sdd", "dsd", "dds"):
        tiles = list(TritonBlockMatmul().tiles(Product(mode, compressed=True, block=(128, 128)).spec(mask, A, A)))
        assert all(tile.tma for tile in tiles)
        firsts[mode] = tiles[0].height, tiles[0].width
        for tile in tiles:
            stage = 2 * (tile.height * tile.width + max(tile.height, tile.width) * tile.free)
            assert op_of_products._fitted(tile, stage).stages * stage <= 224 * 1024
    assert firsts == {"sdd": (128, 64), "dsd": (64, 128), "dds": (128, 128)}
    deep = ProductTile(stages=8)
    assert op_of_products._fitted(deep, 1 << 20) == deep  # of one's own choice it is an error


def test_the_copy_engine_is_not_asked_for_what_it_cannot_address():
    asked = []
    for A, B in (
        (torch.randn(3, 40, 24).mT, torch.randn(3, 40, 32)[..., ::2]),  # no dim side by side
        (torch.randn(3, 24, 41)[..., 1:], torch.randn(3, 16, 40).mT),  # neither rows nor the first one aligned
        (torch.randn(1, 24, 40).expand(3, 24, 40), torch.randn(40, 16).expand(3, 40, 16)),  # one for all batches
        (torch.randn(3, 40, 24).mT, torch.randn(3, 16, 40).mT),  # both turned
    ):
        for mode in ("sdd", "dsd", "dds"):
            run_product(small(mode, lead=(3,), sizes=(24, 40, 16), block=(8, 8)), params=COPIED[0], operands=(A, B))
        both = op_of_products._operands(ProductTile.parse(COPIED[0]["tile"]), (A, B), [(16, 16), (16, 64)])
        asked.append((both.tma, both.lasts))
    assert asked == [(0, (0, 0)), (0, (0, 0)), (1, (0, 0)), (4, (2, 2))]


def test_one_sparse_weight_serves_a_batch_of_any_strides():
    mask = block_mask((33, 20), (8, 8), 0.5, seed=1)
    A, B = torch.randn(2, 33, 3, 5).permute(0, 3, 2, 1), torch.randn(20, 33).t()
    case = small("dsd", sizes=(3, 33, 20))
    kernel, packed = product_kernel("triton-block", TILE, case, mask, A, B)
    check(kernel.run(packed, A, B, None), matmul_reference(A, B, B_mask=mask), reduction=33)


def test_gradients_have_gradients():
    mask = block_mask((16, 16), (8, 8), 0.5, seed=0)
    A, B = torch.randn(16, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    kernel, packed = product_kernel("triton-block", TILE, small("sdd", sizes=(16, 16, 4)), mask, A.detach(), B.detach())

    def penalty(y):
        grads = torch.autograd.grad(y.square().sum(), (A, B), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), (A, B))

    for ours, right in zip(penalty(kernel.run(packed, A, B)), penalty(torch.where(mask, A, 0.0) @ B), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-3)


def test_rows_too_long_for_the_chip_are_walked_twice(monkeypatch):
    monkeypatch.setattr(op, "_ON_CHIP", 256)
    mask = torch.rand(16, 60) < 0.3
    mask[3], mask[4, :32] = False, False
    run_softmax(mask, torch.randn(16, 60).masked_fill(~mask, math.nan), 0.5, compressed=False, params=ROWS)


@pytest.mark.parametrize("chip", [8192, 256])
def test_softmax_treats_nan_and_inf_as_pytorch_does(chip, monkeypatch):
    monkeypatch.setattr(op, "_ON_CHIP", chip)
    mask = torch.rand(16, 40) < 0.7
    mask[9], mask[:8, 0] = False, True
    x = torch.randn(16, 40)
    x[1, 0], x[2, 0], x[3], x[4, 0] = math.nan, math.inf, -math.inf, -math.inf
    kernel = TritonBlockSoftmax().build(softmax_spec(mask, x, block=(1, 1), compressed=False), ROWS)
    y = kernel.run(kernel.pack(mask), x, torch.ones((), dtype=torch.float64))
    expected = torch.where(mask, torch.where(mask, x, -math.inf).softmax(-1), 0.0)
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_nan_of_the_dense_operand_spreads_only_through_kept_tiles():
    mask = torch.zeros(32, 32, dtype=torch.bool)
    mask[:16, :16], mask[16:, 16:] = True, True
    A, B = torch.randn(32, 32), torch.randn(32, 4)
    B[3, 1] = math.nan
    kernel, packed = product_kernel("triton-block", TILE, small("sdd", sizes=(32, 32, 4)), mask, A, B)
    y = kernel.run(packed, A, B)
    assert y[:16, 1].isnan().all()
    assert y[16:].isfinite().all()


# ---------------------------------------------------------------------- inside PyTorch


def test_the_ops_keep_their_promises_to_pytorch():
    mask = block_mask((16, 32), (16, 16), 0.5, seed=1)
    lists, plan = tile_lists(mask[None], None, (16, 16))
    product = f"{plan};{ProductTile(16, 16, 16, 16)}"
    S, D = torch.randn(1, 16, 32, requires_grad=True), torch.randn(1, 32, 4, requires_grad=True)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(sparse_product, (S, D, None, list(lists), None, product, 2), test_utils=checks)
    torch.library.opcheck(
        sampled_product, (S.detach().mT[:, :16, :4], D.detach().mT, None, list(lists), None, product), test_utils=checks
    )
    softmax = f"{plan};{ROWS['tile']}"
    one = torch.ones((), dtype=torch.float64)
    torch.library.opcheck(tile_softmax, (S, one, list(lists), None, softmax), test_utils=checks)


def test_torch_compile_takes_products_and_softmax_whole():
    mask = block_mask((2, 16, 32), (16, 16), 0.5, seed=1)
    q, k = torch.randn(2, 16, 8, requires_grad=True), torch.randn(2, 32, 8, requires_grad=True)
    case = small("dds", transpose_B=True, compressed=True)
    product, packed = product_kernel("triton-block", TILE, case, mask, q.detach(), k.detach())
    scores = product.run(packed, q, k).detach()
    softmax = TritonBlockSoftmax().build(softmax_spec(mask, scores, block=(16, 16), compressed=True), ROWS)
    lists, one = softmax.pack(mask), torch.ones((), dtype=torch.float64)

    def both(q, k):
        return softmax.run(lists, product.run(packed, q, k), one)

    y, eager = torch.compile(both, fullgraph=True, backend="aot_eager")(q, k), both(q, k)
    assert torch.equal(y, eager)
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), (q, k)) for t in (y, eager)), strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()


# ---------------------------------------------------------------------- refusing


def spec_of(*, block=(16, 16), compressed=True, dtypes=(torch.float16, torch.float16), sparsity=0.5, device="cuda"):
    mask = block_mask((64, 64), block, sparsity, seed=1)
    A, B = (torch.zeros(64, 64, dtype=dtype) for dtype in dtypes)
    spec = Product("sdd", compressed=compressed, block=block).spec(mask, A, B)
    return KernelSpec(spec.op, spec.operands, spec.epilogue, spec.attributes, device)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (spec_of(device="cpu"), "runs on CUDA"),
        (spec_of(dtypes=(torch.float64,) * 2), "not in fp64"),
        (spec_of(dtypes=(torch.float16, torch.float32)), "all in one of"),
        (spec_of(block=(1, 8)), "compressed blocks are 1×8"),
        (spec_of(sparsity=0.0), "cover 1.00"),
        (spec_of(), "no CUDA device"),
    ],
)
def test_refusals_name_their_reason(spec, text):
    answer = TritonBlockMatmul().supports(spec)
    assert not answer
    assert text in answer.reason


def test_softmax_refuses_too_and_its_default_is_a_point_of_its_space():
    for shape, block in (((64, 64), (16, 16)), ((300, 5000), (1, 1)), ((1, 7), (1, 1))):
        mask = block_mask(shape, block, 0.9, seed=1)
        spec = softmax_spec(mask, torch.zeros(shape), block=block, compressed=False)
        assert TritonBlockSoftmax().space(spec)["tile"].includes(TritonBlockSoftmax().default(spec)["tile"])
        assert "runs on CUDA" in TritonBlockSoftmax().supports(spec).reason


@pytest.mark.parametrize(
    "call",
    [
        lambda: ProductTile(height=48),
        lambda: ProductTile(stages=0),
        lambda: SoftmaxTile(rows=3),
        lambda: ProductTile.parse("height=x"),
        lambda: SoftmaxTile.parse("depth=16"),
    ],
)
def test_impossible_tiles_say_what_is_allowed(call):
    with pytest.raises(ValueRangeError, match="allowed"):
        call()


def test_mixed_dtypes_are_an_error():
    A, B = torch.zeros(20, 33), torch.zeros(33, 18)
    kernel, packed = product_kernel("triton-block", TILE, SMALL, SMALL.mask(), A, B)
    with pytest.raises(ValueRangeError, match="one dtype"):
        kernel.run(packed, A, B.half())


def test_without_triton_building_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="pip install triton"):
        TritonBlockMatmul().build(spec_of(), TILE)
