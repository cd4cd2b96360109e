"""How the gradient of a block-sparse weight is cut into chunks: each kept strip is in one, and all else is dead."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparta.specialize.cuda.few_tokens import SHARED_BYTES
from sparta.specialize.linear import cuda_block_gradient as gradient
from sparta.specialize.linear.cuda_block_gradient import GradientTile
from sparta.tesa.attribute import TeSA

TILES = gradient._TILES


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 20),
    share=st.floats(0, 1),
    seed=st.integers(0, 9),
    bias=st.booleans(),
)
def test_chunks_have_each_kept_strip_once(rows, columns, share, seed, bias):
    kept = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < share
    for tile in TILES:
        made = gradient._chunked(kept, tile, bias=bias)
        found, summed = torch.zeros_like(kept), []
        for output, begin, count, sums in made.chunks.tolist():
            assert count <= tile.boxes
            assert count or bias
            strips = made.columns[begin : begin + count] // 64
            assert not found[output // tile.height, strips].any()
            found[output // tile.height, strips] = True
            summed += [output // tile.height] * sums
        assert torch.equal(found, kept)
        assert sorted(summed) == (list(range(rows)) if bias else [])
        assert len(made.chunks) == gradient._count(kept, tile) or bias
        dead = torch.zeros(rows * tile.height // 64, columns, dtype=torch.bool)
        dead[made.dead[:, 0] // 64, made.dead[:, 1] // 64] = True
        assert torch.equal(dead, ~kept.repeat_interleave(tile.height // 64, 0))
        assert len(made.dead) == int(dead.sum())


def test_a_tile_fits_into_shared_memory_with_a_ring_of_several_stages():
    for tile in TILES:
        assert tile.stages >= 3
        assert tile.shared_bytes <= SHARED_BYTES
        assert GradientTile.parse(str(tile)) == tile


def test_the_tile_that_fetches_least_is_chosen(monkeypatch):
    monkeypatch.setattr(gradient, "capability", lambda: gradient.HOPPER)
    monkeypatch.setattr(gradient, "nvrtc_here", lambda _: True)

    def chosen(kept, size=128):
        mask = kept.repeat_interleave(size, 0).repeat_interleave(size, 1)
        return gradient.gradient_tile(TeSA.from_mask(mask), float(kept.float().mean()))

    generator = torch.Generator().manual_seed(0)
    some = [torch.rand(32, 32, generator=generator) < density for density in (0.02, 0.08, 0.2)]
    assert [chosen(kept) for kept in some] == [None, GradientTile(128, 2), GradientTile(128, 4)]
    assert chosen(torch.rand(64, 64, generator=generator) < 0.1, 64) == GradientTile(64, 4)
    assert chosen(torch.rand(128, 128, generator=generator) < 0.1, 32) is None  # 64x64 would cover much more
    assert chosen(torch.ones(3, 5), 100) is None  # not multiples of 8
