"""Launching the block kernel: what differs from call to call is worked out here, and nothing else.

The one idea to know: Triton looks its compiled kernel up by every argument at every call, which costs more than to
start it; the launcher keeps the compiled kernel itself, by the few facts that Triton compiles for. This module imports
Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from sparta.errors import ValueRangeError, message
from sparta.specialize.cuda.block_linear import INTERPRETED, block_linear
from sparta.specialize.cuda.nvrtc import raw_stream
from sparta.specialize.cuda.tile import BlockTile

__all__ = ["BlockLinearLauncher"]


class BlockLinearLauncher:
    """Launches the kernel for one weight shape, tile and activation.

    Parameters
    ----------
    shape
        (N, K) of the weight.
    whole
        Whether every stored block lies wholly inside the weight along K, so that columns need no bounds check.
    """

    def __init__(self, shape: tuple[int, int], tile: BlockTile, activation: str | None, *, whole: bool) -> None:
        self.shape, self.tile = shape, tile
        self._constants = (tile.tokens, tile.height, tile.width, tile.blocks, tile.group)
        self._switches = (
            bool(tile.weight_first),
            whole,
            bool(tile.flatten),
            bool(tile.early) and not INTERPRETED,
            activation,
        )
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._processors: dict[torch.device, int] = {}

    def __call__(self, packed: Sequence[Tensor], x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """Return ``activation(x W^T + bias) + residual`` for x (M, K) with unit stride along K."""
        values, columns, schedule = packed
        (outputs, inputs), tile, tokens = self.shape, self.tile, x.shape[0]
        y = x.new_empty((tokens, outputs))
        if not tokens:
            return y
        stride = x.stride(0) if tokens > 1 else inputs  # a single row may have any
        precision = "tf32" if x.dtype == torch.float32 and _tf32() else "ieee"
        tma = self._tma(x, stride)
        token_tiles = -(-tokens // tile.tokens)
        tiles = token_tiles * schedule.shape[0]
        arguments = (
            _described(x, [tokens, inputs], stride, [tile.tokens, tile.width]) if tma else x,
            _described(values, [values.shape[0] * tile.height, tile.step], tile.step, [tile.height, tile.width])
            if tma else values,
            columns, schedule, bias, residual,
            _described(y, [tokens, outputs], outputs, [tile.tokens, tile.height]) if tma == 2 else y,
            tokens, outputs, inputs, stride, schedule.shape[0], token_tiles, tiles, *self._constants, tma,
            *self._switches, bias is not None, residual is not None, precision, INTERPRETED,
        )  # fmt: skip
        key = (
            x.device, x.dtype, x.data_ptr() % 16, stride % 16, stride >> 31, stride == 1, tma, precision,
            bias if bias is None else (bias.dtype, bias.data_ptr() % 16),
            residual if residual is None else (residual.dtype, residual.data_ptr() % 16),
        )  # fmt: skip
        self._start(key, (self._grid(tiles, x.device), 1, 1), arguments)
        return y

    def _tma(self, x: Tensor, stride: int) -> int:
        """Return how far the copy engine can be used; what it cannot address, ordinary loads can."""
        outputs, inputs = self.shape
        size = x.element_size()
        if not self.tile.tma or x.data_ptr() % 16 or stride * size % 16 or stride < inputs:
            return 0
        return 1 if outputs * size % 16 else self.tile.tma

    def _grid(self, tiles: int, device: torch.device) -> int:
        """Return the number of programs."""
        if not self.tile.ctas:
            return tiles
        if device not in self._processors:
            on_cuda = device.type == "cuda"
            self._processors[device] = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 4
        return min(tiles, self.tile.ctas * self._processors[device])

    def _start(self, key: tuple[Any, ...], grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        """Start the kernel on the device and the stream that are current for the tensors."""
        if INTERPRETED:
            block_linear[grid](*arguments)
            return
        device = key[0]
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._start(key, grid, arguments)
            return
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments, stream=raw_stream(device))  # given, it is not looked up
            return
        options = {"num_warps": self.tile.warps, "num_stages": self.tile.stages, "launch_pdl": bool(self.tile.early)}
        try:
            self._compiled[key] = block_linear[grid](*arguments, **options)
        except OutOfResources as error:
            raise ValueRangeError(message(f"{self.tile} needs more than the GPU has: {error}")) from error


def _described(tensor: Tensor, shape: list[int], stride: int, box: list[int]) -> TensorDescriptor:
    """Return a descriptor of a matrix, without the checks of its constructor: :meth:`_tma` has made them, cheaper."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape = tensor, shape, [stride, 1], box
    return descriptor


def _tf32() -> bool:
    """Return whether torch multiplies float32 in TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
