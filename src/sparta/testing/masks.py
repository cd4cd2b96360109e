"""Masks to test with: blocks of a given size, pruned to a given sparsity.

:func:`block_mask` is what examples, tests and benchmarks use when the values do not matter but the pattern does. The
number of pruned blocks is exact, ``round(sparsity * number of blocks)``, never a matter of luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message

__all__ = ["block_mask"]


def block_mask(
    shape: Sequence[int],
    block: int | Sequence[int] = (1, 1),
    sparsity: float = 0.99,
    algo: str = "rand",
    device: torch.device | str | None = None,
    *,
    seed: int | None = None,
    score: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a mask whose pruned elements form whole blocks.

    Parameters
    ----------
    shape
        The shape of the mask, one dimension or more. With two block entries, every leading index (batch,
        head) gets a mask of its own, with its own exact count.
    block
        The block (granularity) ``(h, w)`` over the last two dimensions, an int for a square one, or one entry
        for each dimension of ``shape``, which then has a single mask. Blocks at ragged edges are cut. In one
        dimension ``w``, ``(w,)`` and ``(1, w)`` mean the same.
    sparsity
        The fraction of pruned blocks, in [0, 1]: exactly ``round(sparsity * blocks)`` blocks of each mask are
        pruned.
    algo
        ``'rand'``: the kept blocks are drawn uniformly. ``'balanced'``: drawn so that all rows of blocks keep
        the same number, give or take one. ``'topk'``: the blocks with the highest mean ``score`` are kept,
        ties by lowest index.
    device
        Where the mask goes. ``None`` means the device of ``score`` if there is one, torch's default device
        otherwise.
    seed
        An int draws from a generator of its own and leaves torch's global state alone. ``None`` draws from
        torch's global CPU generator, so ``torch.manual_seed`` reproduces the mask. Both give the same mask on
        every device. ``'topk'`` draws nothing.
    score
        For ``'topk'``, and only there: a tensor of shape ``shape`` without NaN.

    Returns
    -------
    torch.Tensor
        A bool tensor of shape ``shape``, True = kept.

    Examples
    --------
    >>> mask = block_mask(shape=(64, 96), block=(32, 32), sparsity=0.5, algo='rand', seed=0)
    >>> mask.shape, mask.dtype, int(mask.sum()) // (32 * 32)
    (torch.Size([64, 96]), torch.bool, 3)
    >>> linear = torch.nn.Linear(96, 64)
    >>> with torch.no_grad():
    ...     _ = linear.weight.mul_(mask)
    """
    sizes = _checked_shape(shape)
    blocks = _checked_block(block, sizes)
    fraction = _checked_sparsity(sparsity)
    if algo not in _ALGORITHMS:
        raise NameNotFoundError(did_you_mean(str(algo), _ALGORITHMS, "block mask algorithm"))
    _check_score(score, sizes, algo)

    grid = tuple(math.ceil(size / extent) for size, extent in zip(sizes, blocks, strict=True))
    mask_dims = 2 if _one_mask_per_leading_index(block, sizes) else len(sizes)
    masks = math.prod(grid[:-mask_dims])
    rows, columns = math.prod(grid[-mask_dims:-1]), grid[-1]
    pruned = round(fraction * rows * columns)

    default = torch.get_default_device() if score is None else score.device
    target = default if device is None else torch.device(device)
    if 0 in grid:
        return torch.ones(sizes, dtype=torch.bool, device=target)

    # The choice is made on the CPU whatever the device, so that one seed means one mask everywhere.
    if score is None:
        generator = None if seed is None else torch.Generator(device="cpu").manual_seed(seed)
        ranking = torch.rand((masks, rows, columns), generator=generator, device="cpu", dtype=torch.float32)
    else:
        ranking = _block_means(score, blocks).reshape(masks, rows, columns).neg().cpu()
    kept = _ALGORITHMS[algo](ranking, rows * columns - pruned).reshape(grid)
    return _expand(kept.to(target), blocks, sizes)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape as a tuple of ints, one or more, none negative."""
    if isinstance(shape, int):
        raise ShapeError(message(f"shape is the int {shape}", "a sequence of ints", f"pass ({shape},)"))
    sizes = tuple(int(size) for size in shape)
    if not sizes or min(sizes) < 0:
        raise ShapeError(message(f"shape is {sizes}", "one dimension or more, each of size 0 or more"))
    return sizes


def _one_mask_per_leading_index(block: int | Sequence[int], sizes: tuple[int, ...]) -> bool:
    """Tell whether the block speaks of the last two dimensions only."""
    return len(sizes) > 2 and (isinstance(block, int) or len(block) == 2)


def _checked_block(block: int | Sequence[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return one block entry a dimension of ``sizes``."""
    rank = len(sizes)
    entries = (block,) * min(rank, 2) if isinstance(block, int) else tuple(int(extent) for extent in block)
    if rank == 1 and len(entries) == 2 and entries[0] == 1:
        entries = entries[1:]
    if len(entries) == 2 and rank > 2:
        entries = (1,) * (rank - 2) + entries
    if len(entries) != rank:
        allowed = "an int, (h, w) over the last two dimensions, or one entry for each dimension"
        raise ShapeError(message(f"block {block} for shape {sizes}", allowed))
    for extent, size in zip(entries, sizes, strict=True):
        if extent < 1 or extent > max(size, 1):
            given = f"block {block} for shape {sizes}"
            allowed = f"entries from 1 to the size of the dimension they cut, here {size}"
            raise ShapeError(message(given, allowed, "choose a smaller block; ragged edges are fine"))
    return entries


def _checked_sparsity(sparsity: float) -> float:
    """Return the sparsity as a float in [0, 1]."""
    if not 0.0 <= float(sparsity) <= 1.0:  # false for NaN too
        given = f"sparsity is {sparsity}"
        raise ValueRangeError(message(given, "a number in [0, 1]", "pass 0.9 to prune nine blocks of ten"))
    return float(sparsity)


def _check_score(score: torch.Tensor | None, sizes: tuple[int, ...], algo: str) -> None:
    """Raise unless ``score`` is there exactly when the algorithm reads it, and fits."""
    if algo != "topk":
        if score is not None:
            fix = "pass algo='topk' or leave score out"
            raise ValueRangeError(message(f"algo {algo!r} with a score", "a score only with algo 'topk'", fix))
        return
    if score is None:
        raise ValueRangeError(message("algo 'topk' without a score", f"a tensor of shape {sizes}", "pass score="))
    if tuple(score.shape) != sizes:
        given = f"a score of shape {tuple(score.shape)} for a mask of shape {sizes}"
        raise ShapeError(message(given, "the same shape"))
    if bool(torch.isnan(score).any()):
        raise ValueRangeError(message("score holds NaN", "numbers that can be ordered", "replace the NaNs first"))


def _block_means(score: torch.Tensor, blocks: tuple[int, ...]) -> torch.Tensor:
    """Return the mean score of every block in float64; a cut block counts only the elements it has."""
    values = score.detach().to(torch.float64)
    for dim, extent in enumerate(blocks):
        size = values.shape[dim]
        cells = math.ceil(size / extent)
        padding = [0, 0] * (values.ndim - 1 - dim) + [0, cells * extent - size]
        split = (*values.shape[:dim], cells, extent, *values.shape[dim + 1 :])
        total = functional.pad(values, padding).reshape(split).sum(dim + 1)
        elements = torch.full((cells,), float(extent), dtype=torch.float64, device=values.device)
        elements[-1] = size - (cells - 1) * extent
        values = total / elements.reshape(-1, *[1] * (values.ndim - 1 - dim))
    if bool(torch.isnan(values).any()):
        given = "score holds both inf and -inf in one block"
        raise ValueRangeError(message(given, "blocks whose mean is a number", "use finite scores"))
    return values


def _keep_first(ranking: torch.Tensor, count: int) -> torch.Tensor:
    """Keep the ``count`` lowest entries of each row, equal ones by index; ``ranking`` is (rows, entries)."""
    if count == 0:
        return torch.zeros_like(ranking, dtype=torch.bool)
    # Selecting by threshold is linear where sorting is not, and a weight of 1x1 blocks has tens of millions.
    threshold = ranking.kthvalue(count, dim=-1, keepdim=True).values
    kept, tied = ranking <= threshold, ranking == threshold
    surplus = kept.sum(-1, keepdim=True) - count
    if bool((surplus > 0).any()):
        kept ^= tied & (tied.cumsum(-1, dtype=torch.int32) > tied.sum(-1, keepdim=True) - surplus)
    return kept


def _keep_lowest(ranking: torch.Tensor, count: int) -> torch.Tensor:
    """Keep the ``count`` lowest of every mask, wherever they are; ``ranking`` is (masks, rows, columns)."""
    return _keep_first(ranking.flatten(1), count).reshape(ranking.shape)


def _keep_balanced(ranking: torch.Tensor, count: int) -> torch.Tensor:
    """Keep ``count`` blocks of every mask so that its rows keep the same number, or one more."""
    masks, rows, columns = ranking.shape
    each, extra = divmod(count, rows)
    kept = _keep_first(ranking.reshape(-1, columns), each)
    if extra:
        # Which rows get one more is as random as the ranking itself: those whose best next block ranks
        # lowest.
        following = ranking.reshape(-1, columns).masked_fill(kept, math.inf)
        best, position = following.min(dim=-1)
        lucky = _keep_first(best.reshape(masks, rows), extra).reshape(-1)
        kept[lucky.nonzero().squeeze(-1), position[lucky]] = True
    return kept.reshape(ranking.shape)


_ALGORITHMS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "rand": _keep_lowest,
    "balanced": _keep_balanced,
    "topk": _keep_lowest,
}


def _expand(kept: torch.Tensor, blocks: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the element mask of a grid of kept blocks."""
    for dim, extent in enumerate(blocks):
        if extent > 1:
            kept = kept.repeat_interleave(extent, dim).narrow(dim, 0, sizes[dim])
    return kept.contiguous()
