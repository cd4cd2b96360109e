"""The Triton softmax as an implement: ``triton-block`` for softmax over the kept tiles of scores, whole or compressed.

It stands between the two products of unfused attention. It is bounded by memory, so tiles that cover little beyond the
mask are the best ones, and what is tuned is how many rows a program takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from sparta.specialize.blocks.sparse_plan import SoftmaxTile
from sparta.specialize.blocks.tile_lists import tile_lists
from sparta.specialize.cuda.device import need_triton
from sparta.specialize.implement import Params, Support, TiledImplement, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.matmul.triton_block import GroupTable, covered, tiles_pay
from sparta.specialize.softmax.op import tile_softmax
from sparta.specialize.softmax.spec import SoftmaxKernel, check_softmax

__all__ = ["TritonBlockSoftmax"]

_CUTS = {(128, 128): 1.0, (64, 64): 0.97, (32, 64): 0.95, (32, 32): 0.9, (16, 32): 0.85, (16, 16): 0.75}
_TABLED = 0.6  # how much slower a tile is that is found through the table
_COVERS = 2
_ON_CHIP = 4096  # elements of a program that keep its loads going


class _SoftmaxKernel(SoftmaxKernel):
    """Each row is summed by one program in one order: equal inputs give equal bits."""

    def __init__(self, spec: KernelSpec, tile: SoftmaxTile) -> None:
        need_triton()
        mask = spec["mask"].mask()
        self._mask_shape = tuple(mask.shape)
        self._groups = GroupTable(self._mask_shape[:-2])
        self._own = 1 if spec.attributes["compressed"] else 2
        block = _block(spec) if spec.attributes["compressed"] else None
        masks = mask.reshape(math.prod(mask.shape[:-2]), *mask.shape[-2:])
        self._lists, self._matrix = tile_lists(masks, block, (tile.height, tile.width))
        self._plan = f"{self._matrix};{tile}"

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(operand.device) for tensor in self._lists)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, temperature = present(*inputs)
        stored = self._matrix.stored_shape
        lead = check_softmax(self._mask_shape, x, stored[0] if self._own == 1 else None)
        flat = x.expand(*lead, *stored).reshape(math.prod(lead), *stored)
        y: Tensor = tile_softmax(flat, temperature, list(packed), self._groups.of(lead, x.device), self._plan)
        return y.reshape(*lead, *stored)


class TritonBlockSoftmax(TiledImplement):
    """Softmax in Triton over the tiles that a mask keeps, with gradients; whole or compressed."""

    name = "triton-block"
    op = "softmax"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Fp32, bf16 and fp16 on CUDA, where kept tiles leave something out."""
        block = _block(spec) if spec.attributes["compressed"] else None
        return tiles_pay(spec, ("x",), block, spec["mask"]) and Support.yes("softmax over kept tiles in Triton")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return _tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> SoftmaxKernel:
        """Make the lists; kernels are compiled at their first run."""
        return _SoftmaxKernel(spec, SoftmaxTile.parse(params["tile"]))


def _block(spec: KernelSpec) -> tuple[int, int]:
    h, w = spec.attributes["block"]
    return h, w


def _tiles(spec: KernelSpec) -> list[SoftmaxTile]:
    """Return the tiles worth timing, the best guess first."""
    mask, block = spec["mask"], _block(spec) if spec.attributes["compressed"] else None
    costs = {}
    for cut, speed in _CUTS.items():
        inside = block is None or all(b % t == 0 for b, t in zip(block, cut, strict=True))
        costs[cut] = covered(mask, cut) / (speed if inside else speed * _TABLED)
    tiles = []
    for height, width in sorted(costs, key=lambda cut: costs[cut])[:_COVERS]:
        kept = covered(mask, (height, width)) * mask.shape[-1]
        rows = max(1, min(16, 1 << int(math.log2(max(1.0, _ON_CHIP / max(1.0, kept))))))
        tiles += [SoftmaxTile(height, width, rows, 4), SoftmaxTile(height, width, max(1, rows // 4), 4)]
    return list(dict.fromkeys(tiles))
