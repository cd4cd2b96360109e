"""The backward pass of fused attention: which kernels compute the gradients, and in which pieces.

Of each score there are two gradients to make: one goes into the sums of its query, one into those of its key. Each sum
has one owner and one order, so two kernels compute every score for themselves, seven products in all. (To store the
gradients of the scores for the other kernel saves two, but was slower: storing holds the matrix units up.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparta.specialize.attention.launch import (
    LISTS,
    LOG2E,
    NO_LISTS,
    Sizes,
    copyable,
    described,
    precision,
    sizes_of,
    start,
)
from sparta.specialize.attention.tile import AttentionTile

__all__ = ["Backward", "pieces"]

_NARROW = 128  # heads, for which the gradients of many keys fit on chip
_WALKED = 64
_MASKED_STAGES = 2  # a list has few tiles that need a mask


@dataclass(frozen=True)
class Backward:
    """One backward pass; tensors as in :func:`~sparta.specialize.attention.op.flash_attention`.

    Examples
    --------
    >>> Backward.__name__
    'Backward'
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    lse: Tensor
    lists: Sequence[Tensor]
    where: Tensor
    tile: AttentionTile
    unclean: int

    def run(self, o: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
        """Compute the gradients of q, k and v, of q first: its kernel finds what that of k and v needs."""
        delta = self.lse.new_empty(self.lse.shape)
        self._queries(o, delta, grad_q)
        self._keys(delta, grad_k, grad_v)

    # ------------------------------------------------------------------ what is known

    @property
    def _sizes(self) -> Sizes:
        return sizes_of(self.q, self.v)

    @property
    def _cut(self) -> tuple[int, int]:
        """The tile (queries, keys) of the lists."""
        return self.tile.for_gradients(own=len(self.lists) != LISTS)

    @property
    def _own_lists(self) -> Sequence[Tensor | None]:
        return self.lists[LISTS : 2 * LISTS] or self.lists[:LISTS] or NO_LISTS

    @property
    def _pieces(self) -> tuple[AttentionTile, AttentionTile]:
        return pieces(self._cut, self._sizes, self.q.element_size())

    def _shared(self, patterns: Tensor | None) -> tuple[Any, ...]:
        """Return arguments that both kernels take."""
        width = math.sqrt(self._sizes.e)
        return (
            patterns, self.where, self.where, LOG2E / width, 1.0 / width, self.q.shape[1], self.k.shape[1],
            self.q.shape[2], self.k.shape[2],
        )  # fmt: skip

    @property
    def _strides(self) -> tuple[int, ...]:
        return (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3])

    @property
    def _rest(self) -> tuple[Any, ...]:
        unclean = self.unclean >> 2 if len(self.lists) > LISTS else self.unclean & 3
        return (*self._sizes, bool(self.lists), unclean)

    # ------------------------------------------------------------------ kernels

    def _queries(self, o: Tensor, delta: Tensor, grad_q: Tensor) -> None:
        """Compute the gradient of q, and the sum of ``o * grad`` of each query."""
        from sparta.specialize.attention.flash_backward import flash_backward_q
        from sparta.specialize.attention.flash_forward import INTERPRETED

        piece, cut, sizes = self._pieces[0], self._cut, self._sizes
        bounds, entries, _, _, patterns = self._own_lists
        tiles = -(-self.q.shape[2] // cut[0])
        given, tma = _copied(self.tile, piece.keys, sizes, (self.k, self.v))
        programs = self.q.shape[0] * self.q.shape[1] * tiles * (cut[0] // piece.queries)
        start(
            flash_backward_q, (programs,), piece,
            self.q, *given, o, self.grad, self.lse, delta, grad_q, bounds, entries, *self._shared(patterns), tiles,
            *self._strides, *cut, piece.queries, piece.keys, *self._rest, tma, precision(self.q), INTERPRETED,
            min(piece.stages, _MASKED_STAGES),
        )  # fmt: skip

    def _keys(self, delta: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
        """Compute the gradients of k and v."""
        from sparta.specialize.attention.flash_backward import flash_backward_kv
        from sparta.specialize.attention.flash_forward import INTERPRETED

        piece, cut = self._pieces[1], self._cut
        _, _, bounds, entries, patterns = self._own_lists
        tiles, shared = -(-self.k.shape[2] // cut[1]), self.q.shape[1] // self.k.shape[1]
        (given, facts), tma = _copied_queries(
            self.tile, piece.queries, self._sizes, (self.q, self.grad), (self.lse, delta)
        )
        programs = self.k.shape[0] * self.k.shape[1] * tiles * (cut[1] // piece.keys)
        start(
            flash_backward_kv, (programs,), piece,
            given[0], self.k, self.v, given[1], *facts, grad_k, grad_v, bounds, entries, *self._shared(patterns), tiles,
            *self._strides, *cut, piece.queries, piece.keys, *self._rest, tma, shared, precision(self.q),
            INTERPRETED, min(piece.stages, _MASKED_STAGES),
        )  # fmt: skip


def pieces(tile: tuple[int, int], sizes: Sizes, itemsize: int) -> tuple[AttentionTile, AttentionTile]:
    """Return the pieces of a tile (queries, keys) whose gradients fit on chip, for that of q and for those of k and v.

    Each has a side that its programs own, and one in which they walk. Programs that own 64 leave room for a second one
    on the same processor, of which one computes weights while the other multiplies; those that own 128 read half as
    much from the L2 cache.

    >>> [str(piece)[:19] for piece in pieces((128, 64), Sizes(128, 128, 128, 128), 2)]
    ['queries=128,keys=64', 'queries=64,keys=64,']
    """
    width, cut = max(sizes.padded_e, sizes.padded_f), (min(_WALKED, tile[0]), min(_WALKED, tile[1]))
    if width > _NARROW or itemsize > 2:  # float32 is multiplied in unrolled code that must stay short
        room = (64 if width <= _NARROW else 32) // (itemsize // 2)
        piece = AttentionTile(min(room, tile[0]), min(room, tile[1]), stages=1)
        return piece, piece
    for_q, for_kv = AttentionTile(*cut, stages=2), AttentionTile(*cut, stages=2)
    if tile[0] > _WALKED:
        for_q = AttentionTile(tile[0], cut[1], stages=3, warps=8)
    if tile[1] > _WALKED:
        for_kv = AttentionTile(cut[0], tile[1], stages=3, warps=8)
    return for_q, for_kv


def _copied(cut: AttentionTile, rows: int, sizes: Sizes, pair: tuple[Tensor, Tensor]) -> tuple[tuple[Any, Any], bool]:
    """Return keys and values, or queries and gradient, as the kernels read them, and whether by the copy engine."""
    if not (cut.tma and all(copyable(x) for x in pair)):
        return pair, False
    return (described(pair[0], rows, sizes.padded_e), described(pair[1], rows, sizes.padded_f)), True


def _copied_queries(
    cut: AttentionTile, rows: int, sizes: Sizes, pair: tuple[Tensor, Tensor], facts: tuple[Tensor, Tensor]
) -> tuple[tuple[tuple[Any, Any], tuple[Any, Any]], bool]:
    """Return what :func:`_copied` does, and what is known of each query (B, H, M), which the engine reads as well."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    queries = facts[0].shape[2]
    if queries * facts[0].element_size() % 16:
        return (pair, facts), False
    given, tma = _copied(cut, rows, sizes, pair)
    if not tma:
        return (given, facts), False
    level, share = (TensorDescriptor(x, [x.numel() // queries, queries], [queries, 1], [1, rows]) for x in facts)
    return (given, (level, share)), True
