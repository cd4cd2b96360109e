"""On CUDA, `triton-block` computes what the masked dense layer computes, and works inside everything PyTorch does."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpu.cases import run_poisoned
from sparta.nn import SparseLinear
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.op import LinearState
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.linear.triton_block.candidates import candidates
from sparta.specialize.linear.triton_block.implement import TritonBlock
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.specialize.tuning.select import choose
from sparta.specialize.tuning.shipped import device_kind
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, linear_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}


def kernel_of(mask, rows, dtype, tile=None, **epilogue):
    spec = linear_spec(TeSA.from_mask(mask), rows, dtype, epilogue=Epilogue(**epilogue), device="cuda")
    params = TritonBlock().default(spec) if tile is None else {"tile": str(tile)}
    return TritonBlock().build(spec, params)


def draw(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "block", "sparsity"),
    [
        (1, 256, 512, (64, 64), 0.8),
        (16, 768, 3072, (128, 128), 0.9),
        (33, 1000, 1000, (16, 16), 0.7),
        (64, 512, 4096, (32, 32), 0.9),
        (200, 4096, 1024, (64, 64), 0.5),
        (1000, 520, 776, (32, 64), 0.8),
        (257, 130, 1001, (64, 32), 0.6),
        (4097, 1024, 1024, (128, 128), 0.5),
        (2048, 1024, 1024, (16, 16), 0.9),
        (128, 512, 512, (64, 64), 1.0),
        (128, 96, 512, (32, 32), 0.0),
    ],
)
def test_ragged_shapes_and_densities(m, n, k, block, sparsity, dtype):
    mask = block_mask((n, k), block, sparsity, seed=m)
    x, weight, bias = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype), draw(n, dtype=dtype)
    y = run_poisoned(kernel_of(mask, m, dtype, bias=True), weight, x, bias, None)
    check(y, linear_reference(x, weight, bias, weight_mask=mask.cuda()), reduction=k)


@pytest.mark.parametrize("tokens", [1, 24, 64, 130, 3000])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_every_candidate_is_right(tokens, block):
    mask = block_mask((640, 1152), (block, block), 0.8, seed=block)
    x, weight = draw(tokens, 1152, dtype=torch.bfloat16), draw(640, 1152, dtype=torch.bfloat16)
    expected = linear_reference(x, weight, weight_mask=mask.cuda())
    for tile in candidates(TeSA.from_mask(mask), tokens, 2, tma=True):
        y = run_poisoned(kernel_of(mask, tokens, torch.bfloat16, tile), weight, x, None, None)
        check(y, expected, reduction=1152, what=str(tile))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [16, 300])
def test_the_epilogue_is_fused(activation, rows):
    mask = block_mask((320, 512), (64, 64), 0.7, seed=2)
    x, weight, bias = (draw(*shape, dtype=torch.bfloat16) for shape in ((rows, 512), (320, 512), (320,)))
    residual = draw(rows, 320, dtype=torch.bfloat16)
    kernel = kernel_of(mask, rows, torch.bfloat16, bias=True, activation=activation, residual=True)
    exact = linear_reference(x, weight, bias, weight_mask=mask.cuda())
    expected = ACTIVATIONS[activation](exact) + residual.double()
    check(kernel.run(kernel.pack(weight), x, bias, residual), expected, reduction=512)


@pytest.mark.parametrize("rows", [16, 1000])
def test_strided_and_misaligned_inputs(rows):
    mask = block_mask((256, 512), (64, 64), 0.7, seed=2)
    weight, kernel = draw(256, 512, dtype=torch.float16), kernel_of(mask, rows, torch.float16)
    packed = kernel.pack(weight)
    for x in (
        draw(512, rows, dtype=torch.float16).t(),
        draw(2 * rows, 1024, dtype=torch.float16)[::2, 64:576],
        draw(rows, 513, dtype=torch.float16)[:, 1:],
        draw(1, 512, dtype=torch.float16).expand(rows, 512),
        draw(0, 512, dtype=torch.float16),
    ):
        check(kernel.run(packed, x, None, None), linear_reference(x, weight, weight_mask=mask.cuda()), reduction=512)


@pytest.mark.parametrize("rows", [16, 1000])
def test_nan_and_inf_spread_only_through_kept_blocks(rows):
    mask = torch.zeros(256, 256, dtype=torch.bool)
    mask[:128, :128], mask[128:, 128:] = True, True
    x, weight = draw(rows, 256, dtype=torch.bfloat16), draw(256, 256, dtype=torch.bfloat16)
    x[1, 3], x[2, 200] = torch.nan, torch.inf
    kernel = kernel_of(mask, rows, torch.bfloat16)
    halves = [linear_reference(x[:, part], weight[part, part]) for part in (slice(0, 128), slice(128, 256))]
    check(kernel.run(kernel.pack(weight), x, None, None), torch.cat(halves, 1), reduction=128)


def test_the_same_bits_every_time():
    mask = block_mask((1024, 1024), (64, 64), 0.8, seed=1)
    x, weight = draw(2048, 1024, dtype=torch.bfloat16), draw(1024, 1024, dtype=torch.bfloat16)
    kernel = kernel_of(mask, 2048, torch.bfloat16)
    packed = kernel.pack(weight)
    first = kernel.run(packed, x, None, None)
    assert all(torch.equal(first, kernel.run(packed, x, None, None)) for _ in range(5))


def test_tf32_is_off_unless_torch_allows_it():
    mask = block_mask((256, 512), (64, 64), 0.5, seed=1)
    x, weight = draw(300, 512, dtype=torch.float32), draw(256, 512, dtype=torch.float32)
    expected = linear_reference(x, weight, weight_mask=mask.cuda())
    kernel = kernel_of(mask, 300, torch.float32)
    packed = kernel.pack(weight)
    check(kernel.run(packed, x, None, None), expected, reduction=512)
    torch.set_float32_matmul_precision("high")  # the folder's fixture puts it back
    rounded = kernel.run(packed, x, None, None)
    torch.set_float32_matmul_precision("highest")
    check(rounded, expected, reduction=512, tf32=True)
    assert not torch.equal(rounded, kernel.run(packed, x, None, None))


# ---------------------------------------------------------------------- inside PyTorch


@pytest.fixture
def layer():
    """A bf16 layer on the block kernel in both directions."""
    mask = block_mask((384, 512), (64, 64), 0.8, seed=4)
    made = SparseLinear(nn.Linear(512, 384).cuda().bfloat16(), weight_mask=mask)
    spec = linear_spec(TeSA.from_mask(mask), 100, torch.bfloat16, epilogue=Epilogue(bias=True), device="cuda")
    made.build({"_name": "triton-block", **TritonBlock().default(spec)}, draw(100, 512, dtype=torch.bfloat16))
    backward = kernel_of(mask.t(), 100, torch.bfloat16)
    made._state = LinearState(made._state.weight, made._state.forward, backward)
    return made


def test_gradients_are_those_of_the_masked_dense_layer(layer):
    x = draw(2, 50, 512, dtype=torch.bfloat16).requires_grad_()
    grad = draw(2, 50, 384, dtype=torch.bfloat16)
    layer(x).backward(grad)
    exact = x.detach().double().requires_grad_()
    weight = layer.weight.detach().double().requires_grad_()
    functional.linear(exact, weight * layer.weight_mask, layer.bias.detach().double()).backward(grad.double())
    check(x.grad, exact.grad, reduction=384)
    check(layer.weight.grad, weight.grad, reduction=100, dtype=torch.bfloat16)
    assert not layer.weight.grad[~layer.weight_mask].any()


def test_torch_compile_takes_it_whole(layer):
    compiled = torch.compile(layer, fullgraph=True)
    x = draw(100, 512, dtype=torch.bfloat16).requires_grad_()
    y = compiled(x)
    check(y, linear_reference(x, layer.weight, layer.bias, weight_mask=layer.weight_mask), reduction=512)
    y.sum().backward()
    assert x.grad is not None


def test_a_cuda_graph_captures_and_replays_it(layer):
    layer.eval()
    x = draw(100, 512, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for _ in range(3):
            x.copy_(draw(100, 512, dtype=torch.bfloat16))
            graph.replay()
            check(y, linear_reference(x, layer.weight, layer.bias, weight_mask=layer.weight_mask), reduction=512)


def test_it_runs_on_the_current_stream(layer):
    layer.eval()
    stream = torch.cuda.Stream()
    x = draw(4096, 512, dtype=torch.bfloat16)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        moved = x * 2
        y = layer(moved)
    stream.synchronize()
    check(y, linear_reference(x * 2, layer.weight, layer.bias, weight_mask=layer.weight_mask), reduction=512)


def test_a_tile_that_does_not_fit_is_an_error_of_ours():
    tile = BlockTile(256, 128, 64, stages=8, warps=8, tma=1)
    kernel = kernel_of(block_mask((256, 256), (128, 128), 0.5, seed=0), 512, torch.bfloat16, tile)
    packed = kernel.pack(draw(256, 256, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="needs more than the GPU has"):
        kernel.run(packed, draw(512, 256, dtype=torch.bfloat16), None, None)


def test_the_shipped_table_answers_before_anything_is_tuned():
    if device_kind("cuda") != "NVIDIA H200":
        pytest.skip("tables are for one kind of GPU")
    weight = TeSA.from_mask(block_mask((4096, 4096), (128, 128), 0.9, seed=3))
    choice = choose(linear_spec(weight, 4096, torch.bfloat16, device="cuda"))
    assert choice.implement == "triton-block"
    assert "shipped" in choice.reason
