"""Int8 kernels are exact: equal, bit for bit, to the integer product, in every build and for any shape."""

from ctypes import addressof
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.measure.machine import probe_cpu
from sparta.specialize.cpu import load, runnable_isas
from sparta.specialize.cpu.library import INT8_CALL
from sparta.specialize.implement import implement_named, supported
from sparta.specialize.int8_linear import dense
from sparta.specialize.int8_linear.cpu import Int8Options, Int8Panel, PackedInt8Linear
from sparta.specialize.int8_linear.spec import int8_linear_spec, requantization, requantized
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.tuning.select import Problem, build, tune_kernel
from sparta.tesa.attribute import TeSA
from sparta.testing import check
from specialize.kernel_strategies import weight_masks

FORMATS = {"int8": torch.int8, "uint8": torch.uint8, "fp32": torch.float32}
ZEROS = {"int8": [0, -128, 7, 127], "uint8": [0, 128, 255], "fp32": [0]}


def random_bytes(shape, format, *, extreme=False):
    low, high = (0, 255) if format == "uint8" else (-128, 127)
    if extreme:  # what saturates instructions that add in 16 bits
        return torch.where(torch.rand(shape) < 0.5, low, high).to(FORMATS[format])
    return torch.randint(low, high + 1, shape).to(FORMATS[format])


def made(mask, tokens, data, **fields):
    """A spec and its inputs."""
    formats = {"input_format": data.draw(st.sampled_from(["int8", "uint8"]))}
    formats["output_format"] = data.draw(st.sampled_from(list(FORMATS)))
    spec = int8_linear_spec(
        TeSA.from_mask(mask),
        tokens,
        **formats,
        input_zero_point=data.draw(st.sampled_from(ZEROS[formats["input_format"]])),
        output_zero_point=data.draw(st.sampled_from(ZEROS[formats["output_format"]])),
        epilogue=Epilogue(bias=data.draw(st.booleans()), activation=data.draw(st.sampled_from([None, "relu"]))),
    )
    extreme = data.draw(st.booleans())
    x = random_bytes((tokens, mask.shape[1]), formats["input_format"], extreme=extreme)
    multiplier = torch.rand(len(mask)) * 0.01
    return spec, x, random_bytes(mask.shape, "int8", extreme=extreme), multiplier, torch.randn(len(mask)) * 10


def strided(x, kind):
    """The same bytes with other strides, among bytes that are not to be read."""
    if kind == "transposed":
        return x.t().contiguous().t()
    wide = torch.full((len(x), 2 * x.shape[1] + 3), 99, dtype=x.dtype)
    chosen = wide[:, ::2][:, : x.shape[1]] if kind == "every other" else wide[:, 3 : 3 + x.shape[1]]
    return x if kind == "contiguous" else chosen.copy_(x)


def expected(spec, x, weight, multiplier, offset):
    zero = spec.attributes["input_zero_point"]
    live = torch.where(spec["weight"].mask(), weight.long(), 0)
    return requantized((x.long() - zero) @ live.t(), spec, multiplier, offset if spec.epilogue.bias else None)


@settings(max_examples=120)
@given(weight_masks(), st.sampled_from(runnable_isas()), st.integers(0, 140), st.sampled_from([1, 4]), st.data())
def test_results_equal_the_integer_product(mask, isa, tokens, block, data):
    spec, x, weight, multiplier, offset = made(mask, tokens, data)
    packed = PackedInt8Linear(mask, isa=isa, block=block, mv=data.draw(st.integers(1, 4)))
    dtype = FORMATS[spec.attributes["output_format"]]
    x = strided(x, data.draw(st.sampled_from(["contiguous", "transposed", "every other", "sliced"])))
    y = packed(
        x,
        packed.pack(weight),
        multiplier,
        offset if spec.epilogue.bias else None,
        zero_point=spec.attributes["input_zero_point"],
        relu=spec.epilogue.activation == "relu",
        output=(dtype, spec.attributes["output_zero_point"]),
        threads=data.draw(st.sampled_from([1, 2])),
    )
    assert y.dtype == dtype
    assert torch.equal(y, expected(spec, x, weight, multiplier, offset))


@settings(max_examples=60)
@given(weight_masks(), st.sampled_from(runnable_isas()), st.integers(0, 140), st.sampled_from([1, 4]), st.data())
def test_panels_hold_the_same_integers_and_go_from_layer_to_layer(mask, isa, tokens, block, data):
    spec, x, weight, multiplier, offset = made(mask, tokens, data)
    packed = PackedInt8Linear(mask, isa=isa, block=block, mv=data.draw(st.integers(1, 4)))
    panel = Int8Panel.pack(x, packed.tile.mv, packed.library)
    assert torch.equal(panel.unpack(packed.library), x)
    dtype = data.draw(st.sampled_from([torch.int8, torch.uint8]))
    zero = data.draw(st.sampled_from(ZEROS[str(dtype).removeprefix("torch.")]))
    options = Int8Options(zero_point=spec.attributes["input_zero_point"], relu=True, output=(dtype, zero))
    scales, threads = (multiplier, offset if spec.epilogue.bias else None), data.draw(st.sampled_from([1, 2]))
    tokens_first = packed.run(x, packed.pack(weight), scales, options, threads)
    between = packed.to_panel(panel, packed.pack(weight), scales, options, threads)
    assert torch.equal(between.unpack(packed.library), tokens_first)
    following = PackedInt8Linear(mask.t(), isa=isa, block=block, mv=packed.tile.mv)
    values, ones = following.pack(weight.t()), torch.ones(mask.shape[1])
    y = following(between, values, ones, zero_point=zero, threads=threads)
    assert torch.equal(y, following(tokens_first, values, ones, zero_point=zero))


@settings(max_examples=60)
@given(weight_masks(), st.sampled_from(runnable_isas()), st.integers(0, 70), st.sampled_from([1, 4]), st.data())
def test_real_numbers_are_rounded_on_the_way_as_before_it(mask, isa, tokens, block, data):
    format = data.draw(st.sampled_from(["int8", "uint8"]))
    zero, scale = data.draw(st.sampled_from(ZEROS[format])), data.draw(st.sampled_from([0.03, 1.0]))
    x = torch.randn(tokens, mask.shape[1]) * data.draw(st.sampled_from([1.0, 1e30]))
    x[torch.rand(x.shape) < 0.1] = data.draw(st.sampled_from([0.5, -1.5, torch.inf, -torch.inf]))
    packed = PackedInt8Linear(mask, isa=isa, block=block, mv=data.draw(st.integers(1, 4)))
    values, ones = packed.pack(random_bytes(mask.shape, "int8")), torch.ones(len(mask))
    low, high = (0, 255) if format == "uint8" else (-128, 127)
    integers = ((x * (1 / scale)).round() + zero).clamp(low, high).to(FORMATS[format])
    grid = {"zero_point": zero, "rounded_to": (FORMATS[format], scale)}
    x = strided(x, data.draw(st.sampled_from(["contiguous", "transposed", "sliced"])))
    y = packed(x, values, ones, threads=data.draw(st.sampled_from([1, 2])), **grid)
    assert torch.equal(y, packed(integers, values, ones, zero_point=zero))


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("relu", [False, True])
def test_scales_that_are_no_numbers_and_signs_of_zero_are_as_dense_gives_them(isa, relu):
    weight = random_bytes((5, 6), "int8")
    weight[4] = 0
    x = random_bytes((19, 6), "int8")
    multiplier = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, -1.0])
    spec = int8_linear_spec(TeSA.dense((5, 6)), 19, epilogue=Epilogue(bias=True, activation="relu" if relu else None))
    packed = PackedInt8Linear(torch.ones(5, 6, dtype=torch.bool), isa=isa)
    for offset in (None, torch.tensor([0.0, torch.inf, 1.0, 1e38, -0.0])):
        y = packed(x, packed.pack(weight), multiplier, offset, relu=relu)
        truth = requantized(x.long() @ weight.long().t(), spec, multiplier, offset)
        assert torch.equal(y.nan_to_num(nan=7.0), truth.nan_to_num(nan=7.0))
        # A clamp may give either zero.
        assert relu or torch.equal(y.signbit()[:, 1:], truth.signbit()[:, 1:])


@pytest.mark.parametrize("isa", runnable_isas())
def test_the_switch_forces_a_build(isa, monkeypatch):
    monkeypatch.setenv("SPARTA_CPU_ISA", isa)
    weight, x = random_bytes((24, 40), "int8", extreme=True), random_bytes((33, 40), "uint8", extreme=True)
    packed = PackedInt8Linear(weight > 0)
    assert packed.library.isa == isa
    y = packed(x, packed.pack(weight), torch.ones(24))
    assert torch.equal(y.long(), x.long() @ (weight * (weight > 0)).long().t())


@settings(max_examples=30)
@given(st.data())
def test_every_implement_agrees(data):
    mask = (torch.rand(8, 20) < 0.4).repeat_interleave(4, 0).repeat_interleave(4, 1)
    spec, x, weight, multiplier, offset = made(mask, 33, data)
    truth = expected(spec, x, weight, multiplier, offset)
    for implement in supported(spec)[0]:
        kernel = build(spec, {"_name": implement.name, **implement.default(spec)})
        y = kernel.run(kernel.pack(weight), x, multiplier, offset if spec.epilogue.bias else None)
        assert y.dtype == truth.dtype
        if implement.name == "onednn":  # it rounds in its own order
            assert (y.double() - truth.double()).abs().max() <= (1 if truth.dtype != torch.float32 else 1e-3)
        else:
            assert torch.equal(y, truth)


@pytest.mark.parametrize(
    ("flags", "runs"), [((), False), (("avx2", "fma"), False), (("avx_vnni",), True), (("avx512_vnni",), True)]
)
def test_onednn_is_no_candidate_where_its_sums_overflow(flags, runs, monkeypatch):
    known = replace(probe_cpu(), vector_isa=flags)
    monkeypatch.setattr(dense, "probe_cpu", lambda: known)
    monkeypatch.setattr(dense.platform, "machine", lambda: "x86_64")
    dense._sums_in_16_bits.cache_clear()
    answer = dense.OneDnnInt8Linear().supports(int8_linear_spec(TeSA.dense((8, 8)), 4))
    dense._sums_in_16_bits.cache_clear()
    assert bool(answer) == (runs and torch.backends.mkldnn.is_available())
    assert answer or "overflow" in answer.reason or "without oneDNN" in answer.reason


def test_the_tuner_chooses_among_them():
    mask = (torch.rand(16, 16) < 0.2).repeat_interleave(4, 0).repeat_interleave(4, 1)
    weight, x = random_bytes(mask.shape, "int8"), random_bytes((32, 64), "int8")
    multiplier, offset = requantization(torch.full((64,), 0.02), 0.1, bias=torch.randn(64))
    spec = int8_linear_spec(TeSA.from_mask(mask), 32, epilogue=Epilogue(bias=True))
    truth = expected(spec, x, weight, multiplier, offset)
    choice = tune_kernel(Problem(spec, weight, (x, multiplier, offset), truth.double(), 64), max_trials=4)
    kernel = build(spec, choice.config)
    check(kernel.run(kernel.pack(weight), x, multiplier, offset), truth.double(), reduction=64)
    assert implement_named("cpu-int8", "int8_linear").default(spec)["tile"].startswith("panel:4")


def test_scales_fold_into_one_multiplier():
    scale, bias = torch.rand(6) + 0.1, torch.randn(6)
    multiplier, offset = requantization(scale, 0.5, bias=bias, output_scale=2.0)
    torch.testing.assert_close(multiplier, scale / 4)
    torch.testing.assert_close(offset, bias / 2)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda w: int8_linear_spec(w, 4, input_format="fp32"), NameNotFoundError, "input format"),
        (lambda w: int8_linear_spec(w, 4, output_format="int9"), NameNotFoundError, "did you mean 'int8'"),
        (lambda w: int8_linear_spec(w, 4, input_zero_point=128), ValueRangeError, "-128 to 127"),
        (lambda w: int8_linear_spec(w, 4, output_zero_point=1), ValueRangeError, "output in fp32"),
        (lambda w: int8_linear_spec(w, 4, epilogue=Epilogue(activation="gelu")), ValueRangeError, "bias and relu"),
        (lambda w: int8_linear_spec(TeSA.dense((2, 3, 4)), 4), ShapeError, "a weight of shape"),
    ],
)
def test_wrong_specs_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text):
        call(TeSA.dense((8, 8)))


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
