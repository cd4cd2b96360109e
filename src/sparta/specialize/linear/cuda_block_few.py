"""``cuda-block-few``: weights pruned in blocks for few tokens, read once from memory into registers.

The kernel is CUDA C++ (``native/few_blocks.cu``), compiled at run time for one tile, on the layout of ``triton-block``
with blocks of 64 bytes in a row. With few tokens a layer takes as long as it waits: for where its blocks are, for the
kernel that makes x, for the blocks. Here the first two waits and most of the third are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparta.specialize.cuda.device import HALF_FORMATS, HOPPER, takes
from sparta.specialize.cuda.few_tokens import nvrtc_here
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import StreamedKernel, streamed_call
from sparta.specialize.linear.triton_block.candidates import coverage
from sparta.specialize.linear.triton_block.layout import BlockLayout
from sparta.specialize.linear.triton_block.tile import BlockTile

__all__ = ["CudaBlockFew", "FewBlocksKernel", "FewBlocksTile", "few_blocks_fit", "few_blocks_tiles"]

_SLAB = 16  # outputs that the matrix unit multiplies at once
_ROW = 64  # bytes of a row of a kept block
_TOKENS = (1, 8, 16, 32)
_MOST_TOKENS = 32  # for more, tiles that come by the copy engine are faster
_MOST_COVERED = 0.7
_NO_MORE = 1.05  # times what lower blocks store
# slabs, warps, stages: what was among the fastest somewhere on an H200
_SHAPES = ((1, 8, 1), (2, 8, 1), (1, 4, 2), (2, 4, 2), (4, 8, 1), (4, 4, 2))


@dataclass(frozen=True)
class FewBlocksTile(TextTile):
    """How blocks of threads cut their work; it changes the speed, and of the result only how sums are rounded.

    Parameters
    ----------
    tokens
        Rows of x that a block of threads multiplies.
    slabs
        Slabs of 16 outputs of a kept block.
    warps
        Warps that share the kept blocks of a block row.
    stages
        Kept blocks that a warp has on their way at once.

    Examples
    --------
    >>> FewBlocksTile.parse(str(FewBlocksTile(8, slabs=2))).rows
    32
    """

    tokens: int = 1
    slabs: int = 2
    warps: int = 2
    stages: int = 3

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "tokens": _TOKENS,
        "slabs": (1, 2, 4),
        "warps": (1, 2, 4, 8, 16),
        "stages": (1, 2, 3, 4, 6, 8),
    }

    @property
    def rows(self) -> int:
        """Outputs of a kept block."""
        return self.slabs * _SLAB

    def shared_bytes(self) -> int:
        """Return the shared memory of a block of threads: the sums of its warps."""
        return self.warps * self.tokens * (self.rows + 4) * 4


class FewBlocksLayout:
    """Packs a weight (N, K) in kept blocks of `rows` outputs and 64 bytes.

    Parameters
    ----------
    itemsize
        Bytes of an element of what is packed.
    """

    def __init__(self, spec: KernelSpec, rows: int, itemsize: int) -> None:
        self._layout = BlockLayout(spec["weight"], BlockTile(height=rows, width=_ROW // itemsize))

    @property
    def grid(self) -> tuple[int, int]:
        """Number of blocks along each axis."""
        return self._layout.grid

    def pack(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return kept blocks, their columns, the schedule."""
        index = self._layout.index(weight.device)
        return self._layout.values(weight), index.columns, index.schedule


class FewBlocksKernel(StreamedKernel):
    """See ``native/few_blocks.cu``."""

    source = "few_blocks"
    call = streamed_call(3)
    early = True

    def __init__(
        self, spec: KernelSpec, tile: FewBlocksTile, itemsize: int, constants: Mapping[str, int] | None = None
    ) -> None:
        layout = FewBlocksLayout(spec, tile.rows, itemsize)
        block = (tile.warps * 32, tile.shared_bytes())
        super().__init__(spec, tile, layout, (tile.tokens, tile.rows, 1), block, constants=constants)


class CudaBlockFew(TiledImplement):
    """CUDA C++ on kept blocks of 16 to 64 outputs, for up to 32 tokens on Hopper."""

    name = "cuda-block-few"
    op = "linear"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper, few tokens, where kept blocks leave enough out."""
        return takes(spec, HALF_FORMATS) and few_blocks_fit(spec, 2)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return few_blocks_tiles(spec, 2)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the kept blocks; the kernel is compiled at its first run."""
        return FewBlocksKernel(spec, FewBlocksTile.parse(params["tile"]), 2)


def few_blocks_fit(spec: KernelSpec, itemsize: int) -> Support:
    """Say whether the kernel takes a weight and its tokens, in elements of so many bytes.

    >>> import torch
    >>> from sparta.specialize.linear.spec import linear_spec
    >>> from sparta.tesa.attribute import TeSA
    >>> few_blocks_fit(linear_spec(TeSA.dense((16, 256)), 100, torch.bfloat16, device="cuda"), 2).reason
    '100 tokens; it reads the weight for at most 32'
    """
    weight, tokens = spec["weight"], spec["input"].shape[0]
    if min(weight.shape) < 1:
        return Support.no("the weight is empty", Cause.SHAPE)
    if tokens > _MOST_TOKENS:
        return Support.no(f"{tokens} tokens; it reads the weight for at most {_MOST_TOKENS}", Cause.SHAPE)
    block = (_SLAB, _ROW // itemsize)
    covered = coverage(weight, [block])[block]
    if covered > _MOST_COVERED:
        given = f"blocks of {block[0]}×{block[1]} with a live weight cover {covered:.2f} of the matrix"
        return Support.no(f"{given}; at most {_MOST_COVERED} pays", Cause.PATTERN)
    return nvrtc_here(HOPPER) and Support.yes("kept blocks are read once, into registers")


def few_blocks_tiles(spec: KernelSpec, itemsize: int) -> list[FewBlocksTile]:
    """Return the tiles that are worth timing, the best guess first; higher blocks only where they store no more."""
    rows, width = spec["input"].shape[0], _ROW // itemsize
    tokens = next((each for each in _TOKENS if each >= rows), _TOKENS[-1])
    covered = coverage(spec["weight"], [(slabs * _SLAB, width) for slabs in (1, 2, 4)])
    tiles = [FewBlocksTile(tokens, *shape) for shape in _SHAPES]
    return [tile for tile in tiles if covered[tile.rows, width] <= _NO_MORE * covered[_SLAB, width]]
