"""``cuda-block``: weights pruned in blocks for many tokens, by the matrix instructions of Hopper's warpgroups.

The kernel is CUDA C++ (``native/blocks.cu``), compiled at run time for one tile, on the layout of ``triton-block``. A
block row of a small layer keeps a few blocks only, too few to fill a pipeline; here one pipeline runs on through all
rows, and results are written while the next row is multiplied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int, c_uint64, c_void_p
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.cuda.device import HALF_FORMATS, HOPPER, capability, takes, triton_here
from sparta.specialize.cuda.direct import tensor_map
from sparta.specialize.cuda.few_tokens import SHARED_BYTES, fitting_residual, load_tile, nvrtc_here
from sparta.specialize.cuda.graphs import weights_settled
from sparta.specialize.cuda.nvrtc import Function
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel
from sparta.specialize.linear.triton_block.candidates import coverage
from sparta.specialize.linear.triton_block.implement import BlockKernel
from sparta.specialize.linear.triton_block.layout import BlockLayout
from sparta.specialize.linear.triton_block.tile import BlockTile

__all__ = ["BlockMatrixLauncher", "BlockMatrixTile", "CudaBlock", "block_matrix_fits", "block_matrix_tiles"]

_HEIGHT = 64  # outputs that a warpgroup multiplies
_PIECE = 16  # bytes
_STAGED = 32  # tokens of one of two parts of a warpgroup's results on their way out
_RESULTS = 9216  # bytes that are left for both: what is stored counts on as many stages as fit beside them
_SWIZZLES = {128: 3, 64: 2}  # CUtensorMapSwizzle, by the bytes of a row
_MOST_COVERED = 0.7
_FEWEST_TOKENS = 48
# By the fewest tokens: tokens and groups of what was among the fastest somewhere on an H200.
_SHAPES = ((256, ((256, 2), (128, 3), (128, 2))), (96, ((128, 3), (128, 2), (64, 2))), (0, ((64, 2), (64, 3))))
_MOST_STAGES = 10
_CACHED, _KEPT = 40 << 20, 16 << 20  # bytes of x that stay in the L2 cache whatever the order of tiles; of a group
_ALL = 1024
_NO_MORE = 1.05  # times what narrower blocks store


@dataclass(frozen=True)
class BlockMatrixTile(TextTile):
    """How blocks of threads cut their work; it changes the speed, and of the result only how sums are rounded.

    Parameters
    ----------
    tokens
        Rows of x that a warpgroup multiplies.
    groups
        Warpgroups of a block that multiply, of a tile each.
    stages
        Kept blocks that are on their way at once.
    row
        Bytes of a row of a kept block.
    group
        Tiles of tokens that are worked on before the next ones, so that they stay in the L2 cache.

    Examples
    --------
    >>> BlockMatrixTile.parse(str(BlockMatrixTile(128, 3, 7))).shared_bytes() < SHARED_BYTES
    True
    """

    tokens: int = 256
    groups: int = 2
    stages: int = 5
    row: int = 128
    group: int = 1024

    _choices: ClassVar[dict[str, tuple[int, ...]]] = {
        "tokens": (64, 128, 256),
        "groups": (2, 3),
        "stages": tuple(range(2, 33)),
        "row": (64, 128),
    }

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a kept block on its way, with its tokens and its barriers."""
        return (self.tokens + _HEIGHT) * self.row + 16

    def shared_bytes(self) -> int:
        """Return the shared memory of a block: the ring of x and the weight, results, barriers, what aligns them."""
        results = self.groups * (_RESULTS + self.tokens * 4 + 8)
        return self.stages * self.stage_bytes + results + 1024


class _Call(ctypes.Structure):
    """See ``native/blocks.cu``, which aligns it to 64 bytes."""

    _fields_ = (
        *((name, c_uint64 * 16) for name in ("x_map", "w_map", "y_map")),
        *((name, c_void_p) for name in ("columns", "schedule", "scales", "x_scales", "bias", "residual")),
        *((name, c_int) for name in ("tokens", "outputs", "block_rows", "token_tiles", "tiles", "group", "settled")),
        ("rest", c_uint64 * 6),
    )


_Map = Callable[[int, int, int, int], bytes]
_Loaded = tuple[Function, _Map, _Map, _Map, int]


class BlockMatrixLauncher:
    """Launches the kernel for one weight, tile and activation; equal inputs give equal bits.

    Parameters
    ----------
    operand
        Dtype of x and the weight, as they are multiplied.
    """

    def __init__(self, spec: KernelSpec, tile: BlockMatrixTile, operand: torch.dtype) -> None:
        self._tile, self._operand, self._activation = tile, operand, spec.epilogue.activation
        self._result = HALF_FORMATS[str(spec["input"].format)]
        self._width = tile.row // operand.itemsize
        self._outputs, self._inputs = spec["weight"].shape
        self.layout = BlockLayout(spec["weight"], BlockTile(height=_HEIGHT, width=self._width))
        self._loaded: dict[tuple[torch.device, bool], _Loaded] = {}

    def __call__(
        self,
        packed: Sequence[Tensor],
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        x_scales: Tensor | None = None,
    ) -> Tensor:
        """Return ``activation(x W^T * scales + bias) + residual`` for x (M, K) in the dtype that is multiplied.

        Parameters
        ----------
        packed
            Kept blocks, their columns, the schedule; in fp8 also the scales (N,) of outputs, float32.
        x_scales
            Of tokens, (M,), float32, in fp8.
        """
        if x.dim() != 2 or x.shape[1] != self._inputs:
            raise ShapeError(message(f"an input of shape {tuple(x.shape)}", f"(M, {self._inputs})"))
        if x.dtype != self._operand:
            raise ValueRangeError(message(f"an input in {x.dtype}", f"{self._operand}, as the weight", "cast one"))
        tokens, device, size, tile = x.shape[0], x.device, self._operand.itemsize, self._tile
        y = torch.empty((tokens, self._outputs), dtype=self._result, device=device)
        if not tokens:
            return y
        if x.stride(1) != 1 or x.stride(0) * size % _PIECE or x.data_ptr() % _PIECE or x.stride(0) < self._inputs:
            x = x.clone(memory_format=torch.contiguous_format)
        residual = fitting_residual(residual, tokens, self._outputs)
        if residual is not None and residual.data_ptr() % _PIECE:
            residual = residual.clone()
        bias = None if bias is None else bias.contiguous()
        function, of_x, of_weight, of_result, processors = self.load(device, residual is not None)
        values, columns, schedule, *scales = packed
        block_rows, token_tiles = schedule.shape[0], -(-tokens // tile.tokens)
        tiles = token_tiles * block_rows
        maps = (
            of_x(x.data_ptr(), tokens, self._inputs, x.stride(0) if tokens > 1 else self._inputs),
            of_weight(values.data_ptr(), values.shape[0] * _HEIGHT, self._width, self._width),
            of_result(y.data_ptr(), tokens, self._outputs, self._outputs),
        )
        others = (scales[0] if scales else None, x_scales, bias, residual)
        call = _Call(
            *[(c_uint64 * 16).from_buffer_copy(each) for each in maps], columns.data_ptr(), schedule.data_ptr(),
            *[None if each is None else each.data_ptr() for each in others],
            tokens, self._outputs, block_rows, token_tiles, tiles, tile.group, weights_settled(),
        )  # fmt: skip
        function.launch((min(tiles, processors), 1), call, device)
        return y

    def load(
        self,
        device: torch.device,
        residual: bool,  # noqa: FBT001 - the other half of a key
    ) -> _Loaded:
        """Return the function, what describes x, weight and result to it, and the number of multiprocessors."""
        known = self._loaded.get((device, residual))
        if known is not None:
            return known
        tile, size = self._tile, self._operand.itemsize
        block = ((tile.groups + 1) * 128, tile.shared_bytes())
        spec = (self._result, self._activation)
        constants = {"FORMAT": int(size == 1), "RESIDUAL": int(residual), "BESIDE": 1}
        function = load_tile("blocks", tile, spec, block, device, constants, early=True, exactly=True)
        of_x, of_weight = (
            tensor_map(self._operand, (rows, self._width), _SWIZZLES[tile.row], function.context)
            for rows in (tile.tokens, _HEIGHT)
        )
        of_result = tensor_map(self._result, (_STAGED, _HEIGHT), _SWIZZLES[128], function.context)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        loaded = function, of_x, of_weight, of_result, processors
        self._loaded[device, residual] = loaded
        return loaded


class _CudaKernel(BlockKernel):
    """Sums in float32 over the kept blocks of a row in one fixed order."""

    def __init__(self, spec: KernelSpec, tile: BlockMatrixTile) -> None:
        self._launch = BlockMatrixLauncher(spec, tile, HALF_FORMATS[str(spec["input"].format)])
        super().__init__(self._launch.layout)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return self._launch(packed, x, bias, residual)


class CudaBlock(TiledImplement):
    """CUDA C++ on kept blocks of 64 outputs, for many tokens on Hopper."""

    name = "cuda-block"
    op = "linear"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper, many tokens, where kept blocks leave enough out."""
        return takes(spec, HALF_FORMATS) and block_matrix_fits(spec, 2)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return block_matrix_tiles(spec, 2)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the kept blocks; the kernel is compiled at its first run."""
        return _CudaKernel(spec, BlockMatrixTile.parse(params["tile"]))


def block_matrix_fits(spec: KernelSpec, itemsize: int) -> Support:
    """Say whether the kernel takes a weight and its tokens, in elements of so many bytes."""
    (n, k), tokens = spec["weight"].shape, spec["input"].shape[0]
    if tokens < _FEWEST_TOKENS:
        return Support.no(f"{tokens} tokens; below {_FEWEST_TOKENS} smaller tiles are faster", Cause.SHAPE)
    if n % 8 or k * itemsize % _PIECE or not n or not k:
        given = f"{n} outputs and {k} inputs"
        return Support.no(f"{given}; they must be multiples of 8 and of {_PIECE // itemsize}", Cause.SHAPE)
    block = (_HEIGHT, 64)
    covered = coverage(spec["weight"], [block])[block]
    if covered > _MOST_COVERED:
        given = f"blocks of 64×64 with a live weight cover {covered:.2f} of the matrix"
        return Support.no(f"{given}; at most {_MOST_COVERED} pays", Cause.PATTERN)
    answer = triton_here() and nvrtc_here(HOPPER)  # Triton packs
    if answer and capability() != HOPPER:
        return Support.no("it is written for the matrix unit of Hopper GPUs", Cause.CAPABILITY)
    return answer and Support.yes("the matrix instructions of warpgroups on kept blocks")


def block_matrix_tiles(spec: KernelSpec, itemsize: int) -> list[BlockMatrixTile]:
    """Return tiles that fit, the best guess first; kept blocks are read 128 bytes wide where that stores no more."""
    narrow, wide = 64 // itemsize, 128 // itemsize
    covered = coverage(spec["weight"], [(_HEIGHT, narrow), (_HEIGHT, wide)])
    row = 128 if covered[_HEIGHT, wide] <= _NO_MORE * covered[_HEIGHT, narrow] else 64
    rows, token_bytes = spec["input"].shape[0], spec["weight"].shape[1] * itemsize
    fits = rows * token_bytes <= _CACHED
    tiles = []
    for tokens, groups in next(shapes for fewest, shapes in _SHAPES if rows >= fewest):
        group = _ALL if fits else max(1, _KEPT // (tokens * token_bytes))
        bare = BlockMatrixTile(tokens, groups, 2, row)
        stages = 2 + (SHARED_BYTES - bare.shared_bytes()) // bare.stage_bytes
        tiles.append(BlockMatrixTile(tokens, groups, min(_MOST_STAGES, stages), row, group))
    return tiles
