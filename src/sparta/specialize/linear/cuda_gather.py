"""``cuda-gather``: unstructured weights of which little is live, for very few tokens.

The kernel is CUDA C++ (``native/gather.cu``), compiled at run time for one tile. It reads a byte or half of one more
than a live value for each, and does nothing for those that are pruned, so that its time follows the density; a bitmap
takes a bit and a look for every element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sparta.specialize.cuda.device import AMPERE, HALF_FORMATS, takes
from sparta.specialize.cuda.few_tokens import SHARED_BYTES, nvrtc_here
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_gather_layout import BANKS, GatherLayout, spread_of
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import StreamedKernel, streamed_call, walking_pays, walking_width

__all__ = ["CudaGather", "GatherTile", "gather_fits", "gather_tiles"]

_MOST_LIVE = {1: 0.4, 2: 0.2, 4: 0.1}  # density by tokens; each of them is one more look into shared memory
_SHAPES = ((16, 256, 3), (32, 256, 3), (32, 512, 2), (16, 256, 4), (16, 128, 4), (64, 512, 3))  # rows, threads, depth
_NIBBLE_SHAPES = ((16, 256, 2), (32, 256, 2), (32, 512, 2), (16, 256, 3), (16, 128, 3))
_NIBBLES_PAY = 0.14  # density from which on most distances fit into half a byte


@dataclass(frozen=True)
class GatherTile(TextTile):
    """How one block of threads cuts its work; it changes the speed, and of the result only how sums are rounded.

    Parameters
    ----------
    tokens
        Rows of x that a block multiplies.
    rows
        Outputs of a block.
    threads
        Of a block; threads / rows of them share an output.
    depth
        Pieces of 8 live values, or 16, that a thread has on their way at once.
    nibbles
        1 if distances take half a byte, in pieces of 16; 0 if they take a byte.

    Examples
    --------
    >>> GatherTile.parse(str(GatherTile(2, rows=32))).parts
    8
    """

    tokens: int = 1
    rows: int = 16
    threads: int = 256
    depth: int = 3
    nibbles: int = 0

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "tokens": tuple(_MOST_LIVE),
        "rows": (8, 16, 32, 64),
        "threads": (64, 128, 256, 512),
        "depth": (1, 2, 3, 4, 6),
        "nibbles": (0, 1),
    }

    @property
    def parts(self) -> int:
        """Threads that share an output."""
        return self.threads // self.rows

    def shared_bytes(self, inputs: int) -> int:
        """Return the shared memory of a block: all of x, later the partial sums."""
        planes = -(-self.tokens // 2)
        return max(planes * BANKS * 4 * spread_of(inputs), self.threads * self.tokens * 4)


class GatherKernel(StreamedKernel):
    """See ``native/gather.cu``."""

    source = "gather"
    call = streamed_call(3)
    early = True

    def __init__(self, spec: KernelSpec, tile: GatherTile, constants: Mapping[str, int] | None = None) -> None:
        layout = GatherLayout(spec["weight"], tile.rows, tile.parts, bool(tile.nibbles))
        block = (tile.threads, tile.shared_bytes(spec["weight"].shape[1]))
        super().__init__(spec, tile, layout, (tile.tokens, tile.rows, 1), block, constants=constants)


class CudaGather(TiledImplement):
    """CUDA C++ on any mask, for up to 4 tokens."""

    name = "cuda-gather"
    op = "linear"
    version = 2
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on CUDA, very few tokens, weights of which little is live."""
        return takes(spec, HALF_FORMATS) and gather_fits(spec) and nvrtc_here(AMPERE)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return gather_tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return GatherKernel(spec, GatherTile.parse(params["tile"]))


def gather_fits(spec: KernelSpec) -> Support:
    """Say whether a weight and a number of tokens are such that walking over live values may pay.

    >>> from sparta.specialize.linear.spec import linear_spec
    >>> from sparta.tesa.attribute import TeSA
    >>> import torch
    >>> gather_fits(linear_spec(TeSA.dense((16, 16)), 1, torch.bfloat16, device="cuda")).reason
    '1.00 of the weight is live; at most 0.4 pays for so many tokens'
    """
    return walking_pays(spec, _MOST_LIVE, gather_tiles)


def gather_tiles(spec: KernelSpec, *, narrow: bool = False) -> list[GatherTile]:
    """Return tiles that fit into shared memory, the best guess first.

    Parameters
    ----------
    narrow
        Whether values take 8 bits.
    """
    inputs, width = spec["weight"].shape[1], walking_width(spec, _MOST_LIVE)
    shapes = [(*shape, 0) for shape in _SHAPES]
    if narrow and spec["weight"].density >= _NIBBLES_PAY:
        shapes = [*((*shape, 1) for shape in _NIBBLE_SHAPES), *shapes[:2]]
    tiles = [GatherTile(tokens, *shape) for tokens in (width, width // 2) if tokens for shape in shapes]
    return [tile for tile in tiles if tile.shared_bytes(inputs) <= SHARED_BYTES][: len(shapes)]
