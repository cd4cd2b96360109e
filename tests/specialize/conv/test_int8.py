"""Int8 convolutions are exact: equal, bit for bit, to the convolution of integers, in every build and geometry."""

import copy
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.specialize.conv.cpu_image import IMAGES
from sparta.specialize.conv.int8 import CONV_OPS, conv_reference, int8_conv_spec, residual_grid
from sparta.specialize.conv.int8_depthwise import Int8Depthwise
from sparta.specialize.conv.int8_packed import PackedInt8Conv
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu import runnable_isas
from sparta.specialize.cpu.library import load
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import implement_named, supported
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.tuning.select import build
from sparta.tesa.attribute import TeSA

GRIDS = [Quantization(0.02), Quantization(0.03, 100, "uint8"), Quantization(0.01, -128), Quantization(0.05, 0, "uint8")]
EPILOGUES = [
    Epilogue(),
    Epilogue(bias=True, activation="relu"),
    Epilogue(bias=True, activation="relu6"),
    Epilogue(bias=True, activation="relu", residual=True, residual_first=True),
    Epilogue(activation="relu6", residual=True),
]


@st.composite
def layers(draw):
    """A spec of any geometry, the weight's integers, an image, bias and residual."""
    dims = draw(st.sampled_from([1, 2, 2, 2]))
    kernel = [draw(st.sampled_from([1, 1, 2, 3])) for _ in range(dims)]
    groups = draw(st.sampled_from([1, 1, 2]))
    # 64 channels are 16 places, which tile registers read where they are
    each = draw(st.sampled_from([4, 8, 64]) if groups > 1 else st.one_of(st.integers(1, 18), st.sampled_from([64, 70])))
    outputs = groups * draw(st.sampled_from([4, 8, 16, 32])) if groups > 1 else draw(st.integers(1, 70))
    geometry = ConvGeometry.make(
        dims,
        stride=[draw(st.integers(1, 3)) for _ in range(dims)],
        padding=[(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(dims)],
        dilation=draw(st.integers(1, 2)),
        groups=groups,
    )
    size = [draw(st.integers(2 * (k - 1) + 1, 24)) for k in kernel]
    shape, grid = (outputs, each, *kernel), draw(st.sampled_from(GRIDS))
    mask = torch.rand(shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    weight = TeSA.from_mask(mask).with_format("int8", scale=torch.rand(outputs, dtype=torch.float64) + 0.1)
    images = (draw(st.integers(1, 2)), each * groups, *size)
    epilogue = draw(st.sampled_from(EPILOGUES))
    adding = draw(st.sampled_from([None, *GRIDS])) if epilogue.residual else None
    spec = int8_conv_spec(weight, images, grid, geometry, epilogue=epilogue, residual=adding)
    integers = torch.randint(draw(st.sampled_from([-128, -127])), 128, shape).to(torch.int8)
    x = torch.randn(images) * draw(st.sampled_from([1.0, 100.0]))
    bias = torch.randn(outputs) if epilogue.bias else None
    out = (images[0], outputs, *geometry.output_size(size, kernel))
    return spec, integers, x, bias, torch.randn(out) if epilogue.residual else None


@settings(max_examples=60, deadline=None)
@given(layers(), st.sampled_from(runnable_isas()), st.sampled_from(IMAGES), st.integers(1, 4), st.data())
def test_results_equal_the_convolution_of_integers(layer, isa, image, mv, data):
    spec, integers, x, bias, residual = layer
    groups = spec.attributes["groups"]
    each = integers.shape[0] // groups if groups > 1 else 0
    tiles = [Tile(block=1, mv=mv), Tile(block=4, mv=mv), Tile("gathered", 16, mv), Tile("runs", 32)]
    tile = data.draw(st.sampled_from([tile for tile in tiles if each % tile.block == 0]))
    with mock.patch.dict(os.environ, {"SPARTA_CPU_ISA": isa}):
        kernel = build(spec, {"_name": "cpu-int8", "tile": str(tile), "image": image})
    strange = x.to(memory_format=torch.channels_last) if x.dim() == 4 and data.draw(st.booleans()) else x
    y = kernel.run(kernel.pack(integers), strange, bias, residual)
    assert torch.equal(y, conv_reference(spec, integers, x, bias, residual))
    short = kernel.fast_path(kernel.pack(integers), bias)
    assert torch.equal(short(x, residual), y)
    assert short(x.double(), residual) is None
    assert short(x[:, :0], residual) is None


@settings(max_examples=15, deadline=None)
@given(layers())
def test_every_implement_agrees_on_the_grid(layer):
    spec, integers, x, bias, residual = layer
    x, adding = Quantization.from_dict(spec.attributes).rounded(x), residual_grid(spec.attributes)
    residual = residual if adding is None else adding.rounded(residual)
    truth = conv_reference(spec, integers, x, bias, residual)
    scales = spec["weight"].scale.dense()[:, :1].float() if spec["weight"].count("live") else 1.0
    names = {implement.name for implement in supported(spec)[0]}
    assert {"dense", "cpu", "cpu-int8"} <= names
    for name in names:
        config = {"_name": name, **implement_named(name, spec.op).default(spec)}
        kernel = build(spec, config)
        for weight in (integers, integers * scales):
            torch.testing.assert_close(kernel.run(kernel.pack(weight), x, bias, residual), truth, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dims", [1, 2])
def test_depthwise_layers_on_a_grid_run_in_kernels_that_skip_nothing(dims, stride):
    weight = TeSA.dense((10, 1, *[3] * dims)).with_format("int8", scale=0.1)
    geometry = ConvGeometry.make(dims, padding=1, stride=stride, groups=10)
    grid, epilogue = Quantization(0.02, 7), Epilogue(bias=True, activation="relu6")
    spec = int8_conv_spec(weight, (2, 10, *[9] * dims), grid, geometry, epilogue=epilogue)
    assert {"cpu-dense", "cpu-int8"} <= {each.name for each in supported(spec)[0]}
    integers = torch.randint(-127, 128, weight.shape).to(torch.int8)
    x, bias = grid.rounded(torch.randn(2, 10, *[9] * dims)), torch.randn(10)
    kernel = build(spec, {"_name": "cpu-dense"})
    truth = conv_reference(spec, integers, x, bias, None)
    for operand in (integers, integers * 0.1):
        packed = kernel.pack(operand)
        torch.testing.assert_close(kernel.run(packed, x, bias, None), truth, rtol=1e-4, atol=1e-4)
        assert kernel.product(packed, bias)(tuple(x.shape), 1).shape == truth.shape


def test_inputs_that_are_no_numbers_are_as_the_grid_says():
    x = torch.randn(1, 4, 6, 6)
    x[0, 1, 2, 2], x[0, 0, 3, 3], x[0, 2, 0, 0] = torch.nan, torch.inf, -torch.inf
    weight = TeSA.dense((8, 4, 3, 3)).with_format("int8", scale=0.1)
    integers = torch.randint(-127, 128, (8, 4, 3, 3)).to(torch.int8)
    spec = int8_conv_spec(weight, x.shape, Quantization(0.02, 7), ConvGeometry.make(2, padding=1))
    for isa in runnable_isas():
        with mock.patch.dict(os.environ, {"SPARTA_CPU_ISA": isa}):
            kernel = build(spec, {"_name": "cpu-int8", **implement_named("cpu-int8", spec.op).default(spec)})
        y = kernel.run(kernel.pack(integers), x, None, None)
        assert torch.equal(y, conv_reference(spec, integers, x, None, None))


def test_residuals_that_are_no_numbers_are_as_their_grid_says():
    x, residual = torch.randn(1, 4, 6, 6), torch.randn(1, 8, 6, 6)
    residual[0, 1, 2, 2], residual[0, 0, 3, 3], residual[0, 7, 5, 5] = torch.nan, torch.inf, -torch.inf
    weight = TeSA.dense((8, 4, 3, 3)).with_format("int8", scale=0.1)
    integers = torch.randint(-127, 128, (8, 4, 3, 3)).to(torch.int8)
    padded, grid = ConvGeometry.make(2, padding=1), Quantization(0.02, 7)
    spec = int8_conv_spec(weight, x.shape, grid, padded, epilogue=Epilogue(residual=True), residual=Quantization(0.1))
    for isa in runnable_isas():
        with mock.patch.dict(os.environ, {"SPARTA_CPU_ISA": isa}):
            kernel = build(spec, {"_name": "cpu-int8", **implement_named("cpu-int8", spec.op).default(spec)})
        y = kernel.run(kernel.pack(integers), x, None, residual)
        assert torch.equal(y, conv_reference(spec, integers, x, None, residual))
        assert bool(y.isfinite().all())


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu6"])
@pytest.mark.parametrize("tile", [Tile("runs", 32), Tile("gathered", 16, 2), Tile("gathered", 16, 3)], ids=str)
def test_wide_groups_have_every_activation_and_any_number_of_threads(tile, activation, isa):
    weight = TeSA.dense((43, 66, 3, 3)).with_format("int8", scale=0.01)
    geometry, epilogue = ConvGeometry.make(2, padding=1), Epilogue(bias=True, activation=activation, residual=True)
    spec = int8_conv_spec(weight, (3, 66, 13, 7), Quantization(0.02), geometry, epilogue=epilogue)
    integers, bias = torch.randint(-128, 128, (43, 66, 3, 3)).to(torch.int8), torch.randn(43)
    x, residual, before = torch.randn(3, 66, 13, 7), torch.randn(3, 43, 13, 7), torch.get_num_threads()
    with mock.patch.dict(os.environ, {"SPARTA_CPU_ISA": isa}):
        kernel = build(spec, {"_name": "cpu-int8", "tile": str(tile), "image": "flat"})
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            y = kernel.run(kernel.pack(integers), x, bias, residual)
            torch.testing.assert_close(y, conv_reference(spec, integers, x, bias, residual), rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_dense_layers_are_offered_runs_where_registers_are_many():
    for outputs, density, found in [(64, 1.0, True), (64, 0.3, False), (16, 1.0, True)]:
        weight = TeSA.from_mask(torch.rand(outputs, 8, 3, 3) < density).with_format("int8", scale=0.1)
        spec = int8_conv_spec(weight, (1, 8, 9, 9), Quantization(0.02), ConvGeometry.make(2, padding=1))
        implement = implement_named("cpu-int8", spec.op)
        for isa in runnable_isas():
            with mock.patch.dict(os.environ, {"SPARTA_CPU_ISA": isa}):
                tiles = implement.space(spec)["tile"]._value
                by_tiles = load().byte_tiles
            plain = [tile for tile in tiles if not tile.startswith("gathered")]
            assert (str(Tile("runs", 32)) in tiles) == (found and isa == "avx512")
            assert (plain[0] == str(Tile("runs", 32))) == (found and isa == "avx512" and outputs >= 32)
            assert (str(Tile("gathered", 16, 4)) in tiles) == by_tiles
            assert tiles[0].startswith("gathered") == (by_tiles and density == 1.0)


def test_groups_that_have_no_whole_places_run_in_real_numbers():
    weight = TeSA.dense((8, 2, 3, 3)).with_format("int8", scale=0.1)
    spec = int8_conv_spec(weight, (1, 8, 9, 9), Quantization(0.02), ConvGeometry.make(2, groups=4))
    answer = implement_named("cpu-int8", CONV_OPS["conv2d"]).supports(spec)
    assert not answer
    assert "a group has 2" in answer.reason
    assert "cpu-dense" in {implement.name for implement in supported(spec)[0]}
    with pytest.raises(ShapeError, match="a multiple of 4"):
        PackedInt8Conv(torch.ones(8, 2, 3, 3) > 0, ConvGeometry.make(2, groups=4))
    with pytest.raises(ShapeError, match="in C groups"):
        Int8Depthwise(torch.ones(16, 1, 3, 3) > 0, ConvGeometry.make(2, groups=8))


@st.composite
def depthwise_layers(draw):
    """A spec of a depthwise convolution, the weight's integers, an image, bias and residual."""
    dims, channels = draw(st.sampled_from([1, 2, 2, 2])), draw(st.integers(2, 11))
    side = draw(st.sampled_from([1, 2, 3, 3, 4, 5, 7]))
    kernel = [side] * dims if draw(st.booleans()) else [draw(st.integers(1, 6)) for _ in range(dims)]
    geometry = ConvGeometry.make(
        dims,
        stride=draw(st.integers(1, 3)),
        padding=[(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(dims)],
        dilation=draw(st.sampled_from([1, 1, 2])),
        groups=channels,
    )
    size = [draw(st.integers(2 * (k - 1) + 1, 40)) for k in kernel]
    shape, grid = (channels, 1, *kernel), draw(st.sampled_from(GRIDS))
    mask = torch.rand(shape) < draw(st.sampled_from([0.5, 1.0]))
    weight = TeSA.from_mask(mask).with_format("int8", scale=torch.rand(channels, dtype=torch.float64) + 0.1)
    images, epilogue = (draw(st.integers(1, 2)), channels, *size), draw(st.sampled_from(EPILOGUES))
    adding = draw(st.sampled_from([None, *GRIDS])) if epilogue.residual else None
    spec = int8_conv_spec(weight, images, grid, geometry, epilogue=epilogue, residual=adding)
    integers = torch.randint(draw(st.sampled_from([-128, -127])), 128, shape).to(torch.int8)
    x, bias = torch.randn(images) * draw(st.sampled_from([1.0, 100.0])), torch.randn(channels)
    out = (images[0], channels, *geometry.output_size(size, kernel))
    residual = torch.randn(out) if epilogue.residual else None
    return spec, integers, x, bias if epilogue.bias else None, residual


@settings(max_examples=80, deadline=None)
@given(depthwise_layers(), st.sampled_from(runnable_isas()), st.integers(1, 2))
def test_depthwise_results_equal_the_convolution_of_integers(layer, isa, threads):
    spec, integers, x, bias, residual = layer
    with mock.patch.dict(os.environ, {"SPARTA_CPU_ISA": isa}):
        kernel = build(spec, {"_name": "cpu-int8"})
    packed, before = kernel.pack(integers), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = kernel.run(packed, x, bias, residual)
        assert torch.equal(y, conv_reference(spec, integers, x, bias, residual))
        short = copy.deepcopy(kernel).fast_path(packed, bias)
        assert torch.equal(short(x, residual), y)
        assert short(x.double(), residual) is None
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_depthwise_layers_have_every_activation(activation):
    weight = TeSA.dense((6, 1, 3, 3)).with_format("int8", scale=0.1)
    geometry, epilogue = ConvGeometry.make(2, padding=1, groups=6), Epilogue(bias=True, activation=activation)
    spec = int8_conv_spec(weight, (1, 6, 9, 9), Quantization(0.02), geometry, epilogue=epilogue)
    integers, x, bias = torch.randint(-127, 128, (6, 1, 3, 3)).to(torch.int8), torch.randn(1, 6, 9, 9), torch.randn(6)
    kernel = build(spec, {"_name": "cpu-int8"})
    y = kernel.run(kernel.pack(integers), x, bias, None)
    torch.testing.assert_close(y, conv_reference(spec, integers, x, bias, None), rtol=1e-5, atol=1e-5)


def test_wrong_specs_and_arguments_say_what_is_allowed():
    weight, grid = TeSA.dense((8, 4, 3, 3)).with_format("int8", scale=0.1), Quantization(0.1)
    packed = PackedInt8Conv(torch.ones(8, 4, 3, 3) > 0, ConvGeometry.make(2))
    integers = torch.ones(8, 4, 3, 3, dtype=torch.int8)
    values, scales, x = packed.pack_integers(integers), (torch.ones(8), None), torch.zeros(1, 4, 5, 5)
    for call, error, text in [
        (lambda: int8_conv_spec(TeSA.dense((8, 4, 3, 3)), (1, 4, 5, 5), grid), ValueRangeError, "a weight in"),
        (lambda: int8_conv_spec(weight, (1, 4, 5, 5), Quantization.per_token()), ValueRangeError, "a static one"),
        (
            lambda: int8_conv_spec(weight, (1, 4, 5, 5), grid, residual=Quantization.per_token()),
            ValueRangeError,
            "a static one",
        ),
        (lambda: int8_conv_spec(weight, (1, 5, 5, 5), grid), ShapeError, "an input of shape"),
        (lambda: packed.pack_integers(integers.float()), ShapeError, "int8"),
        (lambda: packed.run(x[:, :3], values, scales, grid), ShapeError, "x of shape"),
        (lambda: packed.run(x, (values[0][1:], values[1]), scales, grid), ShapeError, "pack_integers"),
        (lambda: packed.run(x, values, (torch.ones(7), None), grid), ShapeError, "a scale of shape"),
        (lambda: packed.run(x, values, scales, Quantization.per_token()), ValueRangeError, "a static one"),
        (lambda: PackedInt8Conv(torch.ones(8, 4, 3, 3) > 0, ConvGeometry.make(2), block=8), ValueRangeError, "1 or 4"),
    ]:
        with pytest.raises(error, match=text):
            call()
    cuda = replace(int8_conv_spec(weight, (1, 4, 5, 5), grid), device="cuda")
    assert "on the CPU" in implement_named("cpu-int8", cuda.op).supports(cuda).reason
