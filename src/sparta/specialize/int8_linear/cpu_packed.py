"""A pruned int8 linear layer in the layout its kernel reads.

:class:`PackedInt8Linear` stores four neighbouring input channels as one 32-bit number and skips those groups of four
that are pruned altogether, so blocks of 4x4 (and taller ones) lose nothing. Sums are exact integers in every build, so
they are equal bit for bit to the dense integer product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import addressof
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.cpu.library import INT8_CALL, PanelMatrix, activation_code, load, raise_for
from sparta.specialize.cpu.packing import Layout, is_float, pack_mask
from sparta.specialize.cpu.tile import Tile
from sparta.specialize.int8_linear.cpu_gathered import gathered_layout
from sparta.specialize.int8_linear.cpu_panel import UNIT, Int8Panel, whole_units

__all__ = ["SCALES", "Int8Options", "Int8Panel", "PackedInt8Linear", "no_least_weight"]

SCALES = (1e-37, 1e37)
"""Scales whose inverse is a number in float32, and not 0."""
_OUTPUTS = {torch.float32: 0, torch.int8: 1, torch.uint8: 2}
_INPUTS = (torch.uint8, torch.int8, torch.float32)
_LEAST_WEIGHT = -128
_pack_call = INT8_CALL.pack


@dataclass(frozen=True)
class Int8Options:
    """What an int8 layer does beside multiplying.

    Attributes
    ----------
    zero_point
        Of the input.
    activation
        Of results, by the names of :data:`~sparta.specialize.cpu.library.ACTIVATIONS`; ``'relu_last'`` comes after the
        residual.
    output
        Dtype of the result, float32, int8 or uint8, and its zero point.
    output_scale
        Of an 8-bit result, where it comes after an activation other than ReLU, or a residual; without these it is a
        part of the multiplier.
    rounded_to
        For an input in float32: the dtype of the integers it is rounded to, and their scale.
    dynamic
        Whether an input in float32 is rounded to int8 with a scale for each token.
    """

    zero_point: int = 0
    activation: str | None = None
    output: tuple[torch.dtype, int] = (torch.float32, 0)
    output_scale: float = 1.0
    rounded_to: tuple[torch.dtype, float] | None = None
    dynamic: bool = False
    floor: float = field(init=False)
    codes: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        if self.output[0] not in _OUTPUTS:
            raise ValueRangeError(message(f"a result in {self.output[0]}", ", ".join(map(str, _OUTPUTS))))
        if self.dynamic and (self.rounded_to is not None or self.zero_point):
            raise ValueRangeError(message("an input that is dynamic and has a grid", "one of them"))
        if self.rounded_to is not None and (
            self.rounded_to[0] not in _INPUTS[:2] or not SCALES[0] <= self.rounded_to[1] <= SCALES[1]
        ):
            given = f"an input rounded to {self.rounded_to[0]} with the scale {self.rounded_to[1]}"
            raise ValueRangeError(
                message(given, f"torch.int8 or torch.uint8, and a scale of {SCALES[0]} to {SCALES[1]}")
            )
        if not SCALES[0] <= self.output_scale <= SCALES[1]:
            raise ValueRangeError(message(f"an output scale of {self.output_scale}", f"{SCALES[0]} to {SCALES[1]}"))
        # As the kernel takes them; set once, because every call needs them. A plain ReLU is a floor of the results.
        code, relu = activation_code(self.activation), self.activation == "relu"
        object.__setattr__(self, "floor", 0.0 if relu else -math.inf)
        object.__setattr__(self, "codes", (_OUTPUTS[self.output[0]], 0 if relu else code, code))


class PackedInt8Linear:
    """The mask of an int8 weight (N, K), packed in units of 1x4; every call brings the values that :meth:`pack` made.

    Parameters
    ----------
    mask
        (N, K) bool, True = live.
    isa
        Instruction set; ``None`` for the best.
    tile
        ``block`` 1 or 4 and ``mv`` 1 to 4 of a :class:`~sparta.specialize.cpu.tile.Tile`, or the form ``'gathered'``.

    Examples
    --------
    >>> weight = torch.tensor([[1, 2, 0, 0], [0, 0, 0, 3]], dtype=torch.int8)
    >>> packed = PackedInt8Linear(weight != 0)
    >>> x = torch.tensor([[1, 1, 1, -1]], dtype=torch.int8)
    >>> packed(x, packed.pack(weight), torch.ones(2))
    tensor([[ 3., -3.]])
    """

    def __init__(self, mask: Tensor, *, isa: str | None = None, **tile: Any) -> None:
        self.tile = Tile(**tile)
        gathers = self.tile.form == "gathered"
        plain = self.tile.form == "panel" and self.tile.block in (1, 4) and self.tile.interleave == 1
        if not (plain or gathers) or self.tile.k_chunk or self.tile.prefetch:
            raise ValueRangeError(message(f"the tile {self.tile}", "panels of blocks of 1 or 4, or gathered, and mv"))
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ShapeError(message(f"a mask of shape {tuple(mask.shape)} and {mask.dtype}", "bool (N, K)"))
        self.library = load(isa)
        self.mask = mask.cpu().contiguous()
        outputs, inputs = mask.shape
        self.shape = (outputs, inputs)
        self._units = -(-inputs // UNIT)
        units = whole_units(self.mask).view(outputs, self._units, UNIT).any(-1)
        lanes = self.library.lanes
        layout = gathered_layout(units.numpy(), self.tile, lanes) if gathers else pack_mask(units, self.tile, lanes)
        self.layout: Layout = layout
        self._bound: Bound | None = None

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the live values of a weight (N, K), int8, and the sums of its rows."""
        if tuple(weight.shape) != self.shape or weight.dtype != torch.int8:
            given = f"a weight of shape {tuple(weight.shape)} and {weight.dtype}"
            raise ShapeError(message(given, f"{self.shape} and int8, as when packed"))
        live = torch.where(self.mask, weight.detach().cpu(), 0)
        numbers = whole_units(live).reshape(-1).view(torch.int32)
        source = self.layout.source.long()
        found = numbers[source.clamp_min(0)] if numbers.numel() else numbers.new_zeros(len(source))
        return torch.where(source >= 0, found, 0), live.sum(1, dtype=torch.int32)

    def __call__(
        self,
        x: Tensor | Int8Panel,
        packed: Sequence[Tensor],
        multiplier: Tensor,
        offset: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        threads: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the requantised product (M, N).

        Parameters
        ----------
        x
            (M, K), int8 or uint8, with any strides; a panel of these; or float32, which is rounded on the way.
        packed
            What :meth:`pack` returned.
        multiplier, offset
            (N,), float32: a sum becomes ``activation(sum * multiplier + offset)``, with the scale of its token as a
            factor where the input is dynamic.
        residual
            (M, N), float32: added after the activation.
        options
            Fields of :class:`Int8Options`.
        """
        return self.run(x, packed, (multiplier, offset), Int8Options(**options), threads, residual)

    def run(
        self,
        x: Tensor | Int8Panel,
        packed: Sequence[Tensor],
        scales: tuple[Tensor, Tensor | None],
        options: Int8Options,
        threads: int | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the same, with the options made before."""
        y = torch.empty(x.tokens if isinstance(x, Int8Panel) else len(x), self.shape[0], dtype=options.output[0])
        self._run(x, y, packed, scales, options, threads, residual)
        return y

    def to_panel(
        self,
        x: Tensor | Int8Panel,
        packed: Sequence[Tensor],
        scales: tuple[Tensor, Tensor | None],
        options: Int8Options,
        threads: int | None = None,
        residual: Tensor | None = None,
    ) -> Int8Panel:
        """Return the same as a panel of bytes, for a next layer with the same ``mv``."""
        dtype = options.output[0]
        if dtype == torch.float32:
            raise ValueRangeError(message(f"a panel of {dtype}", "torch.int8, torch.uint8"))
        tokens = x.tokens if isinstance(x, Int8Panel) else len(x)
        y = Int8Panel.empty(tokens, self.shape[0], self.tile.mv * self.library.lanes, dtype)
        self._run(x, y.data, packed, scales, options, threads, residual, to_panel=True)
        return y

    def fast_path(
        self, packed: Sequence[Tensor], scales: tuple[Tensor, Tensor | None], options: Int8Options
    ) -> Callable[..., Tensor | None]:
        """Return a call with these values, scales and options, which takes x (..., K) and a residual (..., N) or None.

        It returns None for tensors that are not contiguous on the CPU, or that the options do not say how to round. All
        that does not change is found here, because that is most of a small layer's time beside the kernel.
        """
        bound, multiply, (outputs, inputs) = (
            self.bound(packed, scales),
            self.library.handle.sparta_multiply_int8,
            self.shape,
        )
        grid = (torch.int8, 1.0) if options.dynamic else options.rounded_to
        wanted, inverse = (None, 0.0) if grid is None else (grid[0], 1.0 / grid[1])
        whole = not options.dynamic and inputs % UNIT == 0
        output, plain, general = options.codes
        address, dtype = addressof(bound.matrix), options.output[0]
        ends = (*bound.addresses, options.floor)
        grids = (options.zero_point, output, options.output[1])
        last = (options.dynamic, 1.0 / options.output_scale, bound.no_least_weight)
        empty, threads = torch.empty, torch.get_num_threads

        def call(x: Tensor, residual: Tensor | None = None, _alive: object = (bound, self)) -> Tensor | None:
            shape, given = x.shape, x.dtype
            if not shape or shape[-1] != inputs:
                return None
            if is_float(x) and wanted is not None:
                stride, unsigned, factor = inputs, wanted is torch.uint8, inverse
            elif whole and (given is torch.uint8 or given is torch.int8) and x.is_contiguous() and x.is_cpu:
                stride, unsigned, factor = inputs // UNIT, given is torch.uint8, 0.0
            else:
                return None
            lead, added = shape[:-1], 0
            y = empty(*lead, outputs, dtype=dtype)
            if residual is not None:
                if residual.shape != y.shape or not is_float(residual):
                    return None
                added = residual.data_ptr()
            tokens = lead[0] if len(lead) == 1 else lead.numel()
            rows = (x.data_ptr(), y.data_ptr(), tokens, stride, outputs)
            middle = (unsigned, *grids, threads(), factor, inputs, 0, 0, added, outputs, general if added else plain)
            code = multiply(address, _pack_call(*rows, *ends, *middle, *last))
            if code:
                raise_for(code)
            return y

        return call

    def _run(
        self,
        x: Tensor | Int8Panel,
        y: Tensor,
        packed: Sequence[Tensor],
        scales: tuple[Tensor, Tensor | None],
        options: Int8Options,
        threads: int | None,
        residual: Tensor | None,
        *,
        to_panel: bool = False,
    ) -> None:
        bound = self._bound
        if bound is None or not bound.is_for(packed, scales):
            # A new one, because another thread may be running with other values.
            bound = self._bound = self.bound(packed, scales)
        rows, stride, tokens, unsigned, inverse, panel = self._rows_of(x, options)
        outputs, inputs = self.shape
        output, plain_activation, activation = options.codes
        added = None if residual is None else self._residual(residual, tokens)
        call = _pack_call(
            rows.data_ptr(),
            y.data_ptr(),
            tokens,
            stride,
            outputs,
            *bound.addresses,
            options.floor,
            unsigned,
            options.zero_point,
            output,
            options.output[1],
            torch.get_num_threads() if threads is None else threads,
            inverse,
            inputs,
            panel,
            to_panel,
            0 if added is None else added.data_ptr(),
            outputs,
            plain_activation if added is None else activation,
            options.dynamic,
            1.0 / options.output_scale,
            bound.no_least_weight,
        )
        self.library.multiply_int8(addressof(bound.matrix), call)

    def _residual(self, residual: Tensor, tokens: int) -> Tensor:
        if tuple(residual.shape) != (tokens, self.shape[0]) or not residual.is_cpu:
            given = f"a residual of shape {tuple(residual.shape)} on {residual.device}"
            raise ShapeError(message(given, f"({tokens}, {self.shape[0]}) on cpu, as the result"))
        return residual.detach().resolve_neg().to(torch.float32).contiguous()

    def _rows_of(self, x: Tensor | Int8Panel, options: Int8Options) -> tuple[Tensor, int, int, bool, float, bool]:
        """Return x as the kernel reads it: rows, stride, tokens, if unsigned, 1 / scale or 0, whether it is a panel."""
        inputs = self.shape[1]
        if isinstance(x, Int8Panel):
            size = self.tile.mv * self.library.lanes
            if x.channels != inputs or x.tile != size or options.dynamic:
                given = f"x is a panel of {x.channels} channels in tiles of {x.tile}"
                raise ShapeError(message(given, f"{inputs} channels in tiles of {size}, of a static grid"))
            return x.data, 0, x.tokens, x.dtype is torch.uint8, 0.0, True
        dtype, shape = x.dtype, x.shape
        if len(shape) != 2 or shape[1] != inputs or dtype not in _INPUTS or not x.is_cpu:
            given = f"x of shape {tuple(shape)} and {dtype} on {x.device}"
            raise ShapeError(message(given, f"(M, {inputs}), int8 or uint8 (or float32 and its grid), on cpu"))
        if dtype is not torch.float32:
            if options.dynamic:
                raise ShapeError(message(f"x in {dtype} for a dynamic grid", "float32"))
            return whole_units(x), self._units, shape[0], dtype is torch.uint8, 0.0, False
        rows = x.resolve_neg().contiguous()
        if options.dynamic:
            return rows, inputs, shape[0], False, 1.0, False
        if options.rounded_to is None:
            raise ShapeError(message("x in float32", "int8 or uint8", "say its grid with rounded_to="))
        wanted, scale = options.rounded_to
        return rows, inputs, shape[0], wanted is torch.uint8, 1.0 / scale, False

    def bound(self, packed: Sequence[Tensor], scales: tuple[Tensor, Tensor | None]) -> Bound:
        """Return checked values and scales with their addresses, as a call takes them."""
        values, row_sums = packed
        if values.shape != self.layout.source.shape or values.dtype != torch.int32 or not values.is_contiguous():
            raise ShapeError(message(f"packed values of shape {tuple(values.shape)}", fix="take what pack() returned"))
        kept: list[Tensor | None] = []
        for name, scale in zip(("multiplier", "offset"), scales, strict=True):
            if scale is not None and (scale.shape != (self.shape[0],) or scale.dtype != torch.float32):
                given = f"{name} of shape {tuple(scale.shape)} and {scale.dtype}"
                raise ShapeError(message(given, f"({self.shape[0]},), float32"))
            kept.append(None if scale is None else scale.contiguous())
        addresses = tuple(0 if scale is None else scale.data_ptr() for scale in kept)
        return Bound(
            values,
            *scales,
            _places(values, *scales),
            self._matrix(values),
            (*addresses, row_sums.data_ptr()),
            kept,
            no_least_weight=no_least_weight(values),
        )

    def _matrix(self, values: Tensor) -> PanelMatrix:
        """Return the C structure of the packed weight."""
        layout, tile = self.layout, self.tile
        fields = {name: array.data_ptr() for name, array in layout.arrays.items()}
        sizes = {"channels": layout.shape[0], "inputs": layout.shape[1], "groups": layout.groups, "chunks": 1}
        return PanelMatrix(**fields, **sizes, values=values.data_ptr(), bn=tile.block, mv=tile.mv, interleave=1)


class Bound(NamedTuple):
    """Values and scales as in the last call: what was given, where it lay, and what the kernel takes."""

    values: Tensor
    multiplier: Tensor
    offset: Tensor | None
    lay: tuple[int, int, int]
    matrix: PanelMatrix
    addresses: tuple[int, ...]  # of multiplier, offset and row sums
    kept: list[Tensor | None]  # contiguous, and alive
    no_least_weight: bool

    def is_for(self, packed: Sequence[Tensor], scales: tuple[Tensor, Tensor | None]) -> bool:
        """Tell whether a call brings the same, in the same places."""
        values, multiplier, offset, lay, *_ = self
        same = packed[0] is values and scales[0] is multiplier and scales[1] is offset
        return same and _places(values, multiplier, offset) == lay


def no_least_weight(values: Tensor) -> bool:
    """Tell whether no weight among packed values is -128, so that quicker kernels are exact.

    >>> no_least_weight(torch.tensor([-127, 127, 0, 3], dtype=torch.int8).view(torch.int32))
    True
    """
    return not bool((values.view(torch.int8) == _LEAST_WEIGHT).any())


def _places(values: Tensor, multiplier: Tensor, offset: Tensor | None) -> tuple[int, int, int]:
    return values.data_ptr(), multiplier.data_ptr(), 0 if offset is None else offset.data_ptr()
