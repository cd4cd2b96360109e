"""Row and column sums of packed values, the same on every run.

Scatter-add on a GPU sums in whatever order the threads come; the functions here sum in index order instead: within the
segments of a sorted index (:func:`segment_sum`), or over slabs of rows (:func:`slab_sum`). Long sums are carried in 64
bits and only the result is rounded, so half precision does not overflow half-way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.tesa.formats.dtypes import accumulation_dtype, as_movable, sum_dtype

__all__ = ["check_axis", "segment_sum", "slab_sum", "sum_dims"]

_SLAB_ELEMENTS = 1 << 22


def check_axis(axis: int) -> None:
    """Raise unless `axis` is -1 (sum of each row) or -2 (sum of each column).

    >>> check_axis(-1)
    """
    if axis not in {-1, -2}:
        raise ShapeError(
            message(
                f"axis is {axis}",
                "-1 (the sum of each row) or -2 (the sum of each column)",
                "count axes from the end: leading dimensions are batch",
            )
        )


def sum_dims(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum `values` over `dims` in the dtype that sums of it have, see :func:`~.dtypes.sum_dtype`.

    >>> sum_dims(torch.full((2, 300), 100, dtype=torch.int8), (-1,))
    tensor([30000, 30000])
    """
    result = sum_dtype(values.dtype)
    if as_movable(values) is not values:  # a dtype PyTorch cannot sum directly
        values = values.to(result)
    return values.sum(dims, dtype=result)


def segment_sum(values: Tensor, pointers: Tensor) -> Tensor:
    """Sum consecutive entries of `values` along its first dimension.

    Parameters
    ----------
    values
        Shape (entries, ...).
    pointers
        Shape (segments + 1,): segment s holds the entries from ``pointers[s]`` to ``pointers[s + 1]``.

    Returns
    -------
    Tensor
        Shape (segments, ...), dtype :func:`~.dtypes.sum_dtype`; an empty segment sums to 0. Differentiable.

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]))
    tensor([3., 0., 4.])
    """
    result = sum_dtype(values.dtype)
    segments, inner = pointers.numel() - 1, values.shape[1:]
    if values.numel() == 0 or segments == 0:
        return values.new_zeros((segments, *inner), dtype=result)
    wide = values.to(accumulation_dtype(values.dtype))
    if not (wide.is_floating_point() or wide.is_complex()):
        # Integers wrap around exactly, so differences of running sums are exact.
        running = torch.cat([wide.new_zeros((1, *inner)), wide.cumsum(0)])
        ends = running.index_select(0, pointers)
        return ends[1:] - ends[:-1]
    real = torch.view_as_real(wide) if wide.is_complex() else wide
    # One column is passed as a vector: on a GPU that form reduces each segment in parallel.
    columns = real.reshape(-1) if real.numel() == real.shape[0] else real.contiguous()
    # `unsafe` skips checks of the pointers that would wait for the GPU; ours come from a sorted index.
    sums = torch.segment_reduce(columns, "sum", offsets=pointers.to(torch.int64), unsafe=True)
    sums = sums.reshape(segments, *real.shape[1:])
    return (torch.view_as_complex(sums) if wide.is_complex() else sums).to(result)


def slab_sum(
    unpack_rows: Callable[[int, int], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Sum the columns of a matrix that is made a few rows at a time, so that the whole of it never exists.

    Parameters
    ----------
    unpack_rows
        Called with (start, stop); returns rows ``start`` to ``stop`` of the matrix, shape (*batch, stop -
        start, cols).
    shape
        ``(*batch, rows, cols)`` of the matrix.
    dtype, device
        Of the matrix.

    >>> dense = torch.arange(6.0).reshape(3, 2)
    >>> slab_sum(lambda start, stop: dense[start:stop], (3, 2), dense.dtype, dense.device)
    tensor([6., 9.])
    """
    *batch, rows, cols = shape
    wide = accumulation_dtype(dtype)
    total = torch.zeros((*batch, cols), dtype=wide, device=device)
    row_elements = max(1, cols * torch.Size(batch).numel())
    step = max(1, _SLAB_ELEMENTS // row_elements)
    for start in range(0, rows, step):
        slab = unpack_rows(start, min(rows, start + step))
        if as_movable(slab) is not slab:
            slab = slab.to(wide)
        total = total + slab.sum(-2, dtype=wide)
    return total.to(sum_dtype(dtype))
