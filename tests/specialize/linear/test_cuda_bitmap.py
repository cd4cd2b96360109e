"""Unstructured weights for few tokens: packing loses nothing, and reading as a warp does multiplies rightly."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.specialize.linear.cuda_bitmap import BitmapTile, CudaBitmap
from sparta.specialize.linear.cuda_bitmap_layout import CHUNK, SLAB, BitmapLayout, record_head
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA

KINDS = [(1, 4), (1, 8), (2, 4), (2, 8)]


def mask_of(rows, columns, density, seed=0):
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < density


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tile_of_lanes(record, group, run, multiply):
    """Return the 16×16 tile that 32 lanes read for one multiplication, from the bytes of a record.

    A lane's four registers hold two neighbours each, of rows g, g + 8, g, g + 8 and columns 2t, 2t, 2t + 8, 2t + 8 with
    g = lane // 4 and t = lane % 4. It reads the words of four cells at once, counts the bits below its own
    to find its first value, and then takes a value wherever a bit is set.
    """
    cells = 64 // group // run
    words = record[: cells * run * 4].view(np.uint32).reshape(cells // 4, run, 4)
    starts = record[cells * run * 4 : record_head(group)].view(np.uint16).reshape(cells // 4, run, 4)
    tile = np.zeros((16, 16), np.uint16)
    for lane in range(32):
        word, shift = lane * run // 32, lane * run % 32
        registers = []
        for cell in range(cells):
            bits = int(words[cell // 4, word, cell % 4])
            place = int(starts[cell // 4, word, cell % 4]) + 2 * group * (bits & ((1 << shift) - 1)).bit_count()
            for j in range(run):
                live = bits >> (shift + j) & 1
                registers.append(record[place : place + 2 * group].view(np.uint16) if live else np.zeros(group, "u2"))
                place += 2 * group * live
        elements = np.concatenate(registers)[8 * multiply : 8 * multiply + 8].reshape(4, 2)
        for register, (low, high) in enumerate(elements):
            row, column = lane // 4 + 8 * (register % 2), 2 * (lane % 4) + 8 * (register // 2)
            tile[row, column], tile[row, column + 1] = low, high
    return torch.from_numpy(tile.view(np.int16)).view(torch.bfloat16).float()


def tile_of_x(x, k, multiply):
    """Return the (tokens, 16) tile that lanes hold of x: of every 32 inputs, lane t has 16 bytes, for two of them."""
    tile = torch.zeros(len(x), 16)
    for t in range(4):
        piece = x[:, k + multiply // 2 * 32 + 8 * t :][:, 4 * (multiply % 2) : 4 * (multiply % 2) + 4]
        tile[:, 2 * t : 2 * t + 2], tile[:, 2 * t + 8 : 2 * t + 10] = piece[:, :2], piece[:, 2:]
    return tile


@pytest.mark.parametrize(("group", "run"), KINDS)
@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
def test_lanes_find_every_value_in_its_place(group, run, density):
    mask = mask_of(20, 150, density, seed=run)
    weight, x = draw(20, 150, dtype=torch.bfloat16), draw(3, 150, seed=1)
    records, offsets = BitmapLayout(TeSA.from_mask(mask), group, run).pack(weight)
    data, begins = records.numpy().view(np.uint8), offsets.tolist()
    padded = torch.nn.functional.pad(x, (0, 256 - 150))
    y = torch.zeros(3, 32)
    for slab in range(2):
        for chunk in range(2):
            record = data[begins[slab * 2 + chunk] * 16 : begins[slab * 2 + chunk + 1] * 16]
            for multiply in range(8):
                tile, inputs = tile_of_lanes(record, group, run, multiply), tile_of_x(padded, chunk * CHUNK, multiply)
                y[:, slab * SLAB : (slab + 1) * SLAB] += inputs @ tile.t()
    expected = x @ torch.where(mask, weight, 0).float().t()
    torch.testing.assert_close(y[:, :20], expected, atol=1e-4, rtol=1e-4)
    assert not y[:, 20:].any()


@given(
    rows=st.integers(1, 40), columns=st.integers(1, 300), density=st.sampled_from([0, 0.05, 0.5, 1]),
    kind=st.sampled_from(KINDS), seed=st.integers(0, 9),
)  # fmt: skip
def test_what_is_packed_is_unpacked(rows, columns, density, kind, seed):
    mask = mask_of(rows, columns, density, seed)
    weight = draw(columns, rows, dtype=torch.float16, seed=seed).t()  # strided on purpose
    layout = BitmapLayout(TeSA.from_mask(mask), *kind)
    records, offsets = layout.pack(weight)
    assert torch.equal(layout.unpack(records, torch.float16), torch.where(mask, weight, 0))
    sizes = offsets.diff() * 16
    assert len(records) * 2 == int(sizes.sum())
    assert int(sizes.max()) == layout.largest
    live = int(mask.sum())
    if kind[0] == 1:  # nothing is stored but heads, live values and what fills the last piece
        assert int(sizes.sum()) <= len(sizes) * (record_head(1) + 14) + 2 * live


def test_values_keep_their_bits():
    weight = torch.tensor([[torch.nan, -0.0, torch.inf, 1.0]], dtype=torch.bfloat16)
    layout = BitmapLayout(TeSA.from_mask(torch.ones(1, 4, dtype=torch.bool)))
    assert torch.equal(layout.unpack(layout.pack(weight)[0]).view(torch.int16), weight.view(torch.int16))


def test_another_weight_is_refused():
    layout = BitmapLayout(TeSA.from_mask(mask_of(8, 8, 0.5)))
    for weight in (draw(8, 12, dtype=torch.bfloat16), draw(8, 8)):
        with pytest.raises(ShapeError, match="16 bits"):
            layout.pack(weight)


def test_bad_parameters_are_refused():
    spec = linear_spec(TeSA.from_mask(mask_of(64, 64, 0.5)), 8, torch.bfloat16, device="cuda")
    with pytest.raises(ValueRangeError, match="groups of 1 or 2"):
        BitmapLayout(TeSA.dense((8, 8)), group=3)
    with pytest.raises(ValueRangeError, match="clusters"):
        BitmapTile(tokens=7)
    with pytest.raises(ValueRangeError, match="name=number"):
        CudaBitmap().build(spec, {"tile": "nonsense=1"})
    kernel = CudaBitmap().build(spec, CudaBitmap().default(spec))
    with pytest.raises(ValueRangeError, match="as when built"):
        kernel.pack(draw(64, 64, dtype=torch.float16))
    packed = kernel.pack(draw(64, 64, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="input of shape"):
        kernel.run(packed, draw(8, 63, dtype=torch.bfloat16), None, None)
    with pytest.raises(ValueRangeError, match="cast one"):
        kernel.run(packed, draw(8, 64), None, None)
    with pytest.raises(ShapeError, match="residual"):
        kernel.run(packed, draw(8, 64, dtype=torch.bfloat16), None, draw(8, 63, dtype=torch.bfloat16))


def test_refusals_have_reasons():
    def reason(mask, rows=8, dtype=torch.bfloat16, device="cuda"):
        return CudaBitmap().supports(linear_spec(TeSA.from_mask(mask), rows, dtype, device=device)).reason

    half = mask_of(64, 64, 0.5)
    assert "not on cpu" in reason(half, device="cpu")
    assert "not fp32" in reason(half, dtype=torch.float32)
    assert "17 tokens" in reason(half, rows=17)
    assert "is live" in reason(mask_of(64, 64, 0.9))
    assert "is live" in reason(half, rows=16)
    assert "0 elements" in reason(torch.ones(0, 4, dtype=torch.bool))


@pytest.mark.parametrize("density", [0.05, 0.25, 0.5, 0.75])
def test_every_tile_fits_into_shared_memory(density):
    mask = mask_of(64, 256, density)
    mask[:16, :128] = True  # one record that is full decides for all
    for rows in (1, 9, 16):
        spec = linear_spec(TeSA.from_mask(mask), rows, torch.float16)
        tiles = [BitmapTile.parse(text) for text in CudaBitmap().space(spec)["tile"].domain.values]
        assert tiles
        assert all(tile.tokens >= rows and tile.shared_bytes(4480) <= 227 * 1024 for tile in tiles if tile.group == 1)
