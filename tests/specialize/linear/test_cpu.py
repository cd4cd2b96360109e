"""Every kernel against float64: any shape, stride, density, tile, instruction set and number of threads."""

import copy
import pickle
from ctypes import addressof

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sparta.errors import NameNotFoundError, ShapeError, SpartaError, ValueRangeError
from sparta.specialize.cpu import Panel, candidates, load, runnable_isas
from sparta.specialize.cpu.library import PANEL_CALL, STREAM_CALL
from sparta.specialize.cpu.tile import AVX512_FORMS
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.tesa.attribute import TeSA
from sparta.testing import check, linear_reference
from specialize.kernel_strategies import tiles, weight_masks

ISAS = st.sampled_from(runnable_isas())
ACTIVATIONS = {
    None: lambda y: y,
    "none": lambda y: y,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}
# Tolerance of an element: sums of up to 70 terms, and what an activation adds to their rounding.
REDUCTION = 128


def strided(tensor, kind):
    """The same values with other strides."""
    if kind == "transposed":
        return tensor.mT.contiguous().mT
    if kind == "sliced":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), torch.nan)
        wide[..., 1 : 1 + tensor.shape[-1]] = tensor
        return wide[..., 1 : 1 + tensor.shape[-1]]
    if kind == "every other":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor


STRIDES = st.sampled_from(["contiguous", "transposed", "sliced", "every other"])


def packed_for(weight, mask, tile, isa):
    if tile.form in AVX512_FORMS and isa != "avx512":
        return PackedLinear(weight, mask, isa=isa, form="rows")
    return PackedLinear(weight, mask, isa=isa, **tile.to_dict())


def expected(x, weight, mask, bias=None, activation=None, residual=None):
    y = ACTIVATIONS[activation](linear_reference(x, weight, bias, weight_mask=mask))
    return y if residual is None else y + residual.double()


@settings(max_examples=300)
@given(weight_masks(), tiles(), ISAS, st.data())
def test_the_result_is_that_of_the_masked_dense_layer(mask, tile, isa, data):
    outputs, inputs = mask.shape
    lead = data.draw(st.sampled_from([(), (1,), (16,), (2, 3), (0,)]) | st.integers(0, 140).map(lambda m: (m,)))
    x = strided(torch.randn(*lead, inputs), data.draw(STRIDES) if lead else "contiguous")
    weight = torch.where(mask, torch.randn(mask.shape), torch.nan)
    bias = data.draw(st.sampled_from([None, torch.randn(outputs)]))
    residual = data.draw(st.sampled_from([None, torch.randn(*lead, outputs)]))
    if residual is not None and lead:
        residual = strided(residual, data.draw(STRIDES))
    activation = data.draw(st.sampled_from(list(ACTIVATIONS)))
    packed = packed_for(weight, mask, tile, isa)
    y = packed(x, bias, activation, residual, threads=data.draw(st.sampled_from([1, 2])))
    assert y.is_contiguous()
    check(y, expected(x, weight, mask, bias, activation, residual), reduction=REDUCTION)


@settings(max_examples=40)
@given(weight_masks(), tiles(), ISAS, st.integers(0, 70))
def test_threads_do_not_change_a_bit(mask, tile, isa, tokens):
    packed = packed_for(torch.randn(mask.shape), mask, tile, isa)
    x = torch.randn(tokens, mask.shape[1])
    assert torch.equal(packed(x, threads=1), packed(x, threads=3))


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("height", [1, 4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 3, 16, 130])
def test_every_candidate_is_right(isa, height, tokens):
    mask = (torch.rand(96 // height, 100) < 0.2).repeat_interleave(height, 0)
    weight, x, bias = torch.randn(96, 100), torch.randn(tokens, 100), torch.randn(96)
    truth = expected(x, weight, mask, bias, "gelu")
    for tile in candidates(tokens, 96, 100, 0.2, (height, 1), isa):
        check(PackedLinear(weight, mask, isa=isa, **tile)(x, bias, "gelu"), truth, reduction=100, what=str(tile))


@settings(max_examples=60)
@given(weight_masks(), tiles(), ISAS, st.integers(0, 40), st.data())
def test_a_sum_of_zeros_is_positive_zero(mask, tile, isa, tokens, data):
    signs = torch.where(torch.rand(mask.shape) < 0.5, 1.0, -1.0)
    x = torch.where(torch.rand(tokens, mask.shape[1]) < 0.5, 0.0, -0.0)
    bias = data.draw(st.sampled_from([None, torch.zeros(len(mask)), -torch.zeros(len(mask))]))
    residual = data.draw(st.sampled_from([None, torch.zeros(tokens, len(mask)), -torch.zeros(tokens, len(mask))]))
    y = packed_for(signs, mask, tile, isa)(x, bias, data.draw(st.sampled_from([None, "relu"])), residual)
    assert torch.equal(y, torch.zeros(tokens, len(mask)))
    assert not bool(y.signbit().any())


@pytest.mark.skipif("avx512" not in runnable_isas(), reason="needs AVX-512")
def test_the_permuted_form_crosses_long_gaps():
    mask = torch.zeros(20, 20001, dtype=torch.bool)
    mask[3, 40] = mask[3, 8300] = mask[17, 20000] = mask[18, 0] = mask[18, 8160] = True
    weight, x = torch.randn(mask.shape), torch.randn(2, 20001)
    y = PackedLinear(weight, mask, isa="avx512", form="permuted", block=16)(x)
    check(y, expected(x, weight, mask), reduction=2)


@settings(max_examples=60)
@given(weight_masks(), tiles(form="panel"), ISAS, st.integers(0, 140), st.data())
def test_layers_hand_panels_to_each_other(mask, tile, isa, tokens, data):
    outputs, inputs = mask.shape
    first = PackedLinear(torch.randn(mask.shape), mask, isa=isa, **tile.to_dict())
    second = PackedLinear(torch.randn(inputs, outputs), mask.mT, isa=isa, **tile.to_dict())
    x, bias = torch.randn(tokens, inputs), torch.randn(outputs)
    threads = data.draw(st.sampled_from([1, 2]))
    apart = second(first(x, bias, "silu", threads=1), residual=x, threads=1)
    panel = Panel.pack(x, tile.mv, first.library, threads)
    hidden = first.to_panel(data.draw(st.sampled_from([x, panel])), bias, "silu", threads=threads)
    assert torch.equal(second(hidden, residual=x, threads=threads), apart)
    assert torch.equal(second.to_panel(hidden, residual=panel, threads=threads).unpack(second.library), apart)


@settings(max_examples=40)
@given(ISAS, st.integers(0, 140), st.integers(0, 70), st.integers(1, 4), STRIDES, st.sampled_from([1, 2]))
def test_panels_round_trip(isa, tokens, channels, mv, kind, threads):
    x = strided(torch.randn(tokens, channels), kind)
    panel = Panel.pack(x, mv, load(isa), threads)
    assert panel.data.shape == (-(-tokens // panel.tile), channels, mv * load(isa).lanes)
    assert torch.equal(panel.unpack(load(isa), threads), x)


@settings(max_examples=60)
@given(weight_masks(), tiles(), ISAS)
def test_new_values_equal_a_new_packing(mask, tile, isa):
    old, new = torch.randn(mask.shape), torch.randn(mask.shape)
    x = torch.randn(5, mask.shape[1])
    fresh = packed_for(new, mask, tile, isa)(x)
    packed = packed_for(old, mask, tile, isa)
    assert torch.equal(packed(x, values=packed.pack(new)), fresh)
    address = packed.values.data_ptr()
    packed.update_values(new)
    assert packed.values.data_ptr() == address
    assert torch.equal(packed(x), fresh)
    empty = packed_for(None, mask, tile, isa)
    with pytest.raises(ValueRangeError, match="update_values"):
        empty(x)
    empty.update_values(new)
    assert torch.equal(empty(x), fresh)


@settings(max_examples=100)
@given(weight_masks(), tiles(), ISAS, st.integers(1, 20))
def test_nan_is_only_where_the_masked_dense_layer_has_it(mask, tile, isa, tokens):
    weight, x = torch.randn(mask.shape), torch.randn(tokens, mask.shape[1])
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[torch.rand(x.shape) < 0.02] = bad
    packed = packed_for(weight, mask, tile, isa)
    y = packed(x).double()
    # Term by term, so that every 0 * inf is there.
    masked = (x.double()[:, None] * torch.where(mask, weight, 0.0).double()).sum(-1)
    live = torch.where(mask, x.double()[:, None] * weight.double(), 0.0).sum(-1)
    assert bool((y.isnan() <= masked.isnan()).all())
    assert bool((live.isnan() <= y.isnan()).all())
    inside = ~y.isnan()
    assert torch.equal(y.isinf()[inside], live.isinf()[inside])
    if packed.tile.block == 1:  # then pruned weights are not multiplied
        assert torch.equal(y.isnan(), live.isnan())


@settings(max_examples=100)
@given(weight_masks(), tiles(), ISAS, st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.data())
def test_nan_and_inf_spread_to_the_rows_that_read_them(mask, tile, isa, bad, data):
    inputs = mask.shape[1]
    if not inputs:
        return
    x = torch.randn(20, inputs)
    token, channel = data.draw(st.integers(0, 19)), data.draw(st.integers(0, inputs - 1))
    x[token, channel] = bad
    weight = torch.randn(mask.shape)
    y = packed_for(weight, mask, tile, isa)(x)
    touched = mask[:, channel]
    truth = bad * weight[touched, channel]
    assert torch.equal(y[token, touched].isnan(), truth.isnan())
    assert torch.equal(y[token, touched][~truth.isnan()], truth[~truth.isnan()])
    # A block holds 0 for its pruned weights, which 0 * inf then shows; without blocks no other row sees it.
    exact = tile.block == 1 or tile.form == "permuted"
    if exact:
        assert bool(y[token, ~touched].isfinite().all())
    y[token] = 0
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activations_are_torchs(isa, activation):
    # An identity weight, so that the activation is all there is.
    x = torch.cat([torch.linspace(-30, 30, 4000), torch.logspace(-30, 2, 2000), -torch.logspace(-30, 2, 2000)])
    x = x.view(-1, 8)
    y = PackedLinear(torch.eye(8), isa=isa, block=4, mv=2)(x, activation=activation)
    truth = ACTIVATIONS[activation](x.double())
    if activation == "gelu":  # far below zero the formula cancels, as PyTorch's does
        torch.testing.assert_close(y.double(), truth, rtol=2e-7, atol=1e-6)
    else:
        torch.testing.assert_close(y.double(), truth, rtol=2e-5, atol=1e-36)
        assert ((y - truth) / truth.abs().clamp_min(1e-3)).abs().max() < 2e-6
    special = torch.full((1, 8), torch.nan)
    assert bool(PackedLinear(torch.eye(8), isa=isa)(special, activation=activation).isnan().all())
    far = torch.full((1, 8), torch.inf)
    assert bool((PackedLinear(torch.eye(8), isa=isa)(far, activation=activation) == torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_computed_in_float32(dtype):
    weight, x = torch.randn(24, 40), torch.randn(2, 9, 40).to(dtype)
    bias, residual = torch.randn(24).to(dtype), torch.randn(2, 9, 24).to(dtype)
    y = PackedLinear(weight, block=4)(x, bias, "relu", residual)
    assert y.dtype == dtype
    exact = functional.relu(linear_reference(x.double(), weight, bias.double())) + residual.double()
    check(y, exact, reduction=40)


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "sliced", "every other"])
def test_the_result_can_go_where_it_is_told(kind):
    weight, x = torch.randn(24, 40), torch.randn(33, 40)
    packed = PackedLinear(weight, block=8)
    out = strided(torch.zeros(33, 24), kind)
    assert packed(x, out=out) is out
    assert torch.equal(out, packed(x))


def test_the_result_may_replace_its_input_or_residual():
    weight, x, residual = torch.randn(40, 40), torch.randn(100, 40), torch.randn(100, 40)
    packed = PackedLinear(weight, block=4, mv=2)
    truth = packed(x, residual=residual)
    assert torch.equal(packed(x, residual=residual, out=residual, threads=2), truth)
    both = torch.randn(101, 40)
    truth = packed(x, residual=both[:-1])
    assert torch.equal(packed(x, residual=both[:-1], out=both[1:], threads=2), truth)
    again = x.clone()
    assert torch.equal(packed(again, out=again, threads=2), packed(x))


def test_views_that_negate_and_gradients_are_understood():
    weight = torch.randn(8, 6)
    packed = PackedLinear(weight)
    z = torch.randn(5, 6, dtype=torch.complex64)
    negated = z.conj().imag
    assert negated.is_neg()
    assert torch.equal(packed(negated), packed(negated.clone()))
    x, bias = torch.randn(5, 6), torch.randn(8)
    whole, shift = torch._neg_view(x), torch._neg_view(bias)  # contiguous, and still not what lies in memory
    assert torch.equal(packed(whole, bias=shift), packed(-x, bias=-bias))
    x = torch.randn(5, 6, requires_grad=True)
    assert not packed(x, bias=torch.zeros(8, requires_grad=True)).requires_grad


def test_the_mask_may_be_a_tesa_or_be_read_from_zeros():
    mask = torch.rand(20, 30) < 0.3
    weight, x = torch.randn(20, 30), torch.randn(4, 30)
    truth = PackedLinear(weight, mask)(x)
    assert torch.equal(PackedLinear(weight, TeSA.from_mask(mask))(x), truth)
    assert torch.equal(PackedLinear(weight * mask)(x), truth)
    assert "30 -> 20" in repr(PackedLinear(weight, mask))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])  # noqa: S301
@pytest.mark.parametrize("fields", [{"block": 4, "mv": 2}, {"form": "rows"}])
def test_copies_have_their_own_values(copied, fields):
    weight, x = torch.randn(20, 30), torch.randn(4, 30)
    packed = PackedLinear(weight, **fields)
    twin, truth = copied(packed), packed(x)
    packed.update_values(torch.zeros(20, 30))
    assert torch.equal(twin(x), truth)


def test_a_denser_mask_reads_more_bytes():
    weight = torch.randn(64, 64)
    sizes = [PackedLinear(weight, torch.rand(64, 64) < d, form="columns", block=16).nbytes for d in (0.0, 0.01, 1.0)]
    assert sizes == sorted(set(sizes))


@pytest.fixture
def layer():
    return PackedLinear(torch.randn(8, 6), block=4, mv=2)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"x": torch.zeros(3, 5)}, ShapeError, r"x of shape \(3, 5\)"),
        ({"x": torch.tensor(1.0)}, ShapeError, r"allowed: \(..., 6\)"),
        ({"x": torch.zeros(3, 6, dtype=torch.float64)}, ValueRangeError, "float64"),
        ({"x": torch.zeros(3, 6, dtype=torch.int64)}, ValueRangeError, "int64"),
        ({"x": torch.zeros(3, 6, device="meta")}, ValueRangeError, "on meta"),
        ({"bias": torch.zeros(7)}, ShapeError, r"bias of shape \(7,\)"),
        ({"bias": torch.zeros(8, dtype=torch.int32)}, ShapeError, "int32"),
        ({"residual": torch.zeros(3, 7)}, ShapeError, r"residual of shape \(3, 7\)"),
        ({"residual": torch.zeros(8)}, ShapeError, r"residual of shape \(8,\)"),
        ({"activation": "rellu"}, NameNotFoundError, "did you mean 'relu'"),
        ({"threads": 0}, ValueRangeError, "threads is 0"),
        ({"out": torch.zeros(3, 7)}, ShapeError, r"out of shape \(3, 7\)"),
        ({"out": torch.zeros(3, 8, dtype=torch.float16)}, ShapeError, "float16"),
        ({"values": torch.zeros(3)}, ShapeError, "take what pack"),
        ({"x": Panel.empty(3, 5, 8)}, ShapeError, "panel of 5 channels"),
        ({"x": Panel.empty(3, 6, 7)}, ShapeError, "tiles of 7"),
    ],
)
def test_bad_arguments_are_named(layer, arguments, error, says):
    with pytest.raises(error, match=says):
        layer(**{"x": torch.zeros(3, 6), **arguments})


@pytest.mark.parametrize(
    ("weight", "mask", "says"),
    [
        (None, None, "neither a weight nor a mask"),
        (torch.zeros(3, 4), torch.ones(4, 3, dtype=torch.bool), "one shape"),
        (torch.zeros(3, 4), torch.ones(3, 4), "bool"),
        (torch.zeros(3), None, "mask of shape"),
    ],
)
def test_bad_weights_are_named(weight, mask, says):
    with pytest.raises(SpartaError, match=says):
        PackedLinear(weight, mask)


def test_what_a_layer_cannot_do_is_named(layer):
    with pytest.raises(ShapeError, match="as when packed"):
        layer.update_values(torch.zeros(6, 8))
    stream = PackedLinear(torch.randn(8, 6), form="rows")
    with pytest.raises(ValueRangeError, match="form 'panel'"):
        stream.to_panel(torch.zeros(3, 6))
    with pytest.raises(ShapeError, match="in the form 'panel'"):
        stream(Panel.empty(3, 6, layer.library.lanes))
    with pytest.raises(ShapeError, match="2 tokens"):
        layer.to_panel(torch.zeros(3, 6), residual=Panel.empty(2, 8, 2 * layer.library.lanes))
    with pytest.raises(ShapeError, match=r"Panel\.pack"):
        Panel(torch.zeros(2, 3, 4), 3)
    with pytest.raises(ShapeError, match="flatten"):
        Panel.pack(torch.zeros(2, 3, 4), 1, layer.library)
    with pytest.raises(ShapeError, match="tiles of 0 vectors"):
        Panel.pack(torch.zeros(2, 3), 0, layer.library)
    with pytest.raises(ShapeError, match="whole vectors"):
        Panel.empty(2, 3, 3).unpack(layer.library)
    with pytest.raises(ValueRangeError, match="take the form 'rows'"):
        PackedLinear(torch.randn(8, 6), isa="portable", form="permuted", block=16)


def test_the_library_refuses_tiles_it_does_not_hold(layer):
    library = load()
    assert library.has_tile(4, 4, 1, 0)
    assert not library.has_tile(5, 4, 1, 0)
    assert not library.has_tile(8, 4, 1, 0)
    matrix = layer._matrix
    matrix.bn = 5
    with pytest.raises(ValueRangeError, match="no kernel for"):
        library.multiply_panels(addressof(matrix), bytes(PANEL_CALL.size))
    stream = PackedLinear(torch.randn(8, 6), form="rows")._matrix
    stream.height = 5
    with pytest.raises(ValueRangeError, match="no kernel for"):
        library.multiply_stream(addressof(stream), bytes(STREAM_CALL.size))


@pytest.mark.parametrize("form", ["panel", "rows"])
def test_a_bound_call_is_the_same_call_and_leaves_other_tensors_alone(form):
    weight = torch.randn(24, 40) * (torch.rand(24, 40) < 0.3)
    packed = PackedLinear(weight, form=form)
    bias = torch.randn(24)
    call = packed.fast_path(packed.values, bias, "gelu")
    for lead in ((5,), (2, 3), (), (0,), (2, 0)):
        x, residual = torch.randn(*lead, 40), torch.randn(*lead, 24)
        assert torch.equal(call(x), packed(x, bias, "gelu"))
        assert torch.equal(call(x, residual), packed(x, bias, "gelu", residual))
    x = torch.randn(5, 40)
    for other in (x[:, :39], x.double(), x.mT.contiguous().mT, torch.tensor(1.0), torch.empty(5, 40, device="meta")):
        assert call(other) is None
    for residual in (torch.randn(5, 23), torch.randn(24, 5).mT, torch.randn(5, 24).double()):
        assert call(x, residual) is None
    assert packed.fast_path(packed.values, bias.bfloat16()) is None
