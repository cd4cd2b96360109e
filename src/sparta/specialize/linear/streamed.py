"""Kernels in CUDA C++ that stream a packed weight once for few tokens: what they share.

They differ in how the weight is packed and in which source reads it. What a call needs is worked out when a kernel is
built, because the host must keep up with kernels of a few microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.specialize.cuda.device import HALF_FORMATS
from sparta.specialize.cuda.extension import extension_loaded, launch
from sparta.specialize.cuda.few_tokens import PIECE, addressable, fitting_residual, load_tile
from sparta.specialize.cuda.graphs import weights_settled
from sparta.specialize.cuda.nvrtc import Function
from sparta.specialize.cuda.text_tile import TextTile
from sparta.specialize.implement import Cause, Support
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel

__all__ = ["StreamedKernel", "streamed_call", "walking_pays", "walking_width"]


def streamed_call(arrays: int, *more: str) -> type[ctypes.Structure]:
    """Return the structure that kernels take as their argument, for a weight that is packed in this many arrays.

    What a source takes in `more` are numbers after those that all have. Of these, `settled` is whether the weight is
    older than the kernels before this one, see :func:`sparta.specialize.cuda.graphs.weights_settled`.

    >>> [name for name, _ in streamed_call(2)._fields_][:4]
    ['x', 'packed0', 'packed1', 'bias']
    """
    pointers = ["x", *(f"packed{each}" for each in range(arrays)), "bias", "residual", "y"]
    numbers = ("tokens", "outputs", "inputs", "chunks", "settled", *more)
    fields = (
        *((name, ctypes.c_void_p) for name in pointers),
        ("x_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in numbers),
    )
    return type("StreamedCall", (ctypes.Structure,), {"_fields_": fields})


def walking_width(spec: KernelSpec, most_live: Mapping[int, float]) -> int:
    """Return how many tokens a block multiplies, of those numbers for which a density is given in ascending order."""
    return next((each for each in most_live if each >= spec["input"].shape[0]), max(most_live))


def walking_pays(
    spec: KernelSpec, most_live: Mapping[int, float], tiles: Callable[[KernelSpec], Sequence[TextTile]]
) -> Support:
    """Say whether a weight and a number of tokens are such that walking over live values may pay.

    Parameters
    ----------
    most_live
        By tokens of a block, in ascending order: the density up to which it does.
    tiles
        What fits into shared memory.
    """
    weight, tokens, most_tokens = spec["weight"], spec["input"].shape[0], max(most_live)
    if not 0 < weight.numel < 1 << 31:
        return Support.no(f"the weight has {weight.numel} elements; it counts from 1 to 2^31", Cause.SHAPE)
    if tokens > most_tokens:
        return Support.no(f"{tokens} tokens; it walks over the weight for at most {most_tokens}", Cause.SHAPE)
    most = most_live[walking_width(spec, most_live)]
    if weight.density > most:
        given = f"{weight.density:.2f} of the weight is live"
        return Support.no(f"{given}; at most {most} pays for so many tokens", Cause.PATTERN)
    if not tiles(spec):
        return Support.no(f"{weight.shape[1]} inputs are more than shared memory holds", Cause.SHAPE)
    return Support.yes("live values and where they are from are streamed once")


class _Layout(Protocol):
    @property
    def grid(self) -> tuple[int, int]: ...
    def pack(self, weight: Tensor) -> tuple[Tensor, ...]: ...


class StreamedKernel(LinearKernel):
    """A built kernel of one source and tile; it sums in float32 in one fixed order: equal inputs give equal bits.

    Parameters
    ----------
    layout
        How the weight is packed, in arrays that the call points to, and its grid of slabs and chunks.
    shape
        Of a block: tokens and outputs that it computes, and blocks that share the input channels of the same outputs.
    block
        Threads of a block, and its bytes of shared memory.
    numbers
        What the source takes after the numbers that all have.
    constants
        What the source is compiled for beside the tile, dtype and epilogue.
    """

    source: ClassVar[str]
    call: ClassVar[type[ctypes.Structure]] = streamed_call(2)
    through_extension: ClassVar[bool] = False
    early: ClassVar[bool] = False

    def __init__(
        self,
        spec: KernelSpec,
        tile: TextTile,
        layout: _Layout,
        shape: tuple[int, int, int],
        block: tuple[int, int],
        numbers: tuple[int, ...] = (),
        constants: Mapping[str, int] | None = None,
    ) -> None:
        self._layout, self._tile, self._block, self._constants = layout, tile, block, dict(constants or {})
        self._activation, self._dtype = spec.epilogue.activation, HALF_FORMATS[str(spec["input"].format)]
        self._functions: dict[torch.device, Function] = {}
        self._outputs, self._inputs = spec["weight"].shape
        self._tokens, rows, cluster = shape
        self._blocks = -(-self._outputs // rows) * cluster
        self._sizes, self._numbers = (self._outputs, -(-self._inputs // PIECE) * PIECE, layout.grid[1]), numbers

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the arrays of a weight (N, K) of the dtype that the kernel was built for."""
        if operand.dtype != self._dtype:
            raise ValueRangeError(message(f"a weight in {operand.dtype}", f"{self._dtype}, as when built"))
        return self._layout.pack(operand)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (M, N) for the inputs x (M, K), bias (N,) or None, residual (M, N) or None."""
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        x = addressable(x, self._inputs, self._dtype)
        tokens, outputs, device = x.shape[0], self._outputs, x.device
        residual = fitting_residual(residual, tokens, outputs)
        bias = None if bias is None else bias.contiguous()
        if not tokens:
            return x.new_empty(tokens, outputs)
        function = self._functions.get(device) or self._load(device)
        grid, stride, settled = (self._blocks, -(-tokens // self._tokens)), x.stride(0), weights_settled()
        if self.through_extension and extension_loaded() and not settled:
            tensors = [x, *packed]
            first = 1 << len(tensors)  # what stands for the bias
            given = first * 5 - 1
            if bias is not None:
                tensors.append(bias)
                given |= first
            if residual is not None:
                tensors.append(residual)
                given |= 2 * first
            return launch(
                function.code, function.name, tensors,
                (*grid, function.block, function.shared, given, stride, tokens, *self._sizes, 0, *self._numbers),
            )  # fmt: skip
        y = x.new_empty(tokens, outputs)
        call = self.call(
            x.data_ptr(), *[each.data_ptr() for each in packed], None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(), y.data_ptr(), stride, tokens, *self._sizes,
            settled, *self._numbers,
        )  # fmt: skip
        function.launch(grid, call, device)
        return y

    def _load(self, device: torch.device) -> Function:
        spec = (self._dtype, self._activation)
        function = load_tile(self.source, self._tile, spec, self._block, device, self._constants, early=self.early)
        self._functions[device] = function
        return function
