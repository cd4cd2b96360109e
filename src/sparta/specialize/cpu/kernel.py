"""PackedKernel: a packed C++ operator with the interface of a kernel; what linear layers and convolutions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from sparta.specialize.cpu.device import layout_of
from sparta.specialize.cpu.library import Library, fused_activation
from sparta.specialize.cpu.packing import Layout
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import Kernel, KernelLayout
from sparta.specialize.kernel_spec import Epilogue

__all__ = ["PackedKernel"]


class _Packed(Protocol):
    """A mask that was laid out for a tile."""

    tile: Tile
    library: Library
    layout: Layout

    def pack(self, weight: Tensor) -> Tensor: ...
    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        *,
        values: Tensor | None = None,
    ) -> Tensor: ...
    def fast_path(
        self, values: Tensor, bias: Tensor | None, activation: str | None
    ) -> Callable[..., Tensor | None] | None: ...
    def product(self, values: Tensor, bias: Tensor | None, activation: str | None) -> Any: ...


class PackedKernel(Kernel):
    """A kernel that packs a weight into one array of live values, and takes x, a bias and a residual."""

    def __init__(self, packed: _Packed, epilogue: Epilogue) -> None:
        self._packed, self._activation = packed, fused_activation(epilogue)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the live values of the weight."""
        return (self._packed.pack(operand.detach()),)

    def layout(self) -> KernelLayout:
        """Return the index arrays and the tile."""
        return layout_of(self._packed.layout, self._packed.tile, self._packed.library)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return the result for x, bias and residual."""
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return self._packed(x, bias, self._activation, residual, values=packed[0])

    def fast_path(self, packed: Sequence[Tensor], bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        """Return a call with all but x and the residual found out before."""
        return self._packed.fast_path(packed[0], bias, self._activation)

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Any:
        """Return what the operator is as a step of a chain."""
        return self._packed.product(packed[0], bias, self._activation)
