"""Kernels that are kept between calls are those that a call needs, whatever the calls before it were."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from gpu.cases import draw
from sparta.nn import SparseLinear
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.cuda_24 import TwoFour
from sparta.specialize.linear.cusparselt import CuSparseLt
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.linear.triton_block.implement import TritonBlock
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, linear_reference

N, K = 320, 512
TILES = [
    BlockTile(16, 16, 64, warps=1, tma=1, group=1, early=1),
    BlockTile(64, 64, 64, tma=2, ctas=1, flatten=1),
    BlockTile(32, 32, 32, blocks=2, weight_first=1),
    BlockTile(128, 64, 64, stages=3, tma=1, weight_first=1, early=1),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kernel_of(tile, mask, **epilogue):
    spec = linear_spec(TeSA.from_mask(mask), 64, torch.bfloat16, epilogue=Epilogue(**epilogue), device="cuda")
    return TritonBlock().build(spec, {"tile": str(tile)})


def inputs_of(dtype):
    """Return inputs (M, K) that want different kernels, and such that want the same one with other numbers."""
    return [
        draw(16, K, dtype=dtype),
        draw(1, K, dtype=dtype),
        draw(200, K, dtype=dtype),
        draw(17, K + 64, dtype=dtype)[:, 64:],
        draw(17, K + 1, dtype=dtype)[:, 1:],
        draw(40, K + 8, dtype=dtype)[::2, :K],
        draw(33 * K + 3, dtype=dtype)[3:].view(33, K),
        draw(1, K, dtype=dtype).expand(50, K),
        draw(K, 24, dtype=dtype).t(),
        draw(0, K, dtype=dtype),
    ]


def calls_of(weight):
    """Return (x, bias, residual, expected) of calls that differ in all that a kernel may be compiled for."""
    made, dtype = [], weight.dtype
    for number, x in enumerate(inputs_of(dtype)):
        bias = (None, draw(N, dtype=dtype), draw(N + 1, dtype=dtype)[1:])[number % 3]
        rows = x.shape[0]
        residual = (None, draw(rows, N, dtype=dtype), draw(rows * N + 1, dtype=dtype)[1:].view(rows, N))[
            number // 3 % 3
        ]
        expected = linear_reference(x, weight, bias)
        made.append((x, bias, residual, expected if residual is None else expected + residual.double()))
    return made


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_shapes_strides_alignments_and_dtypes_may_alternate(tile):
    mask = block_mask((N, K), (64, 64), 0.7, seed=3)
    kernel, calls = kernel_of(tile, mask), []
    for dtype in DTYPES:
        weight = torch.where(mask.cuda(), draw(N, K, dtype=dtype), 0)
        calls += [(kernel.pack(weight), *call) for call in calls_of(weight)]
    for turn in range(4):
        random.Random(turn).shuffle(calls)  # noqa: S311 - an order, no secret
        for packed, x, bias, residual, expected in calls:
            y = kernel.run(packed, x, bias, residual)
            what = f"turn {turn}, {x.dtype} {tuple(x.shape)} {x.stride()}, {bias is None}, {residual is None}"
            check(y, expected, reduction=K, what=what)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_driver_starts_what_triton_compiled(tile):
    mask = block_mask((N, K), (64, 64), 0.7, seed=3)
    kernel, weight = kernel_of(tile, mask), draw(N, K)
    packed, x, bias = kernel.pack(weight), draw(100, K), draw(N)
    by_triton = kernel.run(packed, x, bias, None)
    launcher = kernel._launch
    assert len(launcher._direct) == len(launcher._calls) == 1, (
        "Triton's kernels are not laid out as direct starts need them"
    )
    by_driver = kernel.run(packed, x, bias, None)
    assert torch.equal(by_triton, by_driver)
    launcher._direct.clear()
    launcher._calls.clear()
    assert torch.equal(by_triton, kernel.run(packed, x, bias, None))


@pytest.mark.parametrize("tile", TILES[:2], ids=str)
def test_any_number_of_tokens_after_any_other(tile):
    """More of them than calls and tensor maps are kept."""
    mask = block_mask((N, K), (64, 64), 0.7, seed=3)
    kernel, x = kernel_of(tile, mask), draw(700, K)
    packed = kernel.pack(draw(N, K))
    whole = kernel.run(packed, x, None, None)
    for begin in range(350):
        rows = x[begin : 350 + begin // 2 if begin % 3 else begin + 1 + begin % 37]
        assert torch.equal(kernel.run(packed, rows, None, None), whole[begin : begin + len(rows)]), begin


def test_a_changed_weight_is_read_anew():
    mask = block_mask((N, K), (64, 64), 0.7, seed=3)
    layer = SparseLinear(nn.Linear(K, N).cuda().bfloat16(), weight_mask=mask).eval()
    x = draw(16, K)
    layer.build({"_name": "triton-block", "tile": str(TILES[0])}, x)
    with torch.no_grad():
        for _ in range(4):
            layer.weight.mul_(-1.5)
            layer.bias.add_(1)
            expected = linear_reference(x, layer.weight, layer.bias, weight_mask=mask.cuda())
            check(layer(x), expected, reduction=K)
        layer.bias = nn.Parameter(draw(N))
        check(layer(x), linear_reference(x, layer.weight, layer.bias, weight_mask=mask.cuda()), reduction=K)


def many_calls(kernel, packed, xs, expected, *, own_stream):
    """Return which of many calls in this thread gave other bits than expected; every input is a new tensor."""
    stream, wrong = torch.cuda.Stream() if own_stream else torch.cuda.default_stream(), []
    with torch.cuda.stream(stream):
        for turn in range(60):
            which = turn % len(xs)
            if not torch.equal(kernel.run(packed, xs[which] + 0, None, None), expected[which]):
                wrong.append((turn, which))
    return wrong


@pytest.mark.parametrize("name", ["triton-block", "triton-block, no maps", "cuda-24", "cusparselt"])
@pytest.mark.parametrize("own_stream", [True, False])
def test_threads_and_streams_do_not_disturb_each_other(name, own_stream):
    if name.startswith("triton"):
        mask = block_mask((N, K), (64, 64), 0.7, seed=3)
        kernel = kernel_of(TILES[2 if "maps" in name else 0], mask)
    else:
        mask = torch.tensor([True, False, False, True]).repeat(N, K // 4)
        implement = TwoFour() if name == "cuda-24" else CuSparseLt()
        spec = linear_spec(TeSA.from_mask(mask), 16 if name == "cuda-24" else 128, torch.bfloat16, device="cuda")
        kernel = implement.build(spec, implement.default(spec))
    packed = kernel.pack(torch.where(mask.cuda(), draw(N, K), 0))
    xs = [draw(rows, K) for rows in (128, 16, 144, 40, 256, 1)]
    expected = [kernel.run(packed, x, None, None) for x in xs]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(many_calls, kernel, packed, xs, expected, own_stream=own_stream) for _ in range(4)]
    assert [each.result() for each in work] == [[]] * 4


def test_a_thread_may_use_the_gpu_for_the_first_time_by_a_kernel_of_ours():
    mask = block_mask((N, K), (64, 64), 0.7, seed=3)
    two_four = torch.tensor([True, False, False, True]).repeat(N, K // 4)
    spec = linear_spec(TeSA.from_mask(two_four), 16, torch.bfloat16, device="cuda")
    kernels = [*(kernel_of(tile, mask) for tile in TILES), TwoFour().build(spec, TwoFour().default(spec))]
    x = draw(16, K)
    packed = [kernel.pack(draw(N, K)) for kernel in kernels]
    expected = [kernel.run(each, x, None, None) for kernel, each in zip(kernels, packed, strict=True)]
    expected = [y.clone() for y in expected]  # so that memory for a result is there, and no one asks CUDA for it
    torch.cuda.synchronize()
    for kernel, each, wanted in zip(kernels, packed, expected, strict=True):
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(kernel.run, each, x, None, None).result(), wanted)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_stream_of_each_call_is_the_one_that_is_current(tile):
    mask = block_mask((N, K), (64, 64), 0.7, seed=3)
    kernel, weight = kernel_of(tile, mask), torch.where(mask.cuda(), draw(N, K), 0)
    packed, streams = kernel.pack(weight), [torch.cuda.Stream() for _ in range(3)]
    warm = draw(2048, K)
    kernel.run(packed, warm, None, None)
    torch.cuda.synchronize()
    results = []
    for turn, stream in enumerate(streams * 2):
        with torch.cuda.stream(stream):
            x = torch.zeros(2048, K, device="cuda", dtype=torch.bfloat16)
            torch.cuda._sleep(20_000_000)
            x += turn + 1  # on another stream the kernel would still read 0
            results.append((x, kernel.run(packed, x, None, None)))
    torch.cuda.synchronize()
    for x, y in results:
        check(y, linear_reference(x, weight), reduction=K)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_graphs_hold_direct_starts(tile):
    mask = block_mask((N, K), (64, 64), 0.7, seed=3)
    kernel, weight = kernel_of(tile, mask), torch.where(mask.cuda(), draw(N, K), 0)
    packed, x, other = kernel.pack(weight), draw(64, K), draw(64, K)
    kernel.run(packed, x, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = kernel.run(packed, x, None, None)
        second = kernel.run(packed, x * 2, None, None)
    for _ in range(3):
        x.copy_(draw(64, K))
        kernel.run(packed, other, None, None)  # must not change what the graph holds
        graph.replay()
        check(first, linear_reference(x, weight), reduction=K)
        check(second, linear_reference(x * 2, weight), reduction=K)


def test_plans_of_cusparselt_are_those_of_the_call():
    mask = torch.tensor([False, True, True, False]).repeat(N, K // 4)
    spec = linear_spec(TeSA.from_mask(mask), 128, torch.bfloat16, epilogue=Epilogue(bias=True), device="cuda")
    kernel = CuSparseLt().build(spec, CuSparseLt().default(spec))
    weight = torch.where(mask.cuda(), draw(N, K), 0)
    packed, calls = kernel.pack(weight), []
    for rows in (128, 130, 144, 1, 512):
        for bias in (None, draw(N), draw(N + 8)[8:]):
            inputs = (draw(rows, K), draw(rows, K + 1)[:, 1:])
            calls += [(x, bias, linear_reference(x, weight, bias)) for x in inputs]
    for turn in range(3):
        random.Random(turn).shuffle(calls)  # noqa: S311 - an order, no secret
        for x, bias, expected in calls:
            check(kernel.run(packed, x, bias, None), expected, reduction=K)
