"""Packing and the gradient of kept blocks, under Triton's interpreter, against the dense computation."""

import pytest
import torch

from sparta.specialize.linear.triton_block.layout import BlockLayout
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has these on CUDA", allow_module_level=True)

from sparta.specialize.linear.triton_block import training

CASES = [
    # N, K, block, blocks of a step, tokens, sparsity, share of live elements in kept blocks
    (128, 128, (16, 16), 2, 100, 0.7, 1.0),
    (100, 70, (16, 32), 1, 33, 0.5, 0.8),
    (64, 256, (32, 32), 4, 1100, 0.8, 1.0),
    (64, 64, (16, 16), 2, 10, 1.0, 1.0),
    (16, 16, (16, 16), 1, 1, 0.0, 1.0),
    (40, 300, (32, 64), 2, 0, 0.5, 1.0),
    (200, 150, (64, 64), 1, 70, 0.5, 0.9),
]


def case(n, k, block, blocks, sparsity, live):
    mask = block_mask((n, k), block, sparsity, seed=1) if sparsity < 1 else torch.zeros(n, k, dtype=torch.bool)
    mask &= torch.rand(n, k) <= live
    return mask, BlockLayout(TeSA.from_mask(mask), BlockTile(height=block[0], width=block[1], blocks=blocks))


@pytest.mark.parametrize("given", CASES)
def test_packing_equals_the_layouts_own(given):
    n, k, block, blocks, _, sparsity, live = given
    _, layout = case(n, k, block, blocks, sparsity, live)
    pack = training.BlockPacker(layout)
    for weight in (torch.randn(n, k), torch.randn(k, n).t(), torch.randn(n, 2 * k)[:, ::2]):
        assert torch.equal(pack(weight), layout.values(weight))


def poisoned(memory):
    """Return what gives out memory full of NaN, so that an element that is not written shows; zeros stay."""

    def filled(plan, x):
        made = memory(plan, x)
        for tensor in (made.result if plan.fills else None, made.bias, made.parts):
            if tensor is not None:
                tensor.fill_(torch.nan)
        return made

    return filled


@pytest.mark.parametrize("given", CASES)
@pytest.mark.parametrize("strided", [False, True])
def test_the_gradient_is_that_of_the_masked_weight(given, strided, monkeypatch):
    monkeypatch.setattr(training._GradientPlan, "memory", poisoned(training._GradientPlan.memory))
    n, k, block, blocks, tokens, sparsity, live = given
    mask, layout = case(n, k, block, blocks, sparsity, live)
    grad, x = torch.randn(tokens, n), torch.randn(tokens, k)
    if strided:
        grad, x = torch.randn(n, tokens).t(), torch.randn(tokens, 2 * k)[:, :k]
    found, summed = training.BlockGradient(layout)(grad, x, mask, bias=strided)
    exact = torch.where(mask, grad.double().t() @ x.double(), 0.0)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
    assert not found[~mask].any()
    assert (summed is not None) == strided
    if summed is not None:
        torch.testing.assert_close(summed.double(), grad.double().sum(0), rtol=1e-4, atol=1e-4)


def test_shares_of_the_tokens_are_added_in_one_order(monkeypatch):
    monkeypatch.setattr(training, "_LEAST_TOKENS", 32)
    mask, layout = case(64, 64, (32, 32), 1, 0.5, 1.0)
    grad, x = torch.randn(301, 64), torch.randn(301, 64)
    gradient = training.BlockGradient(layout)
    assert gradient._splits(2, 301, x.device) > 1
    first, summed = gradient(grad, x, mask, bias=True)
    assert all(map(torch.equal, (first, summed), gradient(grad, x, mask, bias=True)))
    torch.testing.assert_close(summed.double(), grad.double().sum(0), rtol=1e-4, atol=1e-4)
    exact = torch.where(mask, grad.double().t() @ x.double(), 0.0)
    torch.testing.assert_close(first.double(), exact, rtol=1e-4, atol=1e-4)


def test_nan_spreads_only_where_it_meets_a_live_block():
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:32, :32] = True
    layout = BlockLayout(TeSA.from_mask(mask), BlockTile(height=32, width=32, blocks=1))
    grad, x = torch.randn(40, 64), torch.randn(40, 64)
    grad[:, 40], x[:, 50] = float("nan"), float("inf")
    assert training.BlockGradient(layout)(grad, x, mask)[0].isfinite().all()


def test_a_weight_of_another_shape_is_an_error_of_ours():
    from sparta.errors import ShapeError

    _, layout = case(64, 64, (32, 32), 1, 0.5, 1.0)
    with pytest.raises(ShapeError, match="as when built"):
        training.BlockPacker(layout)(torch.randn(64, 32))


@pytest.mark.parametrize("given", CASES)
def test_a_weight_and_its_transpose_are_packed_at_once(given):
    n, k, block, blocks, _, sparsity, live = given
    mask, layout = case(n, k, block, blocks, sparsity, live)
    other = BlockLayout(TeSA.from_mask(mask.t()), BlockTile(height=16, width=32, blocks=1))
    for weight in (torch.randn(n, k), torch.randn(k, n).t()):
        found = training.BlockPacker(layout).with_transpose(training.BlockPacker(other), weight)
        assert torch.equal(found[0], layout.values(weight))
        assert torch.equal(found[1], other.values(weight.t()))
