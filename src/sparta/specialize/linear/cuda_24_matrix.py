"""``cuda-24-matrix``: 2:4 weights for many tokens, by the sparse matrix instructions of Hopper's warpgroups.

The kernel is CUDA C++ (``native/matrix24.cu``), compiled at run time for one tile. Where the weight is no longer what
takes the time, the matrix unit is, and on a 2:4 weight it has half of the work; x then has to come fast enough, and so
neighbouring blocks of threads fetch it for each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.cuda.device import HALF_FORMATS, HOPPER, capability, takes
from sparta.specialize.cuda.direct import tensor_map, tensor_map_of_sheets
from sparta.specialize.cuda.few_tokens import fitting_residual, load_tile, nvrtc_here
from sparta.specialize.cuda.graphs import weights_settled
from sparta.specialize.cuda.nvrtc import Function
from sparta.specialize.implement import Cause, Params, Support, TiledImplement
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cuda_24 import is_two_four
from sparta.specialize.linear.cuda_24_matrix_layout import LINE, MatrixLayout
from sparta.specialize.linear.cuda_24_matrix_tile import ROW, MatrixTile, matrix_tiles
from sparta.specialize.linear.spec import LinearKernel

__all__ = ["MatrixKernel", "TwoFourMatrix", "matrix_fits"]

_FEWEST_TOKENS = 5  # below it, blocks that keep x are faster
_SWIZZLE = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PIECE = 16  # bytes


class _Call(ctypes.Structure):
    """See ``native/matrix24.cu``, which aligns it to 64 bytes."""

    _fields_ = (
        ("x_map", c_uint64 * 16),
        ("w_map", c_uint64 * 16),
        *((name, c_void_p) for name in ("weight", "scales", "x_scales", "bias", "residual", "y")),
        *(
            (name, c_int)
            for name in ("tokens", "outputs", "slabs", "steps", "token_tiles", "columns", "group", "settled")
        ),
        ("rest", c_uint64 * 6),
    )


class _Loaded(NamedTuple):
    """A function on one device, what describes x and the weight to it, and the number of multiprocessors."""

    function: Function
    map_of_x: Callable[[int, int, int, int], bytes]
    map_of_weight: Callable[[int, int, int], bytes]
    processors: int


class MatrixKernel(LinearKernel):
    """A built kernel; it sums in float32 in one fixed order: equal inputs give equal bits.

    Parameters
    ----------
    operand
        Dtype of x and the weight, as they are multiplied.
    """

    def __init__(self, spec: KernelSpec, tile: MatrixTile, operand: torch.dtype) -> None:
        self._tile, self._operand, self._activation = tile, operand, spec.epilogue.activation
        self._result = HALF_FORMATS[str(spec["input"].format)]
        self._layout = MatrixLayout(spec["weight"], operand.itemsize)
        self._outputs, self._inputs = spec["weight"].shape
        self._columns = -(-self._outputs // tile.outputs)
        self._loaded: dict[tuple[torch.device, bool], _Loaded] = {}

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the packed weight (N, K) of the dtype that the kernel was built for."""
        if operand.dtype != self._operand:
            raise ValueRangeError(message(f"a weight in {operand.dtype}", f"{self._operand}, as when built"))
        return (self._layout.pack(operand),)

    def pack_with_transpose(
        self, other: LinearKernel, operand: Tensor
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]] | None:
        """Return the packed weight and, as `other` takes it, its transpose; None where they are packed one by one."""
        if not isinstance(other, MatrixKernel) or not operand.dtype == self._operand == other._operand:
            return None
        both = self._layout.pack_with_transpose(other._layout, operand)
        return None if both is None else ((both[0],), (both[1],))

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (M, N) for the inputs x (M, K), bias (N,) or None, residual (M, N) or None."""
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return self.multiply(packed[0], x, bias, residual)

    def multiply(
        self,
        weight: Tensor,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return ``activation(x W^T * scales + bias) + residual`` for x (M, K) in the dtype that is multiplied.

        Parameters
        ----------
        weight
            As packed.
        scales
            float32 (M,) of tokens and (N,) of outputs.
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
        bias = None if bias is None else bias.contiguous()
        loaded = self._load(device, residual is not None)
        token_tiles = -(-tokens // tile.tokens)
        tiles = token_tiles * self._columns
        x_scales, w_scales = scales or (None, None)
        slabs, steps = self._layout.grid
        map_of_x = loaded.map_of_x(x.data_ptr(), tokens, self._inputs, x.stride(0) if tokens > 1 else self._inputs)
        call = _Call(
            _words(map_of_x), _words(loaded.map_of_weight(weight.data_ptr(), slabs, steps * self._layout.lines)),
            weight.data_ptr(),
            *[None if each is None else each.data_ptr() for each in (w_scales, x_scales, bias, residual)], y.data_ptr(),
            tokens, self._outputs, slabs, steps, token_tiles, self._columns, tile.group, weights_settled(),
        )  # fmt: skip
        blocks = min(tiles, loaded.processors * tile.ctas // tile.cluster) * tile.cluster
        loaded.function.launch((blocks if tile.split == 1 else tiles * tile.split, 1), call, device)
        return y

    def _load(
        self,
        device: torch.device,
        residual: bool,  # noqa: FBT001 - the other half of a key
    ) -> _Loaded:
        """Return the function and what goes with it; found again by device and residual."""
        known = self._loaded.get((device, residual))
        if known is not None:
            return known
        tile, size = self._tile, self._operand.itemsize
        block = ((tile.groups + 1) * 128, tile.shared_bytes(size))
        spec, constants = (self._result, self._activation), {"FORMAT": int(size == 1), "RESIDUAL": int(residual)}
        constants |= {"BESIDE": tile.cluster, "CLUSTER": max(tile.cluster, tile.split)}
        function = load_tile("matrix24", tile, spec, block, device, constants, early=True, exactly=True)
        loaded = _Loaded(
            function,
            tensor_map(self._operand, (tile.tokens // tile.cluster, ROW // size), _SWIZZLE, function.context),
            tensor_map_of_sheets(
                torch.int32, (tile.pieces, tile.depth * self._layout.lines, LINE // 4), function.context
            ),
            torch.cuda.get_device_properties(device).multi_processor_count,
        )
        self._loaded[device, residual] = loaded
        return loaded


def _words(described: bytes) -> ctypes.Array[c_uint64]:
    return (c_uint64 * 16).from_buffer_copy(described)


class TwoFourMatrix(TiledImplement):
    """CUDA C++ on 2:4 weights, for many tokens on Hopper."""

    name = "cuda-24-matrix"
    op = "linear"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Bf16 and fp16 on Hopper, weights of at most 2 live elements in every 4, many tokens."""
        return takes(spec, HALF_FORMATS) and matrix_fits(spec, 2)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return matrix_tiles(spec["weight"].shape, spec["input"].shape[0], 2)

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Lay out the weight; the kernel is compiled at its first run."""
        return MatrixKernel(spec, MatrixTile.parse(params["tile"]), HALF_FORMATS[str(spec["input"].format)])


def matrix_fits(spec: KernelSpec, itemsize: int) -> Support:
    """Say whether the kernel takes a 2:4 weight and its tokens, in elements of so many bytes.

    >>> from sparta.specialize.linear.spec import linear_spec
    >>> from sparta.tesa.attribute import TeSA
    >>> matrix_fits(linear_spec(TeSA.dense((16, 256)), 1, torch.bfloat16, device="cuda"), 2).reason
    '1 tokens; below 5 others read the weight as fast'
    """
    (n, k), tokens = spec["weight"].shape, spec["input"].shape[0]
    if tokens < _FEWEST_TOKENS:
        return Support.no(f"{tokens} tokens; below {_FEWEST_TOKENS} others read the weight as fast", Cause.SHAPE)
    if n % 8 or k * itemsize % _PIECE or not n or not k:
        given = f"{n} outputs and {k} inputs"
        return Support.no(f"{given}; they must be multiples of 8 and of {_PIECE // itemsize}", Cause.SHAPE)
    if not is_two_four(spec["weight"]):
        return Support.no("more than 2 of some 4 neighbouring inputs are live", Cause.PATTERN)
    answer = nvrtc_here(HOPPER)
    if answer and capability() != HOPPER:
        return Support.no("it is written for the matrix unit of Hopper GPUs", Cause.CAPABILITY)
    return answer and Support.yes("the sparse matrix instructions of warpgroups")
