"""On CUDA, 2:4 weights: our streaming kernel and cuSPARSELt compute what the masked dense layer computes."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpu.cases import run_poisoned
from sparta.nn import SparseLinear
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.cuda_24 import TwoFour
from sparta.specialize.linear.cusparselt import CuSparseLt
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA
from sparta.testing import check, linear_reference

DTYPES = [torch.bfloat16, torch.float16]
ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
ROWS = {"cuda-24": 16, "cusparselt": 256}


def mask_of(rows, columns, keep=2, seed=0):
    draws = torch.rand(rows, -(-columns // 4), 4, generator=torch.Generator().manual_seed(seed))
    kept = torch.zeros_like(draws, dtype=torch.bool).scatter_(2, draws.topk(keep, -1).indices, True)
    return kept.flatten(1)[:, :columns]


def draw(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


def spec_of(mask, rows, dtype, **epilogue):
    return linear_spec(TeSA.from_mask(mask), rows, dtype, epilogue=Epilogue(**epilogue), device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "keep"),
    [(1, 64, 256, 2), (3, 17, 5, 2), (16, 100, 300, 2), (5, 4096, 4096, 2), (33, 77, 520, 1), (64, 256, 1024, 2),
     (100, 48, 640, 2), (8, 33, 130, 0), (24, 1000, 1000, 2)],
)  # fmt: skip
def test_every_tile_of_the_streaming_kernel_is_right(m, n, k, keep, dtype):
    mask = mask_of(n, k, keep, seed=m)
    x, weight, bias = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype), draw(n, dtype=dtype)
    spec, expected = spec_of(mask, m, dtype, bias=True), linear_reference(x, weight, bias, weight_mask=mask.cuda())
    for tile in TwoFour().space(spec)["tile"].domain.values:
        y = run_poisoned(TwoFour().build(spec, {"tile": tile}), weight, x, bias, None)
        check(y, expected, reduction=k, what=tile)


@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 512), (1000, 512, 256), (4096, 1024, 1024)])
def test_every_algorithm_of_the_library_is_right(m, n, k):
    mask, dtype = mask_of(n, k, seed=m), torch.bfloat16
    x, weight, bias = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype), draw(n, dtype=dtype)
    spec, expected = spec_of(mask, m, dtype, bias=True), linear_reference(x, weight, bias, weight_mask=mask.cuda())
    assert CuSparseLt().supports(spec), CuSparseLt().supports(spec).reason
    algorithms = CuSparseLt().space(spec)["algorithm"].domain.values
    assert algorithms
    for algorithm in algorithms:
        y = run_poisoned(CuSparseLt().build(spec, {"algorithm": algorithm}), weight, x, bias, None)
        check(y, expected, reduction=k, what=f"algorithm {algorithm}")


@pytest.mark.parametrize("implement", [TwoFour(), CuSparseLt()], ids=lambda each: each.name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue_strides_and_other_sizes(implement, activation):
    rows = ROWS[implement.name]
    mask = mask_of(320, 512)
    spec = spec_of(mask, rows, torch.bfloat16, bias=True, activation=activation, residual=True)
    kernel = implement.build(spec, implement.default(spec))
    weight, bias = draw(320, 512, dtype=torch.bfloat16), draw(320, dtype=torch.bfloat16)
    for m in (rows, rows + 5, 1):
        x, residual = draw(m, 1024, dtype=torch.bfloat16)[:, ::2], draw(320, m, dtype=torch.bfloat16).t()
        expected = linear_reference(x, weight, bias, weight_mask=mask.cuda())
        expected = ACTIVATIONS[activation](expected) + residual.double()
        check(run_poisoned(kernel, weight, x, bias, residual), expected, reduction=512)
    assert kernel.run(kernel.pack(weight), draw(0, 512, dtype=torch.bfloat16), bias, None).shape == (0, 320)


@pytest.mark.parametrize("implement", [TwoFour(), CuSparseLt()], ids=lambda each: each.name)
def test_same_bits_twice_and_in_a_graph(implement):
    rows = ROWS[implement.name]
    mask = mask_of(1024, 2048)
    spec = spec_of(mask, rows, torch.bfloat16)
    kernel = implement.build(spec, implement.default(spec))
    x, weight = draw(rows, 2048, dtype=torch.bfloat16), draw(1024, 2048, dtype=torch.bfloat16)
    packed = kernel.pack(weight)
    first = kernel.run(packed, x, None, None).clone()
    assert torch.equal(first, kernel.run(packed, x, None, None))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.run(packed, x, None, None)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, kernel.run(packed, x, None, None))


def test_a_layer_trains_and_compiles_with_it():
    mask = mask_of(256, 512)
    layer = SparseLinear(nn.Linear(512, 256).cuda().bfloat16(), weight_mask=mask)
    x = draw(16, 512, dtype=torch.bfloat16)
    spec = spec_of(mask, 16, torch.bfloat16, bias=True)
    layer.build({"_name": "cuda-24", **TwoFour().default(spec)}, x)
    layer(x).sum().backward()
    assert not layer.weight.grad[~mask.cuda()].any()
    expected = linear_reference(x, layer.weight.detach(), layer.bias.detach(), weight_mask=mask.cuda())
    check(layer.eval()(x), expected, reduction=512)
    with torch.no_grad():
        check(layer(x), expected, reduction=512)
        check(torch.compile(layer, fullgraph=True)(x), expected, reduction=512)


def test_non_finite_inputs_reach_the_results_they_belong_to():
    mask = torch.zeros(32, 128, dtype=torch.bool)
    mask[:, ::2] = True
    x, weight = draw(4, 128, dtype=torch.bfloat16), draw(32, 128, dtype=torch.bfloat16)
    x[1, 0], x[2, 2], x[3, 1] = torch.nan, torch.inf, torch.nan
    spec = spec_of(mask, 4, torch.bfloat16)
    kernel = TwoFour().build(spec, TwoFour().default(spec))
    y = kernel.run(kernel.pack(weight), x, None, None)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
    assert y[2].isinf().all()
    assert y[3].isfinite().all()  # it meets pruned weights only


def test_both_bindings_start_the_same_kernel():
    """In a process of its own, because the extension stays loaded."""
    program = """
import torch
from sparta.specialize.cuda.extension import extension_loaded, load_extension, without_extension
from sparta.specialize.linear.cuda_24 import TwoFour
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA

mask = torch.tensor([True, False, False, True]).repeat(100, 75)
spec = linear_spec(TeSA.from_mask(mask), 5, torch.bfloat16, device="cuda")
x, weight, bias = (torch.randn(*s, device="cuda").bfloat16() for s in ((5, 300), (100, 300), (100,)))
kernel = TwoFour().build(spec, TwoFour().default(spec))
packed = kernel.pack(weight)
by_ctypes = kernel.run(packed, x, bias, None)
load_extension()
assert extension_loaded()
by_extension = kernel.run(packed, x, bias, None)
assert torch.equal(by_ctypes, by_extension)
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.graph(graph, stream=stream):
    replayed = kernel.run(packed, x, bias, None)
replayed.zero_()
graph.replay()
assert torch.equal(replayed, by_ctypes)
with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
    assert torch.ops.sparta_cuda.launch(torch.ones(1), "f", [x], [1, 1, 1, 0, 3, 1, 7, 3]).shape == (7, 3)
residual = torch.randn(100, 5, device="cuda").bfloat16().t()
both = kernel.run(packed, x, bias, residual), kernel.run(packed, x, None, residual)
with without_extension():
    assert not extension_loaded()
    assert torch.equal(both[0], kernel.run(packed, x, bias, residual))
    assert torch.equal(both[1], kernel.run(packed, x, None, residual))
assert extension_loaded()
print("equal")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr
