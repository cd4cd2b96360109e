"""The order in which kept blocks are packed for few tokens is the one that the kernel's lanes read."""

import pytest
import torch

from sparta.specialize.kernel_spec import Epilogue
from sparta.specialize.linear.cuda_block_few import CudaBlockFew, FewBlocksKernel, FewBlocksTile, few_blocks_tiles
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.scaled_linear.cuda_block_few import ScaledBlockFew
from sparta.specialize.scaled_linear.spec import FP8, reference, scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA
from sparta.testing import block_mask

LANES = 32
UPPER = [1, 3, 0, 2]  # bytes of a word in the order in which they are widened: the upper ones of both halves first


def read_by_lanes(values, columns, schedule, x, outputs, rows):
    """Return (M, N) as the kernel sums it: each lane has 64 bytes / 4 of a row and the same input channels of x."""
    held = values.shape[-1] // 4
    padded = torch.nn.functional.pad(x, (0, values.shape[-1]))
    y = torch.zeros(x.shape[0], schedule.shape[0] * rows, dtype=torch.float64)
    for block_row, first, end, _ in schedule.tolist():
        for block in range(first, end):
            for lane in range(LANES):
                inputs = int(columns[block]) + lane % 4 * held
                for row in range(lane // 4, rows, 8):
                    own = values[block, row, lane % 4 * held : (lane % 4 + 1) * held].double()
                    y[:, block_row * rows + row] += padded[:, inputs : inputs + held].double() @ own
    return y[:, :outputs]


@pytest.mark.parametrize("slabs", [1, 2, 4])
def test_lanes_find_their_values(slabs):
    mask = block_mask((100, 200), (16, 32), 0.6, seed=1)
    x, weight = torch.randn(3, 200).bfloat16(), torch.randn(100, 200).bfloat16()
    spec = linear_spec(TeSA.from_mask(mask), 3, torch.bfloat16, device="cuda")
    values, columns, schedule = FewBlocksKernel(spec, FewBlocksTile(8, slabs), 2).pack(weight)
    y = read_by_lanes(values, columns, schedule, x, 100, slabs * 16)
    torch.testing.assert_close(y, x.double() @ (weight * mask).double().t())


def test_lanes_find_their_values_in_8_bits():
    mask = block_mask((48, 160), (16, 32), 0.6, seed=1)
    x, weight = torch.randn(3, 160).bfloat16(), torch.randn(48, 160)
    spec = scaled_linear_spec(scaled_weight(weight, TeSA.from_mask(mask)), 3)
    kernel = ScaledBlockFew().build(spec, {"tile": "tokens=8,slabs=1"})
    packed, columns, schedule, scales = kernel.pack(weight)
    assert str(spec["weight"].format) == FP8
    codes = packed.unflatten(-1, (-1, 4))[..., UPPER].flatten(-2).view(torch.float8_e4m3fn).float()
    y = read_by_lanes(codes, columns, schedule, x, 48, 16) * scales
    torch.testing.assert_close(y, reference(spec, weight, x), rtol=1e-5, atol=1e-5)


def test_higher_blocks_are_tried_where_they_store_no_more():
    spec_of = {
        height: linear_spec(
            TeSA.from_mask(block_mask((256, 512), (height, 64), 0.9)),
            1,
            torch.bfloat16,
            epilogue=Epilogue(),
            device="cuda",
        )
        for height in (16, 64)
    }
    assert {tile.slabs for tile in few_blocks_tiles(spec_of[16], 2)} == {1}
    assert {tile.slabs for tile in few_blocks_tiles(spec_of[64], 2)} >= {2, 4}
    assert {tile.tokens for tile in few_blocks_tiles(spec_of[64], 2)} == {1}


def test_what_it_does_not_take_it_refuses_with_a_reason():
    dense = linear_spec(TeSA.dense((64, 64)), 1, torch.bfloat16, device="cuda")
    assert "cover 1.00" in CudaBlockFew().supports(dense).reason
    many = linear_spec(TeSA.from_mask(block_mask((256, 256), (64, 64), 0.9)), 65, torch.bfloat16, device="cuda")
    assert "65 tokens" in CudaBlockFew().supports(many).reason
