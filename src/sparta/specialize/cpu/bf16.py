"""A pruned weight in bfloat16 for many tokens: :class:`PackedBf16`, as ``native/bf16.h`` multiplies it.

All forms take two input channels at once, and sums are float32. ``pairs`` lists one even and one odd live channel for
every product of a group of rows, so little is multiplied that is not live; ``blocks`` keeps blocks of 16 rows by 32
channels with any live weight, for processors with tile registers, which multiply a whole block at once; ``gathered``
lists pairs for 16 rows and gathers 16 of them into such a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import addressof
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.specialize.cpu.chain import Product, StepKind, bf16_places, pack_bf16_call
from sparta.specialize.cpu.library import PANEL_CALL, PanelMatrix, activation_code, load
from sparta.specialize.cpu.packing import BLOCK_ROWS, Bools, Ints, is_float, running_sums
from sparta.specialize.cpu.tile import written_tile

__all__ = ["FORMS", "Bf16Tile", "PackedBf16"]

FORMS = {"pairs": (1, 4), "blocks": (16,), "gathered": (16,)}
BLOCK_INPUTS = 32
_STRIP = 16  # tokens of a panel that lie together
_PLACE_BYTES = 4 * _STRIP
_MOST_STRIPS = 64
_GATHERED = 2  # kGathered of native/bf16.h


@dataclass(frozen=True)
class Bf16Tile:
    """How a weight in bf16 is packed: the form, the rows of a group, and the tokens of a tile of activations.

    >>> str(Bf16Tile("pairs", 4, 64)), Bf16Tile.parse("blocks:16:128")
    ('pairs:4:64', Bf16Tile(form='blocks', block=16, tokens=128))
    """

    form: str
    block: int
    tokens: int = 64

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise NameNotFoundError(did_you_mean(str(self.form), FORMS, "form"))
        if self.block not in FORMS[self.form]:
            given = f"groups of {self.block} rows in the form {self.form}"
            raise ValueRangeError(message(given, f"one of {FORMS[self.form]}"))
        if self.tokens % _STRIP or not 0 < self.tokens <= _STRIP * _MOST_STRIPS:
            given = f"tiles of {self.tokens} tokens"
            raise ValueRangeError(message(given, f"a multiple of {_STRIP} up to {_STRIP * _MOST_STRIPS}"))

    def __str__(self) -> str:
        return f"{self.form}:{self.block}:{self.tokens}"

    @classmethod
    def parse(cls, text: str) -> Bf16Tile:
        """Return the tile that ``str(tile)`` wrote."""
        form, numbers = written_tile(text, "form:rows:tokens")
        return cls(form, *numbers)


class PackedBf16:
    """The mask of a weight (N, K), packed for many tokens in bf16; every call brings what :meth:`pack` returned.

    Parameters
    ----------
    mask
        (N, K) bool, True = live.
    tile
        The form, and the tokens that are computed together.
    isa
        Instruction set; ``None`` for the best. What the processor has no instructions for is computed without them.

    Examples
    --------
    >>> weight = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]])
    >>> packed = PackedBf16(weight != 0, Bf16Tile("pairs", 1, 16))
    >>> packed(torch.ones(2, 3), packed.pack(weight))
    tensor([[3., 3.],
            [3., 3.]])
    """

    def __init__(self, mask: Tensor, tile: Bf16Tile, *, isa: str | None = None) -> None:
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise ShapeError(message(f"a mask of shape {tuple(mask.shape)} and {mask.dtype}", "bool (N, K)"))
        if bf16_places(mask.shape[1]) * tile.tokens * 4 >= 2**31:
            given = f"{mask.shape[1]} input channels in tiles of {tile.tokens} tokens"
            raise ShapeError(message(given, "less than 2 GiB for a tile", "take fewer tokens in a tile"))
        self.tile, self.library = tile, load(isa)
        self.mask = mask.cpu().contiguous()
        self.shape = (mask.shape[0], mask.shape[1])
        layout = {"blocks": _pack_blocks, "pairs": _pack_pairs, "gathered": _pack_gathered}[tile.form]
        self.arrays, self._source = layout(self.mask.numpy(), tile)
        self._bound: tuple[Tensor, PanelMatrix] | None = None

    @property
    def groups(self) -> int:
        """Groups of rows."""
        return len(self.arrays["starts"]) - 1

    @property
    def nbytes(self) -> int:
        """Bytes that a call reads: the values and their indices."""
        return sum(array.nbytes for array in self.arrays.values()) + 2 * self._count

    def pack(self, weight: Tensor) -> Tensor:
        """Return the live values of a weight (N, K), rounded to bfloat16, in the order the kernel reads."""
        if tuple(weight.shape) != self.shape:
            raise ShapeError(message(f"a weight of shape {tuple(weight.shape)}", f"{self.shape}, as when packed"))
        short = torch.where(self.mask, weight.detach().cpu(), 0).to(torch.bfloat16)
        if self.tile.form == "blocks":
            return _blocks_of(short)[self._source].reshape(-1)
        flat = short.reshape(-1)
        return torch.where(self._source >= 0, flat[self._source.clamp_min(0).long()], 0) if len(flat) else flat

    def __call__(
        self,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Return ``activation(x W^T + bias) + residual``, (M, N) in float32; x is rounded to bfloat16.

        Parameters
        ----------
        x
            (M, K), of any strides and float dtype.
        values
            What :meth:`pack` returned.
        bias
            (N,).
        residual
            (M, N).
        """
        outputs, inputs = self.shape
        if x.dim() != 2 or x.shape[1] != inputs or not x.is_cpu or not x.is_floating_point():
            given = f"x of shape {tuple(x.shape)} and {x.dtype} on {x.device}"
            raise ShapeError(message(given, f"(M, {inputs}) of a float dtype on cpu"))
        rows = x.detach().resolve_neg().float().contiguous()
        y = torch.empty(len(rows), outputs)
        shift = None if bias is None else _checked(bias, "bias", (outputs,))
        added = None if residual is None else _checked(residual, "residual", tuple(y.shape))
        call = PANEL_CALL.pack(
            *(rows.data_ptr(), y.data_ptr(), len(rows), inputs, outputs),
            *(0 if shift is None else shift.data_ptr(), 0 if added is None else added.data_ptr(), outputs),
            *(activation_code(activation), torch.get_num_threads() if threads is None else threads, False, False),
        )
        self.library.multiply_bf16(addressof(self._matrix_for(values)), call)
        return y

    def product(self, values: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Product | None:
        """Return this layer with these values as a step of a chain; None where a bias would have to be converted."""
        if bias is not None and not is_float(bias):
            return None
        matrix = PanelMatrix.from_buffer_copy(self._matrix_for(values))
        outputs, inputs = self.shape
        ends = (0 if bias is None else bias.data_ptr(), 0, outputs, activation_code(activation), 0)

        def call(tokens: int, stride: int, x: str, *, to_panel: bool, residual: bool) -> bytes:
            del residual
            return PANEL_CALL.pack(0, 0, tokens, stride, outputs, *ends, x == "panel", to_panel)

        return Product(
            kind=StepKind.BF16,
            matrix=matrix,
            inputs=inputs,
            outputs=outputs,
            output=torch.float32,
            takes=None,
            tile=_STRIP,
            rounding=(),
            call=call,
            pack=lambda tokens, stride: pack_bf16_call(tokens, inputs, stride),
            activated=(lambda name: self._activated(values, bias, name)) if activation is None else None,
            alive=(self.arrays, values, bias),
        )

    def _activated(self, values: Tensor, bias: Tensor | None, activation: str) -> Product:
        product = self.product(values, bias, activation)
        assert product is not None  # noqa: S101 - the bias was taken before
        return product

    @property
    def _count(self) -> int:
        blocks = self.tile.form == "blocks"
        return int(self._source.sum()) * 16 * BLOCK_INPUTS if blocks else len(self._source)

    def _matrix_for(self, values: Tensor) -> PanelMatrix:
        """Return the C structure with these values."""
        if self._bound is not None and self._bound[0] is values and self._bound[1].values == values.data_ptr():
            return self._bound[1]
        if values.dtype != torch.bfloat16 or len(values) != self._count or not values.is_contiguous():
            given = f"values of shape {tuple(values.shape)} and {values.dtype}"
            raise ShapeError(message(given, "what pack() returned"))
        fields = {name: array.data_ptr() for name, array in self.arrays.items()}
        matrix = PanelMatrix(
            channels=self.shape[0],
            inputs=self.shape[1],
            groups=self.groups,
            chunks=1,
            values=values.data_ptr(),
            bn=self.tile.block,
            mv=self.tile.tokens // self.library.lanes,
            interleave=_GATHERED if self.tile.form == "gathered" else 1,
            prefetch=0,
            **fields,
        )
        self._bound = (values, matrix)
        return matrix


def _checked(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape or not tensor.is_cpu or not tensor.is_floating_point():
        given = f"{name} of shape {tuple(tensor.shape)} and {tensor.dtype} on {tensor.device}"
        raise ShapeError(message(given, f"{shape}, of a float dtype, on cpu"))
    return tensor.detach().resolve_neg().float().contiguous()


def _pack_pairs(mask: Bools, tile: Bf16Tile) -> tuple[Mapping[str, Tensor], Tensor]:
    """Return the arrays of pairs, and where in the weight both values of each row of a pair are, -1 for none."""
    outputs, inputs = mask.shape
    height, groups, places = tile.block, -(-outputs // tile.block), -(-inputs // 2)
    whole = np.zeros((groups * height, 2 * places), dtype=np.bool_)
    whole[:outputs, :inputs] = mask
    kept = np.bitwise_or.reduce(whole.reshape(groups, height, places, 2), axis=1)
    counts = np.count_nonzero(kept, axis=1)  # (groups, 2): even, odd
    starts = running_sums(counts.max(axis=1, initial=0))
    pairs = np.full((int(starts[-1]), 2), -1, dtype=np.int64)  # the place of each half
    for half in (0, 1):
        group, place = np.nonzero(kept[:, :, half])
        first = np.concatenate([[0], np.cumsum(counts[:, half])])[group]
        pairs[starts[group] + np.arange(len(group)) - first, half] = place
    there = pairs >= 0
    row = np.repeat(np.arange(groups) * height, np.diff(starts))[:, None, None] + np.arange(height)[:, None]
    column = 2 * pairs[:, None, :] + np.arange(2)
    known = there[:, None, :] & (row < outputs)
    flat = np.where(known, row * inputs + column, 0)
    live = mask.reshape(-1)[flat] if mask.size else known
    source = np.where(known & live, flat, -1)
    # A half without a channel has a weight of 0, and reads the place of the other.
    offsets = np.where(there, pairs, pairs[:, ::-1]) * _PLACE_BYTES
    arrays = {**_arrays(starts, height, outputs), "offsets": _tensor(offsets.astype(np.int32).reshape(-1))}
    positions = source.astype(np.int32) if mask.size < 2**31 else source  # half the memory
    return arrays, torch.from_numpy(positions.reshape(-1))


def _pack_gathered(mask: Bools, tile: Bf16Tile) -> tuple[Mapping[str, Tensor], Tensor]:
    """Return pairs of 16 rows, filled up to whole tiles of 16 with such that have no place, and where values are."""
    arrays, source = _pack_pairs(mask, tile)
    counts = np.diff(arrays["starts"].numpy())
    whole = -(-counts // _STRIP) * _STRIP
    starts, before = running_sums(whole), arrays["starts"].numpy()[:-1]
    target = np.repeat(starts[:-1] - before, counts) + np.arange(int(counts.sum()))
    offsets = np.full((int(starts[-1]), 2), -1, dtype=np.int32)
    offsets[target] = arrays["offsets"].numpy().reshape(-1, 2)
    filled = np.full((int(starts[-1]), tile.block, 2), -1, dtype=source.numpy().dtype)
    filled[target] = source.numpy().reshape(-1, tile.block, 2)
    by_tile = filled.reshape(-1, _STRIP, tile.block, 2).transpose(0, 2, 1, 3).reshape(-1)
    listed = {**_arrays(starts, tile.block, mask.shape[0]), "offsets": _tensor(offsets.reshape(-1))}
    return listed, torch.from_numpy(by_tile)


def _pack_blocks(mask: Bools, tile: Bf16Tile) -> tuple[Mapping[str, Tensor], Tensor]:
    """Return the arrays of blocks, and which blocks are kept, (groups, blocks) bool."""
    kept = _blocks_of(torch.from_numpy(mask)).flatten(2).any(dim=2)
    starts = running_sums(kept.sum(dim=1).numpy())
    column = kept.nonzero()[:, 1].numpy() * (BLOCK_INPUTS // 2)
    offsets = _tensor((column * _PLACE_BYTES).astype(np.int32))
    return {**_arrays(starts, tile.block, mask.shape[0]), "offsets": offsets}, kept


def _blocks_of(weight: Tensor) -> Tensor:
    """Return (N, K) as (ceil(N / 16), ceil(K / 32), 16, 32), filled up with zeros."""
    outputs, inputs = weight.shape
    height = FORMS["blocks"][0]
    whole = functional.pad(weight, (0, -inputs % BLOCK_INPUTS, 0, -outputs % height))
    groups, blocks = whole.shape[0] // height, whole.shape[1] // BLOCK_INPUTS
    return whole.reshape(groups, height, blocks, BLOCK_INPUTS).transpose(1, 2)


def _arrays(starts: Ints, height: int, outputs: int) -> dict[str, Tensor]:
    """Return what all forms have: where groups start, their rows, costs of blocks of rows, and one chunk."""
    entries = np.diff(starts)
    index = np.arange(len(entries)) * height // BLOCK_ROWS
    cost = np.bincount(index, entries * height + 8 * height, minlength=-(-outputs // BLOCK_ROWS)).astype(np.int64)
    rows = (np.arange(len(entries)) * height).astype(np.int32)
    return {"starts": _tensor(starts), "rows": _tensor(rows), "costs": _tensor(running_sums(cost))}


def _tensor(array: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
