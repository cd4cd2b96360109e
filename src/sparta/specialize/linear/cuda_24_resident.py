"""``cuda-24-resident``: 2:4 weights for very few tokens, by blocks of threads that stay and keep x.

The kernel is CUDA C++ (``native/resident24.cu``), compiled at run time for one tile; the weight is packed as for
``cuda-24``. As long as x fits into shared memory, each block reads it once, and the weight streams past without a pause
between tiles of outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sparta.specialize.cuda.device import AMPERE, HALF_FORMATS, takes
from sparta.specialize.cuda.few_tokens import SHARED_BYTES, nvrtc_here
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_24 import is_two_four
from sparta.specialize.linear.cuda_24_layout import CHUNK, SLAB, StreamLayout
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import StreamedKernel

__all__ = ["ResidentKernel", "ResidentTile", "TwoFourResident", "resident_fits", "resident_tiles"]

_TOKENS = (1, 2, 4, 8, 16)
# slabs, warps, stages, ctas; those of 16 bits are what registers hold.
_SHAPES = ((2, 8, 3, 2), (1, 16, 4, 1), (1, 8, 4, 2), (1, 8, 6, 2), (1, 16, 3, 2))
_WIDE_SHAPES = ((1, 16, 4, 1), (1, 8, 4, 2))


@dataclass(frozen=True)
class ResidentTile(TextTile):
    """How blocks of threads cut their work; it changes the speed, and of the result only how sums are rounded.

    Parameters
    ----------
    tokens
        Rows of x that a block keeps.
    slabs
        Slabs of 16 outputs of a tile.
    warps
        Warps of a block, which share the input channels.
    stages
        Chunks of 128 input channels that a warp has on their way at once.
    ctas
        Blocks that stay on each multiprocessor.

    Examples
    --------
    >>> ResidentTile.parse(str(ResidentTile(2, slabs=2))).rows
    32
    """

    tokens: int = 1
    slabs: int = 1
    warps: int = 16
    stages: int = 4
    ctas: int = 1

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "tokens": _TOKENS,
        "slabs": (1, 2, 4),
        "warps": (4, 8, 16, 32),
        "stages": (1, 2, 3, 4, 6, 8),
        "ctas": (1, 2, 3, 4),
    }

    @property
    def rows(self) -> int:
        """Outputs of a tile."""
        return self.slabs * SLAB

    def shared_bytes(self, inputs: int) -> int:
        """Return the shared memory of a block: x, zeros for tokens that are not there, partial sums of two tiles."""
        return self.tokens * -(-inputs // CHUNK) * CHUNK * 2 + 16 + 2 * self.warps * self.tokens * (self.rows + 4) * 4

    def fits(self, inputs: int) -> bool:
        """Whether every warp has a chunk, a thread at most two results, and blocks share a multiprocessor's memory."""
        if self.tokens * self.rows > 2 * self.warps * 32:
            return False
        return -(-inputs // CHUNK) >= self.warps and self.ctas * (self.shared_bytes(inputs) + 1024) <= SHARED_BYTES


class ResidentKernel(StreamedKernel):
    """See ``native/resident24.cu``."""

    source = "resident24"
    early = True

    def __init__(self, spec: KernelSpec, tile: ResidentTile, constants: Mapping[str, int] | None = None) -> None:
        block = (tile.warps * 32, tile.shared_bytes(spec["weight"].shape[1]))
        shape = (tile.tokens, tile.rows, 1)
        super().__init__(spec, tile, StreamLayout(spec["weight"]), shape, block, constants=constants)
        here = torch.cuda.is_available()
        processors = torch.cuda.get_device_properties().multi_processor_count if here else 1
        self._blocks = min(self._blocks, tile.ctas * processors)


class TwoFourResident(TiledImplement):
    """CUDA C++ on 2:4 weights, for up to 16 tokens."""

    name = "cuda-24-resident"
    op = "linear"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on CUDA, weights of at most 2 live elements in every 4, few tokens."""
        return takes(spec, HALF_FORMATS) and resident_fits(spec)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return resident_tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return ResidentKernel(spec, ResidentTile.parse(params["tile"]))


def resident_fits(spec: KernelSpec) -> Support:
    """Say whether x fits into shared memory beside a 2:4 weight that streams past.

    >>> from sparta.specialize.linear.spec import linear_spec
    >>> from sparta.tesa.attribute import TeSA
    >>> resident_fits(linear_spec(TeSA.dense((16, 256)), 100, torch.bfloat16, device="cuda")).reason
    '100 tokens; it keeps at most 16'
    """
    weight, tokens = spec["weight"], spec["input"].shape[0]
    if min(weight.shape) < 1:
        return Support.no("the weight is empty", Cause.SHAPE)
    if tokens > _TOKENS[-1]:
        return Support.no(f"{tokens} tokens; it keeps at most {_TOKENS[-1]}", Cause.SHAPE)
    if not resident_tiles(spec):
        return Support.no(f"{weight.shape[1]} inputs are too few to share, or too many to keep", Cause.SHAPE)
    if not is_two_four(weight):
        return Support.no("more than 2 of some 4 neighbouring inputs are live", Cause.PATTERN)
    return nvrtc_here(AMPERE) and Support.yes("x stays and the 2:4 weight streams past it")


def resident_tiles(spec: KernelSpec) -> list[ResidentTile]:
    """Return tiles that fit, the best guess first."""
    inputs, rows = spec["weight"].shape[1], spec["input"].shape[0]
    shapes = _WIDE_SHAPES if str(spec["weight"].format) in HALF_FORMATS else _SHAPES
    tokens = next((each for each in _TOKENS if each >= rows), _TOKENS[-1])
    return [tile for shape in shapes if (tile := ResidentTile(tokens, *shape)).fits(inputs)]
