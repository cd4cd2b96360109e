"""An int8 linear layer as a step of a chain: what its kernel is called with, for any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparta.specialize.cpu.chain import Product, Step, StepKind, pack_int8_call
from sparta.specialize.cpu.library import INT8_CALL
from sparta.specialize.int8_linear.cpu_packed import Int8Options, PackedInt8Linear
from sparta.specialize.int8_linear.cpu_panel import UNIT

__all__ = ["int8_product"]


def int8_product(
    layer: PackedInt8Linear, packed: Sequence[Tensor], scales: tuple[Tensor, Tensor | None], options: Int8Options
) -> Product:
    """Return a layer with these values, scales and options as a step.

    Parameters
    ----------
    packed
        What :meth:`~sparta.specialize.int8_linear.cpu_packed.PackedInt8Linear.pack` returned.
    scales
        Multiplier and offset or None.
    """
    bound = layer.bound(packed, scales)
    (outputs, inputs), mv = layer.shape, layer.tile.mv
    grid = (torch.int8, 1.0) if options.dynamic else options.rounded_to
    dtype, inverse = (None, 0.0) if grid is None else (grid[0], 1.0 / grid[1])
    output, plain, general = options.codes
    units = -(-inputs // UNIT)

    def call(tokens: int, stride: int, x: str, *, to_panel: bool, residual: bool) -> bytes:
        real = x == "real"
        return INT8_CALL.pack(
            *(0, 0, tokens, stride if real else stride // UNIT, outputs, *bound.addresses, options.floor),
            *(dtype is torch.uint8, options.zero_point, output, options.output[1], 0),
            *(inverse if real else 0.0, inputs, x == "panel", to_panel),
            *(0, outputs, general if residual else plain),
            *(options.dynamic, 1.0 / options.output_scale, bound.no_least_weight),
        )

    def rounded(rounding: tuple[Any, ...]) -> Product:
        wanted, factor, zero = rounding
        return int8_product(layer, packed, scales, replace(options, output=(wanted, zero), output_scale=1.0 / factor))

    def pack(tokens: int, stride: int) -> Step:
        return pack_int8_call(call(tokens, stride, "real", to_panel=False, residual=False), units, mv)

    return Product(
        kind=StepKind.INT8,
        matrix=bound.matrix,
        inputs=inputs,
        outputs=outputs,
        output=options.output[0],
        takes=dtype if not options.dynamic and inputs % UNIT == 0 else None,
        tile=mv * layer.library.lanes,
        rounding=None if dtype is None else ("token",) if options.dynamic else (dtype, inverse, options.zero_point),
        call=call,
        pack=pack,
        rounded=rounded if plain and options.output[0] == torch.float32 else None,
        alive=(bound, layer, packed),
    )
