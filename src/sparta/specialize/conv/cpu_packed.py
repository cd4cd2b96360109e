"""A pruned convolution in the layout its kernel reads: ``activation(conv(x, W) + bias) + residual``.

:class:`PackedConv` is below operators and autograd, as :class:`~sparta.specialize.linear.cpu_packed.PackedLinear` is:
it packs a weight once and convolves images of any size. Lists of live weights are the same as those of a linear layer
with a column for each channel and tap; only the table of offsets depends on the image, and is kept for the sizes seen
last.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from ctypes import addressof
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.specialize.conv.cpu_grid import GRID, plan_grid
from sparta.specialize.conv.cpu_image import IMAGES, ImagePlan, plan_image
from sparta.specialize.conv.cpu_phases import PHASE_COUNT, PHASES, by_phase, has_phases
from sparta.specialize.conv.spec import ConvGeometry
from sparta.specialize.cpu.chain import ImageProduct, Step, StepKind
from sparta.specialize.cpu.device import DTYPES
from sparta.specialize.cpu.library import CONV_CALL, PanelMatrix, activation_code, load, raise_for
from sparta.specialize.cpu.packing import (
    BLOCK_ROWS,
    QUAD_ROWS,
    Bools,
    Ints,
    Layout,
    is_float,
    offset_table,
    pack_entries,
)
from sparta.specialize.cpu.tile import Tile

__all__ = ["FixedPlan", "PackedConv", "checked_real"]

_KEPT_PLANS = 8
_FIXED = (
    *("in_channels", "in_rows", "in_columns", "out_rows", "out_columns", "stride_rows", "stride_columns", "slots"),
    *("row_width", "band_tokens", "reach", "plane", "direct"),
)


@dataclass
class _Plan:
    """The layout of images of one size, and how C structures say it: addresses (of `arrays`), and `_FIXED` numbers."""

    image: ImagePlan
    arrays: dict[str, Tensor]
    matrix: PanelMatrix
    addresses: tuple[int, ...]
    numbers: dict[str, int]

    def matrix_for(self, values: Tensor) -> PanelMatrix:
        """Return the packed weight with these values."""
        matrix = self.matrix
        if matrix.values != values.data_ptr():
            # A copy, because another thread may be running with other values.
            matrix = PanelMatrix.from_buffer_copy(matrix)
            matrix.values = values.data_ptr()
            self.matrix = matrix
        return matrix


@dataclass(frozen=True)
class _Ready:
    """What calls for images of one size have in common; `alive` is what the addresses are of."""

    shape: torch.Size
    address: int
    rest: tuple[int, ...]
    alive: tuple[Any, ...]


@dataclass(frozen=True)
class FixedPlan:
    """All that a kernel reads for contiguous images of one size, for code that calls it from elsewhere.

    Attributes
    ----------
    arrays
        Index arrays by name, those of the weight and those of the image.
    numbers
        The fields of ``PanelMatrix`` and of a call that are numbers.
    """

    arrays: dict[str, Tensor]
    numbers: dict[str, int]


class PackedConv:
    """A convolution's weight, packed without its pruned values.

    Sums are computed in float32; bfloat16 and float16 are converted on the way in and out. There is no autograd here.

    Parameters
    ----------
    weight
        (N, C / groups, KH, KW) or (N, C / groups, K), any float dtype. ``None`` packs the mask only, and every call
        must bring the ``values`` that :meth:`pack` returns.
    mask
        Bool, of the same shape, True = live.
    geometry
        Strides, padding, dilation, groups.
    image
        How images are laid out for the kernel, one of :data:`~sparta.specialize.conv.cpu_image.IMAGES`,
        :data:`~sparta.specialize.conv.cpu_grid.GRID`, or :data:`~sparta.specialize.conv.cpu_phases.PHASES`, which
        chooses the chunks and is ``'columns'`` for images that have no phases.
    isa
        Instruction set; ``None`` for the best.
    tile
        Fields of a :class:`~sparta.specialize.cpu.tile.Tile` of the form ``'panel'``; chunks count channels times taps.

    Examples
    --------
    >>> weight = torch.ones(4, 2, 3, 3)
    >>> packed = PackedConv(weight, weight != 0, ConvGeometry.make(2, padding=1), block=4)
    >>> packed(torch.ones(1, 2, 5, 5))[0, 0, 0]
    tensor([ 8., 12., 12., 12.,  8.])
    """

    forms: tuple[str, ...] = ("panel",)

    def __init__(
        self,
        weight: Tensor | None,
        mask: Tensor,
        geometry: ConvGeometry,
        *,
        image: str = "flat",
        isa: str | None = None,
        **tile: Any,
    ) -> None:
        if image not in (*IMAGES, GRID, PHASES):
            raise NameNotFoundError(did_you_mean(str(image), (*IMAGES, GRID, PHASES), "image layout"))
        self.image, self.geometry = image, geometry
        self.library = load(isa)
        self.shape = tuple(mask.shape)
        self.tile = _within_groups(Tile(**tile), self.shape[0], geometry.groups)
        self._check_weight(mask)
        self._dims = len(self.shape) - 2
        outputs, each = self.shape[:2]
        self._channels = each * geometry.groups
        # A 1-d convolution is a 2-d one over images with one row.
        self._geometry = geometry if self._dims == 2 else _with_one_row(geometry)
        self._kernel = (self.shape[2] if self._dims == 2 else 1, self.shape[-1])
        taps = self._kernel[0] * self._kernel[1]
        self._pointwise = taps == 1 and set(geometry.stride) == {1} and not any(map(sum, geometry.padding))
        by_taps = mask.cpu().reshape(outputs, each, taps).numpy()
        self._has_phases = image == PHASES and self._pointwise and geometry.groups == 1 and each % PHASE_COUNT == 0
        if self._has_phases and each:
            self.tile = replace(self.tile, k_chunk=each // PHASE_COUNT)
            self.layout, first_row, channel, self._entry_tap = self._entries_by_phase(by_taps)
        else:
            self.layout, first_row, channel, self._entry_tap = self._entries(by_taps)
        self._entry_channel = first_row // max(outputs // geometry.groups, 1) * each + channel
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self.values = None if weight is None else self.pack(weight)

    def _check_weight(self, mask: Tensor) -> None:
        shape, groups = self.shape, self.geometry.groups
        if mask.dtype != torch.bool or len(shape) != len(self.geometry.stride) + 2 or shape[0] % groups:
            given = f"a mask of shape {shape} and {mask.dtype} for {self.geometry}"
            raise ShapeError(message(given, "bool (N, C / groups, ...) with as many dims after those as strides"))
        if self.tile.form not in self.forms:
            raise ValueRangeError(message(f"the tile {self.tile}", f"the form {' or '.join(map(repr, self.forms))}"))
        if groups > 1 and (shape[0] // groups) % self.tile.block:
            given = f"blocks of {self.tile.block} for {shape[0] // groups} output channels per group"
            raise ValueRangeError(message(given, "blocks that divide a group", "use block=1"))

    def _entries(self, mask: Bools) -> tuple[Layout, Ints, Ints, Ints]:
        """Return the layout of a mask (N, C / groups, taps), and first row, channel and tap of each of its entries."""
        outputs, each, taps = mask.shape
        # Rows that share what they load read the same channels.
        alike = BLOCK_ROWS if self.geometry.groups == 1 else outputs // self.geometry.groups
        layout, first_row, column = pack_entries(mask.reshape(outputs, each * taps), self.tile, alike)
        return layout, first_row, column // max(taps, 1), column % max(taps, 1)

    def _entries_by_phase(self, mask: Bools) -> tuple[Layout, Ints, Ints, Ints]:
        """Return the same with a chunk for each phase of the channels."""
        order, inputs = by_phase(mask.shape[1]), mask.shape[1]
        layout, first_row, channel, tap = self._entries(mask[:, order])
        source = layout.source.numpy()
        places = source - source % inputs + order[source % inputs]
        moved = torch.from_numpy(np.where(source < 0, -1, places).astype(source.dtype))
        return replace(layout, source=moved), first_row, order[channel], tap

    def pack(self, weight: Tensor) -> Tensor:
        """Return the values of a weight with this mask, in the order the kernel reads."""
        if tuple(weight.shape) != self.shape:
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{self.shape}, as when packed"))
        return self.layout.values(weight.reshape(self.layout.shape))

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        threads: int | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Return ``activation(conv(x, W) + bias) + residual``, contiguous.

        Parameters
        ----------
        x
            (B, C, H, W) or (B, C, L), with any strides. Contiguous and channels-last images are read fastest.
        bias
            (N,).
        activation
            ``'relu'``, ``'gelu'`` (the exact one), ``'silu'``, ``'relu6'``, ``'relu_last'`` (a ReLU after the
            residual) or None.
        residual
            Like the result, of any strides.
        threads
            How many to use; by default as many as torch does.
        values
            Of another weight with the same mask, as :meth:`pack` returned them.
        """
        images, size, strides = self._images(x)
        count = torch.get_num_threads() if threads is None else threads
        if count < 1:
            raise ValueRangeError(message(f"threads is {threads}", "1 or more"))
        plan = self._plan(size, count, contiguous=images.is_contiguous())
        shape = (images.shape[0], self.shape[0], *self._out_size(x, plan))
        y = torch.empty(shape)
        added = None if residual is None else checked_real(residual, "residual", shape).contiguous()
        shift = None if bias is None else checked_real(bias, "bias", (self.shape[0],)).contiguous()
        matrix = plan.matrix_for(self._checked_values(values))
        call = CONV_CALL.pack(
            images.data_ptr(),
            y.data_ptr(),
            0 if shift is None else shift.data_ptr(),
            0 if added is None else added.data_ptr(),
            *plan.addresses,
            0 if 0 in shape else shape[0],
            *strides,
            *plan.numbers.values(),
            activation_code(activation),
            count,
            0,
            plan.image.grid_columns,
            plan.image.by_phases,
        )
        self.library.multiply_conv(addressof(matrix), call)
        return y if x.dtype == torch.float32 else y.to(x.dtype)

    def fast_path(
        self, values: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Callable[..., Tensor | None] | None:
        """Return a call with these values, this bias and this activation, which takes x and a residual.

        It returns None for tensors that are not contiguous float32 on the CPU. Where a bias would have to be converted
        there is no such call. What depends on the size of the images is found once for each.
        """
        if bias is not None and not (is_float(bias) and bias.shape == self.shape[:1]):
            return None
        values, code = self._checked_values(values), activation_code(activation)
        shift = 0 if bias is None else bias.data_ptr()
        multiply, pack = self.library.handle.sparta_multiply_conv, CONV_CALL.pack
        threads, empty = torch.get_num_threads, torch.empty
        ready: dict[tuple[Any, ...], _Ready] = {}

        def call(x: Tensor, residual: Tensor | None = None, _alive: tuple[Any, ...] = (values, bias)) -> Tensor | None:
            if not is_float(x):
                return None
            key = x.shape, threads()
            found = ready.get(key)
            if found is None:
                if len(ready) >= _KEPT_PLANS:
                    ready.clear()
                found = ready[key] = self._ready(x, key[1], values, code)
            added = 0
            if residual is not None:
                if residual.shape != found.shape or not is_float(residual):
                    return None
                added = residual.data_ptr()
            y = empty(found.shape)
            failed = multiply(found.address, pack(x.data_ptr(), y.data_ptr(), shift, added, *found.rest))
            if failed:
                raise_for(failed)
            return y

        return call

    def product(
        self, values: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Callable[[tuple[int, ...], int], ImageProduct | None] | None:
        """Return this layer as a step of a chain, as a function of the images' shape and of threads.

        None where a bias would have to be converted; the function returns None for shapes that do not fit.
        """
        if bias is not None and not (is_float(bias) and bias.shape == self.shape[:1]):
            return None
        values, code = self._checked_values(values), activation_code(activation)
        shift = 0 if bias is None else bias.data_ptr()

        def made(shape: tuple[int, ...], threads: int) -> ImageProduct | None:
            if len(shape) != self._dims + 2 or shape[1] != self._channels or 0 in shape:
                return None

            def ready(x_gap: int, y_gap: int) -> _Ready:
                plane = math.prod(shape[2:]) + x_gap
                x = torch.empty_strided(shape, (shape[1] * plane, plane, *[shape[-1], 1][-self._dims :]))
                return self._ready(x, threads, values, code, y_gap)

            def step(found: _Ready) -> Step:
                call = CONV_CALL.pack(0, 0, shift, 0, *found.rest)
                return Step(StepKind.CONV, call, found.address, (found, values, bias))

            found = ready(0, 0)
            return ImageProduct(step(found), tuple(found.shape), apart=lambda *gaps: step(ready(*gaps)))

        return made

    def _ready(self, x: Tensor, threads: int, values: Tensor, activation: int, y_gap: int = 0) -> _Ready:
        """Return what calls for images of this size have in common, contiguous but for gaps between channels."""
        images, size, strides = self._images(x)
        plan = self._plan(size, threads, contiguous=True, plane=strides[1])
        shape = (images.shape[0], self.shape[0], *self._out_size(x, plan))
        matrix = PanelMatrix.from_buffer_copy(plan.matrix)
        matrix.values = values.data_ptr()
        count = 0 if 0 in shape else shape[0]
        rest = (
            *plan.addresses,
            count,
            *strides,
            *plan.numbers.values(),
            activation,
            threads,
            y_gap,
            plan.image.grid_columns,
            plan.image.by_phases,
        )
        return _Ready(torch.Size(shape), addressof(matrix), rest, (plan, matrix))

    def fixed(self, size: Sequence[int], threads: int) -> FixedPlan:
        """Return what a call for contiguous images of this size reads; threads only decide how they are cut up.

        >>> packed = PackedConv(None, torch.ones(4, 2, 3, 3) > 0, ConvGeometry.make(2, padding=1))
        >>> packed.fixed((5, 5), 1).numbers["out_rows"]
        5
        """
        sizes = (1, *size) if self._dims == 1 else tuple(size)
        image = (1, sizes[0] * sizes[1]) if self._pointwise else (sizes[0], sizes[1])
        # Called from elsewhere, a grid is read as rows that follow each other, and phases are chunks of a copy: the
        # same sums, up to rounding.
        flat = self._with_image({GRID: "flat", PHASES: "columns"}.get(self.image, self.image))
        plan = flat._plan(image, threads, contiguous=True)
        matrix = {name: getattr(plan.matrix, name) for name in ("channels", "inputs", "groups", "chunks")}
        matrix |= {name: getattr(plan.matrix, name) for name in ("bn", "mv", "interleave", "prefetch")}
        return FixedPlan({**self.layout.arrays, **plan.arrays}, matrix | plan.numbers)

    def _with_image(self, image: str) -> PackedConv:
        other = copy.copy(self)
        other.image = image
        return other

    def __getstate__(self) -> dict[str, Any]:
        # Addresses and the open library belong to this object in this process; a copy makes its own.
        kept = {name: value for name, value in vars(self).items() if name not in ("_plans", "library")}
        return kept | {"isa": self.library.isa}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.library = load(state.pop("isa"))
        vars(self).update(state, _plans={})

    def __repr__(self) -> str:
        return f"PackedConv({self.shape}, {self.geometry}, {self.library.isa}, {self.tile}, {self.image})"

    def _images(self, x: Tensor) -> tuple[Tensor, tuple[int, int], tuple[int, ...]]:
        """Return the input, and its rows, columns and strides; one row where pixels need not know their neighbours."""
        size = x.shape
        fits = len(size) == self._dims + 2 and size[1] == self._channels
        images = checked_real(x, "x", size if fits else (None, self._channels, *[None] * self._dims))
        size, strides = size[2:], images.stride()
        if self._dims == 1:
            return images, (1, size[0]), (*strides[:2], 0, strides[2])
        if self._pointwise and strides[2] == size[1] * strides[3] and 0 not in images.shape:
            return images, (1, size[0] * size[1]), (*strides[:2], 0, strides[3])
        return images, (size[0], size[1]), strides

    def _out_size(self, x: Tensor, plan: _Plan) -> tuple[int, ...]:
        """Return the spatial size of the result."""
        return tuple(x.shape[2:]) if self._pointwise else plan.image.out_size[2 - self._dims :]

    def _plan(self, size: tuple[int, int], threads: int, *, contiguous: bool, plane: int | None = None) -> _Plan:
        """Return the layout for images of this size, as kernels read it, and of planes of so many floats."""
        key = (*size, threads, contiguous, size[0] * size[1] if plane is None else plane)
        found = self._plans.get(key)
        if found is not None:
            return found
        without_gaps = contiguous and plane in (None, size[0] * size[1])
        image = self._layout_of(size, threads, contiguous=contiguous, without_gaps=without_gaps)
        if image.direct and plane is not None:
            image = replace(image, plane=plane)
        used = np.zeros((len(image.slot_rows), self._channels), dtype=np.uint8)
        used[np.array(image.tap_slots)[self._entry_tap], self._entry_channel] = 1
        arrays = {
            "offsets": offset_table(image.entry_offsets(self._entry_tap, self._entry_channel, self._channels)),
            "slot_rows": torch.tensor(image.slot_rows, dtype=torch.int32),
            "slot_columns": torch.tensor(image.slot_columns, dtype=torch.int32),
            "used": torch.from_numpy(used),
        }
        addresses = tuple(arrays[name].data_ptr() for name in ("slot_rows", "slot_columns", "used"))
        numbers = self._numbers(image, size)
        plan = _Plan(image, arrays, self._matrix(arrays["offsets"]), addresses, numbers)
        # A new dict, because another thread may be reading this one.
        self._plans = {**dict(list(self._plans.items())[1 - _KEPT_PLANS :]), key: plan}
        return plan

    def _layout_of(self, size: tuple[int, int], threads: int, *, contiguous: bool, without_gaps: bool) -> ImagePlan:
        lanes, channels = self.library.lanes, self._channels
        phases = self._has_phases and without_gaps and has_phases(channels, size)
        image = self.image if self.image != PHASES else "flat" if phases else "columns"
        if self.image == GRID:
            return plan_grid(self._geometry, self._kernel, size, channels=channels, lanes=lanes, threads=threads)
        plan = plan_image(
            self._geometry,
            self._kernel,
            size,
            image=image,
            channels=channels,
            tile=self.tile.mv * lanes,
            threads=threads,
            contiguous=contiguous,
        )
        return replace(plan, by_phases=True) if phases and plan.direct else plan

    def _numbers(self, image: ImagePlan, size: tuple[int, int]) -> dict[str, int]:
        """Return the numbers of a plan in the order of the C structure."""
        numbers = (self._channels, *size, *image.out_size, *self._geometry.stride, len(image.slot_rows))
        plan = (image.row_width, image.band_tokens, image.reach, image.plane, int(image.direct))
        return dict(zip(_FIXED, (*numbers, *plan), strict=True))

    def _matrix(self, offsets: Tensor) -> PanelMatrix:
        layout, tile = self.layout, self.tile
        fields = {name: array.data_ptr() for name, array in layout.arrays.items()}
        sizes = {"channels": layout.shape[0], "inputs": layout.shape[1], "groups": layout.groups}
        sizes["chunks"] = len(layout.arrays["chunk_columns"]) - 1
        sizes |= {"bn": tile.block, "mv": tile.mv, "interleave": tile.interleave, "prefetch": tile.prefetch}
        return PanelMatrix(**fields, **sizes, offsets=offsets.data_ptr())

    def _checked_values(self, values: Tensor | None) -> Tensor:
        if values is None and self.values is not None:
            return self.values
        found = values
        if found is None:
            raise ValueRangeError(message("no values", "a packed weight", "pass values="))
        if found.shape != (self.layout.length,) or found.dtype != torch.float32 or not found.is_contiguous():
            given = f"values of shape {tuple(found.shape)} and {found.dtype}"
            raise ShapeError(message(given, f"contiguous float32 ({self.layout.length},)", "take what pack() returned"))
        return found


def checked_real(tensor: Tensor, name: str, shape: tuple[int | None, ...]) -> Tensor:
    """Return a tensor as float32 with plain strides, without a copy where that can be."""
    if tensor.shape != shape:
        wanted = tuple("any" if size is None else size for size in shape)
        raise ShapeError(message(f"{name} of shape {tuple(tensor.shape)}", f"{wanted}"))
    if not tensor.is_cpu or tensor.dtype not in DTYPES:
        given = f"{name} of {tensor.dtype} on {tensor.device}"
        raise ValueRangeError(message(given, f"{', '.join(map(str, DTYPES))} on cpu"))
    if tensor.dtype is torch.float32 and not tensor.requires_grad and not tensor.is_neg():
        return tensor  # the common case: nothing to do, and a call may take only a few microseconds
    return tensor.detach().resolve_neg().to(torch.float32)


def _within_groups(tile: Tile, outputs: int, groups: int) -> Tile:
    """Return a tile whose rows share what they load only where they read the same channels."""
    apart = groups > 1 and (outputs // groups) % QUAD_ROWS
    # Two rows know tiles of up to four vectors.
    return replace(tile, interleave=2, mv=min(tile.mv, 4)) if apart and tile.interleave == QUAD_ROWS else tile


def _with_one_row(geometry: ConvGeometry) -> ConvGeometry:
    return ConvGeometry(
        (1, *geometry.stride), ((0, 0), *geometry.padding), (1, *geometry.dilation), groups=geometry.groups
    )
