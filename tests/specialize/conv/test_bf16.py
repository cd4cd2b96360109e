"""Convolutions in bf16 are those of rounded images and weights with sums in fp32, in every build and geometry."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.measure.machine import probe_compiler
from sparta.specialize.conv import cpu_bf16
from sparta.specialize.conv.bf16_depthwise import Bf16Depthwise
from sparta.specialize.conv.bf16_packed import LAYOUTS, PackedBf16Conv
from sparta.specialize.conv.spec import ConvGeometry, conv_spec, dense_conv
from sparta.specialize.cpu import runnable_isas
from sparta.specialize.cpu.chain import IN_BF16
from sparta.specialize.implement import Cause, implement_named
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.spec import apply_epilogue
from sparta.specialize.tuning.select import build
from sparta.tesa.attribute import TeSA

pytestmark = pytest.mark.skipif(probe_compiler()[0] is None, reason="needs a C++ compiler")

ISAS = runnable_isas()
TILES = [(1, 1), (1, 4), (4, 1), (4, 2), (4, 3), (8, 1)]
EPILOGUES = {
    None: Epilogue(bias=True),
    "relu": Epilogue(bias=True, activation="relu", residual=True),
    "relu_last": Epilogue(bias=True, activation="relu", residual=True, residual_first=True),
    "gelu": Epilogue(bias=True, activation="gelu"),
    "relu6": Epilogue(bias=True, activation="relu6", residual=True),
}


def short(*shape):
    """Random numbers that are bf16 already."""
    return torch.randn(*shape).bfloat16().float()


def truth_of(x, weight, bias, geometry, activation, residual):
    exact = dense_conv(x.bfloat16().double(), weight.double(), bias.double(), geometry)
    return apply_epilogue(exact, EPILOGUES[activation], None if residual is None else residual.double())


def assert_near(y, truth):
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), truth, rtol=1e-4, atol=2e-5 * max(1.0, float(truth.abs().max())))


@settings(max_examples=60)
@given(st.data())
def test_any_convolution_is_that_of_rounded_numbers(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    dims = data.draw(st.sampled_from([1, 2, 2, 2]))
    kernel = [data.draw(st.sampled_from([1, 1, 2, 3])) for _ in range(dims)]
    groups, (block, vectors) = data.draw(st.sampled_from([1, 1, 2])), data.draw(st.sampled_from(TILES))
    each = data.draw(st.integers(1, 17))
    outputs = groups * 8 * data.draw(st.integers(1, 5)) if groups > 1 else data.draw(st.integers(1, 45))
    geometry = ConvGeometry.make(
        dims,
        stride=[data.draw(st.integers(1, 3)) for _ in range(dims)],
        padding=[(data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))) for _ in range(dims)],
        dilation=data.draw(st.integers(1, 2)),
        groups=groups,
    )
    size = [data.draw(st.integers(2 * (k - 1) + 1, 40)) for k in kernel]
    mask = torch.rand(outputs, each, *kernel) < data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    weight, x = short(*mask.shape) * mask, torch.randn(data.draw(st.integers(1, 2)), each * groups, *size)
    bias, activation = torch.randn(outputs), data.draw(st.sampled_from(list(EPILOGUES)))
    out = (len(x), outputs, *geometry.output_size(size, kernel))
    residual = torch.randn(out) if EPILOGUES[activation].residual else None
    packed = PackedBf16Conv(
        mask,
        geometry,
        image=data.draw(st.sampled_from(LAYOUTS)),
        isa=data.draw(st.sampled_from(ISAS)),
        block=block,
        mv=vectors,
    )
    threads, given_x = data.draw(st.integers(1, 3)), x.bfloat16() if data.draw(st.booleans()) else x
    values = packed.pack_short(weight)
    y = packed.run(given_x, values, bias, activation=activation, residual=residual, threads=threads)
    assert_near(y, truth_of(x, weight, bias, geometry, activation, residual))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("kernel", "stride", "size"), [(3, 1, (13, 40)), (3, 2, (28, 28)), (5, 2, (9, 21)), (2, 3, (8, 8))]
)
@pytest.mark.parametrize("activation", EPILOGUES)
def test_depthwise_layers(isa, kernel, stride, size, activation):
    torch.manual_seed(0)
    geometry = ConvGeometry.make(2, stride=stride, padding=kernel // 2, groups=7)
    weight, x, bias = short(7, 1, kernel, kernel), torch.randn(2, 7, *size), torch.randn(7)
    conv = Bf16Depthwise(weight != 0, geometry, isa)
    shape = (2, 7, *geometry.output_size(size, (kernel, kernel)))
    residual = torch.randn(shape) if EPILOGUES[activation].residual else None
    y = conv.run(x, conv.pack_short(weight), bias, activation=activation, residual=residual)
    assert_near(y, truth_of(x, weight, bias, geometry, activation, residual))


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number_stays_with_the_weights_that_read_it(isa):
    """A list of an odd number of weights multiplies its last one with nothing else."""
    mask = torch.zeros(8, 6, 1, 1, dtype=torch.bool)
    mask[:4, :3] = mask[4:, 3:4] = True
    x = torch.randn(1, 6, 5, 5)
    x[0, 2, 0, 0], x[0, 3, 1, 1], x[0, 5] = float("inf"), float("nan"), float("nan")
    packed = PackedBf16Conv(mask, ConvGeometry.make(2), isa=isa, block=4, mv=2)
    y = packed.run(x, packed.pack_short(torch.ones(mask.shape)))
    assert torch.equal(y[0, :4].isinf(), _only(0, 0))
    assert torch.equal(y[0, 4:].isnan(), _only(1, 1))
    assert not y[0, :4].isnan().any()


def _only(row, column):
    found = torch.zeros(4, 5, 5, dtype=torch.bool)
    found[:, row, column] = True
    return found


def test_images_of_any_strides_copies_and_fast_paths_are_the_same_bits():
    torch.manual_seed(1)
    geometry = ConvGeometry.make(2, padding=1)
    mask = torch.rand(12, 9, 3, 3) < 0.3
    weight, bias, x = short(*mask.shape) * mask, torch.randn(12), torch.randn(2, 9, 11, 10)
    packed = PackedBf16Conv(mask, geometry, block=4, mv=2)
    values = packed.pack_short(weight)
    y = packed.run(x, values, bias, activation="relu")
    assert torch.equal(packed.run(x.to(memory_format=torch.channels_last), values, bias, activation="relu"), y)
    assert torch.equal(copy.deepcopy(packed).run(x, values, bias, activation="relu"), y)
    call = packed.fast_path_for(values, bias, "relu")
    assert torch.equal(call(x), y)
    assert call(x.double()) is None
    assert call(x, torch.randn(1)) is None
    assert packed.fast_path_for(values, bias.double(), None) is None
    product = packed.product_for(values, bias, "relu")
    assert product((2, 9, 11, 10), 1).rounding == IN_BF16
    assert product((2, 8, 11, 10), 1) is None


def test_what_does_not_fit_is_refused():
    mask, geometry = torch.ones(4, 4, 1, 1, dtype=torch.bool), ConvGeometry.make(2)
    with pytest.raises(NameNotFoundError):
        PackedBf16Conv(mask, geometry, image="rows")
    with pytest.raises(ValueRangeError):
        PackedBf16Conv(mask, geometry, block=8, mv=2)
    with pytest.raises(ValueRangeError):
        PackedBf16Conv(mask, geometry, interleave=2)
    packed = PackedBf16Conv(mask, geometry, block=4, mv=1)
    with pytest.raises(ShapeError):
        packed.pack_short(torch.ones(4, 4, 3, 3))
    with pytest.raises(ShapeError):
        packed.run(torch.ones(1, 3, 4, 4), packed.pack_short(torch.ones(4, 4, 1, 1)))
    with pytest.raises(ShapeError):
        packed.run(torch.ones(1, 4, 4, 4), torch.ones(3))
    with pytest.raises(ShapeError):
        Bf16Depthwise(mask, geometry)


def _spec(shape, dtype=torch.bfloat16, groups=1, density=0.2):
    mask = (torch.rand(shape[0] // 4, *shape[1:]) < density).repeat_interleave(4, 0)
    geometry = ConvGeometry.make(2, padding=shape[-1] // 2, groups=groups)
    epilogue = Epilogue(bias=True, activation="relu", residual=True)
    return conv_spec(TeSA.from_mask(mask), (1, shape[1] * groups, 14, 14), dtype, geometry, epilogue=epilogue)


def test_the_implement_says_what_it_does_not_take(monkeypatch):
    implement = implement_named("cpu-bf16", "conv2d")
    assert implement.supports(_spec((8, 8, 3, 3), torch.float32)).cause is Cause.DTYPE
    monkeypatch.setattr(cpu_bf16, "_FLAG", "none")
    refused = implement.supports(_spec((8, 8, 3, 3)))
    assert refused.cause is Cause.CAPABILITY
    assert "AVX-512 BF16" in refused.reason


@pytest.mark.parametrize(
    ("shape", "groups", "density"), [((16, 8, 3, 3), 1, 0.2), ((16, 8, 1, 1), 1, 0.9), ((8, 1, 3, 3), 8, 1.0)]
)
def test_the_implement_computes_a_layer_of_a_bf16_model(shape, groups, density):
    torch.manual_seed(0)
    spec = _spec(shape, groups=groups, density=density)
    implement = implement_named("cpu-bf16", "conv2d")
    weight = torch.where(spec["weight"].mask("cpu"), torch.randn(shape), 0).bfloat16()
    x, bias = torch.randn(spec["input"].shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    residual = torch.randn(1, shape[0], 14, 14).bfloat16()
    geometry = ConvGeometry.from_dict(spec.attributes)
    exact = dense_conv(x.double(), weight.double(), bias.double(), geometry)
    truth = apply_epilogue(exact, spec.epilogue, residual.double())
    space = implement.space(spec)
    tiles = space["tile"]._value if space else [None]
    for tile in tiles:
        params = {} if tile is None else {"tile": tile, "image": "columns"}
        kernel = build(spec, {"_name": "cpu-bf16", **params})
        y = kernel.run(kernel.pack(weight), x, bias, residual)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), truth, rtol=1e-2, atol=1e-2)
