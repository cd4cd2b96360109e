"""Int8 kernels are exact: equal, bit for bit, to the integer product, in every build and for any shape."""

import os
from ctypes import addressof
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.measure.machine import probe_cpu
from sparta.specialize.cpu import load, runnable_isas
from sparta.specialize.cpu.library import INT8_CALL, Library
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import implement_named, supported
from sparta.specialize.int8_linear import dense
from sparta.specialize.int8_linear.cpu import Int8Options, Int8Panel, PackedInt8Linear
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import OP, int8_linear_spec, reference, requantization
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.tuning.select import Problem, build, tune_kernel
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check
from specialize.kernel_strategies import weight_masks

FORMATS = {"int8": torch.int8, "uint8": torch.uint8}
ZEROS = {"int8": [0, -128, 7, 127], "uint8": [0, 128, 255]}
EPILOGUES = [
    Epilogue(),
    Epilogue(bias=True),
    Epilogue(bias=True, activation="relu"),
    Epilogue(bias=True, activation="relu6"),
    Epilogue(activation="relu", residual=True),
    Epilogue(bias=True, residual=True),
    Epilogue(bias=True, activation="relu", residual=True, residual_first=True),
]
CURVED = [Epilogue(bias=True, activation=name, residual=added) for name in ("gelu", "silu") for added in (False, True)]


def random_bytes(shape, format, *, extreme=False):
    low, high = (0, 255) if format == "uint8" else (-128, 127)
    if extreme:  # what saturates instructions that add in 16 bits
        return torch.where(torch.rand(shape) < 0.5, low, high).to(FORMATS[format])
    return torch.randint(low, high + 1, shape).to(FORMATS[format])


def grids(data):
    format = data.draw(st.sampled_from(["int8", "uint8"]))
    return Quantization(0.03, data.draw(st.sampled_from(ZEROS[format])), format)


def made(mask, tokens, data, *, epilogues=EPILOGUES, grid=None, output=None):
    """A spec, the weight's integers, x, bias and residual as the spec says."""
    scale = torch.rand(len(mask), dtype=torch.float64) * 0.01 + 1e-4
    weight = TeSA.from_mask(mask).with_format("int8", scale=scale if mask.numel() else 1.0)
    epilogue = data.draw(st.sampled_from(epilogues))
    spec = int8_linear_spec(weight, tokens, grid or grids(data), output=output, epilogue=epilogue)
    extreme = data.draw(st.booleans())
    integers = random_bytes(mask.shape, "int8", extreme=extreme)
    if data.draw(st.booleans()):
        integers.clamp_(min=-127)  # which lets a faster instruction multiply
    x = random_bytes((tokens, mask.shape[1]), spec.attributes["input_format"], extreme=extreme)
    bias = torch.randn(len(mask)) * 10 if epilogue.bias else None
    return spec, integers, x, bias, torch.randn(tokens, len(mask)) if epilogue.residual else None


def built(spec, tile, isa):
    with mock.patch.dict(os.environ, {"SPARTA_CPU_ISA": isa}):
        return build(spec, {"_name": "cpu-int8", "tile": str(tile)})


def panel_tiles():
    forms = st.sampled_from([("panel", 1), ("panel", 4), ("gathered", 16)])
    return st.builds(lambda form, mv: Tile(*form, mv), forms, st.integers(1, 4))


def strided(x, kind):
    """The same bytes with other strides, among bytes that are not to be read."""
    if kind == "transposed":
        return x.t().contiguous().t()
    wide = torch.full((len(x), 2 * x.shape[1] + 3), 99, dtype=x.dtype)
    chosen = wide[:, ::2][:, : x.shape[1]] if kind == "every other" else wide[:, 3 : 3 + x.shape[1]]
    return x if kind == "contiguous" else chosen.copy_(x)


@settings(max_examples=80)
@given(weight_masks(), st.sampled_from(runnable_isas()), st.integers(0, 140), panel_tiles(), st.data())
def test_results_equal_the_integer_product(mask, isa, tokens, tile, data):
    output = data.draw(st.sampled_from([None, Quantization(0.5, 3), Quantization(0.25, 128, "uint8")]))
    spec, integers, x, bias, residual = made(mask, tokens, data, output=output)
    kernel = built(spec, tile, isa)
    kind = data.draw(st.sampled_from(["contiguous", "transposed", "every other", "sliced"]))
    y = kernel.run(kernel.pack(integers), strided(x, kind), bias, residual)
    assert torch.equal(y, reference(spec, integers, x, bias, residual))
    assert y.dtype == (torch.float32 if output is None else output.dtype)


def test_tiles_that_are_not_full_do_not_look_like_neighbours():
    mask, x = torch.ones(16, 64, dtype=torch.bool), random_bytes((16, 64), "int8")
    mask[:, 56:60] = False  # 15 places of 16, the last of which is as far from the first as in a full tile
    weight = random_bytes(mask.shape, "int8")
    packed = PackedInt8Linear(mask, **Tile("gathered", 16, 2).to_dict())
    y = packed(x, packed.pack(weight), torch.ones(16))
    assert torch.equal(y.long(), x.long() @ torch.where(mask, weight, 0).long().t())


@settings(max_examples=60)
@given(weight_masks(), st.sampled_from(runnable_isas()), st.integers(0, 70), panel_tiles(), st.data())
def test_real_numbers_are_rounded_on_the_way(mask, isa, tokens, tile, data):
    dynamic = data.draw(st.booleans())
    output = data.draw(st.sampled_from([None, Quantization(0.5, 3)]))
    grid = Quantization.per_token() if dynamic else None
    spec, integers, _, bias, residual = made(mask, tokens, data, grid=grid, output=output)
    x = torch.randn(tokens, mask.shape[1]) * data.draw(st.sampled_from([1.0, 1e30, 1e-30, 1e-44, 0.0]))
    x[torch.rand(x.shape) < 0.1] *= 0.0
    if data.draw(st.booleans()):
        x[torch.rand(x.shape) < 0.02] = data.draw(st.sampled_from([torch.inf, -torch.inf, torch.nan]))
    kernel = built(spec, tile, isa)
    y = kernel.run(
        kernel.pack(integers), strided(x, data.draw(st.sampled_from(["contiguous", "sliced"]))), bias, residual
    )
    truth = reference(spec, integers, x, bias, residual)
    assert torch.equal(y.double().nan_to_num(nan=7.0), truth.double().nan_to_num(nan=7.0))
    if dynamic and output is None and spec.epilogue.activation is None:  # a token that is no number is not hidden
        gone = ~x.isfinite().all(1)
        assert not bool(y[gone].isfinite().any())


@settings(max_examples=40)
@given(weight_masks(), st.sampled_from(runnable_isas()), st.integers(0, 40), panel_tiles(), st.data())
def test_curved_activations_and_residuals_are_fused(mask, isa, tokens, tile, data):
    output = data.draw(st.sampled_from([None, Quantization(0.5, 3)]))
    spec, integers, x, bias, residual = made(mask, tokens, data, epilogues=CURVED, output=output)
    kernel = built(spec, tile, isa)
    y = kernel.run(kernel.pack(integers), x, bias, residual).double()
    truth = reference(spec, integers, x, bias, residual).double()
    if output is None:
        torch.testing.assert_close(y, truth, rtol=1e-5, atol=1e-5)
    else:  # a number near the middle of two integers may become either
        assert bool(((y - truth).abs() <= 1).all())
        assert y.numel() == 0 or float((y != truth).double().mean()) < 0.02


@settings(max_examples=25)
@given(weight_masks(), st.integers(0, 40), st.data())
def test_the_short_way_computes_the_same_or_leaves_it(mask, tokens, data):
    grid = data.draw(st.sampled_from([None, Quantization.per_token()]))
    output = data.draw(st.sampled_from([None, Quantization(0.5, 3)]))
    spec, integers, x, bias, residual = made(mask, tokens, data, grid=grid, output=output)
    for name in ("cpu-int8", "dense") if mask.numel() else ("cpu-int8",):
        kernel = build(spec, {"_name": name, **implement_named(name, OP).default(spec)})
        packed = kernel.pack(integers)
        short = kernel.fast_path(packed, bias)
        assert short is not None or name == "dense"
        for rows in (x, torch.randn(tokens, mask.shape[1])):
            if short is None or (grid is not None and not rows.is_floating_point()):
                continue
            y = short(rows, residual)
            assert rows.is_floating_point() or y is not None or mask.shape[1] % 4 or name == "dense"
            assert y is None or torch.equal(y, kernel.run(packed, rows, bias, residual))
        if short is not None and name == "cpu-int8":
            assert short(torch.randn(mask.shape[1], 8).t(), None) is None or mask.shape[1] < 2
            three = torch.randn(2, 3, mask.shape[1])
            added = None if residual is None else torch.randn(2, 3, len(mask))
            assert short(three, added).shape == (2, 3, len(mask))


def test_the_quantised_layer_is_near_the_real_one():
    """What rounding costs is half a step of every input and weight, whatever the scales are."""
    torch.manual_seed(0)
    weight, x, bias = torch.randn(48, 96, dtype=torch.float64), torch.randn(33, 96), torch.randn(48)
    scale = weight.abs().amax(1) / 127
    integers = (weight / scale[:, None]).round().to(torch.int8)
    tesa = TeSA.dense((48, 96)).with_format("int8", scale=scale)
    for grid in (Quantization.per_token(), Quantization.covering(float(x.min()), float(x.max()))):
        spec = int8_linear_spec(tesa, 33, grid, epilogue=Epilogue(bias=True))
        kernel = built(spec, Tile(block=4), runnable_isas()[0])
        y = kernel.run(kernel.pack(integers), x, bias, None).double()
        step = x.abs().amax(1, keepdim=True).double() / 127 if grid.dynamic else torch.full((33, 1), grid.scale)
        bound = step / 2 * weight.abs().sum(1) + (x.abs().double().sum(1, keepdim=True) + 96 * step) * scale / 2
        assert bool(((y - (x.double() @ weight.t() + bias)).abs() <= bound + 1e-4).all())


@settings(max_examples=40)
@given(weight_masks(), st.sampled_from(runnable_isas()), st.integers(0, 140), panel_tiles(), st.data())
def test_panels_hold_the_same_integers_and_go_from_layer_to_layer(mask, isa, tokens, tile, data):
    packed = PackedInt8Linear(mask, isa=isa, **tile.to_dict())
    format, dtype = data.draw(st.sampled_from(["int8", "uint8"])), data.draw(st.sampled_from([torch.int8, torch.uint8]))
    x, weight = random_bytes((tokens, mask.shape[1]), format), random_bytes(mask.shape, "int8")
    panel = Int8Panel.pack(x, tile.mv, packed.library)
    assert torch.equal(panel.unpack(packed.library), x)
    zero = data.draw(st.sampled_from(ZEROS[str(dtype).removeprefix("torch.")]))
    activation = data.draw(st.sampled_from(["relu", "gelu", "relu_last"]))
    options = Int8Options(zero_point=3, activation=activation, output=(dtype, zero))
    residual = torch.randn(tokens, len(mask)) if activation == "relu_last" else None
    scales, threads = (torch.rand(len(mask)) * 0.01, torch.randn(len(mask))), data.draw(st.sampled_from([1, 2]))
    tokens_first = packed.run(x, packed.pack(weight), scales, options, threads, residual)
    between = packed.to_panel(panel, packed.pack(weight), scales, options, threads, residual)
    assert torch.equal(between.unpack(packed.library), tokens_first)
    following = PackedInt8Linear(mask.t(), isa=isa, **tile.to_dict())
    values, ones = following.pack(weight.t()), torch.ones(mask.shape[1])
    y = following(between, values, ones, zero_point=zero, threads=threads)
    assert torch.equal(y, following(tokens_first, values, ones, zero_point=zero))


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("relu", [False, True])
def test_scales_that_are_no_numbers_and_signs_of_zero_are_as_dense_gives_them(isa, relu):
    weight = random_bytes((5, 6), "int8")
    weight[4] = 0
    x = random_bytes((19, 6), "int8")
    multiplier = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, -1.0])
    packed = PackedInt8Linear(torch.ones(5, 6, dtype=torch.bool), isa=isa)
    for offset in (None, torch.tensor([0.0, torch.inf, 1.0, 1e38, -0.0])):
        y = packed(x, packed.pack(weight), multiplier, offset, activation="relu" if relu else None)
        exact = (x.long() @ weight.long().t()).double() * multiplier.double()
        truth = (exact if offset is None else exact + offset.double()).float()
        truth = truth.clamp_min(0.0) if relu else truth
        assert torch.equal(y.nan_to_num(nan=7.0), truth.nan_to_num(nan=7.0))
        # A clamp may give either zero.
        assert relu or torch.equal(y.signbit()[:, 1:], truth.signbit()[:, 1:])


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("least", [-128, -127])
def test_sums_of_the_largest_products_do_not_saturate(isa, least, monkeypatch):
    monkeypatch.setenv("SPARTA_CPU_ISA", isa)
    weight = torch.tensor([[least] * 40, [127] * 40, [least, 127] * 20, [127, least] * 20], dtype=torch.int8)
    x = torch.tensor([[-128] * 40, [127] * 40, [-128, 127] * 20, [127, -128] * 20], dtype=torch.int8)
    packed = PackedInt8Linear(torch.ones(4, 40, dtype=torch.bool))
    assert packed.library.isa == isa
    y = packed(x, packed.pack(weight), torch.ones(4))
    assert torch.equal(y.long(), x.long() @ weight.long().t())


@settings(max_examples=30)
@given(st.data())
def test_every_implement_agrees(data):
    mask = (torch.rand(8, 20) < 0.4).repeat_interleave(4, 0).repeat_interleave(4, 1)
    dynamic = data.draw(st.booleans())
    output = data.draw(st.sampled_from([None, Quantization(0.5, 3)]))
    grid = Quantization.per_token() if dynamic else grids(data)
    spec, integers, x, bias, residual = made(mask, 33, data, grid=grid, output=output, epilogues=EPILOGUES + CURVED)
    x = grid.rounded(torch.randn(33, 80)) if dynamic else grid.real(x, torch.float32)
    truth = reference(spec, integers, x, bias, residual)
    scales = spec["weight"].scale.dense()[:, :1].float()
    for implement in supported(spec)[0]:
        kernel = build(spec, {"_name": implement.name, **implement.default(spec)})
        for weight in (integers, integers * scales):
            y = kernel.run(kernel.pack(weight), x, bias, residual)
            assert y.dtype == truth.dtype
            if implement.name == "torch-int8":
                assert torch.equal(y, truth)
            else:  # sums in real numbers, and activations, are rounded in their own order
                apart = 1.0 if output is not None else 1e-3
                assert (y.double() - truth.double()).abs().max() <= apart


def test_implements_of_the_operation_and_what_they_refuse():
    weight = TeSA.dense((8, 8)).with_format("int8", scale=0.1)
    spec = int8_linear_spec(weight, 4, Quantization(0.1))
    assert {"dense", "cpu", "cpu-int8", "torch-int8"} <= {each.name for each in supported(spec)[0]}
    cpu = implement_named("cpu-int8", OP)
    several = TeSA.dense((8, 8)).with_format("int8", scale=torch.rand(8, 2) + 0.1, group=4)
    half = {**spec.operands, "input": TeSA.dense((4, 8), format="fp16")}
    for changed, reason in [
        (replace(spec, operands={**spec.operands, "weight": several}), "several scales"),
        (replace(spec, operands={**spec.operands, "weight": TeSA.dense((8, 8), format="int8")}), "without a scale"),
        (replace(spec, operands={**spec.operands, "weight": TeSA.dense((8, 8), format="fp32")}), "not int8"),
        (replace(spec, operands=half), "fp32 models"),
        (replace(spec, device="cuda"), "on the CPU"),
        (replace(spec, attributes={**spec.attributes, "input_scale": 1e-38}), "a scale outside"),
    ]:
        answer = cpu.supports(changed)
        assert not answer
        assert reason in answer.reason


@pytest.mark.parametrize(
    ("flags", "runs"), [((), False), (("avx2", "fma"), False), (("avx_vnni",), True), (("avx512_vnni",), True)]
)
def test_onednn_is_no_candidate_where_its_sums_overflow(flags, runs, monkeypatch):
    known = replace(probe_cpu(), vector_isa=flags)
    monkeypatch.setattr(dense, "probe_cpu", lambda: known)
    monkeypatch.setattr(dense.platform, "machine", lambda: "x86_64")
    dense._sums_in_16_bits.cache_clear()
    weight = TeSA.dense((8, 8)).with_format("int8", scale=0.1)
    answer = dense.OneDnnInt8Linear().supports(int8_linear_spec(weight, 4, Quantization(0.1)))
    dense._sums_in_16_bits.cache_clear()
    assert bool(answer) == (runs and torch.backends.mkldnn.is_available())
    assert answer or "overflow" in answer.reason or "without oneDNN" in answer.reason


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue(bias=True), Epilogue(bias=True, activation="relu")])
def test_onednn_rounds_results_of_tokens_with_their_own_scales(epilogue):
    weight = TeSA.dense((8, 16)).with_format("int8", scale=0.01)
    spec = int8_linear_spec(weight, 5, Quantization.per_token(), output=Quantization(0.05, 3), epilogue=epilogue)
    integers, x = torch.randint(-3, 4, (8, 16), dtype=torch.int8), torch.randn(5, 16)  # no sum leaves 16 bits
    bias = torch.randn(8) if epilogue.bias else None
    kernel = dense.OneDnnInt8Linear().build(spec, {})
    y = kernel.run(kernel.pack(integers), x, bias, None)
    truth = reference(spec, integers, x, bias, None)
    assert y.dtype == truth.dtype
    assert (y.int() - truth.int()).abs().max() <= 1


def test_the_tuner_chooses_among_them():
    mask = (torch.rand(16, 16) < 0.2).repeat_interleave(4, 0).repeat_interleave(4, 1)
    integers, grid, bias = random_bytes(mask.shape, "int8"), Quantization(0.1), torch.randn(64)
    x = grid.rounded(torch.randn(32, 64))
    weight = TeSA.from_mask(mask).with_format("int8", scale=0.02)
    spec = int8_linear_spec(weight, 32, grid, epilogue=Epilogue(bias=True))
    truth = reference(spec, integers, x, bias, None).double()
    choice = tune_kernel(Problem(spec, integers, (x, bias, None), truth, 64), max_trials=4)
    kernel = build(spec, choice.config)
    check(kernel.run(kernel.pack(integers), x, bias, None), truth, reduction=64)
    assert implement_named("cpu-int8", OP).default(spec)["tile"].startswith("panel:4")


@pytest.mark.parametrize(
    ("block", "tiles", "first"),
    [((4, 4), False, "panel:4"), ((4, 4), True, "panel:4"), ((16, 4), True, "gathered"), ((16, 4), False, "panel:4")],
)
def test_tile_registers_are_tried_and_come_first_where_they_multiply_little_that_is_zero(
    block, tiles, first, monkeypatch
):
    monkeypatch.setattr(Library, "byte_tiles", tiles)
    weight = TeSA.from_mask(block_mask((64, 64), block, 0.8, seed=0)).with_format("int8", scale=0.02)
    found = [
        str(each) for each in implement_named("cpu-int8", OP).tiles(int8_linear_spec(weight, 64, Quantization(1.0)))
    ]
    assert found[0].startswith(first)
    assert any(each.startswith("gathered") for each in found) == tiles


def test_a_bias_that_changes_is_seen():
    weight = TeSA.dense((8, 8)).with_format("int8", scale=0.1)
    spec = int8_linear_spec(weight, 4, Quantization(0.1), output=Quantization(0.5), epilogue=Epilogue(bias=True))
    kernel, bias, x = built(spec, Tile(), runnable_isas()[0]), torch.zeros(8), torch.zeros(4, 8, dtype=torch.int8)
    packed = kernel.pack(torch.ones(8, 8, dtype=torch.int8))
    assert kernel.run(packed, x, bias, None).unique().tolist() == [0]
    bias.fill_(1.0)
    assert kernel.run(packed, x, bias, None).unique().tolist() == [2]


def test_scales_fold_into_one_multiplier():
    scale, bias = torch.rand(6) + 0.1, torch.randn(6)
    multiplier, offset = requantization(scale, 0.5, bias=bias, output_scale=2.0)
    torch.testing.assert_close(multiplier, scale / 4)
    torch.testing.assert_close(offset, bias / 2)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda w, g: int8_linear_spec(TeSA.dense((8, 8)), 4, g), ValueRangeError, "a weight in"),
        (lambda w, g: int8_linear_spec(TeSA.dense((8, 8), format="int8"), 4, g), ValueRangeError, "without a scale"),
        (lambda w, g: int8_linear_spec(w, 4, g, output=Quantization.per_token()), ValueRangeError, "a static one"),
        (lambda w, g: int8_linear_spec(TeSA.dense((2, 3, 4)), 4, g), ShapeError, "a weight of shape"),
        (lambda w, g: int8_linear_spec(TeSA.dense((2, 2**16 + 1)), 4, g), ShapeError, "up to 65536"),
    ],
)
def test_wrong_specs_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text):
        call(TeSA.dense((8, 8)).with_format("int8", scale=1.0), Quantization(0.1))


def test_wrong_arguments_say_what_is_allowed():
    packed = PackedInt8Linear(torch.ones(8, 6, dtype=torch.bool))
    x, values, ones = (
        torch.zeros(3, 6, dtype=torch.int8),
        packed.pack(torch.ones(8, 6, dtype=torch.int8)),
        torch.ones(8),
    )
    for call, error, text in [
        (lambda: packed(x[:, :5], values, ones), ShapeError, "x of shape"),
        (lambda: packed(x, values, ones[:7]), ShapeError, "multiplier of shape"),
        (lambda: packed(x, values, ones, ones.double()), ShapeError, "offset of shape"),
        (lambda: packed(x, values, ones, output=(torch.int32, 0)), ValueRangeError, "int32"),
        (lambda: packed(x, (values[0][1:], values[1]), ones), ShapeError, "take what pack"),
        (lambda: packed(x, values, ones, rounded_to=(torch.int32, 1.0)), ValueRangeError, "int8 or torch.uint8"),
        (lambda: packed(x, values, ones, dynamic=True), ShapeError, "for a dynamic grid"),
        (lambda: packed(x.float(), values, ones, dynamic=True, zero_point=3), ValueRangeError, "one of them"),
        (lambda: packed(x, values, ones, None, torch.ones(2, 8)), ShapeError, "a residual of shape"),
        (lambda: packed(x, values, ones, output_scale=0.0), ValueRangeError, "an output scale"),
        (
            lambda: packed(Int8Panel.pack(x, packed.tile.mv + 1, packed.library), values, ones),
            ShapeError,
            "in tiles of",
        ),
        (lambda: packed.to_panel(x, values, (ones, None), Int8Options()), ValueRangeError, "a panel of"),
        (lambda: Int8Panel.pack(x.float(), 1, packed.library), ShapeError, "int8 or uint8"),
        (lambda: packed.pack(torch.ones(8, 6)), ShapeError, "int8"),
        (lambda: PackedInt8Linear(torch.ones(8, 6)), ShapeError, "bool"),
        (lambda: PackedInt8Linear(torch.ones(8, 6) > 0, block=8), ValueRangeError, "blocks of 1 or 4"),
    ]:
        with pytest.raises(error, match=text):
            call()
    matrix = packed._matrix(values[0])
    matrix.bn = 3
    with pytest.raises(ValueRangeError, match="no kernel for"):
        load().multiply_int8(addressof(matrix), bytes(INT8_CALL.size))
