"""What a GPU leaves room for: targets of the CUDA kernels, and bounds from what was measured of memory and products.

A bound is the time of the dense call over the least time that the sparse one can take: that of its products at the rate
of the fastest dense product in the same file, or that of its bytes at the rate of a copy, whichever is longer. Blocks
have a second bound: every kept one reads its columns of x from the L2 cache for all tokens, at the rate of the cache.
Where kernels that only multiply by 2:4, or only bring bytes, were measured, they are the bound of 2:4 weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from renderers.registry import Record

_COPY = 4.3e6  # bytes a microsecond, read and written, of a large copy on an H200
_CACHE = 8.7e6  # the same of reading from its L2 cache
_HALF = 2  # bytes of a number in bf16
_TOKENS, _HIGHEST = 256, 128  # tokens that a program takes of x at once, and the highest blocks it has room for


class Rates(NamedTuple):
    """Bytes and operations a microsecond, and bytes from the cache."""

    copy: float
    products: float
    cache: float

    @property
    def text(self) -> str:
        """The two that every bound is made of, in words."""
        return f"{self.copy / 1e6:.1f} TB/s and {self.products / 1e6:.0f} TFLOP/s"


def rates(results: Record, dense: Iterable[tuple[float, float]]) -> Rates:
    """Return what a file measured of its GPU; `dense` are operations and microseconds of dense products in it.

    >>> rates({}, [(2e9, 4.0)]).products
    500000000.0
    """
    known = results.get("ceilings", {})
    fastest = max([known.get("operations", 0.0), *(operations / us for operations, us in dense)])
    return Rates(known.get("bytes", _COPY), fastest, known.get("cache", _CACHE))


def linear_bound(
    shape: tuple[int, int], tokens: int, share: float, dense_us: float, limits: Rates, *, stored: float | None = None
) -> float:
    """Return the bound of a layer (N, K) of whose weight a share is multiplied, and read or stored with its index.

    >>> round(linear_bound((4096, 4096), 1, 0.5, 10.0, Rates(4e6, 7e8, 8e6)), 2)
    2.38
    """
    n, k = shape
    moved = _HALF * ((share if stored is None else stored) * n * k + tokens * (n + k))
    return dense_us / max(moved / limits.copy, 2.0 * share * tokens * n * k / limits.products)


def cache_bound(row: Record, dense_us: float, limits: Rates) -> float:
    """Return the bound of a layer in blocks, at random places, by what they read of x from the cache.

    Blocks may be stored in higher ones: x is read for fewer of them, but more of it, and more zeros are multiplied. The
    best height is taken, and dense where none is better.
    """
    (n, k), block, tokens = row["shape"], row["block"], row["tokens"]
    times = []
    for height in (block * 2**power for power in range(8) if block * 2**power <= _HIGHEST):
        share = 1.0 - row["sparsity"] ** (height / block)
        read = _HALF * share * n * k / height * (_TOKENS + height) * tokens / _TOKENS
        times.append(max(read / limits.cache, 2.0 * share * n * k * tokens / limits.products))
    return max(1.0, dense_us / min(times))


class SparseRates(NamedTuple):
    """What kernels that do a part of a 2:4 layer reach: operations a microsecond, pruned ones counted, and bytes."""

    products: float
    stream: tuple[tuple[float, float], ...]  # bytes, and the microseconds in which a call brings them

    def stream_us(self, moved: float) -> float:
        """Return how long a call takes to bring so many bytes, between and beyond what was measured.

        >>> rates = SparseRates(1e9, ((1e6, 2.0), (5e6, 3.0), (9e6, 5.0)))
        >>> rates.stream_us(3e6), rates.stream_us(13e6), rates.stream_us(0.0)
        (2.5, 7.0, 2.0)
        """
        if moved <= self.stream[0][0]:
            return self.stream[0][1]
        pairs = list(zip(self.stream, self.stream[1:], strict=False))
        (first, begin), (last, end) = next((pair for pair in pairs if moved <= pair[1][0]), pairs[-1])
        return begin + (end - begin) * (moved - first) / (last - first)

    @property
    def text(self) -> str:
        """Both in words."""
        few, many = self.stream[0], self.stream[-1]
        return (
            f"one that only multiplies what is in shared memory ({self.products / 1e6:.0f} TFLOP/s, those of zeros "
            f"counted) and one that only brings as many bytes ({few[0] / 1e6:.0f} MB in {few[1]:.1f} µs, "
            f"{many[0] / 1e6:.0f} MB in {many[1]:.1f} µs)"
        )


def sparse_rates(results: Record, kind: str) -> SparseRates | None:
    """Return what a file measured of the parts of 2:4 layers in bf16 or fp8; None where it did not."""
    known = results.get("ceilings", {})
    if "sparse" not in known:
        return None
    return SparseRates(known["sparse"][kind], tuple((size, us) for size, us in known["stream"]))


def two_four_bound(shape: tuple[int, int], tokens: int, dense_us: float, limits: SparseRates, size: int) -> float:
    """Return the bound of a 2:4 layer (N, K) whose elements have `size` bytes: 2 or 1.

    >>> rates = SparseRates(1e9, ((1e6, 2.0), (9e6, 4.0)))
    >>> round(two_four_bound((4096, 4096), 16, 12.0, rates, 2), 2)
    1.84
    >>> round(two_four_bound((1024, 1024), 10000, 45.94, rates, 1), 2)
    2.0
    """
    n, k = shape
    moved = (0.5 * size + 0.125) * n * k + tokens * (size * k + _HALF * n)
    multiplied = limits.stream[0][1] + 2.0 * tokens * n * k / limits.products
    return dense_us / max(limits.stream_us(moved), multiplied)


def step_bound(row: Record, shape: tuple[int, int, int], limits: SparseRates, copied: float) -> float:
    """Return the bound of a training step with a 2:4 weight, of whose three products one or two are sparse.

    No sparse product is taken to be more than twice as fast as the dense one.

    Parameters
    ----------
    shape
        Tokens, outputs and inputs.
    copied
        Bytes a microsecond of a copy, by which the weight is packed.
    """
    tokens, n, k = shape
    sparse = 2 if "both" in row["pattern"] else 1
    dense_us = row["graphed_dense_ms"] * 1e3
    product = max(2.0 * tokens * n * k / limits.products, dense_us / 6)
    packing = (_HALF + (1.0 + 0.125) * sparse) * n * k / copied
    return float(dense_us / (dense_us * (3 - sparse) / 3 + sparse * product + packing))


def block_target(block: int, sparsity: float, tokens: int) -> float | None:
    """Return the target of a layer in blocks; None where there is none.

    >>> block_target(32, 0.9, 4096), block_target(64, 0.8, 16), block_target(64, 0.5, 1024)
    (4.0, 2.6, None)
    """
    if tokens <= 128:
        return {0.8: 2.6, 0.9: 4.0}.get(sparsity)
    if tokens < 4096:
        return None
    high = {128: {0.9: 6.5, 0.95: 9.0}, 64: {0.9: 5.5, 0.95: 8.0}, 32: {0.8: 2.0, 0.9: 4.0, 0.95: 6.0}}
    share = {128: 0.80, 64: 0.65, 32: 0.40, 16: 0.28}[block]
    return high.get(block, {}).get(sparsity, round(share / (1.0 - sparsity), 2))


def product_bound(row: Record, limits: Rates) -> float:
    """Return the bound of a batched product, softmax or attention in three steps, of one sparse matrix."""
    size, depth, density = row["size"], row["depth"], row["density"]
    sheet, kept = size * depth, density * size * depth
    if row["what"] == "softmax":
        moved, multiplied = 2.0 * kept, 0.0
    elif row["what"] == "attention":  # scores are written, normalised and read: four times they cross memory
        sheet = size * size
        moved, multiplied = 4.0 * size * depth + 4.0 * density * sheet, 2.0 * density * sheet * depth
    else:
        moved, multiplied = 2.0 * sheet + kept, density * size * size * depth
    times = 3.0 if row["backward"] else 1.0
    least = max(_HALF * moved / limits.copy, 2.0 * multiplied / limits.products) * times * row["batches"]
    return float(row["us"]["dense"] / least)


def floor_bound(parts: Record, dense_us: float) -> float:
    """Return the bound of a layer whose parts were timed alone, in microseconds: the longest of them is left.

    >>> floor_bound({"bytes": 15_000_000, "launch": 2.0, "stream": 5.0, "look": 1.5}, 20.0)
    4.0
    """
    return dense_us / max(value for name, value in parts.items() if name != "bytes")
