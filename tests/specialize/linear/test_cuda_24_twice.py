"""An unstructured weight as two 2:4 weights: the sparse matrix unit finds every value of both where its input is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.specialize.cuda.few_tokens import SHARED_BYTES
from sparta.specialize.linear.cuda_24_twice import CudaTwice, TwiceTile
from sparta.specialize.linear.cuda_24_twice_layout import CHUNK, SLAB, TwiceLayout, record_bytes
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA

LANES = torch.arange(32)


def bits_of(words):
    """Return int16 words (32, n) as the bits (32, 16 n) that they are made of."""
    return (words.int()[..., None] >> torch.arange(16) & 1).flatten(1).bool()


class Record:
    """What a warp of the kernel does with a record."""

    def __init__(self, layout, elements):
        self.elements, self.at = elements, 0
        self.unit = layout.unit
        self.places = self.take(4)
        self.first = None if layout.whole else bits_of(self.take(2 // layout.unit))
        self.rest = bits_of(self.take(2 // layout.unit))
        if layout.whole:
            self.values = elements[self.at : self.at + 1024].view(4, 32, 4, 2)
            self.at += 1024
        counts = self.rest.sum(1) + (0 if layout.whole else self.first.sum(1))
        self.walk = self.at + layout.unit * (counts.cumsum(0) - counts)
        self.end = self.at + layout.unit * int(counts.sum())

    def take(self, each):
        found = self.elements[self.at : self.at + 32 * each].view(32, each)
        self.at += 32 * each
        return found

    def expanded(self, bits, multiply):
        """Return what lanes take for a multiplication, (32, 4 registers, 2)."""
        found = torch.zeros(32, 8 // self.unit, self.unit, dtype=torch.int16)
        for i in range(8 // self.unit):
            live = bits[:, multiply * (8 // self.unit) + i]
            for value in range(self.unit):
                found[live, i, value] = self.elements[self.walk[live] + value]
            self.walk += live * self.unit
        return found.view(32, 4, 2)

    def operands(self):
        """Yield multiplication, values (32, 4 registers, 2) and the places in its group of each."""
        for multiply in range(4):
            own = self.values[multiply] if self.first is None else self.expanded(self.first, multiply)
            places = torch.zeros(32, 4, 2, dtype=torch.int64)
            for register in range(4):
                # Two lanes of a quad say where values of a multiplication are, and the others those of the next one.
                teller = LANES // 4 * 4 + multiply % 2 * 2 + register // 2
                nibble = self.places[teller, multiply // 2 * 2 + register % 2].long() >> 4 * (LANES % 4) & 15
                places[:, register] = torch.stack([nibble & 3, nibble >> 2], 1)
            assert bool((places[..., 0] < places[..., 1]).all())
            yield multiply, own, places
            yield multiply, self.expanded(self.rest, multiply), torch.tensor([2, 3]).expand(32, 4, 2)
        assert 0 <= len(self.elements) - self.end < 8


def multiplied(layout, weight):
    """Return the dense weight that the matrix unit takes from all records."""
    records, offsets = layout.pack(weight)
    (groups, chunks), slabs = layout.grid, layout.slabs
    dense = torch.zeros(groups * slabs * SLAB, chunks * CHUNK, dtype=torch.int16)
    for number in range(groups * chunks * slabs):
        begin, end = offsets[number : number + 2].tolist()
        group, chunk, slab = number // (chunks * slabs), number // slabs % chunks, number % slabs
        for multiply, values, places in Record(layout, records[begin * 8 : end * 8]).operands():
            for register in range(4):
                row = (group * slabs + slab) * SLAB + register % 2 * 8 + LANES // 4
                # Of what the unit counts as input 8 i + 2 t + odd, lane t of each quad brings neighbours in x.
                logical = (register // 2 * 4 + LANES % 4)[:, None] * 4 + places[:, register]
                column = chunk * CHUNK + multiply * 32 + logical % 8 // 2 * 8 + logical // 8 * 2 + logical % 2
                dense[row[:, None], column] += values[:, register]
    n, k = layout.weight.shape
    assert not dense[n:].any()
    assert not dense[:, k:].any()
    return dense[:n, :k]


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 500)),
    st.sampled_from([0.0, 0.1, 0.5, 0.8, 1.0]),
    st.sampled_from([(1, True), (2, True), (1, False), (2, False)]),
    st.sampled_from([(1, 1), (3, 1), (2, 2)]),
)
def test_the_matrix_unit_finds_every_live_value(shape, density, way, cut):
    mask = torch.rand(shape) < density
    weight = torch.randint(1, 30000, shape, dtype=torch.int16)
    layout = TwiceLayout(TeSA.from_mask(mask), *way, *cut)
    expected = torch.where(mask, weight, 0)
    assert torch.equal(multiplied(layout, weight), expected)
    assert torch.equal(layout.unpack(layout.pack(weight)[0], torch.int16), expected)


@pytest.mark.parametrize(
    ("density", "unit", "whole", "bits"), [(0.5, 1, True, 11.2), (0.5, 2, True, 12.0), (0.3, 1, False, 7.2)]
)
def test_it_is_small(density, unit, whole, bits):
    torch.manual_seed(0)
    mask = torch.rand(64, 4096) < density
    records, _ = TwiceLayout(TeSA.from_mask(mask), unit, whole, 2).pack(torch.ones(64, 4096).bfloat16())
    assert records.numel() * 16 < bits * mask.numel()


def test_the_largest_record_is_that_of_the_densest_slab():
    mask = torch.zeros(64, 256, dtype=torch.bool)
    mask[16:32, 128:] = True
    assert TwiceLayout(TeSA.from_mask(mask)).largest(torch.device("cpu")) == record_bytes(
        SLAB * CHUNK // 2, 1, whole=True
    )
    assert TwiceLayout(TeSA.from_mask(mask), 2, whole=False).largest(torch.device("cpu")) == record_bytes(
        SLAB * CHUNK // 2, 2, whole=False
    )


def test_what_does_not_fit_is_refused_with_a_reason():
    tesa = TeSA.from_mask(torch.rand(32, 256) < 0.5)
    with pytest.raises(ShapeError):
        TwiceLayout(tesa).pack(torch.zeros(32, 256))
    with pytest.raises(ValueRangeError, match="a unit of 1 or 2"):
        TwiceLayout(tesa, 3)
    implement = CudaTwice()
    assert "17 tokens" in implement.supports(linear_spec(tesa, 17, torch.bfloat16, device="cuda")).reason
    assert "fp32" in implement.supports(linear_spec(tesa, 4, torch.float32, device="cuda")).reason
    dense = linear_spec(TeSA.dense((32, 256)), 4, torch.bfloat16, device="cuda")
    assert "1.00 of the weight" in implement.supports(dense).reason
    little = TeSA.from_mask(torch.rand(32, 256) < 0.05)
    assert "it pays from" in implement.supports(linear_spec(little, 4, torch.bfloat16, device="cuda")).reason


@pytest.mark.parametrize("shape", [(14336, 4096), (8192, 8192), (17, 5), (4096, 11008), (100, 100000)])
@pytest.mark.parametrize("tokens", [1, 16])
def test_every_tile_fits(shape, tokens):
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, : max(1, shape[1] // 2)] = True  # the largest records that there are
    spec = linear_spec(TeSA.from_mask(mask), tokens, torch.bfloat16, device="cuda")
    tiles = CudaTwice().tiles(spec)
    assert tiles
    for tile in tiles:
        values = SLAB * CHUNK // 2 if tile.whole else SLAB * CHUNK
        largest = record_bytes(values // tile.unit, tile.unit, whole=bool(tile.whole))
        assert tile.stages(largest) >= 2
        assert tile.shared_bytes(largest) <= SHARED_BYTES
        assert TwiceTile.parse(str(tile)) == tile
