"""The C++ kernels as an implement: ``cpu-panel`` for any sparse linear on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sparta.common.tuning import TunableItemCfg
from sparta.specialize.cpu.candidates import candidates, default
from sparta.specialize.cpu.device import layout_of, runs_here
from sparta.specialize.cpu.library import fused_activation
from sparta.specialize.cpu.panel import Panel
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import Implement, KernelLayout, Params, Support
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.specialize.linear.spec import LinearKernel

__all__ = ["CpuLinear", "CpuLinearKernel"]


class CpuLinearKernel(LinearKernel):
    """A built C++ kernel of ``linear``, which may also take and return panels."""

    def __init__(self, spec: KernelSpec, tile: Tile) -> None:
        self._packed = PackedLinear(None, spec["weight"], **tile.to_dict())
        self._activation = fused_activation(spec.epilogue)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the live values of the weight (N, K)."""
        return (self._packed.pack(operand.detach()),)

    def layout(self) -> KernelLayout:
        """Return the index arrays and the tile."""
        return layout_of(self._packed.layout, self._packed.tile, self._packed.library)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (M, N) for x (M, K), bias and residual."""
        x, bias, residual = inputs
        assert x is not None  # noqa: S101 - the operation's convention
        return self._packed(x, bias, self._activation, residual, values=packed[0])

    def fast_path(self, packed: Sequence[Tensor], bias: Tensor | None) -> Callable[..., Tensor | None] | None:
        """Return a call with all but x and the residual found out before."""
        return self._packed.fast_path(packed[0], bias, self._activation)

    @property
    def panel_width(self) -> int | None:
        """The tokens in a tile of the panels that it reads; None where it reads no panels."""
        tile = self._packed.tile
        return tile.mv * self._packed.library.lanes if tile.form == "panel" else None

    def multiply(
        self, packed: Sequence[Tensor], x: Tensor | Panel, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        """Return (M, N) for x (M, K), or for a panel of it."""
        return self._packed(x, bias, self._activation, residual, values=packed[0])

    def to_panel(self, packed: Sequence[Tensor], x: Tensor | Panel, bias: Tensor | None) -> Panel:
        """Return the same as a panel, without a residual."""
        return self._packed.to_panel(x, bias, self._activation, values=packed[0])


class CpuLinear(Implement):
    """Hand-written C++ kernels, compiled with the package or at their first use."""

    name = "cpu"
    op = "linear"
    every_epilogue = True
    any_mask = True

    def supports(self, spec: KernelSpec) -> Support:
        """Any mask on the CPU in fp32, bf16 and fp16, where the library is there or a compiler is."""
        return runs_here(spec)

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the tiles that are worth timing for this layer."""
        tiles = [str(Tile(**fields)) for fields in candidates(*_sizes(spec))]
        return {"tile": TunableItemCfg("choice", _value=tiles)}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the best guess."""
        return {"tile": str(Tile(**default(*_sizes(spec))))}

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return CpuLinearKernel(spec, Tile.parse(params["tile"]))


def _sizes(spec: KernelSpec) -> tuple[int, int, int, float, tuple[int, int]]:
    """Return M, N, K, the density and the blocks of the weight's mask."""
    weight = spec["weight"]
    channels, inputs = weight.shape
    h, w = weight.state.block
    return spec["input"].shape[0], channels, inputs, weight.density, (h, w)
