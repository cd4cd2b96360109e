"""Training of block-sparse layers on CUDA: gradients of kept blocks only, equal to those of the masked dense layer."""

import copy

import pytest
import torch
from torch import nn

from sparta.nn import SparseLinear
from sparta.specialize.cuda.device import HOPPER, capability
from sparta.specialize.implement import implement_named
from sparta.specialize.linear.cuda_block_gradient import GradientTile, MatrixGradient
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.linear.triton_block.layout import BlockLayout
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.specialize.linear.triton_block.training import BlockGradient, BlockPacker
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def layer_of(n, k, block, sparsity, dtype, tokens):
    """Return a sparse layer that runs triton-block, and the dense one with the same weight."""
    mask = block_mask((n, k), (block, block), sparsity, seed=1, device="cuda")
    dense = nn.Linear(k, n).to("cuda", dtype)
    with torch.no_grad():
        dense.weight *= mask
    layer = SparseLinear(copy.deepcopy(dense), weight_mask=mask)
    spec = linear_spec(TeSA.from_mask(mask), tokens, dtype, device="cuda")
    layer.build(
        {"_name": "triton-block", **implement_named("triton-block", "linear").default(spec)},
        draw(tokens, k, dtype=dtype),
    )
    return layer.train(), dense, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("shape", [(512, 384, 1000), (300, 200, 77), (128, 128, 1), (256, 1024, 5000)])
def test_the_gradient_of_kept_blocks(shape, block, dtype):
    n, k, tokens = shape
    mask = block_mask((n, k), (block, block), 0.6, seed=1, device="cuda")
    layout = BlockLayout(TeSA.from_mask(mask), BlockTile(height=block, width=block, blocks=1))
    grad, x = draw(tokens, n, dtype=dtype), draw(tokens, k, dtype=dtype)
    gradient = BlockGradient(layout)
    found, summed = gradient(grad, x, mask, bias=True)
    check(found, torch.where(mask, grad.double().t() @ x.double(), 0.0), reduction=tokens)
    assert not found[~mask].any()
    check(summed, grad.double().sum(0), reduction=tokens)
    assert all(map(torch.equal, (found, summed), gradient(grad, x, mask, bias=True)))  # the same bits again
    assert torch.equal(found, gradient(grad, x, mask)[0])


@pytest.mark.skipif(capability() != HOPPER, reason="the kernel is for Hopper GPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "masked"])
@pytest.mark.parametrize("cut", [(128, 4), (128, 2), (64, 8), (64, 4)], ids="{0[0]}by{0[1]}".format)
@pytest.mark.parametrize(
    "shape", [(512, 384, 1000), (304, 200, 577), (256, 1024, 5000), (128, 128, 512)], ids="{0[0]}x{0[1]}".format
)
def test_the_gradient_by_warpgroups(shape, cut, whole, dtype):
    n, k, tokens = shape
    mask = block_mask((n, k), (64, 64), 0.6, seed=1, device="cuda")
    if not whole:
        mask &= torch.rand(n, k, device="cuda") < 0.9
    mask[64:192] = False  # outputs with nothing kept have sums too
    gradient = MatrixGradient(TeSA.from_mask(mask), GradientTile(*cut))
    grad, x = draw(tokens, 2 * n, dtype=dtype)[:, :n], draw(tokens, k + 4, dtype=dtype)[:, 4:]
    gradient(grad, x, mask, bias=True)[0].fill_(torch.nan)  # the next call is given the same memory
    found, summed = gradient(grad, x, mask, bias=True)
    check(found, torch.where(mask, grad.double().t() @ x.double(), 0.0), reduction=tokens)
    assert not found[~mask].any()
    check(summed, grad.double().sum(0), reduction=tokens)
    assert all(map(torch.equal, (found, summed), gradient(grad, x, mask, bias=True)))  # the same bits again
    assert torch.equal(found, gradient(grad, x, mask)[0])


@pytest.mark.skipif(capability() != HOPPER, reason="the kernel is for Hopper GPUs")
def test_what_is_not_finite_stays_in_its_blocks_of_the_gradient():
    mask = block_mask((256, 512), (64, 64), 0.5, seed=1, device="cuda")
    grad, x = draw(700, 256), draw(700, 512)
    grad[3, 70], x[5, 200] = torch.nan, torch.inf
    found, summed = MatrixGradient(TeSA.from_mask(mask), GradientTile(128, 4))(grad, x, mask, bias=True)
    touched = torch.zeros_like(mask)
    touched[70], touched[:, 200] = True, True
    assert not found[mask & touched].isfinite().any()
    assert found[mask & ~touched].isfinite().all()
    assert not found[~mask].any()
    assert summed.isnan().nonzero().flatten().tolist() == [70]
    dead = torch.zeros_like(mask)
    found, summed = MatrixGradient(TeSA.from_mask(dead), GradientTile(128, 4))(grad, x, dead, bias=True)
    assert not found.any()
    check(summed[:64], grad.double().sum(0)[:64], reduction=700)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_packing_by_a_kernel(blocks, dtype):
    mask = block_mask((200, 330), (32, 32), 0.5, seed=1, device="cuda") & (torch.rand(200, 330, device="cuda") < 0.9)
    layout = BlockLayout(TeSA.from_mask(mask), BlockTile(height=32, width=32, blocks=blocks))
    for weight in (draw(200, 330, dtype=dtype), draw(330, 200, dtype=dtype).t(), draw(200, 660, dtype=dtype)[:, ::2]):
        assert torch.equal(BlockPacker(layout)(weight), layout.values(weight))


@pytest.mark.parametrize("shape", [(3, 50), (1, 1), (2048,)])
def test_a_layer_has_the_gradients_of_the_masked_dense_one(shape):
    layer, dense, mask = layer_of(256, 192, 64, 0.5, torch.bfloat16, 100)
    x = draw(*shape, 192).requires_grad_()
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (x, dense.weight, dense.bias)]
    nn.functional.linear(*exact).backward(grad.double())
    check(x.grad, exact[0].grad, reduction=256)
    check(layer.weight.grad, torch.where(mask, exact[1].grad, 0.0), reduction=x[..., 0].numel())
    assert not layer.weight.grad[~mask].any()


def test_training_follows_the_masked_dense_layer():
    layer, dense, mask = layer_of(256, 256, 64, 0.75, torch.float32, 128)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (layer, dense)]
    target = draw(128, 256, dtype=torch.float32)
    x = draw(128, 256, dtype=torch.float32)
    for _ in range(20):
        losses = []
        for model, optimizer in zip((layer, dense), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            if model is dense:
                model.weight.grad *= mask
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    torch.testing.assert_close(layer.weight * mask, dense.weight * mask, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("way", ["autocast", "accumulation", "compile"])
def test_the_usual_ways_to_train(way):
    layer, dense, mask = layer_of(256, 256, 64, 0.75, torch.bfloat16, 128)
    run = torch.compile(layer) if way == "compile" else layer
    x = draw(128, 256)
    for part in x.chunk(2) if way == "accumulation" else [x]:
        with torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
            run(part).float().square().sum().backward()
    exact = dense.weight.detach().double().requires_grad_()
    nn.functional.linear(x.double(), exact, dense.bias.double()).square().sum().backward()
    check(layer.weight.grad, torch.where(mask, exact.grad, 0.0), reduction=1024, dtype=torch.bfloat16)
