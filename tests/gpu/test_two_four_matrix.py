"""On CUDA, 2:4 weights for many tokens: the kernel for warpgroups computes what the masked dense layer computes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpu.cases import draw, run_poisoned
from sparta.nn import SparseLinear
from sparta.specialize.cuda.device import HOPPER, capability
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.cuda_24_matrix import TwoFourMatrix
from sparta.specialize.linear.cuda_24_matrix_layout import MatrixLayout
from sparta.specialize.linear.cuda_24_matrix_tile import SHAPES, MatrixTile, shaped
from sparta.specialize.linear.op import LinearState, run_linear
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.scaled_linear.cuda_24_matrix import Fp8Matrix
from sparta.specialize.scaled_linear.inputs import InputRounding
from sparta.specialize.scaled_linear.spec import FP8, reference, rounded_rows, scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA
from sparta.testing import check, linear_reference

if capability() != HOPPER:
    pytest.skip("these kernels are for Hopper GPUs", allow_module_level=True)


ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
TILES = [shaped(shape, 1) for shape in SHAPES] + [
    MatrixTile(256, 2, 2, 4), MatrixTile(256, 1, 1, 5), MatrixTile(128, 1, 2, 8), MatrixTile(128, 2, 1, 6, group=1),
    MatrixTile(64, 1, 2, 2), MatrixTile(32, 2, 1, 13, split=8), MatrixTile(128, 2, 1, 8, split=3),
    MatrixTile(64, 1, 1, 3, depth=2), MatrixTile(16, 3, 1, 2, depth=2), MatrixTile(128, 3, 1, 4),
    MatrixTile(64, 2, 1, 4, split=3, depth=2), MatrixTile(64, 3, 1, 3, split=2, depth=2),
    MatrixTile(64, 1, 2, 2, depth=2), MatrixTile(64, 2, 1, 4, 2), MatrixTile(128, 2, 1, 4, each=2, split=4),
    MatrixTile(32, 1, 1, 2, 2, depth=2),
]  # fmt: skip
QUARTERS = {f"tiles{quarter}": TILES[quarter::4] for quarter in range(4)}  # a process may take a part of them
FIRST, SMALL = MatrixTile(256, 2, 2, 4), MatrixTile(64, 1, 1, 14)
SIZES = [(128, 256, 512), (17, 8, 16), (300, 136, 80), (1000, 520, 1040), (77, 1000, 2064), (4096, 1024, 1024)]


def mask_of(rows, columns, keep=2, seed=0):
    draws = torch.rand(rows, -(-columns // 4), 4, generator=torch.Generator().manual_seed(seed))
    kept = torch.zeros_like(draws, dtype=torch.bool).scatter_(2, draws.topk(keep, -1).indices, True)
    return kept.flatten(1)[:, :columns]


@pytest.mark.parametrize("tiles", QUARTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_every_tile_is_right(m, n, k, dtype, tiles):
    mask = mask_of(n, k, seed=m)
    x, weight, bias = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype), draw(n, dtype=dtype)
    spec = linear_spec(TeSA.from_mask(mask), m, dtype, epilogue=Epilogue(bias=True), device="cuda")
    assert TwoFourMatrix().supports(spec), TwoFourMatrix().supports(spec).reason
    expected = linear_reference(x, weight, bias, weight_mask=mask.cuda())
    for tile in QUARTERS[tiles]:
        y = run_poisoned(TwoFourMatrix().build(spec, {"tile": str(tile)}), weight, x, bias, None)
        check(y, expected, reduction=k, what=str(tile))


@pytest.mark.parametrize("tiles", QUARTERS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_every_tile_is_right_in_fp8(m, n, k, tiles):
    mask = mask_of(n, k, keep=1 if m == 77 else 2, seed=m)
    weight, bias = torch.randn(n, k, device="cuda") * (torch.rand(n, 1, device="cuda") + 0.5), draw(n)
    tesa = scaled_weight(weight, TeSA.from_mask(mask))
    spec = scaled_linear_spec(tesa, m, activations=FP8, epilogue=Epilogue(bias=True))
    assert Fp8Matrix().supports(spec), Fp8Matrix().supports(spec).reason
    x = rounded_rows(draw(m, k))
    expected = reference(spec, weight, x, bias)
    for tile in (tile for tile in QUARTERS[tiles] if tile.fits(1)):
        y = run_poisoned(Fp8Matrix().build(spec, {"tile": str(tile)}), weight, x, bias, None)
        check(y, expected, reduction=k, what=str(tile))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tile", [FIRST, SMALL], ids=str)
def test_epilogue_strides_and_other_sizes(activation, tile):
    n, k, rows = 320, 512, 256
    mask = mask_of(n, k)
    epilogue = Epilogue(bias=True, activation=activation, residual=True)
    spec = linear_spec(TeSA.from_mask(mask), rows, torch.bfloat16, epilogue=epilogue, device="cuda")
    kernel = TwoFourMatrix().build(spec, {"tile": str(tile)})
    weight, bias = draw(n, k), draw(n)
    for m in (rows, rows + 5, 1):
        for x in (draw(m, 2 * k)[:, ::2], draw(m, 2 * k)[:, k:], draw(m, k + 4)[:, 4:]):
            residual = draw(n, m).t()
            expected = linear_reference(x, weight, bias, weight_mask=mask.cuda())
            expected = ACTIVATIONS[activation](expected) + residual.double()
            check(run_poisoned(kernel, weight, x, bias, residual), expected, reduction=k)
    assert kernel.run(kernel.pack(weight), draw(0, k), bias, None).shape == (0, n)


@pytest.mark.parametrize("fp8", [False, True])
def test_same_bits_twice_and_in_a_graph_of_many_calls(fp8):
    n, k, rows = 1024, 2048, 700
    mask = mask_of(n, k)
    weight, x = draw(n, k), draw(rows, k)
    if fp8:
        spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(mask)), rows, activations=FP8)
    else:
        spec = linear_spec(TeSA.from_mask(mask), rows, torch.bfloat16, device="cuda")
    kernel = (Fp8Matrix() if fp8 else TwoFourMatrix()).build(spec, {"tile": str(FIRST)})
    packed = kernel.pack(weight.float() if fp8 else weight)
    first = kernel.run(packed, x, None, None).clone()
    assert torch.equal(first, kernel.run(packed, x, None, None))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Kernels that begin before the one ahead of them has ended must still wait for what it writes.
        results = [kernel.run(packed, x + i, None, None) for i in range(10)]
    x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
    for i, y in enumerate(results):
        assert torch.equal(y, kernel.run(packed, x + i, None, None)), i


def test_non_finite_inputs_reach_the_results_they_belong_to():
    mask = torch.zeros(64, 128, dtype=torch.bool)
    mask[:, ::2] = True
    x, weight = draw(64, 128), draw(64, 128)
    x[1, 0], x[2, 2], x[3, 1] = torch.nan, torch.inf, torch.nan
    spec = linear_spec(TeSA.from_mask(mask), 64, torch.bfloat16, device="cuda")
    kernel = TwoFourMatrix().build(spec, {"tile": str(SMALL)})
    y = kernel.run(kernel.pack(weight), x, None, None)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
    assert y[2].isinf().all()
    assert y[3].isfinite().all()  # it meets pruned weights only


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_packing_by_a_kernel_is_what_the_layout_says(dtype):
    n, k = 200, 336
    mask = mask_of(n, k) & (torch.rand(n, k) < 0.9)
    layout = MatrixLayout(TeSA.from_mask(mask), dtype.itemsize)
    weight = torch.randn(k, n).t()
    for given in (weight, weight.contiguous()):
        assert torch.equal(layout.pack(given.cuda().to(dtype)).cpu(), layout.pack(given.to(dtype)))


@pytest.mark.parametrize(("n", "k"), [(72, 200), (300, 136), (512, 1024)])
def test_a_weight_and_its_transpose_are_packed_together(n, k):
    pairs = torch.eye(2, dtype=torch.bool).repeat_interleave(2, 0).repeat_interleave(2, 1)
    mask = pairs.repeat(n // 4, k // 4) & (torch.rand(n, k) < 0.9)
    layouts = [MatrixLayout(TeSA.from_mask(side), 2) for side in (mask, mask.t())]
    weight = torch.randn(n, k).bfloat16()
    found = layouts[0].pack_with_transpose(layouts[1], weight.cuda())
    assert found is not None
    for layout, packed, side in zip(layouts, found, (weight, weight.t()), strict=True):
        assert torch.equal(packed.cpu(), layout.pack(side))


def test_a_layer_trains_and_compiles_with_it():
    mask = mask_of(256, 512)
    layer = SparseLinear(nn.Linear(512, 256).cuda().bfloat16(), weight_mask=mask)
    x = draw(300, 512)
    spec = linear_spec(TeSA.from_mask(mask), 300, torch.bfloat16, epilogue=Epilogue(bias=True), device="cuda")
    layer.build({"_name": "cuda-24-matrix", **TwoFourMatrix().default(spec)}, x)
    given = x.clone().requires_grad_()
    layer(given).float().square().sum().backward()
    assert not layer.weight.grad[~mask.cuda()].any()
    exact = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    functional.linear(*exact).square().sum().backward()
    check(given.grad, exact[0].grad, reduction=256, dtype=torch.bfloat16)
    check(layer.weight.grad, torch.where(mask.cuda(), exact[1].grad, 0.0), reduction=4096, dtype=torch.bfloat16)
    expected = linear_reference(x, layer.weight.detach(), layer.bias.detach(), weight_mask=mask.cuda())
    check(layer.eval()(x), expected, reduction=512)
    with torch.no_grad():
        check(torch.compile(layer, fullgraph=True)(x), expected, reduction=512)


def test_a_mask_that_is_two_four_along_both_axes_has_sparse_gradients():
    n, k, m = 256, 512, 300
    mask = torch.eye(2, dtype=torch.bool).repeat_interleave(2, 0).repeat_interleave(2, 1).repeat(n // 4, k // 4)
    kernels = []
    for side in (mask, mask.t()):
        spec = linear_spec(TeSA.from_mask(side), m, torch.bfloat16, device="cuda")
        kernels.append(TwoFourMatrix().build(spec, TwoFourMatrix().default(spec)))
    state = LinearState(TeSA.from_mask(mask), *kernels)
    given = [draw(m, k), draw(n, k), draw(n)]
    x, weight, bias = (each.clone().requires_grad_() for each in given)
    grad = draw(m, n)
    run_linear(x, weight, bias, state, keep=False).backward(grad)
    exact_x, exact_weight, exact_bias = (each.double().requires_grad_() for each in given)
    functional.linear(exact_x, torch.where(mask.cuda(), exact_weight, 0.0), exact_bias).backward(grad.double())
    check(x.grad, exact_x.grad, reduction=n)
    check(weight.grad, exact_weight.grad, reduction=m)
    check(bias.grad, exact_bias.grad, reduction=m)
    assert not weight.grad[~mask.cuda()].any()


def test_an_input_that_is_rounded_already_gives_the_same_bits():
    n, k, m = 256, 512, 100
    weight, x = torch.randn(n, k, device="cuda"), draw(m, k)
    spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(mask_of(n, k))), m, activations=FP8)
    kernel = Fp8Matrix().build(spec, Fp8Matrix().default(spec))
    packed = kernel.pack(weight)
    assert torch.equal(
        kernel.run(packed, x, None, None), kernel.run_rounded(packed, InputRounding(None)(x), None, None)
    )
