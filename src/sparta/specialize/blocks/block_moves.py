"""Moving blocks between a matrix and its kept tiles, as run-time ops with exact, deterministic gradients.

``gather`` repeats blocks, ``pick`` takes tiles out of matrices and ``place`` puts them back; they carry all data of the
torch implements that stand on :mod:`sparta.specialize.blocks.block_rows`. Each op's gradient is another of them, and
sums of gradients go in index order, so results never vary between runs, eager or compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["gather", "pad_to_tiles", "pick", "place"]


def gather(x: Tensor, indices: Sequence[Tensor]) -> list[Tensor]:
    """Return ``x.index_select(1, index)`` for each index; gradients are summed in the same order on every run.

    >>> x = torch.zeros(1, 2, requires_grad=True)
    >>> gather(x, [torch.tensor([0, 0, 1])])[0].sum().backward()
    >>> x.grad.tolist()
    [[2.0, 1.0]]
    """
    return cast("list[Tensor]", torch.ops.sparta.gather_blocks(x, list(indices)))


def pick(dense: Tensor, places: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return tiles (S, kept, h, w) of `dense` (S, groups, P, Q).

    Parameters
    ----------
    places
        (3, kept): group, row and column of each tile; no place twice.

    Examples
    --------
    >>> pick(torch.arange(6.0).reshape(1, 1, 2, 3), torch.tensor([[0], [0], [1]]), (1, 2)).tolist()
    [[[[2.0, 0.0]]]]
    """
    return cast("Tensor", torch.ops.sparta.pick_tiles(dense, places, *tile))


def place(tiles: Tensor, places: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo :func:`pick`: return (S, groups, P, Q) for `shape` (groups, P, Q), 0 where no tile is.

    >>> place(torch.ones(1, 1, 1, 2), torch.tensor([[0], [0], [1]]), (1, 2, 3)).tolist()
    [[[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]]]
    """
    return cast("Tensor", torch.ops.sparta.place_tiles(tiles, places, *shape))


def pad_to_tiles(dense: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return `dense` (..., P, Q) with zeros added to whole tiles; itself when it fits.

    >>> pad_to_tiles(torch.ones(3, 4), (2, 2)).shape
    torch.Size([4, 4])
    """
    below, right = -dense.shape[-2] % tile[0], -dense.shape[-1] % tile[1]
    return functional.pad(dense, (0, right, 0, below)) if below or right else dense


# ---------------------------------------------------------------------- gather


@torch.library.custom_op("sparta::gather_blocks", mutates_args=())
def gather_blocks(x: Tensor, indices: Sequence[Tensor]) -> list[Tensor]:
    """Return entries of x along dim 1, one tensor an index."""
    return [x.index_select(1, index) for index in indices]


@gather_blocks.register_fake
def _(x: Tensor, indices: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape[0], index.shape[0], *x.shape[2:]) for index in indices]


@torch.library.custom_op("sparta::sum_blocks", mutates_args=())
def sum_blocks(grads: Sequence[Tensor], indices: Sequence[Tensor], size: int) -> Tensor:
    """Return the sum of all `grads` at their index along dim 1, which has `size` entries."""
    first = grads[0]
    wide = torch.promote_types(first.dtype, torch.float32)  # long sums in half precision would lose their tail
    total = first.new_zeros(first.shape[0], size, *first.shape[2:], dtype=wide)
    for index, grad in zip(indices, grads, strict=True):
        if grad.device.type == "cpu":
            total.index_add_(1, index, grad.to(wide))
        else:  # `index_add_` uses atomics there, `index_put_` sorts first
            total.transpose(0, 1).index_put_((index,), grad.to(wide).transpose(0, 1), accumulate=True)
    return total.to(first.dtype)


@sum_blocks.register_fake
def _(grads: Sequence[Tensor], indices: Sequence[Tensor], size: int) -> Tensor:
    del indices
    return grads[0].new_empty(grads[0].shape[0], size, *grads[0].shape[2:])


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    del output
    ctx.save_for_backward(*inputs[1])
    ctx.size = inputs[0].shape[1]


def _gather_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    indices = list(ctx.saved_tensors)
    return torch.ops.sparta.sum_blocks(grads, indices, ctx.size), [None] * len(indices)


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[1])


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    indices = list(ctx.saved_tensors)
    return torch.ops.sparta.gather_blocks(grad, indices), [None] * len(indices), None


gather_blocks.register_autograd(_gather_backward, setup_context=_gather_context)
sum_blocks.register_autograd(_sum_backward, setup_context=_sum_context)


# ---------------------------------------------------------------------- pick and place


@torch.library.custom_op("sparta::pick_tiles", mutates_args=())
def pick_tiles(dense: Tensor, places: Tensor, h: int, w: int) -> Tensor:
    """Return tiles (S, kept, h, w) of (S, groups, P, Q)."""
    if dense.mT.is_contiguous() and not dense.is_contiguous():  # read it as it lies in memory
        return _picked(dense.mT, places[[0, 2, 1]], (w, h)).mT.contiguous()
    return _picked(dense, places, (h, w))


@pick_tiles.register_fake
def _(dense: Tensor, places: Tensor, h: int, w: int) -> Tensor:
    return dense.new_empty(dense.shape[0], places.shape[1], h, w)


@torch.library.custom_op("sparta::place_tiles", mutates_args=())
def place_tiles(tiles: Tensor, places: Tensor, groups: int, rows: int, cols: int) -> Tensor:
    """Return (S, groups, rows, cols) with tiles (S, kept, h, w) in their places and 0 elsewhere."""
    (h, w), count = tiles.shape[2:], tiles.shape[0]
    padded = (groups, rows + -rows % h, cols + -cols % w)
    lines = tiles.new_zeros(count, math.prod(padded) // w, w)
    lines.index_copy_(1, _lines(places, padded, (h, w)), tiles.flatten(1, 2))
    return lines.reshape(count, *padded)[:, :, :rows, :cols].contiguous()


@place_tiles.register_fake
def _(tiles: Tensor, places: Tensor, groups: int, rows: int, cols: int) -> Tensor:
    del places
    return tiles.new_empty(tiles.shape[0], groups, rows, cols)


def _pick_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    dense, places, _, _ = inputs
    ctx.save_for_backward(places)
    ctx.shape = dense.shape[1:]


def _pick_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return place(grad, ctx.saved_tensors[0], ctx.shape), None, None, None


def _place_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    tiles, places, *_ = inputs
    ctx.save_for_backward(places)
    ctx.tile = tuple(tiles.shape[2:])


def _place_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return pick(grad, ctx.saved_tensors[0], ctx.tile), None, None, None, None


pick_tiles.register_autograd(_pick_backward, setup_context=_pick_context)
place_tiles.register_autograd(_place_backward, setup_context=_place_context)


def _picked(dense: Tensor, places: Tensor, tile: tuple[int, int]) -> Tensor:
    padded = pad_to_tiles(dense, tile)
    lines = padded.reshape(padded.shape[0], math.prod(padded.shape[1:]) // tile[1], tile[1])
    return torch.unflatten(lines.index_select(1, _lines(places, padded.shape, tile)), 1, (places.shape[1], tile[0]))


def _lines(places: Tensor, padded: Sequence[int], tile: tuple[int, int]) -> Tensor:
    """Return where the lines of w elements of tiles are in (..., P, Q) taken as lines: (kept * h,)."""
    (group, row, column), (h, w) = places, tile
    in_row = padded[-1] // w
    first: Tensor = (group * padded[-2] + row * h) * in_row + column
    return (first[:, None] + torch.arange(h, device=places.device) * in_row).flatten()
