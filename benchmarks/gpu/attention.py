"""How fast is sparse attention on CUDA? Times of ``triton-flash`` beside dense attention and FlexAttention.

Run with ``python benchmarks/gpu/attention.py``. Each contender is a CUDA graph of a few calls and graphs take turns.
Dense is PyTorch's attention without a mask, by FlashAttention and by cuDNN, whichever is faster; the limit of a mask is
one over its density. Decoding is bounded by reading keys and values instead, and is also given in bytes a second.
``--only`` measures some of the masks again; rows of the others stay as they were stored.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

from record import RESULTS, path_of, save
from sparta.errors import SpartaError
from sparta.specialize.attention.spec import attention_spec
from sparta.specialize.attention.triton_flash import TritonFlash, TritonFlashSeqlen
from sparta.specialize.implement import Kernel
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.seqlen_attention.spec import seqlen_attention_spec
from sparta.tables import table
from sparta.testing import attention_reference, check, compare

DTYPE = torch.bfloat16
_BLOCK = 128
_NOTES = """
Tiles of 128 queries and 64 keys in 4 warps leave room for two programs on a multiprocessor, of which one goes through
the softmax while the other multiplies: 525 TFLOP/s without a mask, at 16384 tokens and 128 channels. Tiles of 128x128
in 8 warps reached 458, and 486 when the scores of the next tile were multiplied before the softmax of this one. Lists
are short at a density of 0.1, and the start and the end of a tile weigh more (483 instead of 537 TFLOP/s at 0.5).
Gradients compute scores twice, once for queries and once for keys, so that every sum has one order: 7 products instead
of the 5 of a kernel with atomics. Programs own 64 queries or keys, so that again two fit on a multiprocessor, or 128 in
8 warps. To store the gradients of scores for the other kernel (5 products again) took longer than to compute them.
Under a causal mask lists are of all lengths: those of eight heads start together, the longest first. Head by head, the
longest lists of the last head were walked on a device that was idle otherwise.
"""
_HEADS = 16
_MASKS = ("blocks", "causal", "window", "decode", "lengths")
# (queries, keys, width, pattern, density or window): the targets first.
PLAN = [
    *((16384, 16384, 128, "blocks", density) for density in (0.5, 0.25, 0.1)),
    *((4096, 4096, 128, "blocks", density) for density in (0.5, 0.25, 0.1)),
    *((16384, 16384, 64, "blocks", density) for density in (0.5, 0.1)),
    (16384, 16384, 128, "causal", 0),
    (16384, 16384, 128, "window", 1024),
    (4096, 4096, 128, "window", 512),
]


@dataclass(frozen=True)
class Case:
    """One shape and mask."""

    queries: int
    keys: int
    width: int
    pattern: str
    parameter: float


def mask_of(case: Case) -> Tensor:
    """Return the mask (M, N) of a case."""
    generator = torch.Generator("cuda").manual_seed(0)
    if case.pattern == "blocks":
        grid = torch.rand(case.queries // _BLOCK, case.keys // _BLOCK, device="cuda", generator=generator)
        return (grid < case.parameter).repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    causal = torch.ones(case.queries, case.keys, dtype=torch.bool, device="cuda").tril()
    return causal if case.pattern == "causal" else causal & ~causal.tril(-int(case.parameter))


def graphed(function: Callable[[], object], count: int) -> Callable[[], None]:
    """Return the replay of a graph of some calls."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            function()
    return graph.replay


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    """Return a call that also computes the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    gradient = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)


def best_tile(
    implement: TritonFlash | TritonFlashSeqlen,
    spec: KernelSpec,
    operand: Tensor | None,
    inputs: Sequence[Tensor],
    *,
    backward: bool = False,
) -> tuple[str, Callable[..., Tensor], float]:
    """Try all candidates, perhaps with gradients; return the fastest, its call, and how much slower the first was."""
    found = []
    for tile in implement.space(spec)["tile"].domain.values:
        kernel = implement.build(spec, {"tile": tile})
        packed = () if operand is None else kernel.pack(operand)

        def call(*xs: Tensor, kernel: Kernel = kernel, packed: Sequence[Tensor] = packed) -> Tensor:
            return kernel.run(packed, *xs)

        try:
            with torch.set_grad_enabled(backward):
                timed = with_gradients(call, inputs) if backward else lambda call=call: call(*inputs)
                replay = graphed(timed, 2)
                took = compare({"it": replay}, warmup=1, iters=5, max_seconds=0.05, device="cuda")["it"]
        except SpartaError as error:
            print(f"  {tile}: {error}")
            continue
        found.append((took.median, tile, call))
    took, tile, fastest = min(found, key=lambda each: each[0])
    return tile, fastest, found[0][0] / took


def dense_calls(inputs: Sequence[Tensor], *, backward: bool) -> dict[str, Callable[[], object]]:
    """Return dense attention by each of PyTorch's fast back ends."""

    def by(backend: SDPBackend) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

        return attend

    backends = {"dense flash": by(SDPBackend.FLASH_ATTENTION), "dense cuDNN": by(SDPBackend.CUDNN_ATTENTION)}
    if backward:
        return {name: with_gradients(attend, inputs) for name, attend in backends.items()}
    return {name: lambda attend=attend: attend(*inputs) for name, attend in backends.items()}


def flex_call(mask: Tensor, compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return compiled FlexAttention under a mask."""

    def kept(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return mask[query, key]

    blocks = create_block_mask(kept, None, None, *mask.shape, device="cuda", BLOCK_SIZE=_BLOCK)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def time_all(calls: Mapping[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Return microseconds a call of each contender that runs, as graphs that take turns."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = graphed(call, count)
        except RuntimeError as error:  # a rival that cannot run this case is named with its reason
            print(f"  {name}: {str(error).splitlines()[0]}")
    times = compare(graphs, warmup=2, iters=15, max_seconds=0.3, device="cuda")
    return {name: times[name].median * 1e3 / count for name in graphs}


def measure(case: Case, compiled: Callable[..., Tensor], *, backward: bool) -> dict[str, Any]:
    """Time one mask."""
    mask = mask_of(case)
    sizes = ((1, _HEADS, length, case.width) for length in (case.queries, case.keys, case.keys))
    inputs = [torch.randn(size, device="cuda", dtype=DTYPE) for size in sizes]
    spec = attention_spec(mask, *inputs, backward=backward)
    tile, ours, first_guess = best_tile(TritonFlash(), spec, mask, inputs, backward=backward)
    part = [inputs[0][:, :1, :256], *(x[:, :1] for x in inputs[1:])]
    check(ours(*inputs)[:, :1, :256], attention_reference(*part, mask[:256]), reduction=case.keys)
    flex = flex_call(mask, compiled)
    calls = dense_calls(inputs, backward=backward)
    if backward:
        calls |= {"FlexAttention": with_gradients(flex, inputs), "triton-flash": with_gradients(ours, inputs)}
    else:
        calls |= {"FlexAttention": lambda: flex(*inputs), "triton-flash": lambda: ours(*inputs)}
    us = time_all(calls, 2)
    dense = min(time for name, time in us.items() if name.startswith("dense"))
    density = spec["mask"].density
    record = {**vars(case), "backward": backward, "density": density, "us": us, "tile": tile}
    record |= {"first_guess": first_guess, "ratio": dense / us["triton-flash"]}
    record["of_limit"] = record["ratio"] * density
    flops = 4.0 * _HEADS * case.queries * case.keys * case.width * density * (3.5 if backward else 1.0)
    record["tflops"] = flops / us["triton-flash"] * 1e-6
    return record


def decode(keys: int, density: float) -> dict[str, Any]:
    """Time one query of 32 heads over a cache of 8 kv heads."""
    grid = torch.rand(1, keys // 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) < density
    mask = grid.repeat_interleave(64, 1)
    batch = 4
    sizes = ((batch, heads, n, 128) for heads, n in ((32, 1), (8, keys), (8, keys)))
    inputs = [torch.randn(size, device="cuda", dtype=DTYPE) for size in sizes]
    spec = attention_spec(mask, *inputs)
    tile, ours, first_guess = best_tile(TritonFlash(), spec, mask, inputs)
    check(ours(*inputs), attention_reference(*inputs, mask), reduction=keys)
    us = time_all(dense_calls(inputs, backward=False) | {"triton-flash": lambda: ours(*inputs)}, 10)
    dense = min(time for name, time in us.items() if name.startswith("dense"))
    read = 2 * batch * 8 * int(mask.sum()) * 128 * 2
    record = {"keys": keys, "density": spec["mask"].density, "us": us, "tile": tile, "first_guess": first_guess}
    return record | {"ratio": dense / us["triton-flash"], "tb_per_s": read / us["triton-flash"] * 1e-6}


def lengths_case() -> dict[str, Any]:
    """Time sequences of several lengths in one padded batch."""
    lengths = torch.randint(128, 4097, (16,), generator=torch.Generator().manual_seed(0))
    inputs = [torch.randn(16, _HEADS, 4096, 128, device="cuda", dtype=DTYPE) for _ in range(3)]
    spec = seqlen_attention_spec(*inputs)
    on_device = lengths.cuda()
    tile, ours, first_guess = best_tile(TritonFlashSeqlen(), spec, None, (*inputs, on_device))
    us = time_all(dense_calls(inputs, backward=False) | {"triton-flash": lambda: ours(*inputs, on_device)}, 2)
    dense = min(time for name, time in us.items() if name.startswith("dense"))
    fill = float((lengths.double() ** 2).mean() / 4096**2)
    record = {"fill": fill, "us": us, "tile": tile, "first_guess": first_guess, "ratio": dense / us["triton-flash"]}
    return record | {"of_limit": record["ratio"] * fill}


def show(records: Sequence[dict[str, Any]]) -> str:
    """Return the times as a table."""
    body = []
    for r in records:
        what = f"{r['pattern']} {r['parameter']:g}" + (" fwd+bwd" if r["backward"] else "")
        us = [f"{time:.0f}" for time in r["us"].values()]
        shape, reached = f"{r['queries']}x{r['keys']}x{r['width']}", f"{r['of_limit']:.0%}"
        body.append([shape, what, *us, f"{r['ratio']:.2f}", reached, f"{r['tflops']:.0f}", r["tile"]])
    names = list(records[0]["us"])
    return table(
        ["M x N x E", "mask", *(f"{name} us" for name in names), "x dense", "of limit", "TFLOP/s", "tile"], body
    )


def _before(folder: Path | None) -> dict[str, Any]:
    """Return what a folder has of an earlier run, or the stored results where it has nothing."""
    paths = [path_of("attention", torch.cuda.get_device_name(), each) for each in (folder, RESULTS) if each is not None]
    path = next((each for each in paths if each.exists()), None)
    return {} if path is None else dict(json.loads(path.read_text(encoding="utf-8"))["results"])


def _is_of(row: Mapping[str, Any], case: Case, *, backward: bool) -> bool:
    return row["backward"] == backward and all(row[key] == value for key, value in vars(case).items())


def main() -> None:
    """Measure all cases, print the ratios, save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after this time with what there is")
    parser.add_argument("--only", nargs="+", choices=_MASKS, default=list(_MASKS), help="masks to measure")
    options = parser.parse_args()
    begin = time.monotonic()
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(flex_attention, dynamic=False)
    todo = [(Case(*case), False) for case in PLAN]
    todo += [(Case(8192, 8192, 128, "blocks", density), True) for density in (0.5, 0.1)]
    todo.append((Case(8192, 8192, 128, "causal", 0), True))
    before = _before(options.out) if set(options.only) < set(_MASKS) else {}
    records = []
    for case, backward in todo:
        kept = [row for row in before.get("attention", ()) if _is_of(row, case, backward=backward)]
        if case.pattern not in options.only and kept:
            records += kept
        elif time.monotonic() - begin <= options.seconds:
            records.append(measure(case, compiled, backward=backward))
            print(show(records[-1:]), flush=True)
            torch.cuda.empty_cache()
        else:
            records += kept
            print(f"not begun, the time is up: {case}")
    decoded, lengths = before.get("decode"), before.get("lengths")
    if decoded is None or "decode" in options.only:
        decoded = [decode(32768, density) for density in (0.5, 0.1)]
    if lengths is None or "lengths" in options.only:
        lengths = lengths_case()
    results: dict[str, Any] = {"dtype": "bf16", "unit": "us a call", "notes": _NOTES, "attention": records}
    results |= {"decode": decoded, "lengths": lengths}
    print(show(records))
    for record in (*results["decode"], results["lengths"]):
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in record.items()})
    print(save("attention", torch.cuda.get_device_name(), results, options.out))


if __name__ == "__main__":
    main()
