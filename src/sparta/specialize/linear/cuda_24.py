"""``cuda-24``: 2:4 weights for few tokens, streamed once through the sparse matrix unit.

The kernel is CUDA C++ (``native/stream24.cu``), compiled at run time for one tile. With few tokens a linear layer takes
as long as its weight takes to read, and a 2:4 weight is 0.56 of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from sparta.errors import ValueRangeError, message
from sparta.specialize.cuda.device import AMPERE, HALF_FORMATS, HOPPER, capability, takes
from sparta.specialize.cuda.few_tokens import (
    SHARED_BYTES,
    nvrtc_here,
)
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_24_layout import CHUNK, SLAB, StreamLayout
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import StreamedKernel
from sparta.tesa.attribute import TeSA, live_cells
from sparta.tesa.grid import Grid

__all__ = ["StreamTile", "TwoFour", "is_two_four"]

_TOKENS = (8, 16, 32, 64)
_MOST_TOKENS = 64  # above it the matrix unit, as a warp alone can use it, is what bounds the time
# slabs, warps_n, warps_k, cluster, stages: what was among the fastest somewhere on an H200.
_FEW = ((2, 1, 8, 1, 2), (1, 1, 16, 1, 2), (2, 1, 16, 1, 2), (2, 2, 4, 1, 2), (1, 1, 8, 1, 3), (2, 1, 8, 1, 3))
_SOME = ((2, 2, 4, 1, 2), (2, 2, 4, 2, 2), (2, 4, 2, 2, 2), (1, 4, 2, 2, 2))


@dataclass(frozen=True)
class StreamTile(TextTile):
    """How one block of threads cuts its work; it changes the speed, and of the result only how sums are rounded.

    Parameters
    ----------
    tokens
        Rows of x that a block multiplies.
    slabs
        Slabs of 16 outputs that a warp multiplies; x is read once for all of them.
    warps_n, warps_k
        Warps side by side along the outputs, which share x; and along the input channels, which share the work.
    cluster
        Blocks that share the input channels of the same outputs (Hopper and later).
    stages
        Chunks of 128 input channels that are on their way at once.

    Examples
    --------
    >>> StreamTile.parse(str(StreamTile(8, slabs=2))) == StreamTile(8, slabs=2)
    True
    """

    tokens: int = 16
    slabs: int = 1
    warps_n: int = 1
    warps_k: int = 8
    cluster: int = 1
    stages: int = 2

    def __post_init__(self) -> None:
        least = min(self.slabs, self.warps_n, self.warps_k, self.cluster, self.stages)
        if self.tokens not in _TOKENS or least < 1 or self.warps_n * self.warps_k > 32 or self.cluster > 8:
            allowed = f"tokens of {', '.join(map(str, _TOKENS))}, at most 32 warps, clusters of at most 8"
            raise ValueRangeError(message(f"the tile {self}", allowed))

    @property
    def rows(self) -> int:
        """Outputs of a block."""
        return self.warps_n * self.slabs * SLAB

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring of x, later the partial sums."""
        ring = self.warps_k * self.stages * self.tokens * CHUNK * 2
        return max(ring, self.warps_k * self.tokens * (self.rows + 4) * 4)


class _StreamKernel(StreamedKernel):
    """See ``native/stream24.cu``."""

    source = "stream24"
    through_extension = True
    early = True

    def __init__(self, spec: KernelSpec, tile: StreamTile) -> None:
        block = (tile.warps_n * tile.warps_k * 32, tile.shared_bytes)
        super().__init__(spec, tile, StreamLayout(spec["weight"]), (tile.tokens, tile.rows, tile.cluster), block)


class TwoFour(TiledImplement):
    """CUDA C++ on 2:4 weights, for up to a few hundred tokens."""

    name = "cuda-24"
    op = "linear"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on CUDA, weights of at most 2 live elements in every 4, few tokens."""
        answer = takes(spec, HALF_FORMATS)
        if not answer:
            return answer
        if min(spec["weight"].shape) < 1:
            return Support.no("the weight is empty", Cause.SHAPE)
        if spec["input"].shape[0] > _MOST_TOKENS:
            given = f"{spec['input'].shape[0]} tokens"
            return Support.no(f"{given}; it streams the weight for at most {_MOST_TOKENS}", Cause.SHAPE)
        if not is_two_four(spec["weight"]):
            return Support.no("more than 2 of some 4 neighbouring inputs are live", Cause.PATTERN)
        return nvrtc_here(AMPERE) and Support.yes("the 2:4 weight is streamed once")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return _tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return _StreamKernel(spec, StreamTile.parse(params["tile"]))


def _tiles(spec: KernelSpec) -> list[StreamTile]:
    """Return tiles, the best guess first: enough warps in flight to hide the memory's latency, x read seldom."""
    rows = spec["input"].shape[0]
    tokens = next((each for each in _TOKENS if each >= rows), _TOKENS[-1])
    shapes = _FEW if tokens <= 32 else _SOME
    tiles = [StreamTile(tokens, *shape) for shape in shapes]
    clusters = capability() >= HOPPER
    return [tile for tile in tiles if tile.shared_bytes <= SHARED_BYTES and (clusters or tile.cluster == 1)]


def is_two_four(weight: TeSA) -> bool:
    """Return whether of every 4 neighbouring inputs of a weight (N, K) at most 2 are live.

    >>> is_two_four(TeSA.from_mask(torch.tensor([[True, False, True, False, True]])))
    True
    """
    if "two four" not in weight.found:
        weight.found["two four"] = _is_two_four(weight)
    return bool(weight.found["two four"])


def _is_two_four(weight: TeSA) -> bool:
    if weight.count("live") > -(-weight.shape[1] // 4) * 2 * weight.shape[0]:
        return False
    return weight.answered(_has_two_of_four)


def _has_two_of_four(state: Grid) -> bool:
    padded = functional.pad(live_cells(state).dense(), (0, -state.shape[1] % 4)).contiguous()
    # Four flags are the bytes of one number; the product sums them up in its highest byte.
    return not bool(((padded.view(torch.int32) * 0x01010101) >> 24 > 2).any())
