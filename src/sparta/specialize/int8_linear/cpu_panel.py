"""Quantised activations in the panel layout, which neighbouring int8 layers can hand to each other as they are.

A panel of bytes is [tiles, places, T]: a place is four neighbouring channels in 32 bits, and otherwise it is a
:class:`~sparta.specialize.cpu.panel.Panel`. Bytes stand with or without a sign as the library's kernels multiply them,
so a panel goes only to the library that made it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import ShapeError, message
from sparta.specialize.cpu.library import INT8_CALL, Library

__all__ = ["Int8Panel", "whole_units"]

UNIT = 4  # channels in one place


@dataclass(frozen=True, slots=True)
class Int8Panel:
    """Integers of M tokens with C channels in the panel layout.

    Attributes
    ----------
    data
        (ceil(M / T), ceil(C / 4), T), int32, contiguous. Places of tokens from M on hold anything.
    tokens, channels
        M and C.
    dtype
        ``torch.int8`` or ``torch.uint8``: what the integers are, however they are stored.
    """

    data: Tensor
    tokens: int
    channels: int
    dtype: torch.dtype

    @property
    def tile(self) -> int:
        """The tokens T in a tile."""
        return self.data.shape[2]

    @staticmethod
    def empty(tokens: int, channels: int, tile: int, dtype: torch.dtype) -> Int8Panel:
        """Return a panel with nothing in it yet."""
        panel = _new(Int8Panel)  # made in every call: setting fields one by one as dataclasses do it takes longer
        _set_data(panel, torch.empty((-(-tokens // tile), -(-channels // UNIT), tile), dtype=torch.int32))
        _set_tokens(panel, tokens)
        _set_channels(panel, channels)
        _set_dtype(panel, dtype)
        return panel

    @staticmethod
    def pack(x: Tensor, mv: int, library: Library, threads: int = 1) -> Int8Panel:
        """Return token-major integers (M, C), int8 or uint8, as a panel with tiles of ``mv`` vectors.

        Examples
        --------
        >>> from sparta.specialize.cpu import load
        >>> Int8Panel.pack(torch.zeros(10, 6, dtype=torch.uint8), 2, load("portable")).data.shape
        torch.Size([2, 2, 8])
        """
        if x.ndim != 2 or x.dtype not in (torch.int8, torch.uint8) or not x.is_cpu or mv < 1:
            given = f"activations of shape {tuple(x.shape)} and {x.dtype} on {x.device}, in tiles of {mv} vectors"
            raise ShapeError(message(given, "int8 or uint8 (M, C) on cpu, and tiles of 1 or more"))
        rows = whole_units(x)
        panel = Int8Panel.empty(len(x), x.shape[1], mv * library.lanes, x.dtype)
        places = panel.data.shape[1]
        numbers = (len(x), places, 0, 0, 0, 0, 0.0, x.dtype == torch.uint8, 0, 0, 0, threads, 0.0, 0, 0, 0)
        call = INT8_CALL.pack(rows.data_ptr(), 0, *numbers, 0, 0, 0, 0, 0.0, 0)
        library.handle.sparta_pack_int8(call, places, mv, panel.data.data_ptr())
        return panel

    def unpack(self, library: Library) -> Tensor:
        """Return the integers token-major, (M, C)."""
        y = torch.empty(self.tokens, self.channels, dtype=self.dtype)
        mv, unsigned = self.tile // library.lanes, self.dtype == torch.uint8
        library.handle.sparta_unpack_int8(self.data.data_ptr(), self.tokens, self.channels, mv, unsigned, y.data_ptr())
        return y


def whole_units(rows: Tensor) -> Tensor:
    """Return rows (M, C) as contiguous memory with zeros up to a whole place.

    >>> whole_units(torch.ones(2, 6)).shape
    torch.Size([2, 8])
    """
    missing = -rows.shape[1] % UNIT
    return functional.pad(rows, (0, missing)) if missing else rows.contiguous()


_new = object.__new__
_set_data, _set_tokens, _set_channels, _set_dtype = (
    vars(Int8Panel)[name].__set__ for name in ("data", "tokens", "channels", "dtype")
)
