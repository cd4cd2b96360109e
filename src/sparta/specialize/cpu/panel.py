"""Activations in the panel layout, which neighbouring sparse layers can hand to each other as they are.

A panel is [tiles, channels, T]: tokens in tiles of T, and inside a tile one row of T tokens for each channel. T must be
the same for both neighbours; it is ``mv`` times the floats in one vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.specialize.cpu.library import Library

__all__ = ["Panel"]


@dataclass(frozen=True, slots=True)
class Panel:
    """Activations of M tokens with C channels in the panel layout.

    Attributes
    ----------
    data
        (ceil(M / T), C, T), float32, contiguous. Places of tokens from M on hold anything.
    tokens
        M.
    """

    data: Tensor
    tokens: int

    def __post_init__(self) -> None:
        data, shape = self.data, self.data.shape
        fits = len(shape) == 3 and shape[2] > 0 and shape[0] == -(-self.tokens // shape[2])
        if not fits or data.dtype != torch.float32 or not data.is_contiguous():
            given = f"panel data of shape {tuple(shape)} and {data.dtype} for {self.tokens} tokens"
            raise ShapeError(message(given, "contiguous float32 (ceil(M / T), C, T)", "make it with Panel.pack"))

    @property
    def channels(self) -> int:
        """The number of channels C."""
        return self.data.shape[1]

    @property
    def tile(self) -> int:
        """The tokens T in a tile."""
        return self.data.shape[2]

    @staticmethod
    def empty(tokens: int, channels: int, tile: int) -> Panel:
        """Return a panel with nothing in it yet."""
        panel = _new(Panel)  # right by construction, and made in every call: no need to check, and none to waste
        _set_data(panel, torch.empty(-(-tokens // tile), channels, tile))
        _set_tokens(panel, tokens)
        return panel

    @staticmethod
    def pack(x: Tensor, mv: int, library: Library, threads: int = 1) -> Panel:
        """Return token-major activations (M, C) as a panel with tiles of ``mv`` vectors.

        Examples
        --------
        >>> from sparta.specialize.cpu import load
        >>> library = load("portable")
        >>> Panel.pack(torch.zeros(10, 3), 2, library).data.shape
        torch.Size([2, 3, 8])
        """
        if x.ndim != 2 or x.dtype != torch.float32:
            given = f"activations of shape {tuple(x.shape)} and {x.dtype}"
            raise ShapeError(message(given, "float32 (M, C)", "flatten the leading dimensions"))
        if mv < 1:
            raise ShapeError(message(f"tiles of {mv} vectors", "1 or more"))
        rows = x if x.stride(1) == 1 else x.contiguous()
        panel = Panel.empty(len(x), x.shape[1], mv * library.lanes)
        library.handle.sparta_pack(
            rows.data_ptr(), rows.stride(0), len(x), x.shape[1], mv, panel.data.data_ptr(), threads
        )
        return panel

    def unpack(self, library: Library, threads: int = 1) -> Tensor:
        """Return the activations token-major, (M, C)."""
        mv, rest = divmod(self.tile, library.lanes)
        if rest:
            given = f"a panel with tiles of {self.tile} and a library with vectors of {library.lanes}"
            raise ShapeError(message(given, "whole vectors in a tile", "use the library that made the panel"))
        y = torch.empty(self.tokens, self.channels)
        library.handle.sparta_unpack(
            self.data.data_ptr(), self.tokens, self.channels, mv, y.data_ptr(), y.stride(0), threads
        )
        return y


_new = object.__new__
_set_data, _set_tokens = (vars(Panel)[name].__set__ for name in ("data", "tokens"))
