"""SparseSoftmax is the softmax of the kept elements, and nothing else matters."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.nn import SparseSoftmax
from sparta.specialize.softmax.spec import DenseSoftmaxKernel
from sparta.testing import block_mask, check, softmax_backward_reference, softmax_reference

H, W = 40, 48
BLOCKS = {"_name": "blocks", "tile": (8, 8)}
CONFIGS = [None, {"_name": "dense"}, BLOCKS, {"_name": "blocks", "tile": (16, 16)}]
NAMES = ["untuned", "dense", "own tiles", "other tiles"]


def compare(op, mask, x, temperature=1.0):
    """Compare result and gradient with float64; x is whole, and may hold anything where it is pruned."""
    indexes = op.indexes
    leaf = (indexes.convert(x) if op.compressed else x).detach().requires_grad_()
    y = op(leaf)
    cotangent = torch.randn(*y.shape, dtype=y.dtype)
    y.backward(cotangent)
    expected = softmax_reference(x, mask, temperature)
    whole, grad = (indexes.inverse(t) if op.compressed else t for t in (y.detach(), leaf.grad))
    slope = indexes.inverse(cotangent) if op.compressed else cotangent
    pruned = ~mask.expand(whole.shape)
    assert not whole[pruned].any()
    assert not grad[pruned].any()
    if whole.numel():
        check(whole, expected, reduction=x.shape[-1])
        check(grad, softmax_backward_reference(slope, expected, mask, temperature), reduction=x.shape[-1], atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "whole"])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "by head"])
def test_result_and_gradient(config, compressed, lead):
    mask = block_mask((*lead, H, W), (8, 8), 0.8, seed=1)
    x = torch.randn(2, 3, H, W).masked_fill(~mask, math.nan)
    op = SparseSoftmax(mask, temperature=math.sqrt(W), compressed=compressed)
    if config is not None:
        op.build((op.indexes.convert(x) if compressed else x,), config)
    compare(op, mask, x, math.sqrt(W))


@st.composite
def problems(draw):
    rows, cols = draw(st.integers(0, 37)), draw(st.integers(0, 37))
    lead = draw(st.sampled_from([(), (2,), (2, 3)]))
    mask_lead = tuple(draw(st.sampled_from([1, size])) for size in lead[draw(st.integers(0, len(lead))) :])
    kept = draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.rand(*mask_lead, rows, cols, generator=generator) < kept, torch.randn(*lead, rows, cols)


@given(problems(), st.booleans(), st.sampled_from([None, "dense", "blocks"]), st.integers(0, 3))
@settings(max_examples=30)
def test_any_size_and_mask(problem, compressed, implement, tile):
    mask, x = problem
    x = x.masked_fill(~mask, math.nan)
    op = SparseSoftmax(mask, compressed=compressed)
    if implement is not None:
        inputs = (op.indexes.convert(x) if compressed else x,)
        space = [config for config in op.get_search_space(inputs).samples() if config["_name"] == implement]
        if space:
            op.build(inputs, space[tile % len(space)])
    compare(op, mask, x)


@pytest.mark.parametrize("config", CONFIGS[1:], ids=NAMES[1:])
def test_the_maximum_is_that_of_kept_elements(config):
    mask = block_mask((H, W), (8, 8), 0.5, seed=1)
    op = SparseSoftmax(mask)
    op.build((torch.zeros(H, W),), config)
    x = torch.where(mask, torch.randn(H, W) - 2e4, 1e30)  # with the maximum of all, every kept element underflows
    check(op(x), softmax_reference(x, mask), reduction=W)
    x = torch.where(mask, torch.randn(H, W) + 2e4, 0.0)
    check(op(x), softmax_reference(x, mask), reduction=W)


def test_temperature_can_change_after_build():
    mask = block_mask((H, W), (8, 8), 0.7, seed=1)
    op, x = SparseSoftmax(mask), torch.randn(H, W)
    op.build((x,), BLOCKS)
    op.set_temperature(7.0)
    assert op.ready
    check(op(x), softmax_reference(x, mask, 7.0), reduction=W)
    assert op.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    check(op(x.bfloat16()), softmax_reference(x.bfloat16(), mask, 7.0), reduction=W)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_and_strides(dtype):
    mask = block_mask((H, W), (8, 8), 0.7, seed=1)
    x = torch.randn(2, W, H, dtype=dtype).mT
    op = SparseSoftmax(mask)
    op.build((x,), BLOCKS)
    y = op(x)
    assert y.dtype == dtype
    check(y, softmax_reference(x, mask), reduction=W)


def test_masks_change_copy_and_load():
    first, second = block_mask((H, W), (8, 8), 0.7, seed=1), block_mask((H, W), (4, 4), 0.5, seed=2)
    op, x = SparseSoftmax(first), torch.randn(3, H, W)
    op.build((x,), BLOCKS)
    twin = copy.deepcopy(op)
    op.update_mask(second)
    assert not op.ready
    compare(op, second, x)
    assert twin.ready
    compare(twin, first, x)
    twin.load_state_dict(op.state_dict())
    assert not twin.ready
    compare(twin, second, x)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_torch_compile_takes_it_whole(config):
    mask = block_mask((H, W), (8, 8), 0.7, seed=1)
    op, x = SparseSoftmax(mask), torch.randn(2, H, W, requires_grad=True)
    if config is not None:
        op.build((x,), config)
    y = torch.compile(op, fullgraph=True, backend="aot_eager")(x)
    check(y, softmax_reference(x, mask), reduction=W)
    y.square().sum().backward()
    assert not x.grad[:, ~mask].any()
    torch._dynamo.reset()


def test_tuning_keeps_what_is_right():
    mask = block_mask((H, W), (8, 8), 0.9, seed=1)
    for compressed in (False, True):
        op, x = SparseSoftmax(mask, compressed=compressed), torch.randn(2, H, W)
        op.tune((op.indexes.convert(x) if compressed else x,), max_trials=3, backward=True)
        assert op.ready
        compare(op, mask, x)


MASK = torch.ones(4, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: SparseSoftmax(MASK[0]), ShapeError, "mask of shape"),
        (lambda: SparseSoftmax(MASK, temperature=0.0), ValueRangeError, "temperature is 0"),
        (lambda: SparseSoftmax(MASK)(torch.ones(4, 5)), ShapeError, "x has shape"),
        (lambda: SparseSoftmax(MASK, compressed=True)(torch.ones(4, 5)), ShapeError, "compressed values"),
        (lambda: SparseSoftmax(MASK.expand(2, 4, 6))(torch.ones(3, 4, 6)), ShapeError, "leading dims"),
        (lambda: SparseSoftmax(MASK).build((torch.ones(4, 6),), {"_name": "blocks"}), ValueRangeError, "space"),
    ],
)
def test_wrong_inputs_say_what_is_allowed(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_kernel_without_its_inputs_says_so():
    with pytest.raises(ValueRangeError, match="without one of its inputs"):
        DenseSoftmaxKernel((1, 1), compressed=False).run((MASK,), torch.ones(4, 6), None)


def test_it_prints_what_runs():
    assert "density 1, temperature=2, dense until tuned" in repr(SparseSoftmax(MASK, 2))
