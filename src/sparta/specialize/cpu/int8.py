"""A pruned int8 linear layer in the layout its kernel reads, and the implement ``cpu-int8`` that runs it.

:class:`PackedInt8Linear` stores four neighbouring input channels as one 32-bit number and skips those groups of four
that are pruned altogether, so blocks of 4x4 (and taller ones) lose nothing. The one idea to know: sums are exact
integers in every build, so results are equal bit for bit to the dense integer product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import addressof
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.common.tuning import TunableItemCfg
from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.cpu.implement import layout_of, library_here
from sparta.specialize.cpu.library import INT8_CALL, PanelMatrix, load
from sparta.specialize.cpu.packing import pack_mask
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.implement import Implement, KernelLayout, Params, Support, present, register
from sparta.specialize.int8 import Int8LinearKernel
from sparta.specialize.kernel_spec import KernelSpec

__all__ = ["CpuInt8Linear", "PackedInt8Linear"]

_UNIT = 4  # input channels in one number
_OUTPUTS = {torch.float32: 0, torch.int8: 1, torch.uint8: 2}


class PackedInt8Linear:
    """The mask of an int8 weight (N, K), packed in units of 1x4; every call brings the values that :meth:`pack` made.

    Parameters
    ----------
    mask
        (N, K) bool, True = live.
    isa
        Instruction set; ``None`` for the best.
    tile
        ``block`` 1 or 4 and ``mv`` 1 to 4 of a :class:`~sparta.specialize.cpu.tile.Tile`.

    Examples
    --------
    >>> weight = torch.tensor([[1, 2, 0, 0], [0, 0, 0, 3]], dtype=torch.int8)
    >>> packed = PackedInt8Linear(weight != 0)
    >>> x = torch.tensor([[1, 1, 1, -1]], dtype=torch.int8)
    >>> packed(x, packed.pack(weight), torch.ones(2))
    tensor([[ 3., -3.]])
    """

    def __init__(self, mask: Tensor, *, isa: str | None = None, **tile: Any) -> None:  # noqa: ANN401
        self.tile = Tile(**tile)
        plain = self.tile.form == "panel" and self.tile.block in (1, 4) and self.tile.interleave == 1
        if not plain or self.tile.k_chunk or self.tile.prefetch:
            raise ValueRangeError(message(f"the tile {self.tile}", "panels of blocks of 1 or 4, and mv"))
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ShapeError(message(f"a mask of shape {tuple(mask.shape)} and {mask.dtype}", "bool (N, K)"))
        self.library = load(isa)
        self.mask = mask.cpu().contiguous()
        outputs, inputs = mask.shape
        self.shape = (outputs, inputs)
        self._units = -(-inputs // _UNIT)
        units = self._whole_units(self.mask).view(outputs, self._units, _UNIT).any(-1)
        self.layout = pack_mask(units, self.tile, self.library.lanes)
        self._bound: PanelMatrix | None = None

    def _whole_units(self, rows: Tensor) -> Tensor:
        """Return rows (M, K) as contiguous memory with zeros up to a whole unit."""
        missing = self._units * _UNIT - rows.shape[1]
        return functional.pad(rows, (0, missing)) if missing else rows.contiguous()

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the live values of a weight (N, K), int8, and the sums of its rows."""
        if tuple(weight.shape) != self.shape or weight.dtype != torch.int8:
            given = f"a weight of shape {tuple(weight.shape)} and {weight.dtype}"
            raise ShapeError(message(given, f"{self.shape} and int8, as when packed"))
        live = torch.where(self.mask, weight.detach().cpu(), 0)
        numbers = self._whole_units(live).reshape(-1).view(torch.int32)
        source = self.layout.source.long()
        found = numbers[source.clamp_min(0)] if numbers.numel() else numbers.new_zeros(len(source))
        return torch.where(source >= 0, found, 0), live.sum(1, dtype=torch.int32)

    def __call__(
        self,
        x: Tensor,
        packed: Sequence[Tensor],
        multiplier: Tensor,
        offset: Tensor | None = None,
        *,
        zero_point: int = 0,
        relu: bool = False,
        output: tuple[torch.dtype, int] = (torch.float32, 0),
        threads: int | None = None,
    ) -> Tensor:
        """Return the requantised product (M, N).

        Parameters
        ----------
        x
            (M, K), int8 or uint8, with any strides, and `zero_point` its zero.
        packed
            What :meth:`pack` returned.
        multiplier, offset
            (N,), float32: a sum becomes ``sum * multiplier + offset``.
        output
            Dtype of the result, float32, int8 or uint8, and its zero point.
        """
        outputs, inputs = self.shape
        if x.ndim != 2 or x.shape[1] != inputs or x.dtype not in (torch.int8, torch.uint8) or not x.is_cpu:
            given = f"x of shape {tuple(x.shape)} and {x.dtype} on {x.device}"
            raise ShapeError(message(given, f"(M, {inputs}), int8 or uint8, on cpu"))
        for name, vector in (("multiplier", multiplier), ("offset", offset)):
            if vector is not None and (vector.shape != (outputs,) or vector.dtype != torch.float32):
                given = f"{name} of shape {tuple(vector.shape)} and {vector.dtype}"
                raise ShapeError(message(given, f"({outputs},), float32"))
        if output[0] not in _OUTPUTS:
            raise ValueRangeError(message(f"a result in {output[0]}", ", ".join(map(str, _OUTPUTS))))
        values, row_sums = packed
        if values.shape != self.layout.source.shape or values.dtype != torch.int32 or not values.is_contiguous():
            raise ShapeError(message(f"packed values of shape {tuple(values.shape)}", fix="take what pack() returned"))
        rows = self._whole_units(x.detach())
        scale, shift = multiplier.contiguous(), None if offset is None else offset.contiguous()
        y = torch.empty(len(x), outputs, dtype=output[0])
        call = INT8_CALL.pack(
            rows.data_ptr(),
            y.data_ptr(),
            len(x),
            self._units,
            outputs,
            scale.data_ptr(),
            0 if shift is None else shift.data_ptr(),
            row_sums.data_ptr(),
            0.0 if relu else -math.inf,
            x.dtype == torch.uint8,
            zero_point,
            _OUTPUTS[output[0]],
            output[1],
            torch.get_num_threads() if threads is None else threads,
        )
        matrix = self._matrix_for(values)
        self.library.multiply_int8(addressof(matrix), call)
        return y

    def _matrix_for(self, values: Tensor) -> PanelMatrix:
        """Return the C structure with these values, as in the last call where they are the same."""
        bound, address = self._bound, values.data_ptr()
        if bound is None or bound.values != address:
            # A new one, because another thread may be running with other values.
            bound = self._bound = self._matrix(values)
        return bound

    def _matrix(self, values: Tensor) -> PanelMatrix:
        layout, tile = self.layout, self.tile
        fields = {name: array.data_ptr() for name, array in layout.arrays.items()}
        sizes = {"channels": layout.shape[0], "inputs": layout.shape[1], "groups": layout.groups, "chunks": 1}
        return PanelMatrix(**fields, **sizes, values=values.data_ptr(), bn=tile.block, mv=tile.mv, interleave=1)


class _CpuInt8Kernel(Int8LinearKernel):
    def __init__(self, spec: KernelSpec, tile: Tile) -> None:
        self._packed = PackedInt8Linear(spec["weight"].mask("cpu"), **tile.to_dict())
        attributes = spec.attributes
        formats = {"int8": torch.int8, "uint8": torch.uint8, "fp32": torch.float32}
        self._options: dict[str, Any] = {
            "zero_point": attributes["input_zero_point"],
            "relu": spec.epilogue.activation == "relu",
            "output": (formats[attributes["output_format"]], attributes["output_zero_point"]),
        }

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return self._packed.pack(operand)

    def layout(self) -> KernelLayout:
        return layout_of(self._packed.layout, self._packed.tile, self._packed.library)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, multiplier = present(*inputs[:2])
        return self._packed(x, packed, multiplier, inputs[2], **self._options)


@register
class CpuInt8Linear(Implement):
    """Hand-written C++ kernels on units of 1x4, with VNNI where the processor has it."""

    name = "cpu-int8"
    op = "int8_linear"

    def supports(self, spec: KernelSpec) -> Support:
        """Any mask on the CPU, where there is a compiler."""
        return library_here(spec)

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the tiles that are worth timing."""
        return {"tile": TunableItemCfg("choice", _value=[str(tile) for tile in _tiles(spec)])}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the best guess."""
        return {"tile": str(_tiles(spec)[0])}

    def build(self, spec: KernelSpec, params: Params) -> Int8LinearKernel:
        """Compile the library if it is not there yet, and pack the mask."""
        return _CpuInt8Kernel(spec, Tile.parse(params["tile"]))


def _tiles(spec: KernelSpec) -> list[Tile]:
    """Return the tiles worth timing, the best guess first: blocks of 4 where the mask has them."""
    most = max(1, min(4, -(-spec["input"].shape[0] // load().lanes)))
    heights = (4, 1) if spec["weight"].state.block[0] % 4 == 0 else (1, 4)
    return [Tile(block=height, mv=mv) for height in heights for mv in range(most, 0, -1)]
