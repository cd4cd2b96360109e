"""Run-time ops of softmax over kept tiles: how PyTorch reaches the kernels, in eager mode, under autograd and compiled.

The gradient needs the result and not the scores, so nothing else is kept for it; the temperature is a number on the
device and is read there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparta.specialize.blocks.sparse_plan import SoftmaxTile, SparsePlan, parsed_plan
from sparta.specialize.matmul.op import on_device, start, strides_of

__all__ = ["tile_softmax"]

_ON_CHIP = 8192  # elements that a program holds at once


@torch.library.custom_op("sparta::tile_softmax", mutates_args=())
def tile_softmax(x: Tensor, temperature: Tensor, lists: Sequence[Tensor], groups: Tensor | None, plan: str) -> Tensor:
    """Return ``softmax(x / temperature)`` over the kept elements of each row, 0 elsewhere, stored as x is.

    Parameters
    ----------
    x
        (B, rows, cols), or (B, values) of kept blocks; pruned elements never matter, whatever they are.
    temperature
        A number, on the device of x.
    lists
        The tensors of :class:`~sparta.specialize.blocks.tile_lists.TileLists`.
    groups
        int32 (B,): the mask of each batch; None where all have one.
    plan
        The text of a :class:`~sparta.specialize.blocks.sparse_plan.SparsePlan` and a
        :class:`~sparta.specialize.blocks.sparse_plan.SoftmaxTile`, joined by a semicolon.
    """
    from sparta.specialize.softmax.triton_kernels import softmax_forward

    matrix, text = parsed_plan(plan)
    y = _made(x, matrix)
    if not (y.numel() and matrix.longest):
        return y
    cut, x = _tile(text), _addressable(x, matrix)
    with on_device(x):
        start(
            softmax_forward, _grid(x, matrix, cut), cut,
            x, y, temperature, lists[0], lists[1], lists[4], lists[6], groups, matrix.tiles(turned=False), matrix.rows,
            matrix.cols, *strides_of(x, matrix), *strides_of(y, matrix), matrix.table_columns,
            *_constants(matrix, cut), groups is not None,
        )  # fmt: skip
    return y


@tile_softmax.register_fake
def _(x: Tensor, temperature: Tensor, lists: Sequence[Tensor], groups: Tensor | None, plan: str) -> Tensor:
    del temperature, lists, groups, plan
    return x.new_empty(x.shape)


@torch.library.custom_op("sparta::tile_softmax_backward", mutates_args=())
def tile_softmax_backward(
    grad: Tensor, y: Tensor, temperature: Tensor, lists: Sequence[Tensor], groups: Tensor | None, plan: str
) -> Tensor:
    """Return the gradient of x, for the result y of :func:`tile_softmax` and its gradient."""
    from sparta.specialize.softmax.triton_kernels import softmax_backward

    matrix, text = parsed_plan(plan)
    out = _made(y, matrix)
    if not (out.numel() and matrix.longest):
        return out
    cut, grad, y = _tile(text), _addressable(grad, matrix), _addressable(y, matrix)
    with on_device(y):
        start(
            softmax_backward, _grid(y, matrix, cut), cut,
            grad, y, out, temperature, lists[0], lists[1], lists[4], lists[6], groups, matrix.tiles(turned=False),
            matrix.rows, matrix.cols, *strides_of(grad, matrix), *strides_of(y, matrix), *strides_of(out, matrix),
            matrix.table_columns, *_constants(matrix, cut), groups is not None,
        )  # fmt: skip
    return out


@tile_softmax_backward.register_fake
def _(
    grad: Tensor, y: Tensor, temperature: Tensor, lists: Sequence[Tensor], groups: Tensor | None, plan: str
) -> Tensor:
    del grad, temperature, lists, groups, plan
    return y.new_empty(y.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, temperature, lists, groups, ctx.plan = inputs
    ctx.lists = len(lists)
    ctx.save_for_backward(output, temperature, groups, *lists)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    y, temperature, groups, *lists = ctx.saved_tensors
    change = tile_softmax_backward(grad, y, temperature, lists, groups, ctx.plan)
    return change, None, [None] * ctx.lists, None, None


tile_softmax.register_autograd(_backward, setup_context=_setup_context)


# ---------------------------------------------------------------------- launching


@functools.lru_cache(maxsize=256)
def _tile(text: str) -> SoftmaxTile:
    return SoftmaxTile.parse(text)


def _made(like: Tensor, plan: SparsePlan) -> Tensor:
    """Return memory for a result, cleared unless the kernel writes all of it."""
    return like.new_empty(like.shape) if plan.complete else like.new_zeros(like.shape)


def _addressable(stored: Tensor, plan: SparsePlan) -> Tensor:
    return stored.contiguous() if plan.compressed and stored.stride(-1) != 1 else stored


def _grid(stored: Tensor, plan: SparsePlan, cut: SoftmaxTile) -> tuple[int]:
    return (stored.shape[0] * plan.tiles(turned=False) * (cut.height // cut.rows),)


def _constants(plan: SparsePlan, cut: SoftmaxTile) -> tuple[int, ...]:
    """Return what the kernels are compiled for: rows, elements of a row at once, whether those are all, tile, block."""
    needed = 1 << (plan.longest * cut.width - 1).bit_length()
    span = min(needed, max(cut.width, _ON_CHIP // cut.rows))
    return (
        cut.rows, span, span == needed, cut.height, cut.width, plan.block_height, plan.block_width, plan.address,
    )  # fmt: skip
