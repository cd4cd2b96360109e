"""The operation ``attention``: ``softmax(q k^T / sqrt(E)) v`` over the kept pairs of query and key.

This file holds its conventions, plain dense, and ``blocks``, which gathers the keys and values that each row of tiles
sees and attends to those alone. Rows of tiles are independent, so to PyTorch's fused attention they are just more
heads, and scores of pruned tiles are never made.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.common.tuning import TunableItemCfg
from sparta.errors import ShapeError, message
from sparta.specialize.blocks.batches import Batches, broadcast
from sparta.specialize.blocks.block_rows import BlockRows, tile_candidates, tile_guess
from sparta.specialize.implement import Cause, DenseImplement, Implement, Kernel, Params, Support, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.softmax.spec import kept_softmax
from sparta.tesa.attribute import TeSA

__all__ = [
    "AttentionKernel",
    "BlocksAttention",
    "DenseAttention",
    "DenseAttentionKernel",
    "attention_spec",
    "check_attention",
    "repeat_heads",
]

_CHUNK_BYTES = {"cpu": 4 << 20}  # gathered keys and values of so many bytes stay in the cache
_OTHER_CHUNK_BYTES = 256 << 20


class AttentionKernel(Kernel):
    """A built kernel of ``attention``."""

    @abstractmethod
    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the index of the mask (..., M, N)."""

    @abstractmethod
    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (..., heads, M, F) for q (..., heads, M, E), k (..., kv heads, N, E) and v (..., kv heads, N, F)."""


def attention_spec(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, *, backward: bool = False) -> KernelSpec:
    """Return the kernel spec of attention under a mask (..., M, N).

    >>> q = torch.zeros(2, 3, 8, 4)
    >>> str(attention_spec(torch.ones(8, 8) > 0, q, q, q)["mask"])
    'TeSA 8×8, dense, density 1, any'
    """
    operands = {
        name: TeSA.dense(x.shape, format=x.dtype, dynamic=range(x.dim() - 2))
        for name, x in (("q", q), ("k", k), ("v", v))
    }
    operands["mask"] = TeSA.from_mask(mask)
    return KernelSpec("attention", operands, attributes={"backward": backward}, device=q.device.type)


def check_attention(mask_shape: Sequence[int] | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the batch dims of the result; raises when q, k, v and the mask do not fit each other.

    >>> check_attention((8, 8), torch.zeros(2, 6, 8, 4), torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 5))
    (2, 6)
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    same_rank = q.dim() == k.dim() == v.dim() and q.dim() >= 2
    if not same_rank or q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(message(shapes, "(..., heads, M, E), (..., kv_heads, N, E), (..., kv_heads, N, F)"))
    if q.dim() > 2 and (q.shape[:-3] != k.shape[:-3] or not _divides(k.shape[-3], q.shape[-3])):
        raise ShapeError(message(shapes, "the same leading dims, and heads a multiple of kv_heads"))
    if mask_shape is None:
        return tuple(q.shape[:-2])
    if (q.shape[-2], k.shape[-2]) != tuple(mask_shape[-2:]):
        given = f"{q.shape[-2]} queries and {k.shape[-2]} keys ({shapes})"
        raise ShapeError(message(given, f"{mask_shape[-2]} and {mask_shape[-1]}, as the mask", "update_mask first"))
    return broadcast(q=tuple(q.shape[:-2]), mask=tuple(mask_shape[:-2]))


def _divides(kv_heads: int, heads: int) -> bool:
    return kv_heads == heads or (kv_heads > 0 and heads % kv_heads == 0)


def repeat_heads(q: Tensor, x: Tensor) -> Tensor:
    """Return keys or values (..., kv heads, N, E) with as many heads as q; each serves neighbouring heads of q.

    >>> repeat_heads(torch.zeros(4, 1, 1), torch.tensor([[[1.0]], [[2.0]]])).flatten().tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    if q.dim() == 2 or q.shape[-3] == x.shape[-3]:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3)


def _sight(groups: Tensor) -> tuple[Tensor, ...]:
    """Return which queries see a key, and which keys are seen, each (groups, size, 1); nothing if all do and are.

    What no query sees is replaced by 0, so that a NaN there never meets a score: 0 * NaN is NaN.
    """
    sees, seen = groups.any(-1)[..., None], groups.any(-2)[..., None]
    return () if bool(sees.all()) and bool(seen.all()) else (sees, seen)


def _cleaned(q: Tensor, k: Tensor, v: Tensor, sight: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    if not sight:
        return q, k, v
    sees, seen = sight
    return torch.where(sees, q, 0.0), torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)


def _without_blind(y: Tensor, sight: Sequence[Tensor]) -> Tensor:
    """Return the results with 0 for queries that see nothing, for which PyTorch's back ends do not agree."""
    return torch.where(sight[0], y, 0.0) if sight else y


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    """Return PyTorch's fused attention; some of its kernels divide by the number of queries or keys: never of none."""
    if q.numel() and k.numel():
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return torch.softmax(q @ k.mT, -1) @ v


class DenseAttentionKernel(AttentionKernel):
    """PyTorch's fused attention with the mask, or without where a mask is not needed."""

    def __init__(self, mask: Tensor) -> None:
        self._mask_lead = tuple(mask.shape[:-2])
        causal = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
        self._full, self._causal = bool(mask.all()), bool((mask == causal).all())

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the mask (1, groups, M, N), and what sees nothing and is not seen."""
        if self._full or self._causal:
            return ()
        folded = Batches(self._mask_lead, self._mask_lead).fold(operand)
        return (folded.contiguous(), *_sight(folded[0]))

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return the attention of q, k, v."""
        q, k, v = present(*inputs)
        batches = Batches(broadcast(q=tuple(q.shape[:-2]), mask=self._mask_lead), self._mask_lead)
        folded = (batches.fold(q), batches.fold(repeat_heads(q, k)), batches.fold(repeat_heads(q, v)))
        mask, causal = packed[0] if packed else None, self._causal and not self._full
        y = _fused_attention(*_cleaned(*folded, packed[1:]), mask, causal=causal)
        return batches.unfold(_without_blind(y, packed[1:]))


class DenseAttention(DenseImplement):
    """``torch.nn.functional.scaled_dot_product_attention`` with a mask."""

    op = "attention"

    def build(self, spec: KernelSpec, params: Params) -> AttentionKernel:
        """Return the dense kernel."""
        del params
        return DenseAttentionKernel(spec["mask"].mask())


class _BlocksKernel(AttentionKernel):
    """Attention of each row of tiles to the keys that it sees."""

    def __init__(self, spec: KernelSpec, tile: tuple[int, int], *, fused: bool) -> None:
        mask = spec["mask"].mask()
        self._mask_lead = tuple(mask.shape[:-2])
        groups = Batches(self._mask_lead, self._mask_lead).fold(mask)[0]
        self._rows, self._fused, self._sight = BlockRows.from_mask(groups, tile), fused, _sight(groups)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.to(operand.device) for t in (*self._rows.tensors, *self._sight))

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        q, k, v = present(*inputs)
        batches = Batches(broadcast(q=tuple(q.shape[:-2]), mask=self._mask_lead), self._mask_lead)
        folded = (batches.fold(q), batches.fold(repeat_heads(q, k)), batches.fold(repeat_heads(q, v)))
        layout = len(self._rows.tensors)
        sight = packed[layout:]
        folded = _cleaned(*folded, sight)
        pieces = zip(*(torch.split(x, self._chunk(k, v)) for x in folded), strict=True)
        done = [self._attend(packed[:layout], *piece) for piece in pieces]
        return batches.unfold(_without_blind(done[0] if len(done) == 1 else torch.cat(done), sight))

    def _chunk(self, k: Tensor, v: Tensor) -> int:
        """Return how many problems to gather at a time."""
        gathered = sum(band.rows * band.width for band in self._rows.bands) * self._rows.tile[1]
        size = gathered * (k.shape[-1] + v.shape[-1]) * k.element_size()
        return max(1, _CHUNK_BYTES.get(k.device.type, _OTHER_CHUNK_BYTES) // max(1, size))

    def _attend(self, packed: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = self._rows
        bands = zip(
            rows.rows_of(packed, q),
            rows.columns_of(packed, k),
            rows.columns_of(packed, v),
            rows.insides(packed),
            strict=True,
        )
        if self._fused:
            attended = [_fused_attention(x, y, z, kept) for x, y, z, kept in bands]
        else:
            scale = 1.0 / math.sqrt(max(1, q.shape[-1]))
            covered = (band.covered for band in rows.bands)
            attended = [
                kept_softmax((x * scale) @ y.mT, kept, covered=all_rows) @ z
                for (x, y, z, kept), all_rows in zip(bands, covered, strict=True)
            ]
        return rows.join(packed, attended)


class BlocksAttention(Implement):
    """Attention over the kept tiles, in plain PyTorch, on any device."""

    name = "blocks"
    op = "attention"

    def supports(self, spec: KernelSpec) -> Support:
        """Any mask that prunes something."""
        if spec["mask"].density == 1.0:
            return Support.no("its mask prunes nothing", Cause.PATTERN)
        return Support.yes("attention over kept tiles")

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the tiles to try, and who attends within them."""
        tiles = tile_candidates(spec["mask"], _own(spec))
        return {
            "tile": TunableItemCfg("choice", _value=tiles),
            "inner": TunableItemCfg("choice", _value=["fused", "products"]),
        }

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the tile that computes little in large pieces, with PyTorch's fused attention."""
        return {"tile": tile_guess(spec["mask"], _own(spec)), "inner": "fused"}

    def build(self, spec: KernelSpec, params: Params) -> AttentionKernel:
        """Lay the tiles out."""
        h, w = params["tile"]
        return _BlocksKernel(spec, (h, w), fused=params["inner"] == "fused")


def _own(spec: KernelSpec) -> tuple[int, int]:
    h, w = spec["mask"].state.block[-2:]
    return h, w
