"""A pruned weight in a short format, int8 or bfloat16, for one token or a few: :class:`PackedShort`.

Reading the weight is all the work there, so what counts is bytes: the values in one or two bytes, and beside them a bit
for every weight (``bitmap``) or a byte for every column of a block (``delta``, the way from the column before).
Activations stay in float32, or in 16 bits with a scale for every 256 of them where the processor multiplies bytes: what
is rounded is the weight.
"""

from __future__ import annotations

from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.specialize.cpu.chain import Product, StepKind, pack_call
from sparta.specialize.cpu.library import STREAM_CALL, ShortMatrix, activation_code, load
from sparta.specialize.cpu.packing import Bools, Ints, columns_of, is_float, running_sums, value_sources
from sparta.specialize.cpu.tile import written_tile
from sparta.specialize.implement import KernelLayout
from sparta.specialize.kernel_spec import KernelSpec

__all__ = ["PackedShort", "ShortTile", "short_layout", "short_tiles"]

FORMS = {"bitmap": (1,), "delta": (1, 4, 8, 16)}
_FORM_CODES = {"bitmap": 0, "delta": 1}
_VALUE_CODES = {torch.int8: 0, torch.bfloat16: 1}
_PADDING = 64  # values that a kernel may load beyond the last one
_FARTHEST = 255
_WORD = 32
_AHEAD = 2048
_BITMAP_DENSITY = 0.1  # below it, a byte for each live weight is less than a bit for every one


@dataclass(frozen=True)
class ShortTile:
    """How a weight in a short format is packed: the form, and the output channels of a block.

    >>> str(ShortTile("delta", 4)), ShortTile.parse("bitmap:1:0")
    ('delta:4:0', ShortTile(form='bitmap', block=1, prefetch=0))
    """

    form: str
    block: int = 1
    prefetch: int = 0

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise NameNotFoundError(did_you_mean(str(self.form), FORMS, "form"))
        if self.block not in FORMS[self.form] or not 0 <= self.prefetch <= 1 << 20:
            given = f"blocks of {self.block} in the form {self.form}, prefetch {self.prefetch}"
            raise ValueRangeError(message(given, f"blocks of {FORMS[self.form]}, and 0 to {1 << 20} bytes"))

    def __str__(self) -> str:
        return f"{self.form}:{self.block}:{self.prefetch}"

    @classmethod
    def parse(cls, text: str) -> ShortTile:
        """Return the tile that ``str(tile)`` wrote."""
        form, numbers = written_tile(text, "form:block:prefetch")
        return cls(form, *numbers)


class PackedShort:
    """The mask of a weight (N, K), packed for a few tokens; every call brings the values that :meth:`pack` made.

    Parameters
    ----------
    mask
        (N, K) bool, True = live.
    tile
        The form and its blocks.
    isa
        Instruction set; ``None`` for the best.
    step
        What activations are multiples of, if they lie on a static grid: kernels that round them do not change those.
        0 for a 127th of the largest of each token.

    Examples
    --------
    >>> weight = torch.tensor([[1, 0, 2], [0, 0, 3]], dtype=torch.int8)
    >>> packed = PackedShort(weight != 0, ShortTile("bitmap"))
    >>> packed(torch.ones(1, 3), packed.pack(weight), torch.tensor([0.5, 1.0]))
    tensor([[1.5000, 3.0000]])
    """

    def __init__(self, mask: Tensor, tile: ShortTile, *, isa: str | None = None, step: float = 0.0) -> None:
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ShapeError(message(f"a mask of shape {tuple(mask.shape)} and {mask.dtype}", "bool (N, K)"))
        self.tile, self.library, self._step = tile, load(isa), step
        self.mask = mask.cpu().contiguous()
        self.shape = (mask.shape[0], mask.shape[1])
        pack = _pack_bitmap if tile.form == "bitmap" else _pack_delta
        self.arrays, self.source = pack(self.mask.numpy(), tile.block)
        self._bound: tuple[Tensor, Tensor | None, ShortMatrix] | None = None

    @property
    def groups(self) -> int:
        """Blocks of output channels."""
        return len(self.arrays["starts"]) - 1

    def nbytes(self, value_bytes: int) -> int:
        """Return the bytes that a call reads, with values of so many: these and their indices."""
        return sum(array.nbytes for array in self.arrays.values()) + value_bytes * len(self.source)

    def pack(self, weight: Tensor) -> Tensor:
        """Return the live values of a weight (N, K), int8 or bfloat16, in the order the kernel reads."""
        if tuple(weight.shape) != self.shape or weight.dtype not in _VALUE_CODES:
            given = f"a weight of shape {tuple(weight.shape)} and {weight.dtype}"
            raise ShapeError(message(given, f"{self.shape} and {', '.join(map(str, _VALUE_CODES))}"))
        flat = torch.where(self.mask, weight.detach().cpu(), 0).reshape(-1)
        values = flat.new_zeros(len(self.source) + _PADDING)
        if len(flat):
            values[: len(self.source)] = torch.where(self.source >= 0, flat[self.source.clamp_min(0)], 0)
        return values

    def __call__(
        self,
        x: Tensor,
        values: Tensor,
        scales: Tensor | None = None,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Return ``activation(x W^T * scales + bias) + residual``, (M, N) in float32.

        Parameters
        ----------
        x
            (M, K), of any strides and float dtype.
        values
            What :meth:`pack` returned.
        scales, bias
            (N,), float32.
        residual
            (M, N).
        """
        outputs, inputs = self.shape
        if x.dim() != 2 or x.shape[1] != inputs or not x.is_cpu or not x.is_floating_point():
            given = f"x of shape {tuple(x.shape)} and {x.dtype} on {x.device}"
            raise ShapeError(message(given, f"(M, {inputs}) of a float dtype on cpu"))
        rows = x.detach().resolve_neg().float().contiguous()
        y = torch.empty(len(rows), outputs)
        shift = None if bias is None else self._checked(bias, "bias", (outputs,))
        added = None if residual is None else self._checked(residual, "residual", tuple(y.shape))
        matrix = self._matrix_for(values, scales)
        call = STREAM_CALL.pack(
            rows.data_ptr(),
            y.data_ptr(),
            len(rows),
            inputs,
            outputs,
            0 if shift is None else shift.data_ptr(),
            0 if added is None else added.data_ptr(),
            outputs,
            activation_code(activation),
            torch.get_num_threads() if threads is None else threads,
        )
        self.library.multiply_short(addressof(matrix), call)
        return y

    def product(
        self, values: Tensor, scales: Tensor | None, bias: Tensor | None = None, activation: str | None = None
    ) -> Product | None:
        """Return this layer with these values as a step of a chain; None where a bias would have to be converted."""
        if bias is not None and not is_float(bias):
            return None
        matrix = ShortMatrix.from_buffer_copy(self._matrix_for(values, scales))
        outputs, inputs = self.shape
        ends = (0 if bias is None else bias.data_ptr(), 0, outputs, activation_code(activation), 0)

        def call(tokens: int, stride: int, x: str, *, to_panel: bool, residual: bool) -> bytes:
            del x, to_panel, residual
            return STREAM_CALL.pack(0, 0, tokens, stride, outputs, *ends)

        return Product(
            kind=StepKind.SHORT,
            matrix=matrix,
            inputs=inputs,
            outputs=outputs,
            output=torch.float32,
            takes=None,
            tile=0,
            rounding=None,
            call=call,
            pack=lambda tokens, stride: pack_call(tokens, inputs, stride, 1),
            alive=(self.arrays, values, scales, bias),
        )

    def _matrix_for(self, values: Tensor, scales: Tensor | None) -> ShortMatrix:
        """Return the C structure with these values and scales."""
        bound = self._bound
        if bound is not None and bound[0] is values and bound[1] is scales and bound[2].values == values.data_ptr():
            return bound[2]
        if len(values) != len(self.source) + _PADDING or values.dtype not in _VALUE_CODES:
            raise ShapeError(
                message(f"values of shape {tuple(values.shape)} and {values.dtype}", "what pack() returned")
            )
        if scales is not None:
            self._checked(scales, "scales", (self.shape[0],))
        if not values.is_contiguous() or (scales is not None and not _is_plain(scales)):
            raise ShapeError(message("values or scales that are not contiguous", "what pack() returned, float32"))
        fields: dict[str, Any] = {name: array.data_ptr() for name, array in self.arrays.items()}
        matrix = ShortMatrix(
            channels=self.shape[0],
            inputs=self.shape[1],
            groups=self.groups,
            values=values.data_ptr(),
            scales=0 if scales is None else scales.data_ptr(),
            form=_FORM_CODES[self.tile.form],
            height=self.tile.block,
            format=_VALUE_CODES[values.dtype],
            prefetch=self.tile.prefetch,
            x_step=self._step,
            **fields,
        )
        self._bound = (values, scales, matrix)
        return matrix

    def _checked(self, tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
        if tuple(tensor.shape) != shape or not tensor.is_cpu or not tensor.is_floating_point():
            given = f"{name} of shape {tuple(tensor.shape)} and {tensor.dtype} on {tensor.device}"
            raise ShapeError(message(given, f"{shape}, of a float dtype, on cpu"))
        return tensor.detach().resolve_neg().float().contiguous()


def short_tiles(spec: KernelSpec) -> list[ShortTile]:
    """Return the forms worth timing, the best guess first: the tallest blocks of the mask, else single weights."""
    weight = spec["weight"]
    height = weight.state.block[0]
    tiles = [ShortTile("delta", block, _AHEAD) for block in (16, 8, 4) if height % block == 0]
    singles = [ShortTile("bitmap", 1, _AHEAD), ShortTile("delta", 1, _AHEAD)]
    if not tiles or weight.density > 0.5:
        tiles += singles if weight.density >= _BITMAP_DENSITY else singles[::-1]
    return tiles


def short_layout(packed: PackedShort, value_bytes: int) -> KernelLayout:
    """Return the layout of a packed weight as other programs need it."""
    launch = {"isa": packed.library.isa, "tile": str(packed.tile), "groups": packed.groups, "shape": list(packed.shape)}
    return KernelLayout(packed.arrays, launch, packed.nbytes(value_bytes))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _pack_bitmap(mask: Bools, height: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arrays of a bitmap, and where in the weight each value is."""
    del height
    outputs, inputs = mask.shape
    whole = np.zeros((outputs, -(-inputs // _WORD) * _WORD), dtype=np.bool_)
    whole[:, :inputs] = mask
    bits = np.append(np.packbits(whole, axis=1, bitorder="little").view("<i4").reshape(-1), np.int32(0))
    counts = np.count_nonzero(mask, axis=1)
    arrays = {"starts": running_sums(counts), "bits": bits, "costs": running_sums(np.full(outputs, inputs // 8 + 4))}
    return _tensors(arrays), torch.from_numpy(np.flatnonzero(mask))


def _pack_delta(mask: Bools, height: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arrays of columns, and where in the weight each value is, -1 for those that are 0."""
    counts, column = columns_of(mask, height)
    group = np.repeat(np.arange(len(counts)), counts)
    first = np.ones(len(column), dtype=np.bool_)
    first[1:] = group[1:] != group[:-1]
    delta = np.where(first, column, column - np.concatenate([column[:1], column[:-1]]))
    # A byte goes no farther than 255; columns of zeros go parts of a longer way.
    between = np.maximum(delta - 1, 0) // _FARTHEST
    before = np.repeat(np.arange(len(column)), between)
    deltas = np.insert(delta - between * _FARTHEST, before, _FARTHEST).astype(np.uint8)
    source = value_sources(mask, group * height, column, height).reshape(-1, height)
    filled = np.insert(source, before, -1, axis=0).reshape(-1)
    all_counts = np.bincount(np.insert(group, before, group[before]), minlength=len(counts))
    arrays = {
        "starts": running_sums(all_counts),
        "deltas": np.concatenate([deltas, np.zeros(_PADDING, dtype=np.uint8)]),
        "costs": running_sums(all_counts * height + 4),
    }
    return _tensors(arrays), torch.from_numpy(filled.astype(np.int64))


def _tensors(arrays: dict[str, Ints]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
