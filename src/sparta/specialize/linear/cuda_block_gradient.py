"""The gradient of a block-sparse weight by the matrix instructions of Hopper's warpgroups, for many tokens.

The kernel is CUDA C++ (``native/gradient.cu``), compiled at run time. It cuts the weight in its own way, whatever the
forward product reads: strips of 64 inputs that are kept in the same outputs are computed together, so that what is read
of the incoming gradient serves several of them. Dead blocks are filled with zeros and the bias's gradient is summed on
the way, all in one launch.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from ctypes import c_int, c_uint64, c_void_p
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparta.specialize.cuda.device import HALF_FORMATS, HOPPER, capability
from sparta.specialize.cuda.direct import tensor_map
from sparta.specialize.cuda.few_tokens import SHARED_BYTES, load_tile, nvrtc_here
from sparta.specialize.cuda.nvrtc import Function
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.linear.triton_block.candidates import coverage
from sparta.specialize.linear.triton_block.layout import BlockLayout, kept_grid
from sparta.specialize.linear.triton_block.tile import BlockTile
from sparta.tesa.attribute import TeSA

__all__ = ["GradientTile", "MatrixGradient", "gradient_tile"]

_BOX = 64  # tokens and channels that are fetched at once
_BOX_BYTES = _BOX * _BOX * 2
_GROUPS = 2
_FEWEST_TOKENS, _FEWEST_CHUNKS = 512, 48  # below them, a kernel that shares out the tokens fills more of the GPU
_AT_ONCE = 132  # blocks that run at once on an H200
_NO_MORE = 1.15  # times what lower blocks cover
_DTYPES = tuple(HALF_FORMATS.values())
_SWIZZLED, _PLAIN = 3, 0  # CUtensorMapSwizzle


@dataclass(frozen=True)
class GradientTile(TextTile):
    """How blocks of threads cut the gradient; of the result it changes only how sums are rounded.

    Parameters
    ----------
    height
        Outputs of a chunk.
    boxes
        Strips of 64 inputs of a chunk.

    Examples
    --------
    >>> GradientTile(128, 4).stages
    4
    """

    height: int = 128
    boxes: int = 4

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "height": (64, 128),
        "boxes": (2, 4, 8),
    }

    @property
    def fetched(self) -> int:
        """Boxes of 64 channels that are fetched for 64 tokens: with it grows what a block takes for its chunk."""
        return self.height // _BOX + self.boxes

    @property
    def _stage_bytes(self) -> int:
        return self.fetched * _BOX_BYTES + 16

    @property
    def stages(self) -> int:
        """Steps of 64 tokens that are on their way at once: as many as there is room for."""
        return (SHARED_BYTES - _BOX_BYTES - 2048) // self._stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring with its barriers, zeros, ones, what aligns them."""
        return self.stages * self._stage_bytes + _BOX_BYTES + 2048


_TILES = (GradientTile(128, 4), GradientTile(128, 2), GradientTile(64, 8), GradientTile(64, 4))


class _Call(ctypes.Structure):
    """See ``native/gradient.cu``, which aligns it to 64 bytes."""

    _fields_ = (
        *((name, c_uint64 * 16) for name in ("grad_map", "x_map", "result_map")),
        *((name, c_void_p) for name in ("chunks", "columns", "dead", "mask", "result", "summed")),
        *((name, c_int) for name in ("tokens", "outputs", "inputs", "zeros")),
    )


class _Index(NamedTuple):
    """The tensors of one gradient on one device.

    Attributes
    ----------
    chunks
        int32 (count, 4): first output, where its columns begin, how many there are, whether sums are computed there.
    columns
        int32: the first input of each strip.
    dead
        int32 (zeros, 2): output and input where 64x64 zeros begin.
    """

    chunks: Tensor
    columns: Tensor
    dead: Tensor


class _Loaded(NamedTuple):
    function: Function
    of_box: Callable[[int, int, int, int], bytes]
    of_result: Callable[[int, int, int, int], bytes]


class MatrixGradient:
    """Computes ``grad^T x`` in the kept blocks of a weight, and exact zeros elsewhere; equal inputs give equal bits.

    Parameters
    ----------
    weight
        Of shape (N, K), multiples of 8.
    tile
        How it is cut.
    """

    def __init__(self, weight: TeSA, tile: GradientTile) -> None:
        self._weight, self._tile = weight, tile
        self._kept = kept_grid(weight, (tile.height, _BOX)).cpu()
        layout = BlockLayout(weight, BlockTile(height=tile.height, width=_BOX))
        self._whole = weight.count("live") == layout.inside(*self._kept.nonzero(as_tuple=True))
        self._on: dict[tuple[torch.device, bool], _Index] = {}
        self._loaded: dict[tuple[torch.device, torch.dtype], _Loaded] = {}

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Whether it computes with inputs of this dtype and number."""
        return x.dtype in _DTYPES and x.shape[0] >= _FEWEST_TOKENS

    def __call__(self, grad: Tensor, x: Tensor, mask: Tensor, *, bias: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the gradient (N, K) of a weight, and (N,) of a bias if it is asked for.

        Parameters
        ----------
        grad
            (M, N) of the result.
        x
            (M, K), of the same dtype, M at least 1.
        mask
            bool (N, K): where the weight is live.
        """
        (n, k), tokens, device = self._weight.shape, x.shape[0], x.device
        index = self._index(device, bias)
        summed = x.new_empty(n) if bias else None
        count = len(index.chunks)
        if not count:
            return x.new_zeros(n, k), summed
        result, (grad, x) = x.new_empty(n, k), (_addressable(each) for each in (grad, x))
        loaded = self._load(device, x.dtype)
        maps = (
            loaded.of_box(grad.data_ptr(), tokens, n, grad.stride(0) if tokens > 1 else n),
            loaded.of_box(x.data_ptr(), tokens, k, x.stride(0) if tokens > 1 else k),
            loaded.of_result(result.data_ptr(), n, k, k),
        )
        shown = None if self._whole else mask.contiguous()
        call = _Call(
            *[(c_uint64 * 16).from_buffer_copy(each) for each in maps], index.chunks.data_ptr(),
            index.columns.data_ptr(), index.dead.data_ptr(), None if shown is None else shown.data_ptr(),
            result.data_ptr(), None if summed is None else summed.data_ptr(), tokens, n, k, len(index.dead),
        )  # fmt: skip
        loaded.function.launch((count, 1), call, device)
        return result, summed

    def _load(self, device: torch.device, dtype: torch.dtype) -> _Loaded:
        known, tile = self._loaded.get((device, dtype)), self._tile
        if known is not None:
            return known
        constants = {"STAGES": tile.stages, "CLUSTER": 1, "GROUPS": _GROUPS, "BESIDE": 1}
        block = ((_GROUPS + 1) * 128, tile.shared_bytes)
        function = load_tile("gradient", tile, (dtype, None), block, device, constants, early=True, exactly=True)
        of_box, of_result = (
            tensor_map(dtype, (_BOX, _BOX), swizzle, function.context) for swizzle in (_SWIZZLED, _PLAIN)
        )
        loaded = self._loaded[device, dtype] = _Loaded(function, of_box, of_result)
        return loaded

    def _index(self, device: torch.device, bias: bool) -> _Index:  # noqa: FBT001 - the other half of a key
        if (device, bias) not in self._on:
            made = _chunked(self._kept, self._tile, bias=bias)
            self._on[device, bias] = _Index(*(each.to(device) for each in made))
        return self._on[device, bias]


def gradient_tile(weight: TeSA, density: float) -> GradientTile | None:
    """Return the tile that suits a weight (N, K) best; None where the kernel is not for it.

    Parameters
    ----------
    density
        The share of the weight that would be computed otherwise.
    """
    if min(weight.shape) < 1 or any(size % 8 for size in weight.shape) or capability() != HOPPER:
        return None
    if not nvrtc_here(HOPPER) or coverage(weight, [(64, _BOX)])[64, _BOX] > _NO_MORE * density:
        return None
    counts = {tile: _count(kept_grid(weight, (tile.height, _BOX)).cpu(), tile) for tile in _TILES}
    best = min(counts, key=lambda tile: _guessed(tile, counts[tile]))
    return best if counts[best] >= _FEWEST_CHUNKS else None


def _guessed(tile: GradientTile, chunks: int) -> float:
    """Guess microseconds of a gradient, with 8192 tokens on an H200; they only have to put tiles in order."""
    rounds, multiplied = -(-chunks // _AT_ONCE), tile.height * tile.boxes / 256
    return rounds * (40 * multiplied + 8) + 0.05 * chunks * tile.fetched


def _count(kept: Tensor, tile: GradientTile) -> int:
    """Return the number of chunks of kept strips (rows, columns)."""
    return int((-(-kept.sum(1) // tile.boxes)).sum())


def _chunked(kept: Tensor, tile: GradientTile, *, bias: bool) -> _Index:
    """Return the kept strips (rows, columns) in chunks of one block row, of about as many each, the largest first.

    >>> made = _chunked(torch.tensor([[True, True, False], [False] * 3]), GradientTile(64, 4), bias=True)
    >>> made.chunks.tolist(), made.columns.tolist(), made.dead.tolist()
    ([[0, 0, 2, 1], [64, 2, 0, 1]], [0, 64], [[0, 128], [64, 0], [64, 64], [64, 128]])
    """
    counts = kept.sum(1)
    begins, chunks = counts.cumsum(0) - counts, []
    for row, (count, begin) in enumerate(zip(counts.tolist(), begins.tolist(), strict=True)):
        parts = max(-(-count // tile.boxes), int(bias))
        cuts = [count * part // max(1, parts) for part in range(parts + 1)]
        pairs = itertools.pairwise(cuts)
        chunks += [
            (row * tile.height, begin + first, end - first, int(bias and not part))
            for part, (first, end) in enumerate(pairs)
        ]
    chunks.sort(key=lambda chunk: -chunk[2])
    columns = kept.nonzero()[:, 1] * _BOX
    dead = (~kept).repeat_interleave(tile.height // _BOX, 0).nonzero() * _BOX
    as_rows = torch.tensor(chunks, dtype=torch.int32).view(-1, 4)
    return _Index(as_rows, columns.to(torch.int32), dead.to(torch.int32).contiguous())


def _addressable(matrix: Tensor) -> Tensor:
    """Return a matrix as the copy engine can read it, copied only if it cannot."""
    columns, stride = matrix.shape[1], matrix.stride(0)
    fits = matrix.stride(1) == 1 and stride % 8 == 0 and stride >= columns and matrix.data_ptr() % 16 == 0
    return (
        matrix
        if fits or (matrix.shape[0] == 1 and matrix.is_contiguous())
        else matrix.clone(memory_format=torch.contiguous_format)
    )
