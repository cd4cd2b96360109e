"""A batch norm in evaluation is part of the convolution before it."""

import pytest
import torch
from torch import fx, nn

from sparta.batch_norms import folded, is_foldable, pairs_in_graph

CASES = {
    "plain": (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)),
    "no bias": (nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
    "transposed": (nn.ConvTranspose2d(3, 6, 3), nn.BatchNorm2d(6)),
    "not affine": (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_folded_convolution_computes_what_both_do(name):
    torch.manual_seed(0)
    conv, norm = CASES[name]
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    norm.eval()
    x = torch.randn(2, conv.in_channels, 5, 5)
    with torch.no_grad():
        conv.weight[0, 0] = 0
        expected, zeros = norm(conv(x)), conv.weight == 0
        weight, bias = folded(conv, norm)
        assert bool((weight[zeros] == 0).all())
        run = torch.conv_transpose2d if isinstance(conv, nn.ConvTranspose2d) else torch.conv2d
        actual = run(x, weight, bias, groups=conv.groups)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_folded_is_no_pair():
    grouped = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6))
    without = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, track_running_stats=False))
    for model in (grouped, without):
        assert not is_foldable(*model)
        assert pairs_in_graph(fx.Tracer().trace(model), dict(model.named_modules())) == []
