"""``cuda-24-twice``: unstructured weights for few tokens, as the sum of two 2:4 weights in one kernel.

The kernel is CUDA C++ (``native/twice24.cu``), compiled at run time for one tile. The sparse matrix unit expands what
it multiplies; so of a weight that is about half live, a warp itself expands only what some groups of four have
too much.
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
from sparta.specialize.linear.cuda_24_twice_layout import SLAB, TwiceLayout
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import StreamedKernel, streamed_call, walking_pays, walking_width

__all__ = ["CudaTwice", "TwiceTile"]

_MOST_LIVE = {8: 0.6, 16: 0.6}  # density by tokens
_LEAST_LIVE = 0.25  # below, kernels that skip zeros in both parts read less
_MULTIPROCESSORS = 132
_MOST_STAGES, _SHAPES = 12, 2
_FEW_SLABS, _WARPS = 4, (16, 12)  # of up to so many slabs, and of more: what registers hold


@dataclass(frozen=True)
class TwiceTile(TextTile):
    """How one block of threads cuts its work; it changes the speed, and of the result only how sums are rounded.

    Parameters
    ----------
    tokens
        Rows of x that a block multiplies.
    unit, whole, slabs
        How the weight is packed, see :class:`~sparta.specialize.linear.cuda_24_twice_layout.TwiceLayout`.
    beside
        Warps of a block that have outputs of their own.
    along
        Warps of a block that share the input channels of the same outputs.
    cluster
        Blocks that share the input channels of the same outputs.

    Examples
    --------
    >>> TwiceTile.parse(str(TwiceTile(16, slabs=7))).rows
    112
    """

    tokens: int = 8
    unit: int = 1
    whole: int = 1
    slabs: int = 4
    beside: int = 1
    along: int = 8
    cluster: int = 1

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "tokens": tuple(_MOST_LIVE),
        "unit": (1, 2),
        "whole": (0, 1),
        "slabs": tuple(range(1, 9)),
        "beside": tuple(range(1, 17)),
        "along": tuple(range(1, 17)),
        "cluster": (1, 2, 4, 8),
    }

    @property
    def rows(self) -> int:
        """Outputs of a block."""
        return self.beside * self.slabs * SLAB

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.beside * self.along

    def stages(self, largest: int) -> int:
        """Return how many records of at most `largest` bytes each warp has a place for."""
        barriers = -(-self.warps * _MOST_STAGES * 8 // 128) * 128
        return min(_MOST_STAGES, (SHARED_BYTES - barriers) // (self.warps * largest))

    def shared_bytes(self, largest: int) -> int:
        """Return the shared memory of a block: barriers and rings, later the partial sums."""
        barriers = -(-self.warps * self.stages(largest) * 8 // 128) * 128
        ring = self.warps * self.stages(largest) * largest
        return barriers + max(ring, self.along * self.tokens * (self.rows + 4) * 4)


class _TwiceKernel(StreamedKernel):
    """See ``native/twice24.cu``."""

    source = "twice24"
    call = streamed_call(2, "slot")
    early = True

    def __init__(self, spec: KernelSpec, tile: TwiceTile) -> None:
        layout = TwiceLayout(spec["weight"], tile.unit, bool(tile.whole), tile.slabs, tile.beside)
        here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        largest = layout.largest(here)
        shape, block = (tile.tokens, tile.rows, tile.cluster), (tile.warps * 32, tile.shared_bytes(largest))
        super().__init__(spec, tile, layout, shape, block, (largest,), {"STAGES": tile.stages(largest)})


class CudaTwice(TiledImplement):
    """CUDA C++ on any mask, for up to 16 tokens."""

    name = "cuda-24-twice"
    op = "linear"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper, few tokens, weights of which about half is live."""
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
        return _TwiceKernel(spec, TwiceTile.parse(params["tile"]))


def _tiles(spec: KernelSpec) -> list[TwiceTile]:
    """Return tiles, the best guess first."""
    tokens = walking_width(spec, _MOST_LIVE)
    shapes = _shapes(spec["weight"].shape[0])
    return [TwiceTile(tokens, unit, 1, *shape) for shape in shapes for unit in (1, 2)]


def _shapes(outputs: int) -> list[tuple[int, int, int, int]]:
    """Return slabs, beside, along and cluster such that the busiest multiprocessor has the least to do."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 0
    processors = processors or _MULTIPROCESSORS
    found = []
    for slabs, cluster in itertools.product(range(1, 9), (1, 2)):
        blocks = -(-outputs // (slabs * SLAB)) * cluster
        waves = -(-blocks // processors)
        found.append((waves * slabs / cluster, waves, cluster, (slabs, 1, _WARPS[slabs > _FEW_SLABS], cluster)))
    return [shape for *_, shape in sorted(found)[:_SHAPES]]
