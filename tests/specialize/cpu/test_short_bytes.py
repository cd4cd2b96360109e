"""Bitmaps of int8 times a few tokens of two bytes per number: the AVX-512 kernels, built here of plain loops."""

import ctypes

import pytest
import torch

from sparta.measure.checks import check
from sparta.specialize.cpu.library import STREAM_CALL
from sparta.specialize.cpu.short import PackedShort, ShortTile
from sparta.specialize.cpu.toolchain import build

SOURCE = """
#define SPARTA_EMULATED
#include "short_stream.h"
extern "C" __attribute__((visibility("default"))) int multiply(const sparta::ShortMatrix* matrix,
                                                                const sparta::StreamCall* call) {
  return sparta::multiply_short(*matrix, *call) ? 0 : 1;
}
"""
GROUP, MOST = 256, 127 * 256


@pytest.fixture(scope="module")
def multiply():
    function = ctypes.CDLL(str(build("portable", SOURCE))).multiply
    function.argtypes = (ctypes.c_void_p, ctypes.c_char_p)

    def call(weight, scales, x, bias, threads=1, step=0.0):
        packed = PackedShort(weight != 0, ShortTile("bitmap", 1, 2048), step=step)
        values = packed.pack(weight)
        matrix, y = packed._matrix_for(values, scales), torch.full((len(x), len(weight)), 7.0)
        given = (x.data_ptr(), y.data_ptr(), len(x), x.shape[1], len(weight), bias.data_ptr(), 0, len(weight), 0)
        assert function(ctypes.addressof(matrix), STREAM_CALL.pack(*given, threads)) == 0
        return y

    return call


def layer(n, k, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    live = torch.rand(n, k, generator=generator) < density
    return torch.where(live, weight, 0), torch.rand(n, generator=generator) + 0.1, torch.randn(n, generator=generator)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (9, 64), (18, 65), (4, 321), (3, 1000)])
@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
def test_products_are_those_of_tokens_in_16_bits(multiply, tokens, shape, density):
    weight, scales, bias = layer(*shape, density)
    x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(1)) * 3
    found = multiply(weight, scales, x, bias).double()
    wide = weight.double() * scales.double()[:, None]
    most = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in x.split(GROUP, 1)], 1).double()
    step = (most / MOST * 1.02) @ wide.abs().t() + 1e-5 * (x.abs().double() @ wide.abs().t())
    assert bool(((found - (x.double() @ wide.t() + bias)).abs() <= step + 1e-6).all())


@pytest.mark.parametrize("step", [0.0, 0.037])
def test_what_lies_on_the_grid_is_not_rounded(multiply, step):
    weight, scales, bias = layer(9, 700, 0.5)
    whole = torch.randint(-127, 128, (4, 700), generator=torch.Generator().manual_seed(2)).float()
    whole[:, 256:512] = (whole[:, 256:512] / 7).round()  # a group of smaller numbers
    whole[:, 0] = 127
    x = whole * (step or torch.tensor([[0.001], [0.3], [1.7], [900.0]]))
    wide = weight.double() * scales.double()[:, None]
    exact = x.double() @ wide.t() + bias
    check(multiply(weight, scales, x, bias, step=step), exact, reduction=700)


def test_a_token_that_cannot_be_rounded_leaves_all_as_they_are(multiply):
    weight, scales, bias = layer(6, 70, 0.5)
    x = torch.randn(3, 70)
    x[1, 4] = float("inf")
    found = multiply(weight, scales, x, bias)
    meets = weight[:, 4] != 0
    assert bool(found[1][meets].isinf().all())
    exact = x[[0, 2]].double() @ (weight.double() * scales.double()[:, None]).t() + bias
    torch.testing.assert_close(found[[0, 2]].double(), exact, rtol=1e-4, atol=1e-4)


def test_threads_change_nothing(multiply):
    weight, scales, bias = layer(50, 300, 0.4)
    x = torch.randn(5, 300)
    assert torch.equal(multiply(weight, scales, x, bias), multiply(weight, scales, x, bias, threads=3))
