"""``cuda-24`` in few bits: 2:4 weights in fp8, int8 or int4 for few tokens, streamed once, multiplied in bf16 or fp16.

The kernel and its order of values are those of :mod:`sparta.specialize.linear.cuda_24`; here values are packed in 8 or
4 bits and widened in registers. x is not rounded. A 2:4 weight is then 0.63 of the bytes of a dense one of 8 bits, and
0.75 of a dense one of 4 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.specialize.cuda.device import AMPERE, HALF_FORMATS, HOPPER, capability
from sparta.specialize.cuda.few_tokens import SHARED_BYTES, nvrtc_here
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_24 import StreamTile, is_two_four
from sparta.specialize.linear.cuda_24_layout import CHUNK, SLAB, StreamLayout
from sparta.specialize.linear.cuda_24_resident import ResidentKernel, ResidentTile, resident_fits, resident_tiles
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.streamed import StreamedKernel, streamed_call
from sparta.specialize.scaled_linear.packed import FORMAT_NUMBERS, packed_codes, takes_scaled
from sparta.specialize.scaled_linear.spec import OP, group_of
from sparta.tesa.formats.blocks import pad_matrix

__all__ = ["ScaledResident", "ScaledTwoFour", "bytes_in_order", "nibbles_in_order"]

_TOKENS = (8, 16, 32, 64)
_MOST_TOKENS = 64
# slabs, warps_n, warps_k, cluster, stages: fewer bytes per chunk than in 16 bits, so more of them on their way.
_FEW = ((2, 1, 8, 1, 3), (2, 1, 8, 1, 4), (1, 1, 8, 1, 4), (2, 1, 16, 1, 3), (1, 1, 16, 1, 4), (4, 1, 8, 1, 2))
_SOME = ((2, 2, 4, 1, 3), (2, 2, 4, 2, 3), (2, 4, 2, 2, 3), (1, 4, 2, 2, 3))


class _ScaledPacking:
    """Packs real weights (N, K) in few bits, in the order of :class:`StreamLayout`."""

    def __init__(self, spec: KernelSpec) -> None:
        self._weight, self._dtype = spec["weight"], HALF_FORMATS[str(spec["input"].format)]
        self._format, self._group = str(self._weight.format), group_of(self._weight)
        self._grouped = self._group < self._weight.shape[1]
        self._order = StreamLayout(self._weight)
        self.constants = {"FORMAT": FORMAT_NUMBERS[self._format], "GROUPED": int(self._grouped)}

    def __call__(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return values, selectors and scales."""
        codes, scales = packed_codes(weight, self._weight, self._dtype)
        values, selectors = self._order.pack(codes)
        packed = nibbles_in_order(values + 8) if self._format == "int4" else bytes_in_order(values)
        return packed, selectors, self._scales(scales)

    def _scales(self, scales: Tensor) -> Tensor:
        """Return the scales of outputs (N,), or of outputs in each chunk (slabs, chunks, 16)."""
        if not self._grouped:
            return scales[:, 0].contiguous()
        slabs, chunks = self._order.grid
        by_chunk = scales.repeat_interleave(self._group // CHUNK, 1)[:, :chunks]
        padded = pad_matrix(by_chunk, (slabs * SLAB, chunks))
        return torch.unflatten(padded, 0, (slabs, SLAB)).transpose(1, 2).contiguous()


class _ScaledStreamKernel(StreamedKernel):
    """See ``native/stream24.cu``."""

    source = "stream24"
    call = streamed_call(3)
    through_extension = True
    early = True

    def __init__(self, spec: KernelSpec, tile: StreamTile) -> None:
        self._packing = _ScaledPacking(spec)
        shape, block = (tile.tokens, tile.rows, tile.cluster), (tile.warps_n * tile.warps_k * 32, tile.shared_bytes)
        layout = StreamLayout(spec["weight"])
        super().__init__(spec, tile, layout, shape, block, constants=self._packing.constants)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return values, selectors and scales of a real weight (N, K)."""
        return self._packing(operand)


class _ScaledResidentKernel(ResidentKernel):
    """See ``native/resident24.cu``."""

    call = streamed_call(3)

    def __init__(self, spec: KernelSpec, tile: ResidentTile) -> None:
        self._packing = _ScaledPacking(spec)
        super().__init__(spec, tile, self._packing.constants)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return values, selectors and scales of a real weight (N, K)."""
        return self._packing(operand)


def bytes_in_order(values: Tensor) -> Tensor:
    """Return the values (slabs, chunks, 4, 32, 8) of lanes, a byte each, as (slabs, chunks, 2, 32, 16).

    Of each four values, the first two go to the upper bytes of both halves of a word, the other two to the lower ones.

    >>> bytes_in_order(torch.arange(8, dtype=torch.uint8).expand(1, 1, 4, 32, 8))[0, 0, 0, 0, :8].tolist()
    [2, 0, 3, 1, 6, 4, 7, 5]
    """
    slabs, chunks = values.shape[:2]
    ordered = torch.unflatten(values, 4, (2, 4))[..., [2, 0, 3, 1]]  # slab, chunk, multiply, lane, word, byte
    pairs = ordered.view(slabs, chunks, 2, 2, 32, 8).transpose(3, 4)  # slab, chunk, piece, lane, which, bytes
    return pairs.reshape(slabs, chunks, 2, 32, 16).contiguous()


def nibbles_in_order(values: Tensor) -> Tensor:
    """Return the values (slabs, chunks, 4, 32, 8) of lanes, 0 to 15, as bytes (slabs, chunks, 32, 16).

    Pair j of a multiplication stands in nibbles j and j + 4 of its word.

    >>> nibbles_in_order(torch.arange(8, dtype=torch.uint8).expand(1, 1, 4, 32, 8))[0, 0, 0, :4].tolist()
    [32, 100, 49, 117]
    """
    slabs, chunks = values.shape[:2]
    nibbles = values.view(torch.uint8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    words = nibbles[..., 0::2] | nibbles[..., 1::2] << 4  # slab, chunk, multiply, lane, 4 bytes
    return words.transpose(2, 3).reshape(slabs, chunks, 32, 16).contiguous()


class ScaledTwoFour(TiledImplement):
    """CUDA C++ on 2:4 weights in 8 or 4 bits, for up to 64 tokens."""

    name = "cuda-24"
    op = OP
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on CUDA, weights of at most 2 live elements in every 4, few tokens."""
        answer = takes_scaled(spec, FORMAT_NUMBERS, groups=CHUNK)
        if not answer:
            return answer
        if spec["input"].shape[0] > _MOST_TOKENS:
            given = f"{spec['input'].shape[0]} tokens"
            return Support.no(f"{given}; it streams the weight for at most {_MOST_TOKENS}", Cause.SHAPE)
        if not is_two_four(spec["weight"]):
            return Support.no("more than 2 of some 4 neighbouring inputs are live", Cause.PATTERN)
        return nvrtc_here(AMPERE) and Support.yes("the 2:4 weight is streamed once")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        rows = spec["input"].shape[0]
        tokens = next((each for each in _TOKENS if each >= rows), _TOKENS[-1])
        tiles = [StreamTile(tokens, *shape) for shape in (_FEW if tokens <= 32 else _SOME)]
        clusters = capability() >= HOPPER
        return [tile for tile in tiles if tile.shared_bytes <= SHARED_BYTES and (clusters or tile.cluster == 1)]

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return _ScaledStreamKernel(spec, StreamTile.parse(params["tile"]))


class ScaledResident(TiledImplement):
    """CUDA C++ on 2:4 weights in 8 or 4 bits, for up to 16 tokens, by blocks that keep x."""

    name = "cuda-24-resident"
    op = OP
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on CUDA, weights of at most 2 live elements in every 4, few tokens."""
        return takes_scaled(spec, FORMAT_NUMBERS, groups=CHUNK) and resident_fits(spec)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return resident_tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return _ScaledResidentKernel(spec, ResidentTile.parse(params["tile"]))
