"""Rows of int8 times a token of two bytes per number: the AVX-512 kernels, built here of plain loops."""

import ctypes

import pytest
import torch

from sparta.generation.matrices import packed
from sparta.specialize.cpu.toolchain import build

SOURCE = """
#define SPARTA_EMULATED
#include "decode_product.h"
extern "C" __attribute__((visibility("default"))) int multiply(const sparta::DecodeMatrix* matrix, const float* x,
                                                                int64_t inputs, float* y) {
  return sparta::multiply_decoded(*matrix, x, inputs, 1, y, matrix->channels, 1) ? 0 : 1;
}
"""
GROUP = 256
MOST = 127 * 256


@pytest.fixture(scope="module")
def multiply():
    function = ctypes.CDLL(str(build("portable", SOURCE))).multiply
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)

    def call(matrix, x):
        struct, y = matrix.struct(), torch.full((matrix.shape[0],), 7.0)
        assert function(ctypes.addressof(struct), x.data_ptr(), x.numel(), y.data_ptr()) == 0
        return y

    return call


def rounded(x):
    """Return x as 16 bits with a scale for every group say it."""
    groups = []
    for part in x.split(GROUP):
        scale = (part.abs().max() / 127 * (127 / MOST)).clamp(min=1e-37)
        groups.append((part * (1 / scale)).round().double() * scale.double())
    return torch.cat(groups)


@pytest.mark.parametrize("form", ["bitmap", "dense"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 63), (9, 64), (7, 65), (4, 320), (3, 1000), (2, 2304)])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_products_are_those_of_the_token_in_16_bits(multiply, form, shape, density):
    generator = torch.Generator().manual_seed(shape[1])
    weight = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density)
    matrix = packed(weight, bias=torch.randn(shape[0], generator=generator), int8=True, form=form)
    x = torch.randn(shape[1], generator=generator) * torch.rand(shape[1], generator=generator).pow(4).mul(50)
    found = multiply(matrix, x).double()
    wide = matrix.weight().double()
    torch.testing.assert_close(found, wide @ rounded(x) + matrix.bias, rtol=2e-5, atol=2e-5 * float(x.abs().max()))
    steps = torch.cat([part.abs().max().expand(len(part)) for part in x.split(GROUP)]).double() / MOST
    least = wide.abs() @ steps * 0.51 + 1e-5 * (wide.abs() @ x.abs().double())
    assert bool(((found - (wide @ x.double() + matrix.bias)).abs() <= least + 1e-6).all())


def test_extreme_weights_and_inputs_are_summed_without_loss(multiply):
    """Every weight at the end of its range, every input at the end of its own: the largest sums there are."""
    weight = torch.full((2, 1024), 127.0)
    weight[1] = -127.0
    x = torch.ones(1024)
    assert multiply(packed(weight, int8=True, form="dense"), x).tolist() == [127.0 * 1024, -127.0 * 1024]
    assert multiply(packed(weight, int8=True, form="bitmap"), -x).tolist() == [-127.0 * 1024, 127.0 * 1024]


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan")])
def test_tokens_that_cannot_be_rounded_are_multiplied_as_they_are(multiply, number):
    weight = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
    x = torch.tensor([number, 1.0, 2.0])
    found = multiply(packed(weight, int8=True, form="bitmap"), x)
    torch.testing.assert_close(found[0], x[0], equal_nan=True)
    torch.testing.assert_close(found[1], torch.tensor(3.0), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_tiny_and_huge_tokens(multiply, size):
    x = torch.tensor([size, -size, size])
    found = multiply(packed(torch.tensor([[1.0, 0.0, 1.0]]), int8=True, form="bitmap"), x)
    torch.testing.assert_close(found, torch.tensor([2 * size]), rtol=1e-3, atol=1e-37)
