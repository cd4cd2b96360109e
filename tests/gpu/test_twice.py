"""On CUDA, an unstructured weight as two 2:4 weights computes what the masked dense layer computes, for few tokens."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpu.cases import run_poisoned
from sparta.nn import SparseLinear
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.cuda_24_twice import CudaTwice, TwiceTile
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA
from sparta.testing import check, linear_reference

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)
ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
CASES = [
    (m, n, k, density, torch.bfloat16)
    for (m, n, k), density in itertools.product(
        [(1, 64, 256), (3, 17, 5), (5, 4096, 4096), (33, 77, 520), (16, 1000, 1000)], [0.0, 0.25, 0.5, 0.9]
    )
] + [(16, 100, 300, 0.3, torch.float16), (8, 33, 136, 0.5, torch.float16)]


def mask_of(rows, columns, density, seed=0):
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < density


def draw(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


def spec_of(mask, rows, dtype=torch.bfloat16, **epilogue):
    return linear_spec(TeSA.from_mask(mask), rows, dtype, epilogue=Epilogue(**epilogue), device="cuda")


@pytest.mark.parametrize(("m", "n", "k", "density", "dtype"), CASES)
def test_every_tile_is_right(m, n, k, density, dtype):
    mask = mask_of(n, k, density, seed=m)
    x, weight, bias = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype), draw(n, dtype=dtype)
    spec, expected = spec_of(mask, m, dtype, bias=True), linear_reference(x, weight, bias, weight_mask=mask.cuda())
    for tile in CudaTwice().space(spec)["tile"].domain.values:
        y = run_poisoned(CudaTwice().build(spec, {"tile": tile}), weight, x, bias, None)
        check(y, expected, reduction=k, what=tile)


@pytest.mark.parametrize("shape", [(1, 1, 8, 1), (7, 1, 6, 1), (2, 3, 2, 2), (3, 1, 4, 4), (4, 1, 1, 1)])
@pytest.mark.parametrize(("tokens", "unit", "whole"), list(itertools.product((8, 16), (1, 2), (0, 1))))
def test_every_layout_is_right(tokens, unit, whole, shape):
    mask = mask_of(200, 1500, 0.5)
    mask[3:40] = False  # dead outputs, two whole slabs among them
    mask[100:120] = True
    mask[:, 128:256] = False  # a chunk of dead inputs
    x, weight = draw(tokens, 1500, dtype=torch.bfloat16), draw(200, 1500, dtype=torch.bfloat16)
    spec = spec_of(mask, tokens)
    tile = TwiceTile(tokens, unit, whole, *shape)
    y = run_poisoned(CudaTwice().build(spec, {"tile": str(tile)}), weight, x, None, None)
    check(y, linear_reference(x, weight, weight_mask=mask.cuda()), reduction=1500, what=str(tile))
    assert not y[:, 3:40].any()


def test_rings_that_go_around_many_times():
    mask = mask_of(64, 40000, 0.5)
    x, weight, spec = draw(5, 40000, dtype=torch.bfloat16), draw(64, 40000, dtype=torch.bfloat16), spec_of(mask, 5)
    for shape in ((1, 1, 2, 1), (4, 1, 8, 1)):
        y = run_poisoned(CudaTwice().build(spec, {"tile": str(TwiceTile(8, 1, 1, *shape))}), weight, x, None, None)
        check(y, linear_reference(x, weight, weight_mask=mask.cuda()), reduction=40000, what=str(shape))


def test_a_full_mask_is_refused_but_right():
    mask = torch.ones(96, 384, dtype=torch.bool)
    x, weight, spec = draw(8, 384, dtype=torch.bfloat16), draw(96, 384, dtype=torch.bfloat16), spec_of(mask, 8)
    assert not CudaTwice().supports(spec)
    y = run_poisoned(CudaTwice().build(spec, CudaTwice().default(spec)), weight, x, None, None)
    check(y, linear_reference(x, weight), reduction=384)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue_strides_and_other_sizes(activation):
    mask = mask_of(320, 512, 0.3)
    spec = spec_of(mask, 16, bias=True, activation=activation, residual=True)
    assert CudaTwice().supports(spec), CudaTwice().supports(spec).reason
    kernel = CudaTwice().build(spec, CudaTwice().default(spec))
    weight, bias = draw(320, 512, dtype=torch.bfloat16), draw(320, dtype=torch.bfloat16)
    for m in (16, 21, 1):
        x, residual = draw(m, 1024, dtype=torch.bfloat16)[:, ::2], draw(320, m, dtype=torch.bfloat16).t()
        expected = linear_reference(x, weight, bias, weight_mask=mask.cuda())
        expected = ACTIVATIONS[activation](expected) + residual.double()
        check(run_poisoned(kernel, weight, x, bias, residual), expected, reduction=512)
    wide = draw(4, 520, dtype=torch.bfloat16)[:, 3:515]  # rows that begin at odd addresses
    check(kernel.run(kernel.pack(weight), wide, None, None),
          ACTIVATIONS[activation](linear_reference(wide, weight, weight_mask=mask.cuda())), reduction=512)  # fmt: skip
    assert kernel.run(kernel.pack(weight), draw(0, 512, dtype=torch.bfloat16), bias, None).shape == (0, 320)


@pytest.mark.parametrize("density", [0.3, 0.5])
def test_every_tile_gives_the_same_bits_every_time(density):
    spec = spec_of(mask_of(4096, 4096, density), 16)
    x, weight = draw(16, 4096, dtype=torch.bfloat16), draw(4096, 4096, dtype=torch.bfloat16)
    for tile in CudaTwice().space(spec)["tile"].domain.values:
        kernel = CudaTwice().build(spec, {"tile": tile})
        packed = kernel.pack(weight)
        results = torch.stack([kernel.run(packed, x, None, None) for _ in range(50)])
        assert results.isfinite().all(), tile
        assert (results == results[0]).all(), tile


@pytest.mark.parametrize("density", [0.3, 0.5])
def test_it_goes_into_a_graph(density):
    spec = spec_of(mask_of(1024, 2048, density), 16)
    kernel = CudaTwice().build(spec, CudaTwice().default(spec))
    x, weight = draw(16, 2048, dtype=torch.bfloat16), draw(1024, 2048, dtype=torch.bfloat16)
    packed = kernel.pack(weight)
    kernel.run(packed, x, None, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.run(packed, x, None, None)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, kernel.run(packed, x, None, None))


def test_a_layer_trains_and_compiles_with_it():
    mask = mask_of(256, 512, 0.3)
    layer = SparseLinear(nn.Linear(512, 256).cuda().bfloat16(), weight_mask=mask)
    x = draw(16, 512, dtype=torch.bfloat16)
    layer.build({"_name": "cuda-24-twice", **CudaTwice().default(spec_of(mask, 16, bias=True))}, x)
    layer(x).sum().backward()
    assert not layer.weight.grad[~mask.cuda()].any()
    expected = linear_reference(x, layer.weight.detach(), layer.bias.detach(), weight_mask=mask.cuda())
    check(layer.eval()(x), expected, reduction=512)
    with torch.no_grad():
        check(layer(x), expected, reduction=512)
        check(torch.compile(layer, fullgraph=True)(x), expected, reduction=512)


@pytest.mark.parametrize("density", [0.3, 0.5])
def test_non_finite_tokens_do_not_touch_others(density):
    mask = mask_of(64, 200, density)
    mask[:, 7] = True
    x, weight = draw(5, 200, dtype=torch.bfloat16), draw(64, 200, dtype=torch.bfloat16)
    x[1, 7], x[3, 7] = torch.nan, torch.inf
    spec = spec_of(mask, 5)
    kernel = CudaTwice().build(spec, CudaTwice().default(spec))
    packed = kernel.pack(weight)
    y = kernel.run(packed, x, None, None)
    assert y[[0, 2, 4]].isfinite().all()
    assert not y[[1, 3]].isfinite().any()
    check(y[[0, 2, 4]], linear_reference(x[[0, 2, 4]], weight, weight_mask=mask.cuda()), reduction=200)
    assert kernel.run(packed, draw(16, 200, dtype=torch.bfloat16), None, None).isfinite().all()  # nothing stays behind
