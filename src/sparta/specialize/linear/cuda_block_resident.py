"""``cuda-block-resident``: weights pruned in blocks with few inputs, for many tokens on Hopper.

The kernel is CUDA C++ (``native/resident_blocks.cu``), compiled at run time for one tile, on the layout of
``triton-block``. ``cuda-block`` reads its columns of x again for every kept block, and the L2 cache bounds it; here a
block of threads keeps some tokens with all their inputs, as far as shared memory goes, and reads kept blocks only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_uint64, c_void_p
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparta.specialize.cuda.device import HALF_FORMATS, takes
from sparta.specialize.cuda.direct import tensor_map
from sparta.specialize.cuda.few_tokens import SHARED_BYTES, load_tile
from sparta.specialize.cuda.graphs import weights_settled
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_block import BlockMatrixKernel, BlockMatrixLauncher, Loaded, block_matrix_fits
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.triton_block.candidates import coverage

__all__ = ["CudaBlockResident", "ResidentBlockTile", "resident_block_tiles"]

_SIDE = 64  # of a kept block
_ROW = 128  # bytes of a row of one
_PITCH = 144  # bytes between tokens of results on their way out
_SWIZZLE = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_MOST_INPUTS = 1024
_FEWEST_TOKENS = 256
_MOST_STAGES = 8
_PROCESSORS = 132  # of the GPU that tiles are guessed for
_FILL = 45  # bytes per cycle at which x comes into shared memory
_SHARED_RATE = 128  # bytes per cycle of shared memory
_SHAPES = ((2, 32), (3, 16), (2, 16))  # groups, and tokens that are written at once


@dataclass(frozen=True)
class ResidentBlockTile(TextTile):
    """How blocks of threads cut their work; it changes the speed and not the result.

    Parameters
    ----------
    tokens
        Rows of x that a block of threads keeps.
    groups
        Warpgroups of it that multiply, of a block row each.
    stages
        Kept blocks that are on their way at once.
    chunk
        Tokens whose results a warpgroup writes at once.
    beside
        Blocks of threads that fetch kept blocks for each other.

    Examples
    --------
    >>> ResidentBlockTile.parse(str(ResidentBlockTile(96, 2, 3))).fits(1024)
    True
    """

    tokens: int = 96
    groups: int = 2
    stages: int = 3
    chunk: int = 32
    beside: int = 1

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "tokens": (64, 96, 128),
        "groups": (2, 3),
        "stages": tuple(range(1, 17)),
        "chunk": (16, 32),
        "beside": (1, 2),
    }

    def shared_bytes(self, inputs: int) -> int:
        """Return the shared memory of a block: x, kept blocks, results, barriers, what aligns them."""
        ring = self.stages * (_SIDE * _ROW + 20)
        results = self.groups * (self.chunk * _PITCH + 8)
        return -(-inputs // _SIDE) * self.tokens * _ROW + ring + results + _MOST_INPUTS // _SIDE * 8 + 1024

    def fits(self, inputs: int) -> bool:
        """Whether a block of threads can keep this many inputs."""
        return inputs <= _MOST_INPUTS and self.shared_bytes(inputs) <= SHARED_BYTES

    def shares(self, token_tiles: int, block_rows: int, processors: int) -> int:
        """Return among how many blocks of threads the block rows of the same tokens are shared."""
        return max(1, min(block_rows, processors // token_tiles))

    def cycles(self, tokens: int, inputs: int, blocks: float) -> float:
        """Return about how long it takes for so many kept blocks: to fetch x, then what shared memory gives."""
        tiles = -(-tokens // (self.tokens * self.beside)) * self.beside
        shares = self.shares(tiles, _MOST_INPUTS, _PROCESSORS)
        each = _SIDE // 16 * (64 + self.tokens) * 32 + _SIDE * _ROW
        one = self.tokens * inputs * 2 / _FILL + blocks / shares * each / _SHARED_RATE
        return -(-tiles * shares // _PROCESSORS) * one


class _Call(ctypes.Structure):
    """See ``native/resident_blocks.cu``, which aligns it to 64 bytes."""

    _fields_ = (
        *((name, c_uint64 * 16) for name in ("x_map", "w_map")),
        *((name, c_void_p) for name in ("columns", "schedule", "bias", "residual", "y")),
        *((name, c_int) for name in ("tokens", "outputs", "block_rows", "shares", "pieces", "settled")),
    )


class _ResidentLauncher(BlockMatrixLauncher[ResidentBlockTile]):
    """Launches the kernel for one weight, tile and activation; equal inputs give equal bits."""

    def start(self, packed: Sequence[Tensor], x: Tensor, given: Sequence[Tensor | None], y: Tensor) -> None:
        bias, residual, _ = given
        function, of_x, of_weight, processors = self.load(x.device, residual is not None)
        values, columns, schedule = packed
        tokens, block_rows, tile = x.shape[0], schedule.shape[0], self.tile
        token_tiles = -(-tokens // (tile.tokens * tile.beside)) * tile.beside
        shares = tile.shares(token_tiles, block_rows, processors)
        call = _Call(
            *self.maps(of_x, of_weight, x, values), columns.data_ptr(), schedule.data_ptr(),
            *[None if each is None else each.data_ptr() for each in (bias, residual)], y.data_ptr(),
            tokens, self.outputs, block_rows, shares, -(-self.inputs // _SIDE), weights_settled(),
        )  # fmt: skip
        function.launch((token_tiles * shares, 1), call, x.device)

    def loaded(self, device: torch.device, *, residual: bool) -> Loaded:
        tile = self.tile
        block = ((tile.groups + 1) * 128, tile.shared_bytes(self.inputs))
        constants = {"FORMAT": 0, "ROW": _ROW, "RESIDUAL": int(residual), "CLUSTER": tile.beside}
        function = load_tile("resident_blocks", tile, self.kind, block, device, constants, early=True, exactly=True)
        of_x, of_weight = (
            tensor_map(self.operand, (rows, _SIDE), _SWIZZLE, function.context)
            for rows in (tile.tokens, _SIDE // tile.beside)
        )
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return function, of_x, of_weight, processors


class CudaBlockResident(TiledImplement):
    """CUDA C++ on kept blocks of 64×64 that keeps tokens with all their inputs, for many tokens on Hopper."""

    name = "cuda-block-resident"
    op = "linear"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper, many tokens of few inputs, where kept blocks leave enough out."""
        answer = takes(spec, HALF_FORMATS) and block_matrix_fits(spec, 2)
        (_, k), tokens = spec["weight"].shape, spec["input"].shape[0]
        if answer and k > _MOST_INPUTS:
            return Support.no(f"{k} inputs; shared memory keeps {_MOST_INPUTS} at most", Cause.SHAPE)
        if answer and tokens < _FEWEST_TOKENS:
            return Support.no(f"{tokens} tokens; below {_FEWEST_TOKENS} there is nothing to keep", Cause.SHAPE)
        return answer and Support.yes("the matrix instructions of warpgroups on kept blocks, with x in shared memory")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return resident_block_tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the kept blocks; the kernel is compiled at its first run."""
        tile = ResidentBlockTile.parse(params["tile"])
        return BlockMatrixKernel(_ResidentLauncher(spec, tile, HALF_FORMATS[str(spec["input"].format)], _SIDE))


def resident_block_tiles(spec: KernelSpec) -> list[ResidentBlockTile]:
    """Return tiles that fit, the best guess first."""
    (n, k), tokens = spec["weight"].shape, spec["input"].shape[0]
    blocks = coverage(spec["weight"], [(_SIDE, _SIDE)])[_SIDE, _SIDE] * n * k / _SIDE**2
    fitting = []
    for rows in (64, 96, 128):
        for groups, chunk in _SHAPES:
            bare = ResidentBlockTile(rows, groups, 1, chunk)
            stages = 1 + (SHARED_BYTES - bare.shared_bytes(k)) // (_SIDE * _ROW + 20)
            if stages > 1:
                fitting.append(ResidentBlockTile(rows, groups, min(_MOST_STAGES, stages), chunk))
    fitting.sort(key=lambda tile: tile.cycles(tokens, k, blocks))
    best = fitting[:3]
    return [*best, *(ResidentBlockTile(t.tokens, t.groups, t.stages, t.chunk, 2) for t in best[:2])]
