"""What the GPU can do at most, measured: a copy, a dense product in bf16, and reading from the L2 cache."""

# ruff: noqa: ANN001, ANN202, N803 - Triton's own conventions
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparta.testing import compare

_CACHED = 32 << 20  # bytes that stay in the cache
_ROUNDS, _LINE = 64, 2048


@triton.jit
def _read(x, out, rounds, pieces, SIZE: tl.constexpr):
    """Read pieces of x again and again, each program in an order of its own."""
    lane = tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), tl.int32)
    program = tl.program_id(0)
    for step in range(rounds):
        total ^= tl.load(x + (program * 7 + step * 131) % pieces * SIZE + lane)
    tl.store(out + program * SIZE + lane, total)


def ceilings() -> dict[str, float]:
    """Return bytes a microsecond of a copy (read and written) and from the cache, and operations of a product."""
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    to, a = torch.empty_like(big), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    x = torch.ones(_CACHED // 4, dtype=torch.int32, device="cuda")
    programs = 16 * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs * _LINE, dtype=torch.int32, device="cuda")
    calls = {
        "bytes": lambda: to.copy_(big),
        "operations": lambda: a @ a,
        "cache": lambda: _read[(programs,)](x, out, _ROUNDS, len(x) // _LINE, _LINE, num_warps=4),
    }
    work = {"bytes": 2.0 * big.numel(), "operations": 2.0 * 8192**3, "cache": 4.0 * programs * _ROUNDS * _LINE}
    times = compare(calls, warmup=2, iters=10, max_seconds=0.2, device="cuda")
    return {name: work[name] / (times[name].median * 1e3) for name in calls}
