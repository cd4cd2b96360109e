"""Compaction by whole blocks: the same function, cut as far as the blocks of pruned weights stay blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparta.errors import ValueRangeError
from sparta.propagation import propagate
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask

HIDDEN = 32


def network(dead, seed=0):
    """Return two layers, the first pruned in blocks of 4 channels, the second blind to the channels in `dead`."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 8))
    with torch.no_grad():
        model[0].weight *= block_mask((HIDDEN, 24), (4, 1), 0.6, seed=seed)
        model[2].weight[:, sorted(dead)] = 0
    return model, torch.randn(5, 24)


@given(st.sets(st.integers(0, HIDDEN - 1), max_size=HIDDEN - 1), st.integers(0, 99))
def test_whole_blocks_are_cut_and_no_others(dead, seed):
    model, x = network(dead, seed)
    small = propagate(model, x).compact(keep_blocks=1.0)
    torch.testing.assert_close(small(x), model(x))
    blocks = [set(range(first, first + 4)) for first in range(0, HIDDEN, 4)]
    kept = sorted(channel for block in blocks if not block <= dead for channel in block)
    assert torch.equal(small.get_parameter("0.weight"), model[0].weight[kept])
    assert torch.equal(small.get_parameter("2.weight"), model[2].weight[:, kept])


def test_a_large_share_is_cut_even_so():
    dead = set(range(1, 17))  # 12 of them in whole blocks
    model, x = network(dead)
    result = propagate(model, x)
    widths = {share: result.compact(keep_blocks=share).get_parameter("0.weight").shape[0] for share in (0, 0.5, 0.51)}
    assert widths == {0: 16, 0.5: 16, 0.51: 20}
    assert result.compact().get_parameter("0.weight").shape[0] == 16


def test_seams_leave_whole_blocks():
    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            return x + self.layer(x)

    torch.manual_seed(0)
    model, x = Stream(), torch.randn(3, 32)
    with torch.no_grad():
        model.layer.weight *= block_mask((32, 32), (4, 1), 0.3, seed=1)
        model.layer.weight[8:24] = 0
    result = propagate(model, x)
    assert result.compact(seams=1.0).get_parameter("layer.weight").shape == (17, 32)
    small = result.compact(seams=1.0, keep_blocks=1.0)
    torch.testing.assert_close(small(x), model(x))
    assert small.get_parameter("layer.weight").shape == (20, 32)
    assert TeSA.from_zeros(small.get_parameter("layer.weight")).state.block[0] == 4


def test_weights_without_blocks_are_cut_as_ever():
    model, x = network({3, 5, 6})
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(HIDDEN, 24) * (torch.rand(HIDDEN, 24) < 0.5))
    assert propagate(model, x).compact(keep_blocks=1.0).get_parameter("0.weight").shape == (HIDDEN - 3, 24)


@pytest.mark.parametrize("share", [-0.1, 1.5, True])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(ValueRangeError, match="keep_blocks"):
        propagate(*network(set())).compact(keep_blocks=share)
