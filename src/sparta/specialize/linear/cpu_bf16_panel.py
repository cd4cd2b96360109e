"""Models in bfloat16 with many tokens: the implement ``cpu-bf16-panel``.

It rounds activations to bf16, as the model does, and multiplies two channels at once, with sums in fp32; it competes
where the processor has instructions for that. Elsewhere the kernels for fp32 run, which compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparta.measure.machine import probe_cpu
from sparta.specialize.cpu.bf16 import Bf16Tile, PackedBf16
from sparta.specialize.cpu.chain import Product
from sparta.specialize.cpu.device import library_here
from sparta.specialize.cpu.library import fused_activation, load
from sparta.specialize.implement import Cause, KernelLayout, Params, Support, TiledImplement, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import LinearKernel

__all__ = ["CpuBf16Panel", "bf16_dense_product", "bf16_dense_tile", "bf16_dense_values"]

_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_FEWEST_TOKENS = 8  # with fewer, reading the weight is all the work
_TOKENS = (64, 128, 16)
_BLOCK_TOKENS = (128, 256, 512, 16)
_GATHERED_TOKENS = (64, 128, 16)
_MOST_UNION = 0.75  # of the channels of 16 rows that are live in any: above, whole blocks are faster


class _Bf16PanelKernel(LinearKernel):
    def __init__(self, spec: KernelSpec, tile: Bf16Tile) -> None:
        self._packed = PackedBf16(spec["weight"].mask("cpu"), tile)
        self._activation = fused_activation(spec.epilogue)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return (self._packed.pack(operand),)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (x,), bias, residual = present(inputs[0]), inputs[1], inputs[2]
        return self._packed(x, packed[0], bias, self._activation, residual).to(x.dtype)

    def product(self, packed: Sequence[Tensor], bias: Tensor | None) -> Product | None:
        return self._packed.product(packed[0], bias, self._activation)

    def layout(self) -> KernelLayout:
        packed = self._packed
        launch = {"isa": packed.library.isa, "tile": str(packed.tile), "groups": packed.groups}
        return KernelLayout(packed.arrays, {**launch, "shape": list(packed.shape)}, packed.nbytes)


class CpuBf16Panel(TiledImplement):
    """Products of two channels at once (AVX-512 BF16), of blocks of 16 x 32, or of 32 gathered channels (AMX)."""

    name = "cpu-bf16-panel"
    version = 2
    op = "linear"
    every_epilogue = True
    any_mask = True

    def supports(self, spec: KernelSpec) -> Support:
        """Take many tokens of a bf16 model, where the processor has instructions for bf16."""
        if str(spec["input"].format) != "bf16":
            return Support.no(f"it computes in bf16, and the model is {spec['input'].format}", Cause.DTYPE)
        if spec["input"].shape[0] < _FEWEST_TOKENS:
            return Support.no(f"it is for {_FEWEST_TOKENS} tokens or more, not {spec['input'].shape[0]}", Cause.SHAPE)
        if spec.device == "cpu" and not _FLAGS & set(probe_cpu().vector_isa):
            return Support.no("the processor has no instructions for bf16 (AVX-512 BF16 or AMX)", Cause.CAPABILITY)
        return library_here(spec)

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the forms that the processor is fast in, the best guess first."""
        weight, units = spec["weight"], load().bf16_units
        height = 4 if weight.state.block[0] % 4 == 0 or weight.density > 0.5 else 1
        pairs = [Bf16Tile("pairs", height, tokens) for tokens in _fitting(_TOKENS, spec["input"].shape[0])]
        blocks = [Bf16Tile("blocks", 16, tokens) for tokens in _fitting(_BLOCK_TOKENS, spec["input"].shape[0])]
        gathered = [Bf16Tile("gathered", 16, tokens) for tokens in _fitting(_GATHERED_TOKENS, spec["input"].shape[0])]
        union = 1 - (1 - weight.density) ** (16 / min(16, weight.state.block[0]))
        if "blocks" not in units:
            return pairs
        tiles = [*gathered[:2], *blocks[:2]] if union < _MOST_UNION else blocks
        return [*tiles, *(pairs[:1] if "pairs" in units else [])]

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return _Bf16PanelKernel(spec, Bf16Tile.parse(params["tile"]))


def bf16_dense_tile(tokens: int) -> Bf16Tile | None:
    """Return the tile for a dense layer of a bf16 model in a chain; None where the kernels for fp32 are as fast."""
    units = load().bf16_units
    if "blocks" in units:
        return Bf16Tile("blocks", 16, _fitting(_BLOCK_TOKENS, tokens)[0])
    return Bf16Tile("pairs", 4, _fitting(_TOKENS, tokens)[0]) if "pairs" in units else None


def bf16_dense_values(weight: Tensor, tile: Bf16Tile) -> Tensor:
    """Return the values of a dense weight (N, K) as the kernels read them; all tiles of one form share them."""
    return _dense(weight, tile).pack(weight)


def bf16_dense_product(weight: Tensor, bias: Tensor | None, tile: Bf16Tile, values: Tensor) -> Product | None:
    """Return a dense layer (N, K) as a step of a chain; None where the kernels do not take its bias as it is.

    Parameters
    ----------
    values
        What :func:`bf16_dense_values` returned for this weight and a tile of the same form.

    Examples
    --------
    >>> weight, tile = torch.ones(4, 3), Bf16Tile("pairs", 4, 16)
    >>> bf16_dense_product(weight, None, tile, bf16_dense_values(weight, tile)).outputs
    4
    """
    return _dense(weight, tile).product(values, bias)


def _dense(weight: Tensor, tile: Bf16Tile) -> PackedBf16:
    return PackedBf16(torch.ones(weight.shape, dtype=torch.bool), tile)


def _fitting(sizes: Sequence[int], tokens: int) -> list[int]:
    """Return the sizes of tiles that so many tokens fill, or the smallest; the order stays."""
    return [size for size in sizes if size <= tokens] or [min(sizes)]
