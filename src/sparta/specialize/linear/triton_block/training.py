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
_MOST_PLANS = 64
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
        self._shape: tuple[int, ...] = ()
        self._count = 0

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the kept blocks (steps, h, step) of a weight, as :meth:`BlockLayout.values` does."""
        n, k = self._checked(weight)
        device = weight.device
        if device.type != "cuda" and not INTERPRETED:
            return self._layout.values(weight)
        values, like = self._empty(weight), (self._number, *_facts(weight))
        if _pack.again(device, like, (weight, values)):
            return values
        arrays, constants = self._target(weight, values)
        row, column, columns, live, beyond, *strides = arrays[1:]
        arguments = (
            weight.detach(), values, row, column, columns, live, n, k, *weight.stride(), beyond, *strides, *constants
        )  # fmt: skip
        _pack(self._count, arguments, device, None, like, (0, 1))
        return values

    def with_transpose(self, other: BlockPacker, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the kept blocks of a weight (N, K), and those that `other` has of its transpose, by one kernel."""
        n, k = self._checked(weight)
        device = weight.device
        if device.type != "cuda" and not INTERPRETED:
            return self(weight), other(weight.t())
        values, others = self._empty(weight), other._empty(weight)
        like = (self._number, other._number, *_facts(weight))
        if _pack_both.again(device, like, (weight, values, others)):
            return values, others
        (own, constants), (more, other_constants) = self._target(weight, values), other._target(weight, others)
        numbers = (weight.detach(), self._count, n, k, *weight.stride())
        arguments = (*numbers, *own, *more, *constants, *other_constants)
        moving = (0, len(numbers), len(numbers) + len(own))
        _pack_both(self._count + other._count, arguments, device, None, like, moving)
        return values, others

    def _checked(self, weight: Tensor) -> tuple[int, int]:
        n, k = shape = self._layout.weight.shape
        if weight.shape != shape:
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{(n, k)}, as when built"))
        return n, k

    def _empty(self, weight: Tensor) -> Tensor:
        """Return the memory for the kept blocks."""
        if not self._shape:
            tile = self._layout.tile
            self._count = self._layout.index(weight.device).tile_row.numel()
            self._shape = (self._count // tile.blocks, tile.height, tile.step)
        return weight.new_empty(self._shape)

    def _target(self, weight: Tensor, values: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return where kept blocks go to and come from, and what kernels are compiled for."""
        layout, tile = self._layout, self._layout.tile
        index = layout.index(weight.device)
        live = index.live
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
        return arrays, (tile.height, tile.width, tile.blocks, live is not None)


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


@dataclass(frozen=True)
class _GradientPlan:
    """How the tokens are shared out, and the sizes that follow.

    Attributes
    ----------
    parts
        Numbers in all shares of the products.
    splits, shares
        Shares of the tokens, for products and for sums.
    fills, zeros
        Whether the kernel fills dead blocks with zeros, and how many there are then.
    """

    shape: tuple[int, int]
    parts: int
    splits: int
    shares: int
    fills: bool
    zeros: int
    bias: bool
    precision: str

    def memory(self, x: Tensor) -> _Made:
        """Return memory for one gradient."""
        n = self.shape[0]
        shared = x.new_empty(self.parts + self.shares * n, dtype=torch.float32)
        result = x.new_empty(self.shape) if self.fills else x.new_zeros(self.shape)
        return (
            _Made(result, x.new_empty(n), shared, shared[self.parts :])
            if self.bias
            else _Made(result, None, shared, shared)
        )


class BlockGradient:
    """Computes ``grad^T x`` in the kept blocks of a weight, and exact zeros elsewhere.

    Parameters
    ----------
    layout
        Of the weight (N, K).
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout, self._number = layout, next(_numbers)
        self._plans: dict[tuple[Any, ...], _GradientPlan] = {}
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
        plan = self._plan(chunks, x, bias=bias)
        made = plan.memory(x)
        like = (self._number, *_facts(x), *_facts(grad), tokens, bias, plan.precision)
        if not _multiply.again(device, like, (grad, x, shown, made.parts, made.summed, made.result)):
            self._multiply(plan, made, chunks, (grad, x, shown), like)
        if (plan.splits > 1 or bias) and not _add.again(
            device, like, (made.parts, shown, made.summed, made.result, made.bias)
        ):
            self._add(plan, made, chunks, shown, like)
        return made.result, made.bias

    def _plan(self, chunks: _Chunks, x: Tensor, *, bias: bool) -> _GradientPlan:
        """Return how the tokens are shared out; worked out once for a number of tokens."""
        device, tokens = x.device, x.shape[0]
        tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        key = (device, tokens, bias, tf32)
        plan = self._plans.get(key)
        if plan is None:
            (n, k), tile = self._layout.weight.shape, self._layout.tile
            splits = self._splits(chunks.count, tokens, device)
            fills = tile.height * tile.width >= _LEAST_TO_FILL  # dead blocks by the kernel itself
            plan = _GradientPlan(
                shape=(n, k),
                # Whole pieces of 16 bytes, so that what comes after them is aligned too.
                parts=splits * chunks.count * tile.height * chunks.side * tile.width if splits > 1 else 4,
                splits=splits,
                shares=self._splits(-(-n // _STRIP), tokens, device) if bias else 0,
                fills=fills,
                zeros=len(chunks.dead) if fills else 0,
                bias=bias,
                precision="tf32" if tf32 else "ieee",
            )
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _multiply(
        self,
        plan: _GradientPlan,
        made: _Made,
        chunks: _Chunks,
        given: tuple[Tensor, Tensor, Tensor | None],
        like: tuple[Any, ...],
    ) -> None:
        (n, k), tile, (grad, x, shown) = plan.shape, self._layout.tile, given
        tokens, products, strips = x.shape[0], chunks.count * plan.splits, -(-n // _STRIP)
        arguments = (
            grad, x, chunks.chunks, chunks.columns, shown, chunks.dead, made.parts, made.summed, made.result, tokens, n,
            k, grad.stride(0), x.stride(0), chunks.count, _share(tokens, plan.splits), products, strips,
            strips * plan.shares, _share(tokens, plan.shares), _TOKENS, tile.height, tile.width, chunks.side,
            plan.splits > 1, n % tile.height == 0 and k % tile.width == 0, shown is not None, plan.bias, _STRIP,
            plan.precision, INTERPRETED,
        )  # fmt: skip
        programs = products + strips * plan.shares + plan.zeros
        _multiply(programs, arguments, x.device, _OPTIONS, like, (0, 1, 4, 6, 7, 8))

    def _add(
        self, plan: _GradientPlan, made: _Made, chunks: _Chunks, shown: Tensor | None, like: tuple[Any, ...]
    ) -> None:
        (n, k), tile = plan.shape, self._layout.tile
        rows = min(16, tile.height)
        products = chunks.count * (tile.height // rows) if plan.splits > 1 else 0
        arguments = (
            made.parts, chunks.chunks, chunks.columns, shown, made.summed, made.result, made.bias, n, k, chunks.count,
            plan.splits, products, plan.shares, tile.height, tile.width, chunks.side, rows, shown is not None,
            plan.bias, _STRIP,
        )  # fmt: skip
        programs = products + (-(-n // _STRIP) if plan.bias else 0)
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


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    """Return what kernels are compiled for of a matrix of known shape."""
    return tensor.dtype, tensor.stride(), tensor.data_ptr() % 16


def _rows(matrix: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
