"""What training needs of a block-sparse weight: a pack that costs next to nothing, and the gradient of kept blocks.

An optimizer changes the weight in every step, so packing it and computing a dense gradient for it would take longer
than the sparse products gain. :class:`BlockPacker` and :class:`BlockGradient` are made once for a layout. This module
imports Triton.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.specialize.cuda.launcher import Launcher
from sparta.specialize.linear.triton_block.kernel import INTERPRETED
from sparta.specialize.linear.triton_block.layout import BlockLayout, kept_grid
from sparta.specialize.linear.triton_block.training_kernels import (
    add_parts,
    block_gradient,
    pack_blocks,
    pack_both,
)

__all__ = ["BlockGradient", "BlockPacker"]

_WIDEST = 128  # columns of a chunk: neighbouring blocks of a row share what is read of the gradient
_TOKENS = 32
_OPTIONS = {"num_warps": 4, "num_stages": 4}
_PROGRAMS_PER_PROCESSOR = 2
_LEAST_TOKENS = 512  # of a share: adding shares costs as well
_STRIP = 128  # outputs whose gradients are summed at once
_LEAST_TO_FILL = 64 * 64  # elements of a block; smaller ones are too many to be filled with zeros one by one
_numbers = itertools.count()  # of packers and gradients: unlike addresses, they are never given away again
_pack, _pack_both, _multiply, _add = (
    Launcher(kernel, interpreted=INTERPRETED) for kernel in (pack_blocks, pack_both, block_gradient, add_parts)
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
        n, k = self._checked(weight)
        if weight.device.type != "cuda" and not INTERPRETED:
            return self._layout.values(weight)
        count, arrays, constants = self._target(weight)
        _, row, column, columns, live, beyond, *strides = arrays
        values: Tensor = arrays[0]
        arguments = (
            weight.detach(), values, row, column, columns, live, n, k, *weight.stride(), beyond, *strides, *constants
        )  # fmt: skip
        like = (self._number, weight.dtype, weight.stride(), weight.data_ptr() % 16)
        _pack(count, arguments, weight.device, None, like, (0, 1))
        return values

    def with_transpose(self, other: BlockPacker, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kept blocks of a weight (N, K), and those that `other` has of its transpose, by one kernel."""
        n, k = self._checked(weight)
        if weight.device.type != "cuda" and not INTERPRETED:
            return self(weight), other(weight.t())
        count, arrays, constants = self._target(weight)
        more, others, other_constants = other._target(weight)
        arguments = (weight.detach(), count, n, k, *weight.stride(), *arrays, *others, *constants, *other_constants)
        like = (self._number, other._number, weight.dtype, weight.stride(), weight.data_ptr() % 16)
        _pack_both(count + more, arguments, weight.device, None, like, (0, 6, 15))
        return arrays[0], others[0]

    def _checked(self, weight: Tensor) -> tuple[int, int]:
        n, k = self._layout.weight.shape
        if tuple(weight.shape) != (n, k):
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{(n, k)}, as when built"))
        return n, k

    def _target(self, weight: Tensor) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
        """Return how many blocks there are, where they come from and go to, and what kernels are compiled for."""
        layout, tile = self._layout, self._layout.tile
        index = layout.index(weight.device)
        count, live = index.tile_row.numel(), index.live
        values = weight.new_empty((count // tile.blocks, tile.height, tile.step))
        shown = None if live is None else live.expand(values.shape).view(torch.uint8)
        strides = (0, 0, 0) if shown is None else shown.stride()
        arrays = (
            values,
            index.tile_row,
            index.tile_column,
            index.columns,
            shown,
            layout.grid[1] * tile.width,
            *strides,
        )
        return count, arrays, (tile.height, tile.width, tile.blocks, live is not None)


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
    dead
        int32 (count, 2): row and column of each block that is not kept.
    """

    chunks: Tensor
    columns: Tensor
    side: int
    dead: Tensor

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.chunks.shape[0]


class _Made(NamedTuple):
    """What one gradient is computed in."""

    result: Tensor
    bias: Tensor | None
    parts: Tensor  # float32: shares of the products
    summed: Tensor  # float32: shares of the sums of grad
    splits: int  # shares of the tokens, for products
    shares: int  # and for sums
    zeros: int  # dead blocks that the kernel fills
    precision: str


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

    def __call__(self, grad: Tensor, x: Tensor, mask: Tensor, *, bias: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the gradient (N, K) of a weight, and (N,) of a bias if it is asked for.

        Parameters
        ----------
        grad
            (M, N) of the result.
        x
            (M, K).
        mask
            bool (N, K): where the weight is live.
        """
        device, tokens = x.device, x.shape[0]
        grad, x, chunks = _rows(grad), _rows(x), self._chunks(device)
        if not chunks.count or not tokens:
            shape = self._layout.weight.shape
            return torch.zeros(shape, dtype=x.dtype, device=device), grad.sum(0) if bias else None
        shown = None if self._whole else mask.contiguous().view(torch.uint8)
        made = self._made(chunks, x, bias=bias)
        like = (
            self._number, x.dtype, x.shape, x.stride(), grad.stride(), x.data_ptr() % 16, grad.data_ptr() % 16, bias,
            made.precision,
        )  # fmt: skip
        self._multiply(made, chunks, (grad, x, shown), like)
        if made.splits > 1 or bias:
            self._add(made, chunks, shown, like)
        return made.result, made.bias

    def _made(self, chunks: _Chunks, x: Tensor, *, bias: bool) -> _Made:
        """Return the memory of one gradient, and how the tokens are shared out."""
        (n, k), tile, device, tokens = self._layout.weight.shape, self._layout.tile, x.device, x.shape[0]
        splits = self._splits(chunks.count, tokens, device)
        shares = self._splits(-(-n // _STRIP), tokens, device) if bias else 0
        fills = tile.height * tile.width >= _LEAST_TO_FILL  # dead blocks by the kernel itself
        parts = splits * chunks.count * tile.height * chunks.side * tile.width if splits > 1 else 4
        tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        shared = torch.empty(parts + shares * n, dtype=torch.float32, device=device)
        return _Made(
            torch.empty((n, k), dtype=x.dtype, device=device) if fills else x.new_zeros((n, k)),
            torch.empty(n, dtype=x.dtype, device=device) if bias else None,
            shared,
            shared[parts:] if bias else shared,
            splits,
            shares,
            len(chunks.dead) if fills else 0,
            "tf32" if tf32 else "ieee",
        )

    def _multiply(
        self, made: _Made, chunks: _Chunks, given: tuple[Tensor, Tensor, Tensor | None], like: tuple[Any, ...]
    ) -> None:
        (n, k), tile, (grad, x, shown) = self._layout.weight.shape, self._layout.tile, given
        tokens, products, strips = x.shape[0], chunks.count * made.splits, -(-n // _STRIP)
        arguments = (
            grad, x, chunks.chunks, chunks.columns, shown, chunks.dead, made.parts, made.summed,
            made.result, tokens, n, k, grad.stride(0), x.stride(0), chunks.count, _share(tokens, made.splits), products,
            strips, strips * made.shares, _share(tokens, made.shares), _TOKENS, tile.height, tile.width, chunks.side,
            made.splits > 1, n % tile.height == 0 and k % tile.width == 0, shown is not None, made.bias is not None,
            _STRIP, made.precision, INTERPRETED,
        )  # fmt: skip
        programs = products + strips * made.shares + made.zeros
        _multiply(programs, arguments, x.device, _OPTIONS, like, (0, 1, 4, 6, 7, 8))

    def _add(self, made: _Made, chunks: _Chunks, shown: Tensor | None, like: tuple[Any, ...]) -> None:
        (n, k), tile = self._layout.weight.shape, self._layout.tile
        rows = min(16, tile.height)
        products = chunks.count * (tile.height // rows) if made.splits > 1 else 0
        arguments = (
            made.parts, chunks.chunks, chunks.columns, shown, made.summed, made.result, made.bias, n, k,
            chunks.count, made.splits, products, made.shares, tile.height, tile.width, chunks.side, rows,
            shown is not None, made.bias is not None, _STRIP,
        )  # fmt: skip
        programs = products + (0 if made.bias is None else -(-n // _STRIP))
        _add(programs, arguments, made.result.device, None, like, (0, 3, 4, 5, 6))

    def _splits(self, count: int, tokens: int, device: torch.device) -> int:
        """Return into how many shares the tokens are split, so that every processor has work."""
        wanted = -(-_PROGRAMS_PER_PROCESSOR * _processors(device) // count)
        return max(1, min(wanted, tokens // _LEAST_TOKENS, 16))

    def _chunks(self, device: torch.device) -> _Chunks:
        if device not in self._on:
            made = _chunked(self._kept, self._layout)
            chunks, columns, dead = (each.to(device) for each in (made.chunks, made.columns, made.dead))
            self._on[device] = _Chunks(chunks, columns, made.side, dead)
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
    return _Chunks(chunks.contiguous(), columns, side, (~kept).nonzero().to(torch.int32).contiguous())


def _share(tokens: int, shares: int) -> int:
    """Return how many tokens one of so many shares has, a multiple of what is multiplied at once."""
    return -(-tokens // (max(1, shares) * _TOKENS)) * _TOKENS


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _rows(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
