"""What training needs of a block-sparse weight: a pack that costs next to nothing, and the gradient of kept blocks.

An optimizer changes the weight in every step, so packing it and computing a dense gradient for it would take longer
than the sparse products gain. :class:`BlockPacker` and :class:`BlockGradient` are made once for a layout. This module
imports Triton.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.specialize.cuda.launcher import Launcher
from sparta.specialize.linear.triton_block.kernel import INTERPRETED
from sparta.specialize.linear.triton_block.layout import BlockLayout, kept_grid
from sparta.specialize.linear.triton_block.training_kernels import add_parts, block_gradient, pack_blocks

__all__ = ["BlockGradient", "BlockPacker"]

_WIDEST = 128  # columns of a chunk: neighbouring blocks of a row share what is read of the gradient
_TOKENS = 32
_PROGRAMS_PER_PROCESSOR = 2
_LEAST_TOKENS = 512  # of a share: adding shares costs as well
_numbers = itertools.count()  # of packers and gradients: unlike addresses, they are never given away again
_pack, _multiply, _add = (
    Launcher(kernel, interpreted=INTERPRETED) for kernel in (pack_blocks, block_gradient, add_parts)
)


class BlockPacker:
    """Packs weights of one layout by a kernel, whatever their strides.

    Parameters
    ----------
    layout
        Of the weight (N, K).
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout, self._number = layout, next(_numbers)

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the kept blocks (steps, h, step) of a weight, as :meth:`BlockLayout.values` does."""
        layout, tile = self._layout, self._layout.tile
        n, k = layout.weight.shape
        if tuple(weight.shape) != (n, k):
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{(n, k)}, as when built"))
        if weight.device.type != "cuda" and not INTERPRETED:
            return layout.values(weight)
        index = layout.index(weight.device)
        count = index.tile_row.numel()
        values = weight.new_empty((count // tile.blocks, tile.height, tile.step))
        live = index.live
        shown = None if live is None else live.expand(values.shape).view(torch.uint8)
        strides = (0, 0, 0) if shown is None else shown.stride()
        arguments = (
            weight.detach(), values, index.tile_row, index.tile_column, index.columns, shown, n, k, weight.stride(0),
            weight.stride(1), layout.grid[1] * tile.width, *strides, tile.height, tile.width, tile.blocks,
            live is not None,
        )  # fmt: skip
        like = (self._number, weight.dtype, weight.stride(), weight.data_ptr() % 16)
        _pack(count, arguments, weight.device, None, like)
        return values


@dataclass(frozen=True)
class _Chunks:
    """Kept blocks of a weight in groups of `side` of one block row, on one device.

    Attributes
    ----------
    chunks
        int32 (count, 3): block row, where its columns begin, and how many blocks it has.
    columns
        int32: the first input channel of each block; 0 for one that only fills a chunk up.
    side
        Blocks per chunk.
    """

    chunks: Tensor
    columns: Tensor
    side: int


class BlockGradient:
    """Computes ``grad^T x`` in the kept blocks of a weight, and exact zeros elsewhere.

    Parameters
    ----------
    layout
        Of the weight (N, K).
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout, self._number = layout, next(_numbers)
        self._on: dict[torch.device, _Chunks] = {}
        self._kept = kept_grid(layout.weight, (layout.tile.height, layout.tile.width)).cpu()
        self._whole = layout.weight.count("live") == layout.inside(*self._kept.nonzero(as_tuple=True))
        self.density = float(self._kept.float().mean()) if self._kept.numel() else 0.0
        """The share of the weight that is computed."""

    def __call__(self, grad: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        """Return the gradient (N, K) of a weight.

        Parameters
        ----------
        grad
            (M, N) of the result.
        x
            (M, K).
        mask
            bool (N, K): where the weight is live.
        """
        (n, k), tile, device = self._layout.weight.shape, self._layout.tile, x.device
        grad, x = _rows(grad), _rows(x)
        result = torch.zeros((n, k), dtype=x.dtype, device=device)
        chunks = self._chunks(device)
        count, tokens = chunks.chunks.shape[0], x.shape[0]
        if not count or not tokens:
            return result
        splits = self._splits(count, tokens, device)
        shown = None if self._whole else mask.contiguous().view(torch.uint8)
        shape = (splits, count, tile.height, chunks.side * tile.width)
        parts = torch.empty(shape if splits > 1 else (1,), dtype=torch.float32, device=device)
        precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
        product = (
            grad, x, chunks.chunks, chunks.columns, shown, parts, result, tokens, n, k, grad.stride(0), x.stride(0),
            count, -(-tokens // (splits * _TOKENS)) * _TOKENS, _TOKENS, tile.height, tile.width, chunks.side,
            splits > 1, n % tile.height == 0 and k % tile.width == 0, shown is not None, precision, INTERPRETED,
        )  # fmt: skip
        aligned = (x.data_ptr() % 16, grad.data_ptr() % 16)
        like = (self._number, x.dtype, x.shape, x.stride(), grad.stride(), aligned, precision)
        _multiply(count * splits, product, device, {"num_warps": 4, "num_stages": 3}, like)
        if splits > 1:
            rows = min(16, tile.height)
            addition = (
                parts, chunks.chunks, chunks.columns, shown, result, n, k, count, splits, tile.height, tile.width,
                chunks.side, rows, shown is not None,
            )  # fmt: skip
            _add(count * (tile.height // rows), addition, device, None, like)
        return result

    def _splits(self, count: int, tokens: int, device: torch.device) -> int:
        """Return into how many shares the tokens are split, so that every processor has work."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        wanted = -(-_PROGRAMS_PER_PROCESSOR * processors // count)
        return max(1, min(wanted, tokens // _LEAST_TOKENS, 16))

    def _chunks(self, device: torch.device) -> _Chunks:
        if device not in self._on:
            made = _chunked(self._kept, self._layout)
            self._on[device] = _Chunks(made.chunks.to(device), made.columns.to(device), made.side)
        return self._on[device]


def _chunked(kept: Tensor, layout: BlockLayout) -> _Chunks:
    """Return the kept blocks in chunks of one block row."""
    side = max(1, _WIDEST // layout.tile.width)
    longest = int(kept.sum(1).max()) if kept.numel() else 0
    while side > 1 and side > longest:
        side //= 2
    counts = -(-kept.sum(1) // side)
    begins = counts.cumsum(0) - counts
    row, column = kept.nonzero(as_tuple=True)
    place = (kept.cumsum(1)[row, column] - 1) + begins[row] * side
    columns = torch.zeros(int(counts.sum()) * side, dtype=torch.int32)
    columns[place] = (column * layout.tile.width).to(torch.int32)
    block_rows = torch.repeat_interleave(torch.arange(kept.shape[0]), counts)
    number = torch.arange(len(block_rows))
    left = kept.sum(1)[block_rows] - (number - begins[block_rows]) * side
    chunks = torch.stack([block_rows, number * side, left.clamp(max=side)], 1).to(torch.int32)
    return _Chunks(chunks.contiguous(), columns, side)


def _rows(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
