"""The fused Triton attention as implements: ``triton-flash`` for masks and for sequences of several lengths.

Both walk tiles of queries and keys with a running softmax and store no scores. Heads that share keys and have few
queries each are put below each other, so that keys and values are read once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from sparta.specialize.attention.op import flash_attention
from sparta.specialize.attention.spec import AttentionKernel
from sparta.specialize.attention.tile import AttentionTile
from sparta.specialize.blocks.attention_lists import attention_lists
from sparta.specialize.blocks.batches import broadcast
from sparta.specialize.cuda.device import FORMATS, bulk_copies, itemsize, need_triton, on_cuda, triton_here
from sparta.specialize.implement import Cause, Params, Support, TiledImplement, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.seqlen_attention.spec import SeqlenAttentionKernel
from sparta.tesa.attribute import TeSA

__all__ = ["TritonFlash", "TritonFlashSeqlen"]

_WIDEST = 256  # of heads: wider ones do not fit on chip
_FOLDED_ROWS = 64  # so many queries of several heads are put into one tile
_TRIED = 6

# Tiles and their speed on full tiles, relative to each other, by bytes of a row of keys; few queries have their own.
_MANY_QUERIES = {
    128: (((128, 64, 2, 4), 1.0), ((128, 128, 2, 8), 0.95), ((64, 64, 3, 4), 0.8), ((32, 32, 3, 4), 0.35)),
    256: (((128, 64, 2, 4), 1.0), ((64, 64, 3, 4), 0.95), ((128, 64, 3, 8), 0.93), ((32, 32, 3, 4), 0.4),
          ((16, 32, 3, 2), 0.2)),
    512: (((128, 64, 2, 8), 1.0), ((64, 64, 2, 4), 0.8), ((64, 32, 2, 4), 0.6), ((32, 32, 2, 4), 0.35)),
}  # fmt: skip
# Float32 is multiplied without the matrix units, in unrolled code that must stay short.
_MANY_FLOAT32 = {
    256: (((64, 32, 1, 4), 1.0), ((32, 32, 1, 4), 0.8), ((16, 16, 1, 4), 0.5)),
    512: (((32, 32, 1, 4), 1.0), ((16, 16, 1, 4), 0.6)),
    1024: (((16, 32, 1, 4), 1.0), ((16, 16, 1, 4), 0.8)),
}
# Tiles of gradients: a side of 128 is owned by one program of 8 warps, one of 64 by one of 4, and two of those fit.
_BACK = {(64, 64): 1.0, (128, 64): 0.98, (64, 128): 0.97, (128, 128): 0.95, (32, 32): 0.35, (16, 16): 0.12}
_NARROW = 256  # bytes of a row; wider heads have tiles for gradients that are made of smaller pieces anyway
_FEW_QUERIES = ((64, 3, 4), (128, 2, 4), (32, 4, 2), (16, 4, 2))


class _Lists(NamedTuple):
    """The lists of a mask for results and perhaps, of another tile, for gradients; as the op takes them."""

    tensors: tuple[Tensor, ...]
    unclean: int
    longest: int


class _FlashKernel(AttentionKernel):
    """Sums in float32 over the tiles of a list in one fixed order: equal inputs give equal bits."""

    def __init__(self, spec: KernelSpec, tile: AttentionTile) -> None:
        need_triton()
        self._mask, self._tile = spec["mask"], tile
        self._mask_lead = tuple(self._mask.shape[:-2])
        self._trained, self._fold = bool(spec.attributes.get("backward")), _folded(spec)
        self._lists = {self._fold: self._made(self._fold)}
        self._groups: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.to(operand.device) for tensor in self._lists[self._fold].tensors)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        q, k, v = present(*inputs)
        lead = broadcast(q=tuple(q.shape[:-2]), mask=self._mask_lead)
        heads, kv_heads = (lead or (1,))[-1], k.shape[-3] if k.dim() > 2 else 1
        whole = lead[:-1]
        q, k, v = (
            x.expand(*whole, count, *x.shape[-2:]).reshape(math.prod(whole), count, *x.shape[-2:])
            for x, count in ((q, heads), (k, kv_heads), (v, kv_heads))
        )
        fold = self._fold if kv_heads and heads // kv_heads % self._fold == 0 else 1
        if fold not in self._lists:
            self._lists[fold] = self._made(fold)
        lists = self._lists[fold]
        tensors = list(packed) if fold == self._fold else [tensor.to(q.device) for tensor in lists.tensors]
        batches, _, queries, width = q.shape
        q = q.reshape(batches, heads // fold, fold * queries, width)
        groups = self._group_table((*whole, heads // fold), q.device)
        o, _ = flash_attention(q, k, v, tensors, groups, str(self._tile), lists.unclean, lists.longest)
        attended: Tensor = o.reshape(*lead, queries, v.shape[-1])
        return attended

    def _made(self, fold: int) -> _Lists:
        mask = self._mask.mask()
        mask = mask.reshape(math.prod(self._mask_lead), *mask.shape[-2:]).repeat(1, fold, 1)
        own = (self._tile.queries, self._tile.keys)
        lists, back = attention_lists(mask, own), self._tile.for_gradients()
        if not self._trained or back == own:
            return _Lists(lists.tensors, lists.unclean, lists.longest)
        more = attention_lists(mask, back)
        return _Lists((*lists.tensors, *more.tensors), lists.unclean + 4 * more.unclean, lists.longest)

    def _group_table(self, lead: tuple[int, ...], device: torch.device) -> Tensor:
        """Return which mask each head of each batch has: int32 (B * H,)."""
        key = (lead, device)
        if key not in self._groups:
            numbers = torch.arange(math.prod(self._mask_lead), dtype=torch.int32).reshape(self._mask_lead)
            # Made on the CPU: the copy is done when it returns, so that any stream may read the table.
            self._groups[key] = numbers.expand(lead).reshape(-1).contiguous().to(device)
        return self._groups[key]


class TritonFlash(TiledImplement):
    """Fused attention in Triton over the tiles that a mask keeps, with gradients; any mask, GQA, any length."""

    name = "triton-flash"
    op = "attention"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Fp32, bf16 and fp16 on CUDA, heads up to 256 wide, masks that prune something."""
        answer = _answer(spec)
        if answer and spec["mask"].density == 1.0:
            return Support.no("its mask prunes nothing", Cause.PATTERN)
        return answer and Support.yes("fused attention over kept tiles")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return _tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> AttentionKernel:
        """Make the lists; kernels are compiled at their first run."""
        return _FlashKernel(spec, AttentionTile.parse(params["tile"]))


class _FlashSeqlenKernel(SeqlenAttentionKernel):
    """Tiles beyond the length of a sequence are never visited; lengths are read on the device."""

    def __init__(self, tile: AttentionTile) -> None:
        need_triton()
        self._tile = str(tile)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        del packed
        q, k, v, lengths = present(*inputs)
        where = lengths.to(device=q.device, dtype=torch.int32, non_blocking=True)
        o: Tensor = flash_attention(q, k, v, [], where, self._tile, 0, 0)[0]
        return o


class TritonFlashSeqlen(TiledImplement):
    """Fused attention in Triton that skips padding, with gradients."""

    name = "triton-flash"
    op = "seqlen_attention"
    first_run_compiles = True

    def supports(self, spec: KernelSpec) -> Support:
        """Fp32, bf16 and fp16 on CUDA, heads up to 256 wide."""
        return _answer(spec) and Support.yes("fused attention that skips padding")

    def tiles(self, spec: KernelSpec) -> Sequence[object]:
        """Return the tiles that are worth timing, the best guess first."""
        return _seqlen_tiles(spec)

    def build(self, spec: KernelSpec, params: Params) -> SeqlenAttentionKernel:
        """Return the kernel; it is compiled at its first run."""
        del spec
        return _FlashSeqlenKernel(AttentionTile.parse(params["tile"]))


# ---------------------------------------------------------------------- what can run here


def _answer(spec: KernelSpec) -> Support:
    """Say whether these inputs can run, or why not."""
    formats = {str(spec[name].format) for name in ("q", "k", "v")}
    widths = [spec[name].shape[-1] for name in ("q", "v")]
    if spec.device != "cuda":
        return on_cuda(spec.device)
    if not all(1 <= width <= _WIDEST for width in widths):
        return Support.no(f"heads are {widths[0]} and {widths[1]} wide; it takes 1 to {_WIDEST}", Cause.SHAPE)
    if len(formats) > 1 or not formats <= set(FORMATS):
        given = ", ".join(sorted(formats))
        return Support.no(f"it computes q, k and v all in one of {', '.join(FORMATS)}, not in {given}", Cause.DTYPE)
    return triton_here()


# ---------------------------------------------------------------------- choosing tiles


def _folded(spec: KernelSpec) -> int:
    """Return how many heads with the same mask and keys are put below each other."""
    q, k, mask = spec["q"], spec["k"], spec["mask"]
    ratio = q.shape[-3] // max(1, k.shape[-3]) if len(q.shape) > 2 else 1
    own_masks = len(mask.shape) > 2 and mask.shape[-3] != 1
    return ratio if ratio > 1 and ratio * q.shape[-2] <= _FOLDED_ROWS and not own_masks else 1


def _table(spec: KernelSpec) -> tuple[tuple[tuple[int, int, int, int], float], ...]:
    """Return the tiles for many queries, and their speeds, by dtype and the bytes of a row of keys or values."""
    table = _MANY_FLOAT32 if str(spec["q"].format) == "fp32" else _MANY_QUERIES
    return next(tiles for size, tiles in table.items() if _row_bytes(spec) <= size)


def _row_bytes(spec: KernelSpec) -> int:
    return max(spec["q"].shape[-1], spec["v"].shape[-1]) * itemsize(spec["q"].format)


def _tiles(spec: KernelSpec) -> list[AttentionTile]:
    """Return the tiles worth timing under a mask, the best guess first."""
    mask, rows, tma = spec["mask"], spec["mask"].shape[-2] * _folded(spec), int(bulk_copies())
    few = 16 if rows <= 16 else 32 if rows <= 32 else None
    if few is not None:
        own = [AttentionTile(few, keys, stages, warps, tma) for keys, stages, warps in _FEW_QUERIES]
        fits = [tile for tile in own if tile.keys * _row_bytes(spec) <= 128 * 256]
        return sorted(fits, key=lambda tile: _covered(mask, tile) * (1 + 8 / tile.keys))
    cost = {AttentionTile(*cut, tma): _covered(mask, AttentionTile(*cut)) / speed for cut, speed in _table(spec)}
    tiles = sorted(cost, key=lambda tile: cost[tile])
    backs = _backs(spec)
    if not backs:
        return tiles[:_TRIED]
    # Results and gradients have nothing to do with each other: both first guesses, then those next to them.
    ranks = sorted(product(range(len(tiles)), range(len(backs))), key=sum)
    pairs = [(tiles[own], backs[back]) for own, back in ranks[:_TRIED]]
    return [replace(tile, back_queries=back[0], back_keys=back[1]) for tile, back in pairs]


def _backs(spec: KernelSpec) -> list[tuple[int, int]]:
    """Return tiles for gradients, those first that cover little in fast pieces; none where they are not asked for."""
    if not spec.attributes.get("backward") or str(spec["q"].format) == "fp32" or _row_bytes(spec) > _NARROW:
        return []
    cost = {cut: _covered(spec["mask"], AttentionTile(*cut)) / speed for cut, speed in _BACK.items()}
    return sorted(cost, key=lambda cut: cost[cut])


def _seqlen_tiles(spec: KernelSpec) -> list[AttentionTile]:
    tma = int(bulk_copies())
    narrow = str(spec["q"].format) != "fp32" and _row_bytes(spec) <= _NARROW
    back = (64, 64) if narrow else (0, 0)  # there are no lists to make
    return [AttentionTile(*cut, tma, *back) for cut, _ in _table(spec)][:_TRIED]


def _covered(mask: TeSA, tile: AttentionTile) -> float:
    rows, columns = mask.shape[-2:]
    block = (min(tile.queries, max(1, rows)), min(tile.keys, max(1, columns)))
    kept = mask.kept_blocks((*[1] * (len(mask.shape) - 2), *block))
    return float(kept.float().mean()) if kept.numel() else 0.0
