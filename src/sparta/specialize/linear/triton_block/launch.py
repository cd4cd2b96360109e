"""Launching the block kernel: what differs from call to call is worked out here, and nothing else.

Triton looks its compiled kernel up by every argument at every call, which costs more than to start it; the launcher
keeps the compiled kernel itself, by the few facts that Triton compiles for, and has the driver start it where that can
be done. What follows from shapes, strides and alignment is kept as well: a call like one before is checked by that
alone. This module imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.cuda.direct import DirectKernel, direct_kernel
from sparta.specialize.cuda.nvrtc import current_device, raw_stream
from sparta.specialize.linear.triton_block.kernel import INTERPRETED, block_linear
from sparta.specialize.linear.triton_block.tile import BlockTile

__all__ = ["BlockLinearLauncher"]

_Key = tuple[Any, ...]
_Packed = tuple[Tensor, Tensor, Tensor, Tensor | None]  # the last one are the scales of the outputs, if it has any
_Added = tuple[Tensor | None, Tensor | None, Tensor | None]  # bias, residual, scales of the tokens
_Tensors = tuple[Tensor, _Packed, _Added, Tensor]
_Numbers = tuple[int, int, int, int, int, int, int]
_MOST_CALLS = 256  # that are kept; there is one for each number of tokens


class _Call(NamedTuple):
    """What calls have in common whose tensors have the same shapes, strides, dtypes and alignment."""

    kernel: DirectKernel
    programs: int
    tma: int
    numbers: _Numbers


class BlockLinearLauncher:
    """Launches the kernel for one weight shape, tile and activation.

    Parameters
    ----------
    shape
        (N, K) of the weight.
    whole
        Whether every stored block lies wholly inside the weight along K, so that columns need no bounds check.
    result
        Dtype of the result, where it is not that of x.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        tile: BlockTile,
        activation: str | None,
        *,
        whole: bool,
        result: torch.dtype | None = None,
    ) -> None:
        self.shape, self.tile, self._result = shape, tile, result
        self._constants = (tile.tokens, tile.height, tile.width, tile.blocks, tile.group)
        self._switches = (
            bool(tile.weight_first),
            whole,
            bool(tile.flatten),
            bool(tile.early) and not INTERPRETED,
            activation,
        )
        self._compiled: dict[_Key, Any] = {}
        self._direct: dict[_Key, DirectKernel] = {}
        self._calls: dict[_Key, _Call] = {}
        self._processors: dict[torch.device, int] = {}

    def __call__(
        self,
        packed: Sequence[Tensor],
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        x_scale: Tensor | None = None,
    ) -> Tensor:
        """Return ``activation(x W^T + bias) + residual`` for x (M, K).

        Parameters
        ----------
        packed
            Kept blocks, their columns, the schedule; for a weight in few bits also the scales (N,) of its outputs.
        x_scale
            (M,), float32: the scales of an x in fp8.
        """
        device, dtype = x.device, x.dtype
        if not INTERPRETED and device.index != current_device():
            with torch.cuda.device(device):
                return self(packed, x, bias, residual, x_scale)
        values, columns, schedule, *scales = packed
        key = (
            device, dtype, x.shape, x.stride(), x.data_ptr() % 16, values.dtype,
            dtype == torch.float32 and _tf32(), bias if bias is None else _facts(bias),
            residual if residual is None else _facts(residual), x_scale is None,
        )  # fmt: skip
        call = self._calls.get(key)
        held, added = (values, columns, schedule, scales[0] if scales else None), (bias, residual, x_scale)
        if call is None:
            return self._first(key, held, x, added)
        y = x.new_empty((call.numbers[0], self.shape[0]), dtype=self._result)
        arguments = self._values(call, (x, held, added, y))
        call.kernel.start(call.programs, arguments, raw_stream(device))
        return y

    def _first(self, key: _Key, packed: _Packed, x: Tensor, given: _Added) -> Tensor:
        """Check the tensors of a call, run it, and keep what calls like it may leave out."""
        (outputs, inputs), (values, _, schedule, scales), (bias, residual, x_scale) = self.shape, packed, given
        self._check(x, values.dtype, residual, scaled=scales is not None)
        tokens, device = x.shape[0], x.device
        y = x.new_empty((tokens, outputs), dtype=self._result)
        if not tokens:
            return y
        rows = x if x.stride(1) == 1 or inputs == 1 else x.contiguous()
        added = [each if each is None else each.contiguous() for each in (bias, residual)]
        if rows is not x or added[0] is not bias or added[1] is not residual:
            return self([each for each in packed if each is not None], rows, added[0], added[1], x_scale)
        stride = x.stride(0) if tokens > 1 else inputs  # a single row may have any
        tma, precision = self._tma(x.data_ptr(), stride, x.element_size()), "tf32" if key[6] else "ieee"
        block_rows, token_tiles = schedule.shape[0], -(-tokens // self.tile.tokens)
        tiles = token_tiles * block_rows
        programs = self._grid(tiles, device)
        numbers = (tokens, outputs, inputs, stride, block_rows, token_tiles, tiles)
        # All that Triton compiles for and that differs from call to call; memory of PyTorch's own is always aligned.
        compiled_for = (
            device, x.dtype, x.data_ptr() % 16, stride % 16, stride >> 31, stride == 1, tma, precision,
            bias if bias is None else (bias.dtype, bias.data_ptr() % 16),
            residual if residual is None else (residual.dtype, residual.data_ptr() % 16), values.dtype,
        )  # fmt: skip
        tensors, kernel = (x, packed, given, y), self._direct.get(compiled_for)
        if kernel is None:
            arguments = self._arguments(tensors, numbers, tma, precision)
            self._start(compiled_for, (programs, 1, 1), arguments, (x.dtype, values.dtype, y.dtype))
            kernel = self._direct.get(compiled_for)
            if kernel is None:
                return y
        else:
            kernel.start(programs, self._values(_Call(kernel, programs, tma, numbers), tensors), raw_stream(device))
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        self._calls[key] = _Call(kernel, programs, tma, numbers)
        return y

    def _check(self, x: Tensor, dtype: torch.dtype, residual: Tensor | None, *, scaled: bool) -> None:
        outputs, inputs = self.shape
        if x.dim() != 2 or x.shape[1] != inputs:
            raise ShapeError(message(f"an input of shape {tuple(x.shape)}", f"(M, {inputs})"))
        if x.dtype != dtype and not scaled:
            raise ValueRangeError(message(f"an input in {x.dtype}", f"{dtype}, as the weight", "cast one"))
        if residual is not None and residual.shape != (x.shape[0], outputs):
            raise ShapeError(message(f"a residual of shape {tuple(residual.shape)}", f"({x.shape[0]}, {outputs})"))

    def _tma(self, address: int, stride: int, size: int) -> int:
        """Return how far the copy engine can be used; what it cannot address, ordinary loads can."""
        outputs, inputs = self.shape
        if not self.tile.tma or address % 16 or stride * size % 16 or stride < inputs:
            return 0
        stored = size if self._result is None else self._result.itemsize
        return 1 if outputs * stored % 16 else self.tile.tma

    def _values(self, call: _Call, tensors: _Tensors) -> tuple[int | bytes, ...]:
        """Return the kernel's arguments as numbers and tensor maps."""
        x, (values, columns, schedule, scales), added, y = tensors
        maps, numbers = call.kernel.maps, call.numbers
        tokens, outputs, inputs, stride, *_ = numbers
        middle = (
            columns.data_ptr(),
            schedule.data_ptr(),
            values.data_ptr(),
            *[0 if each is None else each.data_ptr() for each in (*added, scales)],
        )
        if not call.tma:
            return (x.data_ptr(), values.data_ptr(), *middle, y.data_ptr(), *numbers)
        step, rows = self.tile.step, values.shape[0] * self.tile.height
        first = (
            maps[0](x.data_ptr(), tokens, inputs, stride), tokens, inputs, stride, 1,
            maps[1](values.data_ptr(), rows, step, step), rows, step, step, 1,
        )  # fmt: skip
        if call.tma == 1:
            return (*first, *middle, y.data_ptr(), *numbers)
        result = maps[2](y.data_ptr(), tokens, outputs, outputs)
        return (*first, *middle, result, tokens, outputs, outputs, 1, *numbers)

    def _arguments(self, tensors: _Tensors, numbers: _Numbers, tma: int, precision: str) -> tuple[Any, ...]:
        """Return the kernel's arguments as Triton takes them."""
        x, (values, columns, schedule, scales), added, y = tensors
        tokens, outputs, inputs, stride = numbers[:4]
        tile = self.tile
        return (
            _described(x, [tokens, inputs], stride, [tile.tokens, tile.width]) if tma else x,
            _described(values, [values.shape[0] * tile.height, tile.step], tile.step, [tile.height, tile.width])
            if tma else values,
            columns, schedule, values, *added, scales,
            _described(y, [tokens, outputs], outputs, [tile.tokens, tile.height]) if tma == 2 else y,
            *numbers, *self._constants, tma, *self._switches, *[each is not None for each in (*added, scales)],
            precision, INTERPRETED,
        )  # fmt: skip

    def _grid(self, tiles: int, device: torch.device) -> int:
        """Return the number of programs."""
        if not self.tile.ctas:
            return tiles
        if device not in self._processors:
            on_cuda = device.type == "cuda"
            self._processors[device] = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 4
        return min(tiles, self.tile.ctas * self._processors[device])

    def _start(
        self, key: _Key, grid: tuple[int, int, int], arguments: tuple[Any, ...], dtypes: Sequence[torch.dtype]
    ) -> None:
        """Have Triton start the kernel, and keep what it compiled."""
        if INTERPRETED:
            block_linear[grid](*arguments)
            return
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments, stream=raw_stream(key[0]))  # given, it is not looked up
            return
        options = {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "launch_pdl": bool(self.tile.early)}
        try:
            compiled = block_linear[grid](*arguments, **options)
        except OutOfResources as error:
            raise ValueRangeError(message(f"{self.tile} needs more than the GPU has: {error}")) from error
        self._compiled[key] = compiled
        direct = direct_kernel(compiled, dtypes)
        if direct is not None:
            self._direct[key] = direct


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a kernel may depend on, of a tensor beside its device."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16


def _described(tensor: Tensor, shape: list[int], stride: int, box: list[int]) -> TensorDescriptor:
    """Return a descriptor of a matrix, without the checks of its constructor: :meth:`_tma` has made them, cheaper."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape = tensor, shape, [stride, 1], box
    return descriptor


def _tf32() -> bool:
    """Return whether torch multiplies float32 in TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
