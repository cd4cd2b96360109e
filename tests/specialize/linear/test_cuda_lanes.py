"""Lanes with live values of their own: they find every one of them, in a ring that holds what they need."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparta.errors import ShapeError, ValueRangeError
from sparta.specialize.cuda.few_tokens import SHARED_BYTES
from sparta.specialize.linear.cuda_lanes import CudaLanes, LanesTile
from sparta.specialize.linear.cuda_lanes_layout import COPIED, LANES, SLAB, LanesLayout
from sparta.specialize.linear.spec import linear_spec
from sparta.tesa.attribute import TeSA


class Warp:
    """What a warp of the kernel does with its rows: a ring whose copies come in order and only into free places."""

    def __init__(self, rows, ring):
        self.rows, self.ring = rows, torch.full((ring, 2 * LANES), -7, dtype=torch.int16)
        self.stages, self.asked, self.ready = ring // COPIED, 0, 0
        self.fill(0)

    def fill(self, done):
        while self.asked * COPIED < len(self.rows) and (self.asked - self.stages + 1) * COPIED <= done:
            copied = self.rows[self.asked * COPIED :][:COPIED]
            place = self.asked % self.stages * COPIED
            self.ring[place : place + len(copied)] = copied
            self.asked += 1

    def need(self, rows):
        self.ready = max(self.ready, -(-rows // COPIED))
        assert self.ready <= self.asked, "the kernel would wait for ever"


def walked(layout, weight):
    """Return the dense weight that lanes find when they walk as the kernel does."""
    rows, bits, marks, firsts = layout.pack(weight)
    (groups, chunks), slabs, group = layout.grid, layout.slabs, layout.group
    dense = torch.zeros(groups * slabs * SLAB, chunks * layout.chunk, dtype=torch.int16)
    lanes, steps = torch.arange(LANES), layout.chunk // 32
    each = 32 // steps
    for number in range(groups * layout.parts):
        which, part = divmod(number, layout.parts)
        warp = Warp(rows[int(firsts[number]) : int(firsts[number + 1])], layout.ring)
        at = torch.zeros(2, LANES, dtype=torch.int64)  # rows of the walks of a lane
        for chunk in range(chunks * part // layout.parts, chunks * (part + 1) // layout.parts):
            needed, done = marks[which, chunk].tolist()
            warp.need(needed)
            for unit in range(steps * slabs):
                step, slab = divmod(unit, slabs)
                for i in range(each):
                    live = bits[which, chunk, slab].long() >> (step * each + i) & 1 == 1
                    for half in (i % 2,) if group == 1 else (0, 1):
                        walk = half if group == 1 else 0
                        found = warp.ring[at[walk] % layout.ring, lanes * 2 + half]
                        element = i * group + (half if group == 2 else 0)
                        row = (which * slabs + slab) * SLAB + lanes // 4 + 8 * (element // 2 % 2)
                        column = chunk * layout.chunk + step * 32 + 8 * (lanes % 4) + element // 4 * 2 + element % 2
                        dense[row[live], column[live]] = found[live]
                    at[i % 2 if group == 1 else 0] += live
            assert bool((at[: 3 - group] <= needed).all())
            if needed == done:
                at[:] = needed
            assert bool((at[: 3 - group] >= done).all())
            warp.fill(done)
        assert warp.asked * COPIED >= len(warp.rows)
        assert warp.ready == warp.asked  # nothing is on its way when the ring takes the sums
    n, k = layout.weight.shape
    assert not dense[n:].any()
    assert not dense[:, k:].any()
    return dense[:n, :k]


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 500)),
    st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    st.sampled_from([1, 2]),
    st.sampled_from([(1, 1, 1), (2, 2, 2), (1, 3, 5), (3, 1, 2)]),
    st.sampled_from([(112, 48), (160, 8)]),
)
def test_lanes_find_every_live_value(shape, density, group, cut, ring):
    mask = torch.rand(shape) < density
    weight = torch.randint(1, 30000, shape, dtype=torch.int16)
    layout = LanesLayout(TeSA.from_mask(mask), group, *cut, *ring)
    expected = torch.where(mask, weight, 0)
    assert torch.equal(walked(layout, weight), expected)
    assert torch.equal(layout.unpack(layout.pack(weight)[0], torch.int16), expected)


@pytest.mark.parametrize("group", [1, 2])
def test_lanes_that_are_far_apart_go_on_together(group):
    mask = torch.zeros(32, 1024, dtype=torch.bool)
    mask[3], mask[20, ::7] = True, True  # some lanes own what is dense, others nothing
    weight = torch.randint(1, 30000, mask.shape, dtype=torch.int16)
    layout = LanesLayout(TeSA.from_mask(mask), group, 2, 1, 2, 80)
    assert torch.equal(walked(layout, weight), torch.where(mask, weight, 0))
    _, _, marks, _ = layout.pack(weight)
    assert bool((marks[..., 0] == marks[..., 1]).any())


@pytest.mark.parametrize(("density", "group", "most"), [(0.5, 1, 1.13), (0.1, 2, 1.25)])
def test_few_places_stay_empty(density, group, most):
    torch.manual_seed(0)
    mask = torch.rand(64, 4096) < density
    rows, *_ = LanesLayout(TeSA.from_mask(mask), group, 2, 2, 2).pack(torch.ones(64, 4096).bfloat16())
    stored = mask.view(64, -1, group).any(-1).sum() * group
    assert rows.numel() < most * int(stored)


def test_what_does_not_fit_is_refused_with_a_reason():
    tesa = TeSA.from_mask(torch.rand(32, 256) < 0.1)
    with pytest.raises(ShapeError):
        LanesLayout(tesa).pack(torch.zeros(32, 256))
    with pytest.raises(ValueRangeError, match="a ring of 80 rows"):
        LanesLayout(tesa, 2, 2, 1, 1, 72)
    implement = CudaLanes()
    assert "17 tokens" in implement.supports(linear_spec(tesa, 17, torch.bfloat16, device="cuda")).reason
    assert "fp32" in implement.supports(linear_spec(tesa, 4, torch.float32, device="cuda")).reason
    dense = linear_spec(TeSA.dense((32, 256)), 4, torch.bfloat16, device="cuda")
    assert "1.00 of the weight" in implement.supports(dense).reason
    little = TeSA.from_mask(torch.rand(32, 256) < 0.02)
    assert "from 0.08 on" in implement.supports(linear_spec(little, 4, torch.bfloat16, device="cuda")).reason


@pytest.mark.parametrize("shape", [(14336, 4096), (8192, 8192), (17, 5), (4096, 11008), (100, 100000)])
@pytest.mark.parametrize("density", [0.1, 0.3, 0.5])
def test_every_tile_fits(shape, density):
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, : max(1, int(shape[1] * density))] = True
    spec = linear_spec(TeSA.from_mask(mask), 16, torch.bfloat16, device="cuda")
    tiles = CudaLanes().tiles(spec)
    assert tiles
    for tile in tiles:
        assert tile.shared_bytes() <= SHARED_BYTES
        assert LanesTile.parse(str(tile)) == tile
        LanesLayout(spec["weight"], tile.group, tile.slabs, tile.beside, tile.along, tile.stages * COPIED)
