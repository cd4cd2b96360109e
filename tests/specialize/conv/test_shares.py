"""How threads share images: the same pixels from layer to layer, whatever the sizes, and no result changes."""

import itertools

import pytest
import torch
from torch.nn import functional

from sparta.specialize.conv.cpu_image import plan_image
from sparta.specialize.conv.cpu_packed import PackedConv
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu import runnable_isas


@pytest.mark.parametrize(("pixels", "threads"), [(196, 2), (784, 3), (3136, 5), (3136, 64), (99, 2)])
def test_each_thread_takes_one_run_of_the_pixels_of_an_image_that_is_read_as_it_is(pixels, threads):
    plan = plan_image(ConvGeometry.make(2), (1, 1), (1, pixels), channels=64, tile=64, threads=threads, contiguous=True)
    assert plan.direct
    assert pixels // plan.band_tokens == threads


@pytest.mark.parametrize(("pixels", "threads"), [(49, 2), (196, 5), (16, 1)])
def test_an_image_of_few_pixels_is_not_cut(pixels, threads):
    plan = plan_image(ConvGeometry.make(2), (1, 1), (1, pixels), channels=64, tile=64, threads=threads, contiguous=True)
    assert pixels // plan.band_tokens == 1


@pytest.mark.parametrize(("size", "channels", "stride", "threads"), [(56, 128, 2, 2), (28, 256, 2, 2), (56, 64, 1, 3)])
def test_threads_share_copies_without_cutting_any(size, channels, stride, threads):
    geometry = ConvGeometry.make(2, stride=stride, padding=1)
    plan = plan_image(geometry, (3, 3), (size, size), channels=channels, tile=64, threads=threads, contiguous=True)
    tokens = (plan.out_size[0] - 1) * plan.row_width + plan.out_size[1]
    bands = -(-tokens // plan.band_tokens)
    assert bands > 1
    assert bands % threads == 0


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize(
    ("size", "images"), list(itertools.product([(7, 7), (14, 14), (13, 17), (28, 28), (1, 211)], [1, 2, 5]))
)
def test_shares_change_no_result(isa, size, images):
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 24, 1, 1), torch.randn(40)
    mask = (torch.rand(10, 24, 1, 1) < 0.3).repeat_interleave(4, 0)
    x, residual = torch.randn(images, 24, *size), torch.randn(images, 40, *size)
    x[:, 3, 0, 0], x[:, 5, -1, -1] = torch.inf, torch.nan
    for tile in ({"block": 4, "mv": 4, "prefetch": 4}, {"block": 4, "mv": 3}, {"block": 1, "mv": 4}):
        packed = PackedConv(weight, mask, ConvGeometry.make(2), isa=isa, **tile)
        results = [packed(x, bias, "relu_last", residual, threads=threads) for threads in (1, 2, 3, 5)]
        # A pruned weight multiplies nothing, not even inf.
        columns = [torch.where(mask[..., 0, 0][:, c, None], weight[:, c, 0], 0.0).double() for c in range(24)]
        truth = bias.double()[:, None, None] + residual.double()
        for c, column in enumerate(columns):
            live = mask[:, c, 0, 0]
            truth = truth + torch.where(live[:, None, None], column[:, :, None] * x[:, c, None].double(), 0.0)
        expected = functional.relu(truth).float()
        for result in results:
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
            torch.testing.assert_close(result, results[0], rtol=0, atol=0, equal_nan=True)
