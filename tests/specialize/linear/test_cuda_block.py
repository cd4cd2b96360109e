"""What can be told of the kernel for blocks and many tokens without a GPU: its tiles, and what it refuses."""

import pytest
import torch

from sparta.errors import ValueRangeError
from sparta.specialize.cuda.few_tokens import SHARED_BYTES
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_block import BlockMatrixTile, CudaBlock, block_matrix_tiles
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.scaled_linear.cuda_block import Fp8CudaBlock
from sparta.specialize.scaled_linear.spec import FP8, scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask


def spec_of(n=256, k=256, tokens=512, dtype=torch.bfloat16, device="cuda", sparsity=0.8, block=64):
    mask = block_mask((n, k), (block, block), sparsity, seed=0)
    return linear_spec(TeSA.from_mask(mask), tokens, dtype, device=device)


def scaled_spec(n, k, **given):
    mask = block_mask((n, k), (64, 64), 0.8, seed=0)
    return scaled_linear_spec(scaled_weight(torch.randn(n, k), TeSA.from_mask(mask)), 512, **given)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (spec_of(tokens=47), "below 48"),
        (spec_of(n=260), "multiples of 8"),
        (spec_of(k=260), "multiples of 8"),
        (spec_of(sparsity=0.1), "cover"),
        (spec_of(dtype=torch.float32), "not fp32"),
        (spec_of(device="cpu"), "runs on CUDA"),
        (scaled_spec(256, 256), "must not be rounded"),
        (scaled_spec(256, 264, activations=FP8), "of 16"),
    ],
)
def test_the_reason_of_a_refusal(spec: KernelSpec, reason):
    implement = CudaBlock() if spec.op == "linear" else Fp8CudaBlock()
    answer = implement.supports(spec)
    assert not answer
    assert reason in answer.reason


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("inputs", [256, 8192])
def test_every_tile_fits_a_multiprocessor(inputs, block, size):
    tiles = block_matrix_tiles(spec_of(k=inputs, tokens=20000, block=block), size)
    assert tiles
    assert all(tile.shared_bytes() <= SHARED_BYTES for tile in tiles)
    assert all((tile.tokens * tile.group * inputs * size <= 16 << 20) == (inputs == 8192) for tile in tiles)
    wide = 1 if size == 2 else 2  # blocks of 64 are half as wide in bytes, and two beside each other store more
    assert all((tile.row == 128) == (block >= 64 * wide) for tile in tiles)


def test_tiles_are_checked():
    with pytest.raises(ValueRangeError, match="64, 128, 256"):
        BlockMatrixTile(48)
    assert BlockMatrixTile.parse(str(BlockMatrixTile(128, 3, 6))) == BlockMatrixTile(128, 3, 6)
