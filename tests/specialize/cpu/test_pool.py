"""Max pooling against PyTorch's: the same values, whatever the window, the image and what is in it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from sparta.specialize.cpu import pool
from sparta.specialize.cpu.pool import max_pool2d

PAIRS = st.tuples(st.integers(1, 4), st.integers(1, 4))


@given(
    PAIRS, PAIRS, PAIRS, st.tuples(st.integers(0, 2), st.integers(0, 2)), st.booleans(), st.integers(0, 40), st.data()
)
def test_any_window_gives_what_pytorch_gives(kernel, stride, dilation, padding, ceil, width, data):
    padding = tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True))
    least = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    x = torch.randn(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), least[0] + width % 7, least[1] + width)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[torch.rand(x.shape) < 0.03] = value
    expected = functional.max_pool2d(x, kernel, stride, padding, dilation, ceil)
    torch.testing.assert_close(
        max_pool2d(x, kernel, stride, padding, dilation, ceil), expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 3, 9, 18)[..., ::2],
        torch.randn(2, 3, 9, 9).double(),
        torch.randn(3, 9, 9),
        torch.randn(0, 3, 9, 9),
    ],
)
def test_what_the_kernel_does_not_take_goes_to_pytorch(x):
    assert torch.equal(max_pool2d(x, [3, 3], [2, 2], [1, 1]), functional.max_pool2d(x, 3, 2, 1))


def test_one_number_stands_for_two_and_no_stride_for_the_window():
    x = torch.randn(1, 2, 12, 12)
    assert torch.equal(max_pool2d(x, [3]), functional.max_pool2d(x, 3))


def test_arguments_that_do_not_fit_are_refused_as_pytorch_does():
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        max_pool2d(torch.randn(1, 1, 8, 8), [2, 2], [1, 1], [2, 2])


def test_without_a_compiler_pytorch_runs(monkeypatch):
    monkeypatch.setattr(pool, "_library", [None])
    x = torch.randn(1, 2, 8, 8)
    assert torch.equal(max_pool2d(x, [2, 2]), functional.max_pool2d(x, 2))
