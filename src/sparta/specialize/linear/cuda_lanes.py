"""``cuda-lanes``: unstructured weights for few tokens, every lane with live values and a bank of its own.

The kernel is CUDA C++ (``native/lanes.cu``), compiled at run time for one tile. It reads a weight as bits and live
values, and makes of them in registers what the dense matrix unit takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sparta.specialize.cuda.device import HALF_FORMATS, HOPPER, takes
from sparta.specialize.cuda.few_tokens import SHARED_BYTES, nvrtc_here
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_lanes_layout import COPIED, LANES, SLAB, LanesLayout
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import StreamedKernel, streamed_call, walking_pays, walking_width

__all__ = ["CudaLanes", "LanesTile"]

_MOST_LIVE = {8: 0.55, 16: 0.4}  # density by tokens
_LEAST_LIVE = 0.08  # below, what is fixed in its time weighs more than what lanes save
_SPARSE, _DENSE = 0.16, 0.4  # densities between which neither kind of bits is always the better one
_MULTIPROCESSORS = 132
_MOST_WARPS, _SHAPES = 16, 4


@dataclass(frozen=True)
class LanesTile(TextTile):
    """How one block of threads cuts its work; it changes the speed, and of the result only how sums are rounded.

    Parameters
    ----------
    tokens
        Rows of x that a block multiplies.
    group, slabs
        How the weight is packed, see :class:`~sparta.specialize.linear.cuda_lanes_layout.LanesLayout`.
    beside
        Warps of a block that have outputs of their own.
    along
        Warps of a block that share the input channels of the same outputs.
    cluster
        Blocks that share the input channels of the same outputs.
    stages
        Copies of 8 rows that a warp has a place for.
    apart
        Rows that lanes may be apart when a chunk ends; fewer leave more places to copies that are on their way, more
        leave fewer places of a row empty.

    Examples
    --------
    >>> LanesTile.parse(str(LanesTile(16, slabs=1))).rows
    64
    """

    tokens: int = 8
    group: int = 1
    slabs: int = 2
    beside: int = 4
    along: int = 4
    cluster: int = 1
    stages: int = 12
    apart: int = 64

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "tokens": tuple(_MOST_LIVE),
        "group": (1, 2),
        "slabs": tuple(range(1, 9)),
        "beside": tuple(range(1, 33)),
        "along": tuple(range(1, 33)),
        "cluster": (1, 2, 4, 8),
        "stages": tuple(range(2, 33)),
        "apart": tuple(range(257)),
    }

    @property
    def rows(self) -> int:
        """Outputs of a block."""
        return self.beside * self.slabs * SLAB

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.beside * self.along

    def shared_bytes(self) -> int:
        """Return the shared memory of a block: barriers and rings, later the partial sums."""
        barriers = -(-self.warps * self.stages * 8 // 128) * 128
        ring = self.warps * (self.stages + 1) * COPIED * LANES * 4
        return barriers + max(ring, self.along * self.tokens * (self.rows + 4) * 4)


class _LanesKernel(StreamedKernel):
    """See ``native/lanes.cu``."""

    source = "lanes"
    call = streamed_call(4)
    early = True

    def __init__(self, spec: KernelSpec, tile: LanesTile) -> None:
        parts, ring = tile.along * tile.cluster, tile.stages * COPIED
        layout = LanesLayout(spec["weight"], tile.group, tile.slabs, tile.beside, parts, ring, tile.apart)
        super().__init__(
            spec, tile, layout, (tile.tokens, tile.rows, tile.cluster), (tile.warps * 32, tile.shared_bytes())
        )


class CudaLanes(TiledImplement):
    """CUDA C++ on any mask, for up to 16 tokens."""

    name = "cuda-lanes"
    op = "linear"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper, few tokens, weights of which not much more than half is live."""
        answer = takes(spec, HALF_FORMATS) and walking_pays(spec, _MOST_LIVE, _tiles)
        if answer and spec["weight"].density < _LEAST_LIVE:
            given = f"{spec['weight'].density:.2f} of the weight is live"
            return Support.no(f"{given}; it pays from {_LEAST_LIVE} on", Cause.PATTERN)
        return answer and nvrtc_here(HOPPER)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return _tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return _LanesKernel(spec, LanesTile.parse(params["tile"]))


def _tiles(spec: KernelSpec) -> list[LanesTile]:
    """Return tiles that fit into shared memory, the best guess first."""
    tokens, density = walking_width(spec, _MOST_LIVE), spec["weight"].density
    groups = (1,) if density > _DENSE else (2,) if density < _SPARSE else (2, 1)
    return [LanesTile(tokens, group, *shape) for shape in _shapes(spec["weight"].shape[0]) for group in groups]


def _shapes(outputs: int) -> list[tuple[int, int, int, int, int]]:
    """Return slabs, beside, along, cluster and stages such that the busiest multiprocessor has the least to do."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 0
    processors = processors or _MULTIPROCESSORS
    found = []
    for slabs, cluster, beside in itertools.product((1, 2), (1, 2), range(1, _MOST_WARPS + 1)):
        along = _MOST_WARPS // beside
        blocks = -(-outputs // (slabs * beside * SLAB)) * cluster
        waves = -(-blocks // processors)
        busiest = waves * slabs * beside / cluster
        idle = _MOST_WARPS - beside * along
        found.append((waves, busiest, -slabs, idle, (slabs, beside, along, cluster, _stages(beside * along))))
    return [shape for *_, shape in sorted(found)[:_SHAPES]]


def _stages(warps: int) -> int:
    """Return how many copies have a place in shared memory if each of the warps has as many."""
    return min(12, (SHARED_BYTES - 1024) // warps // (COPIED * LANES * 4) - 1)
