"""Blocks in 8 bits, run by Triton's interpreter, compute what the rounded layer computes, on any shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.triton_block.candidates import candidates
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.specialize.scaled_linear.spec import (
    FP8,
    fp8_rows,
    reference,
    rounded_rows,
    scaled_linear_spec,
    scaled_weight,
)
from sparta.specialize.scaled_linear.triton_block import Fp8Block, ScaledBlock
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask, check

pytest.importorskip("triton", reason="Triton is not installed on this platform")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device")

TILES = [BlockTile(16, 16, 32), BlockTile(16, 16, 16, blocks=2, group=1), BlockTile(16, 32, 32, tma=1, weight_first=1)]


@settings(max_examples=12)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 100)),
    st.sampled_from(TILES),
    st.sampled_from([(Fp8Block(), FP8), (ScaledBlock(), FP8), (ScaledBlock(), "int8")]),
    st.sampled_from([0.0, 0.7, 1.0]),
)
def test_any_shape_and_mask(shape, tile, kind, sparsity):
    (m, n, k), (implement, format) = shape, kind
    mask = block_mask((n, k), (min(16, n), min(16, k)), sparsity)
    weight, bias = torch.randn(n, k), torch.randn(n).half()
    tesa = scaled_weight(weight, TeSA.from_mask(mask), format)
    epilogue = Epilogue(bias=True, activation="relu")
    spec = scaled_linear_spec(tesa, m, torch.float16, activations=FP8, epilogue=epilogue)
    x = rounded_rows(torch.randn(m, k).half())
    kernel = implement.build(spec, {"tile": str(tile)})
    check(kernel.run(kernel.pack(weight), x, bias, None), reference(spec, weight, x, bias), reduction=k)


@pytest.mark.parametrize("scale", [None, 2**-6])
def test_the_kernel_that_rounds_tokens(scale):
    from sparta.specialize.scaled_linear.input_kernels import round_on_gpu

    x = torch.randn(5, 9000)
    x[2] = 0
    codes, scales = round_on_gpu(x, scale)
    expected, expected_scales = fp8_rows(x, scale)
    assert torch.equal(scales, expected_scales.flatten())
    # The interpreter loses the carry where a number is rounded up to a power of two.
    carried = expected.float().abs().log2().frac() == 0
    assert torch.equal(codes.float()[~carried], expected.float()[~carried])


def test_tiles_of_bytes_are_wide_enough_for_the_matrix_unit():
    for block in (16, 32, 128):
        mask = block_mask((512, 512), (block, block), 0.9)
        for tokens in (1, 64, 4096):
            for tile in candidates(TeSA.from_mask(mask), tokens, 1, tma=True):
                assert (tile.width if tile.tma else tile.step) >= 32, tile
