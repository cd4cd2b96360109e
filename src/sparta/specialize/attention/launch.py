"""Starting the kernels of fused attention: what they are compiled for, and whether the bulk copy engine can read.

The forward and the backward ops share it. Nothing here holds state.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.specialize.attention.tile import AttentionTile

__all__ = [
    "LISTS",
    "LOG2E",
    "NO_LISTS",
    "ROWS_AT_ONCE",
    "Sizes",
    "copyable",
    "described",
    "on_device",
    "parsed",
    "precision",
    "rows_of",
    "sizes_of",
    "splits_of",
    "start",
]

LOG2E = 1.4426950408889634
ROWS_AT_ONCE = 16
"""Of kernels that take each row for itself."""
LISTS = 5
"""Tensors of the lists of one tile."""
NO_LISTS: list[Tensor | None] = [None] * LISTS
_MOST_SPLITS = 64
_INTERPRETED_PROCESSORS = 4


class Sizes(NamedTuple):
    """What the kernels are compiled for: widths of keys and values, and their padding."""

    e: int
    padded_e: int
    f: int
    padded_f: int


@functools.lru_cache(maxsize=256)
def parsed(tile: str) -> AttentionTile:
    """Return the tile that a text names.

    >>> parsed("queries=64").queries
    64
    """
    return AttentionTile.parse(tile)


def start(kernel: Any, grid: tuple[int], tile: AttentionTile, *arguments: Any) -> None:
    """Start a kernel; a tile that does not fit is an error of ours.

    >>> start(None, (1,), AttentionTile())  # doctest: +SKIP
    """
    from triton.runtime.errors import OutOfResources

    try:
        kernel[grid](*arguments, num_warps=tile.warps, num_stages=tile.stages)
    except OutOfResources as error:
        raise ValueRangeError(message(f"{tile} needs more than the GPU has: {error}")) from error


def splits_of(programs: int, longest: int, device: torch.device) -> int:
    """Return among how many programs a list is split, so that few queries still fill the device.

    >>> splits_of(2, 100, torch.device("cpu"))
    4
    """
    processors = _processors(device)
    if programs >= processors:
        return 1
    return max(1, min(-(-2 * processors // programs), longest // 2, _MOST_SPLITS))


@functools.lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    on_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else _INTERPRETED_PROCESSORS


def on_device(x: Tensor) -> torch.cuda.device:
    """Return a context in which the device of x is current; nothing on the CPU.

    >>> with on_device(torch.zeros(1)):
    ...     pass
    """
    return torch.cuda.device(x.device if x.is_cuda else -1)


def rows_of(x: Tensor) -> Tensor:
    """Return x with its last dim contiguous, as the kernels read it.

    >>> rows_of(torch.zeros(3, 4).t()).stride()
    (3, 1)
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def sizes_of(q: Tensor, v: Tensor) -> Sizes:
    """Return the sizes of q (..., E) and v (..., F).

    >>> sizes_of(torch.zeros(1, 1, 1, 20), torch.zeros(1, 1, 1, 8))
    Sizes(e=20, padded_e=32, f=8, padded_f=16)
    """
    e, f = q.shape[3], v.shape[3]
    return Sizes(e, _padded(e), f, _padded(f))


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def copyable(x: Tensor) -> bool:
    """Return whether the bulk copy engine can address x (B, H, N, D).

    >>> copyable(torch.zeros(1, 1, 4, 3)), copyable(torch.zeros(1, 1, 4, 4))
    (False, True)
    """
    aligned = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    return aligned and min(x.stride()[:3]) > 0 and x.numel() > 0


def described(x: Tensor, rows: int, width: int) -> Any:
    """Return a descriptor of (B, H, N, D) that copies (rows, width) of one head; what lies beyond its edges is 0.

    >>> described(torch.zeros(1, 1, 4, 4), 4, 4)  # doctest: +SKIP
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, width])


def precision(x: Tensor) -> str:
    """Return how float32 is multiplied.

    >>> precision(torch.zeros(1, dtype=torch.bfloat16))
    'ieee'
    """
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
