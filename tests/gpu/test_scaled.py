"""On CUDA, weights in fp8, int8 and int4: every kernel computes what the rounded layer computes, on any shape."""

import pytest
import torch
from torch.nn import functional

from gpu.cases import draw, run_poisoned, two_four
from sparta.specialize.implement import implement_named, implements_of
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.scaled_linear.inputs import InputRounding
from sparta.specialize.scaled_linear.problem import scaled_problem
from sparta.specialize.scaled_linear.spec import (
    FP8,
    OP,
    fp8_rows,
    reference,
    rounded_rows,
    scaled_linear_spec,
    scaled_weight,
)
from sparta.specialize.tuning.select import tune_kernel
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check

_NAMES = ["cuda-24", "cuda-24-resident", "cuda-gather", "cuda-block-few", "triton-block", "triton-block-fp8"]
ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}


def weight_of(n, k):
    return torch.randn(n, k, device="cuda") * (torch.rand(n, 1, device="cuda") + 0.5)


def every_candidate(name, spec):
    """Return each candidate of an implement, which must take the spec."""
    implement = implement_named(name, OP)
    assert implement.answer(spec), implement.answer(spec).reason
    space = implement.space(spec)
    if not space:
        return [({}, implement.build(spec, {}))]
    ((key, item),) = space.items()
    assert item.domain.values
    return [({key: value}, implement.build(spec, {key: value})) for value in item.domain.values]


def check_all(name, mask, rows, format, dtype=torch.bfloat16, *, activations=None, group=None, input_scale=None):
    n, k = mask.shape
    weight, x, bias = weight_of(n, k), draw(rows, k, dtype=dtype), draw(n, dtype=dtype)
    tesa = scaled_weight(weight, TeSA.from_mask(mask), format, group=group)
    given = {"activations": activations, "input_scale": input_scale, "epilogue": Epilogue(bias=True)}
    spec = scaled_linear_spec(tesa, rows, dtype, **given)
    x = rounded_rows(x, input_scale) if activations else x
    expected = reference(spec, weight, x, bias)
    for params, kernel in every_candidate(name, spec):
        check(run_poisoned(kernel, weight, x, bias, None), expected, reduction=k, what=f"{name} {params}")


@pytest.mark.parametrize(("format", "group"), [(FP8, None), ("int8", None), ("int4", None), ("int4", 128), (FP8, 256)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 256), (3, 17, 5), (16, 100, 300), (33, 77, 520)])
def test_two_four_streamed(m, n, k, format, group):
    dtype = torch.float16 if m == 3 else torch.bfloat16
    check_all("cuda-24", two_four(n, k), m, format, dtype, group=group)


@pytest.mark.parametrize(("format", "group"), [(FP8, None), ("int8", None), ("int4", 128)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 2100), (3, 17, 2048), (16, 100, 1300), (8, 2500, 4096)])
def test_two_four_beside_a_resident_input(m, n, k, format, group):
    dtype = torch.float16 if m == 3 else torch.bfloat16
    check_all("cuda-24-resident", two_four(n, k), m, format, dtype, group=group)


@pytest.mark.parametrize("format", [FP8, "int8"])
@pytest.mark.parametrize(
    ("m", "n", "k", "density"),
    [
        (1, 64, 256, 0.3),
        (1, 333, 4100, 0.3),
        (3, 17, 50, 0.05),
        (2, 100, 1300, 0.001),
        (4, 77, 5000, 0.08),
        (2, 300, 700, 0.15),
    ],
)
def test_unstructured(m, n, k, density, format):
    dtype = torch.float16 if m == 3 else torch.bfloat16
    check_all("cuda-gather", torch.rand(n, k) < density, m, format, dtype)


@pytest.mark.parametrize(
    ("m", "n", "k", "block", "sparsity"),
    [(1, 256, 512, 64, 0.8), (16, 272, 528, 16, 0.8), (100, 300, 400, 32, 0.7), (300, 512, 512, 128, 0.7)],
)
@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("triton-block-fp8", FP8),
        ("triton-block", FP8),
        ("triton-block", "int8"),
        ("cuda-block-few", FP8),
        ("cuda-block-few", "int8"),
    ],
)
def test_blocks(m, n, k, block, sparsity, name, format):
    if m > {"triton-block": 128, "cuda-block-few": 32}.get(name, m):
        pytest.skip(f"{name} takes weights in few bits for few tokens; it refuses {m} with that reason")
    check_all(name, block_mask((n, k), (block, block), sparsity), m, format, activations=FP8)


@pytest.mark.parametrize("input_scale", [None, 0.01])
def test_dense_in_fp8(input_scale):
    check_all("dense-fp8", torch.rand(208, 528) < 0.5, 37, FP8, activations=FP8, input_scale=input_scale)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", _NAMES)
def test_epilogue_strides_and_other_sizes(name, activation):
    n, k, rows = 320, 2048, 4
    mask = two_four(n, k) if "24" in name else block_mask((n, k), (32, 32), 0.9)
    weight, bias = weight_of(n, k), draw(n)
    epilogue = Epilogue(bias=True, activation=activation, residual=True)
    spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(mask)), rows, activations=FP8, epilogue=epilogue)
    implement = implement_named(name, OP)
    kernel = implement.build(spec, implement.default(spec))
    for m in (rows, 9, 1):
        x, residual = rounded_rows(draw(m, 2 * k)[:, ::2]), draw(n, m).t()
        expected = reference(spec, weight, x, bias, residual)
        check(run_poisoned(kernel, weight, x, bias, residual), expected, reduction=k)
    assert kernel.run(kernel.pack(weight), draw(0, k), bias, None).shape == (0, n)


@pytest.mark.parametrize("name", _NAMES)
def test_same_bits_twice_and_in_a_graph_of_many_calls(name):
    n, k = 1024, 2048
    mask = two_four(n, k) if "24" in name else block_mask((n, k), (64, 64), 0.9)
    weight, x = weight_of(n, k), draw(4, k)
    spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(mask)), 4, activations=FP8)
    implement = implement_named(name, OP)
    kernel = implement.build(spec, implement.default(spec))
    packed = kernel.pack(weight)
    first = kernel.run(packed, x, None, None).clone()
    assert torch.equal(first, kernel.run(packed, x, None, None))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Kernels that begin before the one ahead of them has ended must still wait for what it writes.
        results = [kernel.run(packed, x + i, None, None) for i in range(20)]
    x.copy_(torch.randn_like(x))
    for _ in range(3):
        graph.replay()
    for i, y in enumerate(results):
        assert torch.equal(y, kernel.run(packed, x + i, None, None)), i


@pytest.mark.parametrize("name", _NAMES)
def test_what_is_not_finite_is_not_hidden(name):
    n, k = 64, 2048
    mask = two_four(n, k) if "24" in name else block_mask((n, k), (16, 16), 0.9)
    mask[3, :4] = torch.tensor([True, False, False, False])
    weight, x = weight_of(n, k), draw(2, k)
    weight[3, 0] = torch.nan
    spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(mask)), 2, activations=FP8)
    implement = implement_named(name, OP)
    kernel = implement.build(spec, implement.default(spec))
    y = kernel.run(kernel.pack(weight), x, None, None)
    assert y[:, 3].isnan().all()
    assert y[:, torch.arange(n) != 3].isfinite().all()
    x[1, :] = torch.nan
    y = kernel.run(kernel.pack(weight), x, None, None)
    assert y[1, mask.any(1).cuda()].isnan().all()
    assert y[0, torch.arange(n) != 3].isfinite().all()


def test_tokens_are_rounded_as_defined():
    x = draw(37, 5000)
    x[5] = 0
    x[7, 0] = 3e38
    for scale in (None, 0.01):
        codes, scales = InputRounding(scale)(x[:, 1:])
        expected, expected_scales = fp8_rows(x[:, 1:], scale)
        assert torch.equal(codes.float(), expected.float())
        assert torch.equal(scales, expected_scales.flatten())
    x[3, 7], x[4, 9] = torch.inf, torch.nan
    codes, scales = InputRounding(None)(x)
    broken = ~(codes.float() * scales[:, None]).isfinite().all(1)
    assert broken.nonzero().flatten().tolist() == [3, 4]


def test_a_search_takes_all_of_them_and_finds_none_wrong():
    n, k = 512, 2048
    for mask in (two_four(n, k), block_mask((n, k), (64, 64), 0.9)):
        weight, x = weight_of(n, k), draw(4, k)
        spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(mask)), 4, activations=FP8)
        choice = tune_kernel(scaled_problem(spec, weight, x), max_seconds=15, in_graphs=True)
        assert choice.implement in {implement.name for implement in implements_of(OP)}
        assert choice.result is not None
        wrong = [trial for trial in choice.result.trials if "wrong" in str(getattr(trial, "reason", ""))]
        assert not wrong
