"""Run-time ops of batched products with one sparse matrix: how PyTorch reaches the kernels, eager or compiled.

``sparta::sparse_product`` multiplies a sparse matrix with a dense one; ``sparta::sampled_product`` multiplies two dense
ones and keeps what a mask keeps. The gradients of each are the other or itself, so two kernels serve training, and
gradients have gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.specialize.blocks.sparse_plan import ProductTile, SparsePlan, parsed_plan

__all__ = ["FLIPPED", "TURNED", "on_device", "sampled_product", "sparse_product", "start", "strides_of"]

_ROOM = 220 * 1024  # bytes on chip for a pipeline
TURNED = 1
"""The sparse matrix is transposed before the product."""
FLIPPED = 2
"""The product is transposed."""


@torch.library.custom_op("sparta::sparse_product", mutates_args=())
def sparse_product(
    sparse: Tensor,
    dense: Tensor,
    bias: Tensor | None,
    lists: Sequence[Tensor],
    groups: Tensor | None,
    plan: str,
    way: int,
) -> Tensor:
    """Return ``S dense + bias``, (B, P, F), or flipped its transpose (B, F, P).

    Parameters
    ----------
    sparse
        (B, rows, cols), or (B, values) of kept blocks; pruned elements are taken as 0, whatever they are.
    dense
        (B, Q, F), with any strides.
    bias
        One number for each of the last dim of the result.
    lists
        The tensors of :class:`~sparta.specialize.blocks.tile_lists.TileLists`.
    groups
        int32 (B,): the mask of each batch; None where all have one.
    plan
        The text of a :class:`~sparta.specialize.blocks.sparse_plan.SparsePlan` and a
        :class:`~sparta.specialize.blocks.sparse_plan.ProductTile`, joined by a semicolon.
    way
        The sum of :data:`TURNED` and :data:`FLIPPED`, as they apply.
    """
    from sparta.specialize.matmul import triton_kernels as kernels

    (matrix, text), turned, flipped = parsed_plan(plan), bool(way & TURNED), bool(way & FLIPPED)
    own, met = (matrix.cols, matrix.rows) if turned else (matrix.rows, matrix.cols)
    batches, free = dense.shape[0], dense.shape[2]
    out = dense.new_empty((batches, free, own) if flipped else (batches, own, free))
    if not out.numel():
        return out
    cut, sparse = _tile(text), _addressable(sparse, matrix)
    bounds, entries = (lists[2], lists[3]) if turned else (lists[0], lists[1])
    o_b, o_p, o_f = (out.stride(0), 1, own) if flipped else (out.stride(0), free, 1)
    own_tiles, free_tiles = matrix.tiles(turned=turned), -(-free // cut.free)
    both, lasts, tma = _read_sparse(cut, matrix, sparse, dense, turned=turned)
    stage = cut.height * cut.width + (cut.height if turned else cut.width) * cut.free
    with on_device(dense):
        start(
            kernels.sparse_product, (batches * own_tiles * free_tiles,), _fitted(cut, stage * dense.element_size()),
            *both, None if bias is None else bias.contiguous(), out, bounds, entries, lists[4], lists[6], groups,
            own_tiles, free_tiles, own, met, free, *lasts, *strides_of(sparse, matrix), *dense.stride(), o_b, o_p, o_f,
            matrix.table_columns, cut.height, cut.width, cut.free, matrix.block_height, matrix.block_width,
            matrix.address, turned, groups is not None, 0 if bias is None else 2 if flipped else 1, tma,
            _precision(dense), kernels.INTERPRETED,
        )  # fmt: skip
    return out


@sparse_product.register_fake
def _(
    sparse: Tensor,
    dense: Tensor,
    bias: Tensor | None,
    lists: Sequence[Tensor],
    groups: Tensor | None,
    plan: str,
    way: int,
) -> Tensor:
    del sparse, bias, lists, groups
    matrix = parsed_plan(plan)[0]
    own = matrix.cols if way & TURNED else matrix.rows
    return dense.new_empty(
        (dense.shape[0], dense.shape[2], own) if way & FLIPPED else (dense.shape[0], own, dense.shape[2])
    )


@torch.library.custom_op("sparta::sampled_product", mutates_args=())
def sampled_product(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    lists: Sequence[Tensor],
    groups: Tensor | None,
    plan: str,
) -> Tensor:
    """Return ``left right + bias`` where a mask keeps it, as it is stored: (B, rows, cols) or (B, values).

    Parameters
    ----------
    left, right
        (B, M, K) and (B, K, N), with any strides.
    bias
        (N,).
    lists, groups, plan
        As in :func:`sparse_product`.
    """
    from sparta.specialize.matmul import triton_kernels as kernels

    matrix, text = parsed_plan(plan)
    shape = (left.shape[0], *matrix.stored_shape)
    out = left.new_empty(shape) if matrix.complete else left.new_zeros(shape)
    if not (out.numel() and matrix.most):
        return out
    cut = _tile(text)
    both, lasts, tma = _operands(cut, (left, right), [(cut.height, cut.depth), (cut.depth, cut.width)])
    with on_device(left):
        start(
            kernels.sampled_product, (left.shape[0] * matrix.most,),
            _fitted(cut, (cut.height + cut.width) * cut.depth * left.element_size()),
            *both, None if bias is None else bias.contiguous(), out, lists[1], lists[4], lists[5], lists[6], groups,
            matrix.most, matrix.rows, matrix.cols, left.shape[2], *lasts, *left.stride(), *right.stride(),
            *strides_of(out, matrix), matrix.table_columns, cut.height, cut.width, cut.depth, matrix.block_height,
            matrix.block_width, matrix.address, groups is not None, bias is not None, tma, _precision(left),
            kernels.INTERPRETED,
        )  # fmt: skip
    return out


@sampled_product.register_fake
def _(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    lists: Sequence[Tensor],
    groups: Tensor | None,
    plan: str,
) -> Tensor:
    del right, bias, lists, groups
    return left.new_empty((left.shape[0], *parsed_plan(plan)[0].stored_shape))


# ---------------------------------------------------------------------- gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    first, second, _, lists, groups, ctx.plan, *way = inputs
    ctx.way, ctx.lists = way[0] if way else 0, len(lists)
    ctx.save_for_backward(first, second, groups, *lists)


def _sparse_product_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    sparse, dense, groups, *lists = ctx.saved_tensors
    known = (lists, groups, ctx.plan)
    for_sparse = for_dense = for_bias = None
    if ctx.needs_input_grad[2]:
        for_bias = grad.sum((0, 1))
    grad = grad.mT if ctx.way & FLIPPED else grad  # (B, P, F)
    if ctx.needs_input_grad[0]:
        left, right = (dense, grad) if ctx.way & TURNED else (grad, dense)
        for_sparse = sampled_product(left, right.mT, None, *known)
    if ctx.needs_input_grad[1]:
        for_dense = sparse_product(sparse, grad, None, *known, TURNED - (ctx.way & TURNED))
    return for_sparse, for_dense, for_bias, [None] * ctx.lists, None, None, None


def _sampled_product_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    left, right, groups, *lists = ctx.saved_tensors
    known = (lists, groups, ctx.plan)
    for_left = for_right = for_bias = None
    if ctx.needs_input_grad[0]:
        for_left = sparse_product(grad, right.mT, None, *known, 0)
    if ctx.needs_input_grad[1]:
        for_right = sparse_product(grad, left, None, *known, TURNED + FLIPPED)
    if ctx.needs_input_grad[2]:  # the sums of the kept elements of each column are a product with ones
        ones = left.new_ones(()).expand(left.shape[0], left.shape[1], 1)
        for_bias = sparse_product(grad, ones, None, *known, TURNED).sum((0, 2))
    return for_left, for_right, for_bias, [None] * ctx.lists, None, None


sparse_product.register_autograd(_sparse_product_backward, setup_context=_keep)
sampled_product.register_autograd(_sampled_product_backward, setup_context=_keep)


# ---------------------------------------------------------------------- the copy engine


class _Box(NamedTuple):
    """A descriptor of matrices (B, R, C), or turned (B, C, R), and the last of them."""

    matrix: Any
    turned: bool
    last: int


class _Operands(NamedTuple):
    """Two operands as a kernel takes them; the last batch of each, and whether and how the copy engine reads them."""

    both: tuple[Any, Any]
    lasts: tuple[int, int]
    tma: int


def _operands(cut: ProductTile, both: tuple[Tensor, Tensor], boxes: Sequence[tuple[int, int]]) -> _Operands:
    """Return descriptors that copy tiles of these sizes; the tensors where the engine is not wanted or cannot."""
    found = [_box(matrix, *size) for matrix, size in zip(both, boxes, strict=True)] if cut.tma else []
    made = [box for box in found if box is not None]
    if len(made) < 2:
        return _Operands(both, (0, 0), 0)
    first, second = made
    return _Operands(
        (first.matrix, second.matrix), (first.last, second.last), 1 + int(first.turned) + 2 * int(second.turned)
    )


def _box(matrix: Tensor, rows: int, columns: int) -> _Box | None:
    """Return a descriptor of matrices (B, R, C) with any strides that copies (rows, columns); None where it cannot."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not matrix.numel():
        return None
    turned = matrix.stride(2) != 1
    if turned:
        matrix, rows, columns = matrix.mT, columns, rows
    many, line, step = matrix.stride()
    count = 1 if many == 0 else len(matrix)  # one matrix may serve all batches
    many = many if count > 1 else line * matrix.shape[1]
    aligned = matrix.data_ptr() % 16 == 0 and all(each * matrix.element_size() % 16 == 0 for each in (many, line))
    if step != 1 or line < matrix.shape[2] or not aligned:
        return None
    shape, strides = [count, *matrix.shape[1:]], [many, line, 1]
    return _Box(TensorDescriptor(matrix, shape, strides, [1, rows, columns]), turned, count - 1)


@functools.lru_cache(maxsize=256)
def _fitted(cut: ProductTile, stage: int) -> ProductTile:
    """Return the tile with a pipeline that fits on chip: one is chosen for all products that gradients are made of."""
    return replace(cut, stages=max(1, min(cut.stages, _ROOM // stage))) if cut.tma else cut


def _read_sparse(cut: ProductTile, plan: SparsePlan, sparse: Tensor, dense: Tensor, *, turned: bool) -> _Operands:
    """Return what :func:`_operands` does for tiles of a sparse matrix as it is stored, and the dense ones they meet."""
    if plan.address == 2 or sparse.stride(-1) != 1:  # tiles cross the edges of blocks, or lie across memory
        return _Operands((sparse, dense), (0, 0), 0)
    stored = torch.unflatten(sparse, 1, (-1, plan.block_width)) if plan.compressed else sparse
    boxes = [(cut.height, cut.width), (cut.height if turned else cut.width, cut.free)]
    found = _operands(cut, (stored, dense), boxes)
    return found if found.tma else _Operands((sparse, dense), (0, 0), 0)


# ---------------------------------------------------------------------- launching


@functools.lru_cache(maxsize=256)
def _tile(text: str) -> ProductTile:
    return ProductTile.parse(text)


def start(kernel: Any, grid: tuple[int], tile: Any, *arguments: Any) -> None:
    """Start a kernel; a tile that does not fit is an error of ours.

    >>> start(None, (1,), ProductTile())  # doctest: +SKIP
    """
    from triton.runtime.errors import OutOfResources

    try:
        kernel[grid](*arguments, num_warps=tile.warps, num_stages=getattr(tile, "stages", 1))
    except OutOfResources as error:
        raise ValueRangeError(message(f"{tile} needs more than the GPU has: {error}")) from error


def on_device(x: Tensor) -> torch.cuda.device:
    """Return a context in which the device of x is current; nothing on the CPU.

    >>> with on_device(torch.zeros(1)):
    ...     pass
    """
    return torch.cuda.device(x.device if x.is_cuda else -1)


def strides_of(stored: Tensor, plan: SparsePlan) -> tuple[int, int, int]:
    """Return the strides of batches, rows and columns; compressed values have the latter two in the plan.

    >>> strides_of(torch.zeros(2, 8, 4), SparsePlan(8, 4, 0, 0, 0, 16, 16, 1, 1, 1))
    (32, 4, 1)
    """
    return (stored.stride(0), 0, 0) if plan.compressed else (stored.stride(0), stored.stride(1), stored.stride(2))


def _addressable(stored: Tensor, plan: SparsePlan) -> Tensor:
    """Return compressed values side by side; whole matrices may have any strides."""
    return stored.contiguous() if plan.compressed and stored.stride(-1) != 1 else stored


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
