"""On CUDA, strips of live values in banks of their own: every candidate computes what the masked layer computes."""

import itertools

import pytest
import torch
from torch.nn import functional

from gpu.cases import draw
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.cuda_banks import BanksTile, CudaBanks
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.scaled_linear.cuda_banks import ScaledBanks
from sparta.specialize.scaled_linear.spec import FP8, reference, scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA
from sparta.testing import check, linear_reference

ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
SHAPES = [(17, 5), (100, 1300), (300, 700), (40, 9000)]
COPIES = [(3, 0)]  # depth, stages
if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
    COPIES += [(2, 3), (4, 2)]


def run_poisoned(kernel, weight, *inputs):
    """Run on memory that holds NaN, so that an element that is not written shows."""
    packed = kernel.pack(weight)
    kernel.run(packed, *inputs).fill_(torch.nan)
    y = kernel.run(packed, *inputs)
    assert torch.equal(y, kernel.run(packed, *inputs))
    return y


@pytest.mark.parametrize("format", [FP8, "int8"])
@pytest.mark.parametrize("density", [0.02, 0.05, 0.3, 1.0], ids="live{}".format)
@pytest.mark.parametrize(("tokens", "nibbles"), list(itertools.product((1, 2, 4), (0, 1))))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_layout_in_8_bits(n, k, tokens, nibbles, density, format):
    weight, bias = torch.randn(n, k, device="cuda"), draw(n)
    mask = torch.rand(n, k) < density
    mask[n // 2, k // 2] = True  # a weight with nothing live has no format
    tesa = scaled_weight(weight, TeSA.from_mask(mask), format)
    spec = scaled_linear_spec(tesa, tokens, epilogue=Epilogue(bias=True))
    for depth, stages in COPIES:
        kernel = ScaledBanks().build(spec, {"tile": str(BanksTile(tokens, 8, 3, depth, nibbles, 2, stages))})
        for m in (1, tokens, 9):
            x = draw(m, k)
            check(run_poisoned(kernel, weight, x, bias, None), reference(spec, weight, x, bias), reduction=k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "nibbles"), list(itertools.product((1, 2, 4), (0, 1))))
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_layout_in_16_bits(n, k, tokens, nibbles, dtype):
    mask = torch.rand(n, k) < 0.2
    x, weight = draw(3, k, dtype=dtype), draw(n, k, dtype=dtype)
    spec = linear_spec(TeSA.from_mask(mask), tokens, dtype, device="cuda")
    expected = linear_reference(x, weight, weight_mask=mask.cuda())
    for depth, stages in COPIES:
        kernel = CudaBanks().build(spec, {"tile": str(BanksTile(tokens, 12, 2, depth, nibbles, 1, stages))})
        check(run_poisoned(kernel, weight, x, None, None), expected, reduction=k)


@pytest.mark.parametrize(("m", "density"), [(1, 0.3), (1, 0.1), (2, 0.3), (4, 0.1)])
def test_every_candidate_on_a_large_weight(m, density):
    n, k = 4096, 4096
    weight, x = torch.randn(n, k, device="cuda"), draw(m, k)
    spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(torch.rand(n, k) < density)), m)
    expected = reference(spec, weight, x)
    for tile in ScaledBanks().tiles(spec):
        kernel = ScaledBanks().build(spec, {"tile": str(tile)})
        check(run_poisoned(kernel, weight, x, None, None), expected, reduction=k, what=str(tile))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue_and_strides(activation):
    n, k = 320, 2048
    mask = torch.rand(n, k) < 0.1
    epilogue = Epilogue(bias=True, activation=activation, residual=True)
    spec = linear_spec(TeSA.from_mask(mask), 4, torch.bfloat16, epilogue=epilogue, device="cuda")
    kernel = CudaBanks().build(spec, CudaBanks().default(spec))
    weight, bias = draw(n, k), draw(n)
    for m in (4, 9, 1):
        x, residual = draw(m, 2 * k)[:, ::2], draw(n, m).t()
        expected = ACTIVATIONS[activation](linear_reference(x, weight, bias, weight_mask=mask.cuda()))
        check(run_poisoned(kernel, weight, x, bias, residual), expected + residual.double(), reduction=k)
    assert kernel.run(kernel.pack(weight), draw(0, k), bias, None).shape == (0, n)


@pytest.mark.parametrize("nibbles", [0, 1])
def test_what_is_not_finite_is_not_hidden(nibbles):
    n, k = 300, 700
    mask = torch.rand(n, k) < 0.3
    mask[5:60, 7], mask[60:90, 13] = True, True
    weight, x = torch.randn(n, k, device="cuda"), draw(4, k)
    x[1, 7], x[3, 13] = torch.nan, torch.inf
    spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(mask)), 4)
    kernel = ScaledBanks().build(spec, {"tile": str(BanksTile(4, 8, 4, 3, nibbles))})
    y = kernel.run(kernel.pack(weight), x, None, None).cpu()
    assert y[[0, 2]].isfinite().all()
    assert y[1, mask[:, 7]].isnan().all()
    assert not y[3, mask[:, 13]].isfinite().any()


def test_kernels_that_begin_early_wait_for_what_they_read():
    n, k = 1024, 2048
    weight, x = torch.randn(n, k, device="cuda"), draw(1, k)
    spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(torch.rand(n, k) < 0.3)), 1)
    kernel = ScaledBanks().build(spec, ScaledBanks().default(spec))
    packed = kernel.pack(weight)
    other = kernel.pack(2 * weight)
    kernel.run(packed, x, None, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    moved = [each.clone() for each in packed]
    with torch.cuda.graph(graph):
        results = []
        for i in range(20):
            moved[0].copy_((packed, other)[i % 2][0])  # what is asked for early may still be written to
            results.append(kernel.run(moved, kernel.run(packed, x + i, None, None).repeat(1, 2), None, None))
    x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
    for i, y in enumerate(results):
        inner = kernel.run(packed, x + i, None, None).repeat(1, 2)
        moved[0].copy_((packed, other)[i % 2][0])
        assert torch.equal(y, kernel.run(moved, inner, None, None)), i
