"""``cuda-bitmap``: unstructured weights for few tokens, streamed once as bits and live values.

The kernel is CUDA C++ (``native/bitmap.cu``), compiled at run time for one tile; it needs the bulk copies of Hopper.
With few tokens a linear layer takes as long as its weight takes to read, and a weight of density d is about d + 0.09 of
the bytes. A pruned weight counts as 0, so a token that is not finite makes its results not finite, as in the dense
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparta.errors import ValueRangeError, message
from sparta.specialize.cuda.device import HALF_FORMATS, HOPPER, takes
from sparta.specialize.cuda.few_tokens import (
    SHARED_BYTES,
    nvrtc_here,
)
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_bitmap_layout import GROUPS, RUNS, SLAB, BitmapLayout, largest_record
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import StreamedKernel, streamed_call

__all__ = ["BitmapTile", "CudaBitmap"]

_TOKENS = (8, 16)
_MOST_LIVE = {8: 0.55, 16: 0.35}  # density by tokens, up to which it was faster than dense on an H200
_SPARSE, _DENSE = 0.16, 0.4  # densities between which neither kind of bitmap is always the better one
# slabs, warps, cluster, stages: what keeps enough copies on their way and enough warps busy.
_SHAPES = ((1, 8, 1, 2), (1, 16, 1, 2), (2, 8, 1, 2), (1, 4, 1, 3), (2, 16, 1, 2), (2, 4, 1, 3))


@dataclass(frozen=True)
class BitmapTile(TextTile):
    """How one block of threads cuts its work; it changes the speed, and of the result only how sums are rounded.

    Parameters
    ----------
    tokens
        Rows of x that a block multiplies.
    group, run
        How the weight is packed, see :class:`~sparta.specialize.linear.cuda_bitmap_layout.BitmapLayout`.
    slabs
        Slabs of 16 outputs that a warp multiplies; x is read once for all of them.
    warps
        Warps of a block, which share the input channels.
    cluster
        Blocks that share the input channels of the same outputs.
    stages
        Chunks of 128 input channels that a warp has on their way at once.

    Examples
    --------
    >>> BitmapTile.parse(str(BitmapTile(8, slabs=2))) == BitmapTile(8, slabs=2)
    True
    """

    tokens: int = 8
    group: int = 1
    run: int = 8
    slabs: int = 1
    warps: int = 8
    cluster: int = 1
    stages: int = 2

    def __post_init__(self) -> None:
        least = min(self.slabs, self.warps, self.cluster, self.stages)
        fits = self.tokens in _TOKENS and self.group in GROUPS and self.run in RUNS
        if not fits or least < 1 or self.warps > 32 or self.cluster > 8:
            allowed = "tokens of 8 or 16, groups of 1 or 2, runs of 4 or 8, at most 32 warps, clusters of at most 8"
            raise ValueRangeError(message(f"the tile {self}", allowed))

    @property
    def rows(self) -> int:
        """Outputs of a block."""
        return self.slabs * SLAB

    def shared_bytes(self, largest: int) -> int:
        """Return the shared memory of a block for records of at most `largest` bytes."""
        stage = self.slabs * largest
        barriers = -(-self.warps * self.stages * 8 // 16) * 16
        return barriers + self.warps * max(self.stages * stage, self.tokens * (self.rows + 4) * 4)


class _BitmapKernel(StreamedKernel):
    """See ``native/bitmap.cu``."""

    source = "bitmap"
    call = streamed_call(2, "slot")

    def __init__(self, spec: KernelSpec, tile: BitmapTile) -> None:
        layout = BitmapLayout(spec["weight"], tile.group, tile.run)
        block = (tile.warps * 32, tile.shared_bytes(layout.largest))
        shape = (tile.tokens, tile.rows, tile.cluster)
        super().__init__(spec, tile, layout, shape, block, numbers=(layout.largest,))


class CudaBitmap(TiledImplement):
    """CUDA C++ on any mask, for up to 16 tokens."""

    name = "cuda-bitmap"
    op = "linear"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper, weights and numbers of tokens for which it was faster than dense somewhere."""
        weight = spec["weight"]
        answer = takes(spec, HALF_FORMATS)
        if not answer:
            return answer
        if not 0 < weight.numel < 1 << 31:
            return Support.no(f"the weight has {weight.numel} elements; it counts from 1 to 2^31", Cause.SHAPE)
        if spec["input"].shape[0] > _TOKENS[-1]:
            given = f"{spec['input'].shape[0]} tokens"
            return Support.no(f"{given}; it streams the weight for at most {_TOKENS[-1]}", Cause.SHAPE)
        most = _MOST_LIVE[_width(spec)]
        if weight.density > most:
            given = f"{weight.density:.2f} of the weight is live"
            return Support.no(f"{given}; at most {most} pays for so many tokens", Cause.PATTERN)
        return nvrtc_here(HOPPER) and Support.yes("bits and live values are streamed once")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return _tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return _BitmapKernel(spec, BitmapTile.parse(params["tile"]))


def _tiles(spec: KernelSpec) -> list[BitmapTile]:
    """Return tiles that fit into shared memory, the best guess first."""
    tokens, density = _width(spec), spec["weight"].density
    groups = (1,) if density > _DENSE else (2,) if density < _SPARSE else (2, 1)
    largest = {group: largest_record(spec["weight"], group) for group in groups}
    tiles = [BitmapTile(tokens, group, 8, *shape) for shape in _SHAPES for group in groups]
    if density > _DENSE:  # runs of 4 take more steps, but values that lanes want at once stand closer together
        tiles += [BitmapTile(tokens, 1, 4, *shape) for shape in _SHAPES[:2]]
    return [tile for tile in tiles if tile.shared_bytes(largest[tile.group]) <= SHARED_BYTES]


def _width(spec: KernelSpec) -> int:
    """Return how many tokens a block multiplies."""
    return next((each for each in _TOKENS if each >= spec["input"].shape[0]), _TOKENS[-1])
