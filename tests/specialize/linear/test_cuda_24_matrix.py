"""2:4 weights for many tokens: packing loses nothing, and who reads them as the hardware does multiplies rightly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import PatternError, ShapeError, ValueRangeError
from sparta.specialize.cuda.few_tokens import SHARED_BYTES
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_24_matrix import TwoFourMatrix
from sparta.specialize.linear.cuda_24_matrix_layout import MatrixLayout
from sparta.specialize.linear.cuda_24_matrix_tile import MatrixTile, matrix_tiles
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.scaled_linear.cuda_24_matrix import Fp8Matrix
from sparta.specialize.scaled_linear.spec import FP8, scaled_linear_spec, scaled_weight
from sparta.tesa.attribute import TeSA

DTYPES = [torch.float8_e4m3fn, torch.bfloat16]


def two_four(rows, columns, keep=2, seed=0):
    draws = torch.rand(rows, -(-columns // 4), 4, generator=torch.Generator().manual_seed(seed))
    chosen = draws.topk(keep, -1).indices
    return torch.zeros_like(draws, dtype=torch.bool).scatter_(2, chosen, True).flatten(1)[:, :columns]


def place_of(words, size, row, group, half):
    """Return the four bits that tell of a group of a row, as the threads of a warpgroup hold them.

    In 8 bits a thread holds the places of one row and 32 input channels, a word for each multiplication; in 16 bits
    those of two rows and 16 input channels, and pairs of threads hold those of either multiplication.
    """
    warp, upper, g = row // 16, row % 16 // 8, row % 8
    if size == 1:
        word = words[(warp * 32 + g * 4 + group // 8 * 2 + upper) * 2 + half]
        return word >> (group % 8 * 4) & 15
    word = words[warp * 32 + g * 4 + half * 2 + group // 4]
    return word >> (16 * upper + group % 4 * 4) & 15


def as_hardware(packed, size, dtype):
    """Return the weight that the instruction sees in the first slab and step: 64 outputs by two multiplications."""
    chunk = packed[0, 0]
    words = [word & 0xFFFFFFFF for word in chunk[4096:].view(torch.int32).tolist()]
    inputs = 64 // size
    weight = torch.zeros(64, 2 * inputs)
    for half in range(2):
        panel = chunk[half * 2048 : half * 2048 + 2048]
        for row in range(64):
            line = torch.cat([panel[row * 32 + 16 * (part ^ (row >> 2 & 1)) :][:16] for part in range(2)])
            values = line.contiguous().view(dtype).float()
            for group in range(inputs // 4):
                place = place_of(words, size, row, group, half)
                first, second = place & 3, place >> 2
                assert first < second
                column = half * inputs + group * 4
                weight[row, column + first] += values[2 * group]
                weight[row, column + second] += values[2 * group + 1]
    return weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(rows=st.integers(1, 150), columns=st.integers(1, 300), keep=st.integers(0, 2), seed=st.integers(0, 9))
def test_what_is_packed_is_unpacked(dtype, rows, columns, keep, seed):
    mask = two_four(rows, columns, keep, seed)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    layout = MatrixLayout(TeSA.from_mask(mask), dtype.itemsize)
    expected = torch.where(mask, weight.float(), 0.0)
    assert torch.equal(layout.unpack(layout.pack(weight), dtype).float(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keep", [1, 2])
def test_the_instruction_finds_every_value_at_its_place(dtype, keep):
    inputs = 128 // dtype.itemsize
    mask = two_four(64, inputs, keep)
    weight = torch.randn(64, inputs).to(dtype)
    packed = MatrixLayout(TeSA.from_mask(mask), dtype.itemsize).pack(weight)
    assert torch.equal(as_hardware(packed, dtype.itemsize, dtype), torch.where(mask, weight.float(), 0.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(70, 200), (64, 64), (1, 4), (300, 136)])
def test_the_kernel_packs_as_the_layout_does(dtype, n, k):
    pytest.importorskip("triton")
    from sparta.specialize.linear.cuda_24_pack import INTERPRETED, pack_on_gpu

    if not INTERPRETED:
        pytest.skip("tests/gpu has this on CUDA")
    layout = MatrixLayout(TeSA.from_mask(two_four(n, k) & (torch.rand(n, k) < 0.9)), dtype.itemsize)
    words = torch.uint8 if dtype.itemsize == 1 else torch.int16
    for weight in (torch.randn(n, k), torch.randn(k, n).t(), torch.randn(n, 2 * k)[:, ::2]):
        given = weight.to(dtype)
        found = pack_on_gpu(given.view(words), *layout._index(given.device))
        assert torch.equal(found, layout.pack(given))


@pytest.mark.parametrize(("n", "k"), [(72, 200), (64, 64), (4, 8), (300, 136), (320, 64)])
def test_a_weight_and_its_transpose_are_packed_together(n, k):
    pytest.importorskip("triton")
    from sparta.specialize.linear.cuda_24_pack import INTERPRETED, pack_both_on_gpu

    if not INTERPRETED:
        pytest.skip("tests/gpu has this on CUDA")
    pairs = torch.eye(2, dtype=torch.bool).repeat_interleave(2, 0).repeat_interleave(2, 1)
    mask = pairs.repeat(n // 4, k // 4) & (torch.rand(n, k) < 0.9)
    weight = torch.randn(n, k).bfloat16()
    layouts = [MatrixLayout(TeSA.from_mask(side), 2) for side in (mask, mask.t())]
    found = pack_both_on_gpu(weight.view(torch.int16), *(each._index(weight.device) for each in layouts))
    for layout, packed, side in zip(layouts, found, (weight, weight.t()), strict=True):
        assert torch.equal(packed, layout.pack(side))


def test_what_does_not_fit_is_refused():
    layout = MatrixLayout(TeSA.from_mask(two_four(8, 16)), 2)
    with pytest.raises(ShapeError, match="as built"):
        layout.pack(torch.zeros(16, 8, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="2 bytes an element"):
        layout.pack(torch.zeros(8, 16))
    with pytest.raises(PatternError, match="3 or 4 live"):
        MatrixLayout(TeSA.dense((8, 16)), 2).pack(torch.zeros(8, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueRangeError, match="16, 32, 64, 128, 176"):
        MatrixTile(48)


def scaled_spec(mask, tokens, **given):
    return scaled_linear_spec(scaled_weight(torch.randn(mask.shape), TeSA.from_mask(mask)), tokens, **given)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (linear_spec(TeSA.from_mask(two_four(64, 64)), 4, torch.bfloat16, device="cuda"), "below 5"),
        (linear_spec(TeSA.from_mask(two_four(60, 64)), 64, torch.bfloat16, device="cuda"), "multiples of 8"),
        (linear_spec(TeSA.from_mask(two_four(64, 60)), 64, torch.bfloat16, device="cuda"), "multiples of 8"),
        (linear_spec(TeSA.dense((64, 64)), 64, torch.bfloat16, device="cuda"), "more than 2 of some 4"),
        (linear_spec(TeSA.from_mask(two_four(64, 64)), 64, torch.float32, device="cuda"), "not fp32"),
        (linear_spec(TeSA.from_mask(two_four(64, 64)), 64, torch.bfloat16, device="cpu"), "runs on CUDA"),
        (scaled_spec(two_four(64, 64), 64), "must not be rounded"),
        (scaled_spec(two_four(64, 72), 64, activations=FP8), "of 16"),
    ],
)
def test_the_reason_of_a_refusal(spec: KernelSpec, reason):
    implement = TwoFourMatrix() if spec.op == "linear" else Fp8Matrix()
    answer = implement.supports(spec)
    assert not answer
    assert reason in answer.reason


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tokens", [5, 17, 33, 64, 100, 512, 513, 20000])
def test_every_tile_fits_a_multiprocessor(tokens, size):
    tiles = [tile for shape in ((64, 64), (4096, 4096), (11008, 4096)) for tile in matrix_tiles(shape, tokens, size)]
    assert tiles
    assert all(tile.shared_bytes(size) * tile.ctas <= SHARED_BYTES for tile in tiles)
