"""Folding batch norms before pruning."""

import copy

import torch
from torch import nn

from sparta.scheduler.fuse import fuse_batch_norms


def test_what_cannot_be_folded_stays_and_the_rest_computes_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ConvTranspose2d(4, 6, 2, groups=2),
        nn.BatchNorm2d(6),
        nn.ConvTranspose2d(6, 2, 2),
        nn.BatchNorm2d(2),
    )
    for _ in range(3):
        model(torch.randn(4, 3, 6, 6))
    model.eval()
    x, before = torch.randn(2, 3, 6, 6), copy.deepcopy(model)
    assert fuse_batch_norms(model) == [("0", "1"), ("4", "5")]
    assert isinstance(model[0].bias, nn.Parameter)
    torch.testing.assert_close(model(x), before(x), rtol=1e-4, atol=1e-5)
