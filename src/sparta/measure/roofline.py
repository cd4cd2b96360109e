"""What a machine reaches: the FLOP per second of a dense product and the bytes per second of a copy.

Both are the best of a few short runs, about a tenth of a second in all, so that a chart has a roof to draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["reached"]

_ROUNDS = 8
_COPIED = 64 * 2**20


def reached(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Return ``flops_per_second`` and ``bytes_per_second`` that a device reaches.

    >>> figures = reached()
    >>> figures["flops_per_second"] > 0 and figures["bytes_per_second"] > 0
    True
    """
    where = torch.device(device)
    side = 4096 if where.type == "cuda" else 512
    a = torch.ones(side, side, device=where, dtype=dtype)
    source = torch.ones(_COPIED // dtype.itemsize, device=where, dtype=dtype)
    target = torch.empty_like(source)
    product = _shortest(lambda: torch.mm(a, a), where)
    copy = _shortest(lambda: target.copy_(source), where)
    return {"flops_per_second": 2 * side**3 / product, "bytes_per_second": 2 * _COPIED / copy}


def _shortest(call: Callable[[], object], where: torch.device) -> float:
    """Return the seconds of the fastest of some calls."""

    def finished() -> None:
        if where.type == "cuda":
            torch.cuda.synchronize(where)

    call()
    finished()
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        finished()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
