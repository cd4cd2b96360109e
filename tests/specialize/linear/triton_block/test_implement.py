"""The block kernel, run by Triton's interpreter, computes what the masked dense layer computes, on any shape."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sparta.errors import MissingPackageError, ShapeError, ValueRangeError
from sparta.specialize.cuda import nvrtc
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.linear.triton_block.implement import TritonBlock
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check, linear_reference

kernel = pytest.importorskip("sparta.specialize.linear.triton_block.kernel", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device")

NATIVE = Path(nvrtc.__file__).parent / "native"
TILES = [
    BlockTile(16, 16, 16),
    BlockTile(16, 16, 16, blocks=4, group=1),
    BlockTile(32, 32, 16, blocks=2, tma=1, ctas=1, flatten=1, group=2),
    BlockTile(16, 64, 32, tma=2, weight_first=1),
    BlockTile(64, 16, 64, weight_first=1, ctas=2),
]
ACTIVATIONS = {None: lambda y: y, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}


def kernel_of(mask, tile, dtype=torch.float32, **epilogue):
    spec = linear_spec(TeSA.from_mask(mask), 16, dtype, epilogue=Epilogue(**epilogue), device="cuda")
    return TritonBlock().build(spec, {"tile": str(tile)})


def run(mask, tile, x, weight, bias=None, residual=None, activation=None):
    kernel = kernel_of(mask, tile, x.dtype, bias=bias is not None, activation=activation, residual=residual is not None)
    return kernel.run(kernel.pack(weight), x, bias, residual)


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 90), st.integers(1, 100)),
    st.sampled_from(TILES),
    st.sampled_from([(1, 1), (16, 16), (32, 16), (64, 64)]),
    st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_shape_mask_and_dtype(shape, tile, block, sparsity, dtype):
    m, n, k = shape
    mask = block_mask((n, k), (min(block[0], n), min(block[1], k)), sparsity)
    x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    check(run(mask, tile, x, weight), linear_reference(x, weight, weight_mask=mask), reduction=k)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
def test_the_epilogue_is_fused_in_float32(tile, activation, has_bias, has_residual):
    mask = block_mask((40, 48), (16, 16), 0.6, seed=2)
    x, weight = torch.randn(21, 48), torch.randn(40, 48)
    bias = torch.randn(40) if has_bias else None
    residual = torch.randn(40, 21).t() if has_residual else None
    expected = ACTIVATIONS[activation](linear_reference(x, weight, bias, weight_mask=mask))
    expected = expected if residual is None else expected + residual.double()
    check(run(mask, tile, x, weight, bias, residual, activation), expected, reduction=48)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_strided_inputs_and_no_rows(tile):
    mask = block_mask((32, 64), (16, 16), 0.5, seed=2)
    weight = torch.randn(32, 64)
    for x in (
        torch.randn(64, 20).t(),
        torch.randn(20, 128)[::2, 32:96],
        torch.randn(20, 65)[:, 1:],
        torch.randn(1, 64).expand(20, 64),
        torch.randn(0, 64),
        torch.randn(1, 64),
    ):
        check(run(mask, tile, x, weight), linear_reference(x, weight, weight_mask=mask), reduction=64)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_nan_and_inf_spread_only_through_kept_blocks(tile):
    mask = torch.zeros(128, 128, dtype=torch.bool)
    mask[:64, :64], mask[64:, 64:] = True, True
    x, weight = torch.randn(5, 128), torch.randn(128, 128)
    x[1, 3], x[2, 100] = torch.nan, torch.inf
    y = run(mask, tile, x, weight)
    left = linear_reference(x[:, :64], weight[:64, :64])
    right = linear_reference(x[:, 64:], weight[64:, 64:])
    check(y, torch.cat([left, right], 1), reduction=64)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activations_keep_nan_as_torch_does(activation):
    mask, weight, x = torch.ones(16, 16, dtype=torch.bool), torch.randn(16, 16), torch.randn(4, 16)
    x[2, 5] = torch.nan
    expected = ACTIVATIONS[activation](linear_reference(x, weight))
    check(run(mask, TILES[0], x, weight, activation=activation), expected, reduction=16)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_pruned_values_never_count(tile):
    mask = block_mask((48, 48), (1, 1), 0.8, seed=5)
    weight = torch.where(mask, torch.randn(48, 48), torch.nan)
    x = torch.randn(9, 48)
    expected = linear_reference(x, torch.where(mask, weight, 0.0))
    check(run(mask, tile, x, weight), expected, reduction=48)


def test_a_row_without_kept_blocks_is_bias_alone():
    mask = torch.zeros(80, 32, dtype=torch.bool)
    mask[16:32, :16] = True
    x, weight, bias = torch.randn(3, 32), torch.randn(80, 32), torch.randn(80)
    for tile in TILES:
        y = run(mask, tile, x, weight, bias)
        assert torch.equal(y[:, 64:], bias[64:].expand(3, 16))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_same_bits_every_time(tile):
    mask = block_mask((64, 96), (16, 16), 0.5, seed=7)
    x, weight = torch.randn(33, 96), torch.randn(64, 96)
    assert torch.equal(run(mask, tile, x, weight), run(mask, tile, x, weight))


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        ((torch.ones(2, 33), None, None), ShapeError, "an input of shape"),
        ((torch.ones(32), None, None), ShapeError, "an input of shape"),
        ((torch.ones(2, 32).double(), None, None), ValueRangeError, "float64"),
        ((torch.ones(2, 32), None, torch.ones(2, 15)), ShapeError, "a residual of shape"),
    ],
)
def test_wrong_inputs_say_what_is_allowed(inputs, error, text):
    kernel = kernel_of(torch.ones(16, 32, dtype=torch.bool), TILES[0])
    with pytest.raises(error, match=text):
        kernel.run(kernel.pack(torch.ones(16, 32)), *inputs)


@pytest.mark.parametrize(
    ("mask", "dtype", "device", "text"),
    [
        (block_mask((64, 64), (16, 16), 0.9, seed=0), torch.float32, "cpu", "runs on CUDA"),
        (block_mask((64, 64), (16, 16), 0.9, seed=0), torch.float64, "cuda", "not fp64"),
        (block_mask((64, 64), (1, 1), 0.9, seed=0), torch.float32, "cuda", "cover 1.00 of the matrix"),
        (torch.zeros(0, 4, dtype=torch.bool), torch.float32, "cuda", "empty"),
        (block_mask((64, 64), (16, 16), 0.9, seed=0), torch.float32, "cuda", "no CUDA device"),
    ],
)
def test_refusals_name_their_reason(mask, dtype, device, text):
    answer = TritonBlock().supports(linear_spec(TeSA.from_mask(mask), 8, dtype, device=device))
    assert not answer
    assert text in answer.reason


def test_the_default_is_a_point_of_the_space():
    implement = TritonBlock()
    for rows in (1, 64, 4096):
        spec = linear_spec(TeSA.from_mask(block_mask((256, 256), (64, 64), 0.5)), rows, torch.float16, device="cuda")
        assert implement.space(spec)["tile"].includes(implement.default(spec)["tile"])


def test_without_triton_building_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="pip install triton"):
        kernel_of(torch.ones(16, 16, dtype=torch.bool), TILES[0])


def test_the_registry_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import sparta.nn, sparta.specialize.linear.triton_block.implement"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr


GELU_ERRORS = {torch.bfloat16: (9e-5, 1.4e-6), torch.float16: (4e-6, 6e-8)}  # of itself, or so much


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what is no number any more
@pytest.mark.parametrize("dtype", GELU_ERRORS, ids=str)
def test_gelu_of_every_number_of_16_bits(dtype):
    """The weight is the identity, so results are GELU of x, rounded once; what is not finite spoils its own row."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    x = torch.nn.functional.pad(finite, (0, -len(finite) % 16)).view(-1, 16)
    mask, weight = torch.ones(16, 16, dtype=torch.bool), torch.eye(16).to(dtype)
    y = run(mask, BlockTile(128, 16, 16), x, weight, activation="gelu").double()
    relative, absolute = GELU_ERRORS[dtype]
    relative += torch.finfo(dtype).eps  # the interpreter does not round bf16 to the nearest
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(y, functional.gelu(x.double()), rtol=relative, atol=absolute + smallest)
    odd = torch.zeros(2, 16, dtype=dtype)
    odd[:, 0] = torch.tensor([torch.nan, torch.inf])
    y = run(mask, BlockTile(16, 16, 16), odd, weight, activation="gelu")
    assert y[0].isnan().all()
    assert y[1, 0] == torch.inf


@pytest.mark.parametrize("dtype", GELU_ERRORS, ids=str)
def test_gelu_between_the_numbers_of_16_bits(dtype):
    """Sums are in float32: the polynomial holds for all of them, and is the same in Triton and in C++."""
    number = r"-?\d+\.\d*(?:e-?\d+)?"
    source = (NATIVE / "few_tokens.cuh").read_text(encoding="utf-8")
    texts = [text.partition("}")[0] for text in source.split("constexpr float GELU[] = {")[1:]]
    factors = [float(each) for each in re.findall(number, texts[dtype == torch.bfloat16])]
    triton = Path(kernel.__file__).read_text(encoding="utf-8")
    triton = triton.partition(f"tl.{str(dtype).partition('.')[2]} == KIND:")[2].partition("y = x / ")[0]
    triton = triton.replace("- ", "-")
    assert [float(each) for each in re.findall(number, triton)] == factors
    small = torch.logspace(-30, 4, 100_001)
    x = torch.cat([torch.linspace(-40, 40, 2_000_001), small, -small])
    power = torch.full_like(x, factors[0])
    for factor in factors[1:]:
        power = power * (x * x) + factor
    y, expected = (x / (1 + torch.exp2(-x * power))).double(), functional.gelu(x.double())
    relative, absolute = GELU_ERRORS[dtype]
    assert ((y - expected).abs() <= torch.maximum(relative * expected.abs(), torch.tensor(absolute))).all()
