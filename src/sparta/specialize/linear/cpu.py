"""The C++ kernels as an implement: ``cpu`` for any sparse linear on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparta.common.tuning import TunableItemCfg
from sparta.specialize.cpu.candidates import candidates, default
from sparta.specialize.cpu.device import runs_here
from sparta.specialize.cpu.kernel import PackedKernel
from sparta.specialize.cpu.panel import Panel
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import Implement, Params, Support
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.cpu_packed import PackedLinear
from sparta.specialize.linear.spec import LinearKernel

__all__ = ["CpuLinear", "CpuLinearKernel"]


class CpuLinearKernel(PackedKernel, LinearKernel):
    """A built C++ kernel of ``linear``, which may also take and return panels."""

    def __init__(self, spec: KernelSpec, tile: Tile) -> None:
        self._linear = PackedLinear(None, spec["weight"], **tile.to_dict())
        super().__init__(self._linear, spec.epilogue)

    @property
    def panel_width(self) -> int | None:
        """The tokens in a tile of the panels that it reads; None where it reads no panels."""
        tile = self._linear.tile
        return tile.mv * self._linear.library.lanes if tile.form == "panel" else None

    def multiply(
        self, packed: Sequence[Tensor], x: Tensor | Panel, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        """Return (M, N) for x (M, K), or for a panel of it."""
        return self._linear(x, bias, self._activation, residual, values=packed[0])

    def to_panel(self, packed: Sequence[Tensor], x: Tensor | Panel, bias: Tensor | None) -> Panel:
        """Return the same as a panel, without a residual."""
        return self._linear.to_panel(x, bias, self._activation, values=packed[0])


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
