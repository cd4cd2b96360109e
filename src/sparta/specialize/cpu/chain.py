"""Steps of a chain, as the library runs them: one call into C++ for many kernels, norms and attentions in a row.

A :class:`Step` is a call of the library with everything filled in but where its activations are; a :class:`Product` is
what a kernel of a linear layer tells of itself, so that steps can be made of it for any number of tokens.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from sparta.specialize.cpu.library import ACTIVATIONS, INT8_CALL

__all__ = [
    "IN_BF16",
    "NOWHERE",
    "NO_ROW",
    "PLACE",
    "STEP_BYTES",
    "ImageProduct",
    "Product",
    "Step",
    "StepKind",
    "attention_call",
    "bf16_places",
    "copy_call",
    "gather_call",
    "kept_bytes",
    "kept_dtype",
    "map_call",
    "mean_call",
    "norm_call",
    "pack_bf16_call",
    "pack_call",
    "pack_int8_call",
    "place",
    "step_table",
]


class StepKind(IntEnum):
    """The kinds of steps, as ``native/chain.h`` numbers them."""

    PANELS = 0
    STREAM = 1
    SHORT = 2
    INT8 = 3
    CONV = 4
    INT8_CONV = 5
    POOL = 6
    NORM = 7
    MAP = 8
    COPY = 9
    GATHER = 10
    ATTENTION = 11
    PACK = 12
    PACK_INT8 = 13
    BF16 = 14
    PACK_BF16 = 15
    ATTENTION_BF16 = 16
    DENSE_CONV = 20
    DEPTHWISE = 21
    MEAN = 22
    INT8_POOL = 24
    INT8_DEPTHWISE = 25
    BF16_CONV = 26
    BF16_POOL = 27
    BF16_DEPTHWISE = 28


NOWHERE = -1
"""The place of an operand that is not there."""
NO_ROW = 3
"""The code of a chain that was asked for a row that a table does not have."""
PLACES = 5
PLACE = 4
"""Channels in a place, the 32 bits that int8 convolutions multiply at once."""
IN_BF16 = ("bf16",)
"""The rounding of images that are kept in bf16."""
COPY_DIMS = 6
_PLACE_BITS = 48
_LINE = 64
_STEP = struct.Struct(f"@iiPP{PLACES}q")
STEP_BYTES = _STEP.size
_NORM = struct.Struct("@4P4qfi")
_MAP = struct.Struct("@3P5qf5i")
_COPY = struct.Struct("@2P13q2i")
_GATHER = struct.Struct("@3P3q2i")
_ATTENTION = struct.Struct("@5P23qf3i")
_PACK = struct.Struct("@2P4q")
_PACK_INT8 = struct.Struct(f"{INT8_CALL.format}2q")
_MEAN = struct.Struct("@2P2qi")
_MASKS = {torch.bool: 1, torch.float32: 2}


@dataclass(frozen=True)
class Step:
    """One step of a chain.

    Attributes
    ----------
    kind
        What it does.
    call
        Its call, as bytes, without the places.
    matrix
        The address of a packed weight, or 0.
    alive
        What the addresses in it are of.
    """

    kind: StepKind
    call: bytes
    matrix: int = 0
    alive: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Product:
    """A linear layer's kernel with its packed weight, bias and activation, as a step.

    Attributes
    ----------
    kind
        Of the step.
    matrix
        The C structure of the weight.
    inputs, outputs
        K and N.
    output
        The dtype of the result.
    takes
        The 8-bit dtype that it takes beside real numbers, or None.
    tile
        Tokens in a tile of the panels that it reads, 0 where it reads none.
    rounding
        How it rounds real numbers, as values that are equal for kernels that can share a packed input; None where it
        can not.
    call
        From tokens, the stride of x, what x is (``'real'``, ``'bytes'`` or ``'panel'``), and whether the result is a
        panel (`to_panel`) and there is a `residual`: the call of the step.
    pack
        From tokens and the stride of x, the step that packs x into a panel.
    rounded
        From the rounding of the only readers of its result, the same product with a result that is rounded so; None
        where it cannot.
    activated
        From the name of an activation, the same product with it; None where it has its epilogue already.
    """

    kind: StepKind
    matrix: ctypes.Structure
    inputs: int
    outputs: int
    output: torch.dtype
    takes: torch.dtype | None
    tile: int
    rounding: tuple[Any, ...] | None
    call: Callable[..., bytes]
    pack: Callable[[int, int], Step]
    rounded: Callable[[tuple[Any, ...]], Product] | None = None
    activated: Callable[[str], Product] | None = None
    alive: tuple[Any, ...] = ()

    def step(
        self, tokens: int, stride: int, x: str = "real", *, to_panel: bool = False, residual: bool = False
    ) -> Step:
        """Return the step for so many tokens."""
        call = self.call(tokens, stride, x, to_panel=to_panel, residual=residual)
        return Step(self.kind, call, ctypes.addressof(self.matrix), (self.matrix, *self.alive))

    def panel_bytes(self, tokens: int, channels: int) -> int:
        """Return the bytes of a panel of this kernel's tiles.

        A place has two channels of bf16, or four of bytes with the tokens' scales after them.
        """
        if self.kind is StepKind.BF16:
            places = bf16_places(channels)
        else:
            places = channels if self.kind is StepKind.PANELS else 1 + -(-channels // 4)
        return 4 * -(-tokens // self.tile) * self.tile * places


@dataclass(frozen=True)
class ImageProduct:
    """A convolution's kernel for contiguous images of one size, as a step.

    Attributes
    ----------
    step
        The step.
    shape
        Of the result, contiguous.
    room
        Bytes that it needs beside, while it runs.
    rounding
        How it keeps an image in bytes, as values that are equal for kernels that keep it in the same way; None for
        kernels of real numbers.
    handing
        Whether the image comes in bytes, the rounding of those that the result is handed to in bytes, or None, and
        whether the residual comes in bytes: the step for that.
    activated
        From the name of an activation, the same product with it; None where it has its epilogue already.
    adding
        The rounding of its residual, None where that is added as it is.
    apart
        From the floats of gaps between the channels of the image, and between those of the result and the residual: the
        step for that; None where there must be none.
    hands
        What it hands on in, beside real numbers.
    """

    step: Step
    shape: tuple[int, ...]
    room: int = 0
    rounding: tuple[Any, ...] | None = None
    handing: Callable[[bool, tuple[Any, ...] | None, bool], Step] | None = None
    activated: Callable[[str], ImageProduct | None] | None = None
    adding: tuple[Any, ...] | None = None
    apart: Callable[[int, int], Step] | None = None
    hands: torch.dtype = torch.int8


def kept_dtype(rounding: tuple[Any, ...]) -> torch.dtype:
    """Return what images that are rounded so are kept in: bfloat16, or int8 for bytes in places.

    >>> kept_dtype(IN_BF16), kept_dtype((0.5, True, 0))
    (torch.bfloat16, torch.int8)
    """
    return torch.bfloat16 if rounding == IN_BF16 else torch.int8


def kept_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of images (B, C, ...) that are kept in bf16, or in int8 in places.

    >>> kept_bytes((2, 6, 5, 5), torch.int8), kept_bytes((2, 6, 5, 5), torch.bfloat16)
    (400, 664)
    """
    images, channels, *size = shape
    if dtype == torch.bfloat16:
        return 2 * math.prod(shape) + _LINE  # kernels read whole vectors
    return PLACE * images * -(-channels // PLACE) * math.prod(size)


def place(memory: int, offset: int) -> int:
    """Return where an operand is: bytes from the start of one of the memories that a call brings.

    >>> place(0, 64), place(1, 0) == 2**48
    (64, True)
    """
    return (memory << _PLACE_BITS) + offset


def step_table(
    steps: Sequence[tuple[Step, Sequence[int]]], passing: Container[int] = ()
) -> tuple[ctypes.Array[ctypes.c_char], tuple[Any, ...]]:
    """Return steps and their places as one table for the library, and what must live as long as it.

    Parameters
    ----------
    passing
        The numbers of steps whose results only the next one reads, so that they need not be stored.
    """
    table = ctypes.create_string_buffer(max(1, _STEP.size * len(steps)))
    calls = []
    for number, (step, places) in enumerate(steps):
        call = ctypes.create_string_buffer(step.call, len(step.call))
        calls.append((call, step.alive))
        full = (*places, *[NOWHERE] * (PLACES - len(places)))
        _STEP.pack_into(
            table, number * _STEP.size, step.kind, number in passing, step.matrix, ctypes.addressof(call), *full
        )
    return table, tuple(calls)


def norm_call(
    rows: int, width: int, strides: tuple[int, int], weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Step:
    """Return a layer norm over rows of `width` neighbours; strides are those of x and y."""
    ends = (0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr())
    return Step(StepKind.NORM, _NORM.pack(0, 0, *ends, rows, width, *strides, epsilon, 0), alive=(weight, bias))


def map_call(
    rows: int,
    width: int,
    strides: tuple[int, int, int],
    *,
    kind: str = "add",
    number: float = 0.0,
    other: bool = False,
    activation: str | None = None,
) -> Step:
    """Return ``activation(x + number)``, ``activation(x + number * other)`` or the same with ``*``."""
    code = (0 if kind == "add" else 1, other, ACTIVATIONS[activation or "none"])
    return Step(StepKind.MAP, _MAP.pack(0, 0, 0, rows, width, *strides, number, *code, 0, 0))


def mean_call(planes: int, size: int) -> Step:
    """Return the mean of each of contiguous planes."""
    return Step(StepKind.MEAN, _MEAN.pack(0, 0, planes, size, 0))


def copy_call(sizes: Sequence[int], strides: Sequence[int], element: int) -> Step:
    """Return a copy of up to six dims with these strides, in elements, to contiguous memory."""
    missing = COPY_DIMS - len(sizes)
    shape, steps = (*[1] * missing, *sizes), (*[0] * missing, *(element * stride for stride in strides))
    return Step(StepKind.COPY, _COPY.pack(0, 0, *shape, *steps, element, 0, 0))


def gather_call(rows: int, table: Tensor) -> Step:
    """Return the rows of a contiguous table by their numbers, int64."""
    count, width = table.shape
    return Step(StepKind.GATHER, _GATHER.pack(0, 0, table.data_ptr(), rows, width, count, 0, 0), alive=(table,))


def attention_call(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, mask: Tensor | None, scale: float, *, causal: bool
) -> Step:
    """Return attention of tensors (B, H, L, E) with these shapes and strides; of the mask (B, H, L, S)."""
    batch, heads, queries, width = q.shape
    sizes = (batch, heads, k.shape[1], queries, k.shape[2], width, v.shape[3])
    strides = [stride for tensor in (q, k, v, y) for stride in tensor.stride()[:3]]
    strides += [0] * 4 if mask is None else list(mask.stride())
    kind = 0 if mask is None else _MASKS[mask.dtype]
    return Step(StepKind.ATTENTION, _ATTENTION.pack(0, 0, 0, 0, 0, *sizes, *strides, scale, kind, causal, 0))


def pack_call(tokens: int, channels: int, stride: int, mv: int) -> Step:
    """Return the packing of token-major float32 rows into panels."""
    return Step(StepKind.PACK, _PACK.pack(0, 0, tokens, channels, stride, mv))


def pack_bf16_call(tokens: int, channels: int, stride: int) -> Step:
    """Return the packing of token-major float32 rows into panels of bf16."""
    return Step(StepKind.PACK_BF16, _PACK.pack(0, 0, tokens, channels, stride, 0))


def bf16_places(channels: int) -> int:
    """Return the places of a panel of bf16: two channels each, and a multiple of 16.

    >>> bf16_places(32), bf16_places(33)
    (16, 32)
    """
    return 16 * -(-channels // 32)


def pack_int8_call(rows: bytes, places: int, mv: int) -> Step:
    """Return the packing of rows into panels of bytes, rounded as an int8 call says."""
    return Step(StepKind.PACK_INT8, _PACK_INT8.pack(*INT8_CALL.unpack(rows), places, mv))
