"""The backward pass of fused attention: which kernels compute the gradients, and in which pieces.

Of each score there are two gradients to make: one goes into the sums of its key, one into those of its query, and each
sum has one owner. Either two kernels compute every score for themselves (seven products), or the one for keys stores
the gradients of the scores, a part of the heads at a time, and a product with the keys is left for the other (five):
that pays where a product costs more than moving them, for wide heads.
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
    ROWS_AT_ONCE,
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
_OWNED, _WALKED = 128, 64
_STORED_BYTES = 1 << 30  # of gradients of scores at a time
_LEAST_STORED = 128  # channels of a head from which a product costs more than to move what it needs


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
        """Compute the gradients of q, k and v."""
        from sparta.specialize.attention.flash_backward import flash_delta

        lines, width, delta = self.lse.numel(), self.v.shape[3], self.lse.new_empty(self.lse.shape)
        padded = self._sizes.padded_f
        flash_delta[(-(-lines // ROWS_AT_ONCE),)](o, self.grad, delta, lines, width, ROWS_AT_ONCE, padded)
        heads = self._heads_at_once(delta)
        if heads:
            self._by_parts(heads, delta, grad_q, grad_k, grad_v)
        else:
            self._queries(delta, grad_q)
            self._keys(delta, grad_k, grad_v, None, 0, self.k.shape[0] * self.k.shape[1])

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

    def _queries(self, delta: Tensor, grad_q: Tensor) -> None:
        """Compute the gradient of q, from scores computed again."""
        from sparta.specialize.attention.flash_backward import flash_backward_q
        from sparta.specialize.attention.flash_forward import INTERPRETED

        piece, cut, sizes = self._pieces[0], self._cut, self._sizes
        bounds, entries, _, _, patterns = self._own_lists
        tiles = -(-self.q.shape[2] // cut[0])
        given, tma = _copied(self.tile, piece.keys, sizes, (self.k, self.v))
        programs = self.q.shape[0] * self.q.shape[1] * tiles * (cut[0] // piece.queries)
        start(
            flash_backward_q, (programs,), piece,
            self.q, *given, self.grad, self.lse, delta, grad_q, bounds, entries, *self._shared(patterns), tiles,
            *self._strides, *cut, piece.queries, piece.keys, *self._rest, tma, precision(self.q), INTERPRETED,
        )  # fmt: skip

    def _keys(
        self, delta: Tensor, grad_k: Tensor, grad_v: Tensor, changes: Tensor | None, first: int, count: int
    ) -> None:
        """Compute the gradients of `count` heads of k and v from a first one on; store those of their scores."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        from sparta.specialize.attention.flash_backward import flash_backward_kv
        from sparta.specialize.attention.flash_forward import INTERPRETED

        piece, cut = self._pieces[1], self._cut
        _, entries_q, bounds, entries, patterns = self._own_lists
        tiles, shared = -(-self.k.shape[2] // cut[1]), self.q.shape[1] // self.k.shape[1]
        (given, facts), tma = _copied_queries(
            self.tile, piece.queries, self._sizes, (self.q, self.grad), (self.lse, delta)
        )
        stored: Any = changes
        if changes is not None:
            stored = TensorDescriptor(changes, list(changes.shape), [cut[0], 1], [piece.keys, piece.queries])
        slots = None if changes is None else self.lists[2 * LISTS]
        per_head = 0 if entries_q is None else entries_q.shape[0] - 1
        start(
            flash_backward_kv, (count * tiles * (cut[1] // piece.keys),), piece,
            given[0], self.k, self.v, given[1], *facts, grad_k, grad_v, bounds, entries, *self._shared(patterns), tiles,
            *self._strides, stored, slots, first * shared, per_head, *cut, piece.queries, piece.keys, *self._rest, tma,
            changes is not None, shared, precision(self.q), INTERPRETED,
        )  # fmt: skip

    def _by_parts(self, heads: int, delta: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
        """Compute all gradients, storing those of the scores of so many heads of k and v at a time."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        from sparta.specialize.attention.flash_backward import flash_join_q
        from sparta.specialize.attention.flash_forward import INTERPRETED

        cut, sizes, shared = self._cut, self._sizes, self.q.shape[1] // self.k.shape[1]
        bounds, entries = self._own_lists[:2]
        assert entries is not None  # noqa: S101 - parts are of lists
        per_head, tiles, every = entries.shape[0] - 1, -(-self.q.shape[2] // cut[0]), self.k.shape[0] * self.k.shape[1]
        changes = self.q.new_empty(heads * shared * per_head * cut[1], cut[0])
        joined = AttentionTile(*cut, stages=3 if cut[0] * cut[1] < _OWNED * _OWNED else 2, warps=8)
        keys = described(self.k, cut[1], sizes.padded_e)
        tall = TensorDescriptor(changes, list(changes.shape), [cut[0], 1], [cut[1], cut[0]])
        for first in range(0, every, heads):
            count = min(heads, every - first)
            self._keys(delta, grad_k, grad_v, changes, first, count)
            start(
                flash_join_q, (count * shared * tiles,), joined,
                keys, tall, grad_q, bounds, entries, 1.0 / math.sqrt(sizes.e), self.q.shape[1], self.k.shape[1],
                self.q.shape[2], tiles, first * shared, per_head, *cut, sizes.e, sizes.padded_e, precision(self.q),
                INTERPRETED,
            )  # fmt: skip

    def _heads_at_once(self, delta: Tensor) -> int:
        """Return of how many heads of k and v the gradients of scores are stored at a time; 0 where none are."""
        if len(self.lists) <= 2 * LISTS or not self.lists[2 * LISTS].numel() or self._sizes.e < _LEAST_STORED:
            return 0
        piece, cut = self._pieces[1], self._cut
        _, tma = _copied_queries(self.tile, piece.queries, self._sizes, (self.q, self.grad), (self.lse, delta))
        if not (tma and copyable(self.k)):
            return 0
        shared, per_head = self.q.shape[1] // self.k.shape[1], self.lists[LISTS + 1].shape[0] - 1
        size = shared * per_head * cut[0] * cut[1] * self.q.element_size()
        return min(_STORED_BYTES // max(1, size), self.k.shape[0] * self.k.shape[1]) if per_head else 0


def pieces(tile: tuple[int, int], sizes: Sizes, itemsize: int) -> tuple[AttentionTile, AttentionTile]:
    """Return the pieces of a tile (queries, keys) whose gradients fit on chip, for that of q and for those of k and v.

    Each has a side that its programs own, and one in which they walk: what is walked is read from the L2 cache for
    every owner, so owners are as large as registers allow.

    >>> [str(piece)[:19] for piece in pieces((128, 128), Sizes(128, 128, 128, 128), 2)]
    ['queries=128,keys=64', 'queries=64,keys=128']
    """
    queries, keys = tile
    width = max(sizes.padded_e, sizes.padded_f)
    if width > _NARROW or itemsize > 2:  # float32 is multiplied in unrolled code that must stay short
        room = (64 if width <= _NARROW else 32) // (itemsize // 2)
        piece = AttentionTile(min(room, queries), min(room, keys), stages=1)
        return piece, piece
    for_q = AttentionTile(min(_OWNED, queries), min(_WALKED, keys), 3, 8 if queries >= _OWNED else 4)
    for_kv = AttentionTile(min(_WALKED, queries), min(_OWNED, keys), 3, 8 if keys >= _OWNED else 4)
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
