"""Weights in int8 and bf16 for a few tokens: the product of the rounded weight, in every form and build."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError
from sparta.specialize.cpu import runnable_isas
from sparta.specialize.cpu.short import PackedShort, ShortTile
from sparta.specialize.implement import implement_named, supported
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import OP, int8_linear_spec
from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.spec import apply_epilogue, linear_spec
from sparta.specialize.tuning.select import build
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check
from specialize.kernel_strategies import weight_masks

TILES = ["bitmap:1:0", "bitmap:1:2048", "delta:1:0", "delta:4:0", "delta:8:64", "delta:16:2048"]


def weights(mask, dtype):
    return torch.randint(-128, 128, mask.shape).to(dtype) if dtype is torch.int8 else torch.randn(mask.shape).to(dtype)


def on_grid(x):
    """Return tokens as integers of 8 bits say them: kernels that keep 16 do not round those."""
    whole, steps = Quantization.per_token().token_integers(x)
    return whole * steps


@settings(max_examples=100, deadline=None)
@given(weight_masks(), st.sampled_from(runnable_isas()), st.sampled_from(TILES), st.integers(0, 9), st.data())
def test_results_are_those_of_the_rounded_weight(mask, isa, tile, tokens, data):
    packed = PackedShort(mask, ShortTile.parse(tile), isa=isa)
    weight = weights(mask, data.draw(st.sampled_from([torch.int8, torch.bfloat16])))
    weight = torch.where(mask, weight, torch.full_like(weight, 99))  # what is pruned is not read
    scales = torch.rand(len(mask)) if weight.dtype is torch.int8 else None
    bias = torch.randn(len(mask)) if data.draw(st.booleans()) else None
    residual = torch.randn(tokens, len(mask)) if data.draw(st.booleans()) else None
    activation = data.draw(st.sampled_from([None, "relu", "gelu", "silu", "relu6"]))
    x = torch.randn(tokens, mask.shape[1]) if data.draw(st.booleans()) else torch.randn(mask.shape[1], tokens).t()
    x = on_grid(x)
    y = packed(x, packed.pack(weight), scales, bias, activation, residual, threads=data.draw(st.sampled_from([1, 2])))
    exact = x.double() @ torch.where(mask, weight.double(), 0.0).t()
    exact = exact if scales is None else exact * scales.double()
    exact = exact if bias is None else exact + bias.double()
    truth = apply_epilogue(exact, Epilogue(activation=activation), None if residual is None else residual.double())
    torch.testing.assert_close(y.double(), truth, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("tile", TILES)
def test_far_columns_are_reached_by_bytes(isa, tile):
    mask = torch.zeros(17, 3000, dtype=torch.bool)
    mask[torch.arange(17), torch.arange(17) * 180] = True
    mask[:, [0, 255, 256, 511, 2999]] = True
    packed, weight = PackedShort(mask, ShortTile.parse(tile), isa=isa), weights(mask, torch.int8)
    x = on_grid(torch.randn(2, 3000))
    truth = x.double() @ (weight.double() * mask).t()
    torch.testing.assert_close(packed(x, packed.pack(weight)).double(), truth, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("tile", TILES)
def test_no_number_hides_and_none_appears(tile):
    mask = block_mask((16, 64), (16, 1), 0.5, seed=0)
    packed, x = PackedShort(mask, ShortTile.parse(tile)), torch.randn(3, 64)
    live, dead = int(mask[0].nonzero()[0]), int((~mask[0]).nonzero()[0])
    x[0, live], x[1, live], x[2, dead] = torch.nan, torch.inf, 1e30
    weight = weights(mask, torch.int8).clamp_(min=1)
    y = packed(x, packed.pack(weight))
    assert bool(y[0].isnan().all())
    assert bool((y[1] == torch.inf).all())
    assert bool(y[2].isfinite().all())


def test_bytes_are_what_they_are_for():
    mask = torch.rand(256, 512) < 0.5
    bitmap = PackedShort(mask, ShortTile("bitmap")).nbytes(1)
    assert bitmap / mask.numel() < 0.68  # a byte for each live weight, a bit for every one, and where rows begin
    tall = block_mask((256, 512), (16, 1), 0.8, seed=0)
    assert PackedShort(tall, ShortTile("delta", 16)).nbytes(1) < 1.2 * int(tall.sum())


@pytest.mark.parametrize("pattern", [(1, 1), (4, 1), (16, 1)])
@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue(bias=True, activation="silu", residual=True)])
def test_implements_for_a_few_tokens(pattern, epilogue):
    mask = block_mask((64, 96), pattern, 0.6, seed=0)
    integers, x = weights(mask, torch.int8), on_grid(torch.randn(2, 96))
    scales = torch.rand(64, dtype=torch.float64) * 0.01 + 1e-3
    inputs = (torch.randn(64) if epilogue.bias else None, torch.randn(2, 64) if epilogue.residual else None)
    real = integers.double() * scales[:, None] * mask
    weight = TeSA.from_mask(mask)
    spec = int8_linear_spec(weight.with_format("int8", scale=scales), 2, Quantization.per_token(), epilogue=epilogue)
    bf16 = linear_spec(weight, 2, torch.bfloat16, epilogue=epilogue)
    rounded = real.to(torch.bfloat16)
    for which, name, operand, rows in (
        (spec, "cpu-weight8", integers, x),
        (spec, "cpu-weight8", real.float(), x),
        (bf16, "cpu-bf16", rounded, x.bfloat16()),
    ):
        implement = implement_named(name, which.op)
        assert implement in supported(which)[0]
        for tile in implement.tiles(which):
            kernel = build(which, {"_name": name, "tile": str(tile)})
            y = kernel.run(kernel.pack(operand), rows, *inputs)
            wide = [None if t is None else t.double() for t in inputs]
            exact = rows.double() @ (rounded if name == "cpu-bf16" else real).double().t()
            exact = exact if wide[0] is None else exact + wide[0]
            check(y, apply_epilogue(exact, epilogue, wide[1]), reduction=96)
            assert y.dtype == rows.dtype


def test_what_does_not_fit_is_refused():
    weight = TeSA.dense((8, 8)).with_format("int8", scale=0.1)
    many = int8_linear_spec(weight, 100, Quantization(0.1))
    assert "up to 8 tokens" in implement_named("cpu-weight8", OP).supports(many).reason
    bf16 = implement_named("cpu-bf16", "linear")
    assert "up to 8 tokens" in bf16.supports(linear_spec(TeSA.dense((8, 8)), 100, torch.bfloat16)).reason
    assert "fp32" in bf16.supports(linear_spec(TeSA.dense((8, 8)), 1, torch.float32)).reason
    packed, x = PackedShort(torch.ones(8, 8) > 0, ShortTile("bitmap")), torch.ones(1, 8)
    values = packed.pack(torch.ones(8, 8, dtype=torch.int8))
    for call, error, text in [
        (lambda: ShortTile("rows"), NameNotFoundError, "form"),
        (lambda: ShortTile("bitmap", 4), ValueRangeError, "blocks of"),
        (lambda: ShortTile.parse("delta:4"), ValueRangeError, "form:block"),
        (lambda: PackedShort(torch.ones(8, 8), ShortTile("bitmap")), ShapeError, "bool"),
        (lambda: packed.pack(torch.ones(8, 8)), ShapeError, "a weight of shape"),
        (lambda: packed(x[:, :7], values), ShapeError, "x of shape"),
        (lambda: packed(x, values[1:]), ShapeError, "what pack"),
        (lambda: packed(x, values, torch.ones(7)), ShapeError, "scales of shape"),
        (lambda: packed(x, values, None, torch.ones(7)), ShapeError, "bias of shape"),
    ]:
        with pytest.raises(error, match=text):
            call()
