"""How much faster are compiled transformer stacks on a GPU, end to end? Prefill and decode, sparse against dense.

Run with ``python benchmarks/compiler/stacks.py`` on a CUDA machine; ``--quick`` takes tiny stacks on any device,
``--only`` some. Stacks are 4 encoder layers of BERT-large's shape and 2 decoder layers of Llama-7B's (RMSNorm, rotary
positions, SwiGLU, as many heads for keys as for queries), in bf16. A decode step attends to 1024 tokens that are
cached already. In each case dense eager, `torch.compile`, both in CUDA graphs, and the compiled model take turns, call
by call until the device is done. The bound of Amdahl's law is what the best dense would gain if pruned layers took no
time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparta
from sparta.compiler import compile_model
from sparta.compiler.run.cuda_graph import Graphed
from sparta.tables import table
from sparta.testing import compare

sys.path.insert(0, str(Path(__file__).parents[1]))
from networks import EncoderLayer

from record import save

_KEPT_FOR_THE_REPORT = 3.0  # seconds


@dataclass(frozen=True)
class Shape:
    """The sizes of a stack: layers, width, heads, hidden width, tokens of a prefill (B, T), tokens in the cache."""

    layers: int
    width: int
    heads: int
    hidden: int
    prefill: tuple[int, int]
    cache: int = 1024


SHAPES = {"bert-large": Shape(4, 1024, 16, 4096, (8, 512)), "llama-7b": Shape(2, 4096, 32, 11008, (1, 4096))}
QUICK = {"bert-large": Shape(1, 256, 4, 512, (2, 32)), "llama-7b": Shape(1, 256, 4, 512, (1, 64), 32)}
PATTERNS: dict[str, sparta.Pattern] = {
    "2:4": sparta.NM(2, 4),
    "128x128": sparta.Block(128, 128),
    "64x64": sparta.Block(64, 64),
    "unstructured": sparta.Unstructured(),
}


class DecoderLayer(nn.Module):
    """A layer of Llama; in a decode step each row of x is the new token of a sequence of its own.

    A step attends to a cache that is there already, and returns its own keys and values to the caller.
    """

    def __init__(self, shape: Shape, rows: int) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, width, bias=False)
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.decodes = rows > 0
        if self.decodes:
            cache = torch.randn(2, rows, shape.heads, shape.cache, width // shape.heads)
            self.register_buffer("cached_keys", cache[0].clone())
            self.register_buffer("cached_values", cache[1].clone())

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (B, T, C) for (B, T, C), and the keys and values (B, H, T, E)."""
        b, t, c = x.shape
        h = self.first(x)
        q, k, v = (f(h).reshape(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        seen = (self.cached_keys, self.cached_values) if self.decodes else (k, v)
        y = functional.scaled_dot_product_attention(q, *seen, is_causal=not self.decodes)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        h = self.second(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h)), k, v


class Decoder(nn.Module):
    """Decoder layers with their rotary positions."""

    def __init__(self, shape: Shape, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(shape, rows) for _ in range(shape.layers))
        positions = torch.tensor([float(shape.cache)]) if rows else torch.arange(float(shape.prefill[1]))
        half = shape.width // shape.heads // 2
        angles = torch.outer(positions, 10000.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return (B, T, C) for (B, T, C), and what a cache keeps."""
        kept = []
        for layer in self.layers:
            x, *new = layer(x, self.cosine, self.sine)
            kept += new
        return x, kept


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return queries or keys (B, H, T, E) turned by their positions."""
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat([-right, left], -1) * sine


@dataclass(frozen=True)
class Case:
    """One measurement; rows 0 is a prefill, others are the new tokens of a decode step; sparsity 0 is dense."""

    model: str
    rows: int
    pattern: str
    sparsity: float

    def __str__(self) -> str:
        what = f"decode {self.rows}" if self.rows else "prefill"
        return f"{self.model} {what} {self.pattern if self.sparsity else 'dense'} {self.sparsity:.0%}"


def cases(names: list[str], modes: list[int]) -> list[Case]:
    """Return what to measure, the most telling cases of each stack first."""
    blocks = [("128x128", 0.9), ("64x64", 0.9), ("128x128", 0.8), ("64x64", 0.8)]
    kinds = [("2:4", 0.5), *blocks[:2], ("unstructured", 0.0), ("unstructured", 0.9), *blocks[2:]]
    return [
        Case(model, rows, pattern, sparsity)
        for pattern, sparsity in kinds
        for model in names
        for rows in modes
        if rows == 0 or (model == "llama-7b" and (pattern, sparsity) not in blocks[2:])
    ]


class Stage:
    """A stack of one kind with its rivals; weights are drawn and pruned in place, so rivals are compiled once."""

    def __init__(self, shape: Shape, model: str, rows: int, device: torch.device) -> None:
        torch.manual_seed(0)
        decodes = model == "llama-7b" and rows > 0
        with torch.device(device):
            stack = (
                Decoder(shape, rows if decodes else 0)
                if model == "llama-7b"
                else nn.Sequential(*[EncoderLayer(shape.width, shape.heads, shape.hidden) for _ in range(shape.layers)])
            )
            lead = (rows, 1) if decodes else shape.prefill
            self.x = torch.randn(*lead, shape.width).bfloat16()
        self.model = stack.bfloat16().eval().requires_grad_(requires_grad=False)
        self.weights = {name: p.clone() for name, p in self.model.named_parameters() if p.dim() == 2}
        self.rivals: dict[str, Callable[[Tensor], Any]] = {"eager": self.model}
        compiled = torch.compile(self.model, dynamic=False)
        try:
            with torch.no_grad():
                compiled(self.x)
            self.rivals["inductor"] = compiled
        except Exception as error:  # noqa: BLE001 - a rival that does not run is left out, and said so
            print(f"  torch.compile does not run: {str(error).splitlines()[0]}", flush=True)
        if device.type == "cuda":
            for name, rival in list(self.rivals.items()):
                self.rivals[f"{name} graph"] = Graphed(rival)

    def prune(self, case: Case) -> None:
        """Set the weights, pruned as the case says."""
        parameters = dict(self.model.named_parameters())
        for name, weight in self.weights.items():
            kept = PATTERNS[case.pattern].project(weight.float().abs(), case.sparsity) if case.sparsity else None
            parameters[name].copy_(weight if kept is None else weight * kept)


def measure(case: Case, stage: Stage, *, seconds: float, inductor: bool, timing: float) -> dict[str, Any]:
    """Compile one case within some seconds and time it against dense."""
    stage.prune(case)
    begin = time.perf_counter()
    fast = compile_model(stage.model, stage.x, budget_s=seconds, inductor=inductor)
    compile_seconds = time.perf_counter() - begin
    rivals = {name: _waiting(run, stage.x) for name, run in {**stage.rivals, "sparta": fast}.items()}
    timings = compare(rivals, warmup=5, iters=200, max_seconds=timing, device="cpu")
    medians = {name: found.median for name, found in timings.timings.items()}
    best = min((name for name in medians if name != "sparta"), key=lambda name: medians[name])
    report = fast.report
    pruned = [layer.first.entry.dense_milliseconds for layer in report.plan.layers if layer.first.entry is not None]
    rest = medians[best] - sum(pruned)
    implements: dict[str, int] = {}
    for layer in report.plan.layers:
        implements[layer.first.implement] = implements.get(layer.first.implement, 0) + 1
    return {
        **asdict(case),
        "median_ms": medians,
        "best_dense": best,
        "speedup": medians[best] / medians["sparta"],
        "amdahl_bound": medians[best] / rest if pruned and rest > 0 else None,
        "compile_seconds": compile_seconds,
        "error": report.certificate.error,
        "implements": implements,
        "host": report.plan.whole.host,
        "runs": report.plan.whole.reason,
        "whole_ms": dict(report.plan.whole.milliseconds),
        "notes": list(report.notes),
    }


def _waiting(run: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            result = run(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        return result

    return call


def show(results: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    rows = [
        [
            r["model"],
            f"decode {r['rows']}" if r["rows"] else "prefill",
            f"{r['pattern']} {r['sparsity']:.0%}" if r["sparsity"] else "dense",
            r["best_dense"],
            r["median_ms"][r["best_dense"]],
            r["median_ms"]["sparta"],
            f"{r['speedup']:.2f}x",
            "" if r["amdahl_bound"] is None else f"{r['amdahl_bound']:.1f}x",
            r["host"],
            " ".join(f"{count}×{name}" for name, count in r["implements"].items()),
            f"{r['compile_seconds']:.0f}",
        ]
        for r in results
    ]
    columns = ["stack", "step", "weights", "best dense", "ms", "sparta ms", "speed-up", "bound", "host", "runs", "s"]
    return table(columns, rows, title="times faster than the best dense; seconds to compile")


def tell(case: Case, found: dict[str, Any]) -> None:
    """Print one case as it is done."""
    times = ", ".join(f"{name} {value:.4g}" for name, value in found["median_ms"].items())
    bound = "none" if found["amdahl_bound"] is None else f"{found['amdahl_bound']:.2f}x"
    print(
        f"{case}: {found['speedup']:.2f}x (bound {bound}) compiled in {found['compile_seconds']:.1f} s, "
        f"{found['implements']}, host {found['host']}, error {found['error']:.2g}; ms: {times}",
        flush=True,
    )
    for name, value in found["whole_ms"].items():
        print(f"    {name}: {value:.4g} ms", flush=True)
    for note in found["notes"]:
        print(f"    note: {note}", flush=True)


def measured_in(path: Path, device: str, shapes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the cases of an earlier run, each with its date, but those whose budget did not reach for Inductor."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["device"] != device or record["results"]["shapes"] != shapes:
        raise SystemExit(f"{path} is of {record['device']}, or of stacks of other sizes; this run is of {device}")
    found = [{"date": record["date"], **case} for case in record["results"]["cases"]]
    names = [str(Case(r["model"], r["rows"], r["pattern"], r["sparsity"])) for r in found]
    whole = [any("inductor" in variant for variant in r["whole_ms"]) for r in found]
    return {name: r for name, r, tried in zip(names, found, whole, strict=True) if tried}


def arguments() -> argparse.Namespace:
    """Return the options of this run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny stacks, to see that all runs")
    parser.add_argument("--only", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[0, 1, 16], help="0 for prefill, tokens of a decode step"
    )
    parser.add_argument("--pattern", nargs="+", choices=[*PATTERNS, "dense"], help="some of the patterns")
    parser.add_argument("--seconds", type=float, default=360.0, help="for everything; cases that remain are left out")
    parser.add_argument("--compile-seconds", type=float, default=45.0, help="for each compilation")
    parser.add_argument("--no-inductor", action="store_true", help="without torch.compile inside the compiled model")
    parser.add_argument("--resume", type=Path, help="a JSON of an earlier run, whose cases are kept and not run again")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure every case that there is time for, and save the results."""
    options = arguments()
    warnings.simplefilter("ignore")
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    sizes = QUICK if options.quick else SHAPES
    shapes = json.loads(json.dumps({key: asdict(shape) for key, shape in sizes.items()}))
    results = {} if options.resume is None else measured_in(options.resume, name, shapes)
    failed: dict[str, str] = {}
    skipped: list[str] = []
    stages: dict[tuple[str, int], Stage] = {}
    for case in cases(options.only, options.rows):
        wanted = not options.pattern or (case.pattern if case.sparsity else "dense") in options.pattern
        if not wanted or str(case) in results:
            continue
        left = options.seconds - (time.perf_counter() - begin) - _KEPT_FOR_THE_REPORT
        if left < options.compile_seconds:  # with less, it would show what a small budget does
            skipped.append(str(case))
            continue
        try:
            key = case.model, case.rows
            if key not in stages:
                stages[key] = Stage(sizes[case.model], case.model, case.rows, device)
            seconds, timing = options.compile_seconds, 0.3 if options.quick else 1.5
            found = measure(case, stages[key], seconds=seconds, inductor=not options.no_inductor, timing=timing)
            results[str(case)] = found
            tell(case, found)
        except Exception as error:  # noqa: BLE001 - one case that fails must not cost the others
            failed[str(case)] = f"{type(error).__name__}: {error}"
            print(f"{case}: FAILED", flush=True)
            traceback.print_exc()
    rows = list(results.values())
    seconds = time.perf_counter() - begin
    record = {"cases": rows, "failed": failed, "skipped": skipped, "shapes": shapes, "seconds": seconds}
    path = save("compiler_stacks", name, record, folder=options.out)
    print(show(rows))
    print(f"left out for want of time: {', '.join(skipped) or 'nothing'}; failed: {', '.join(failed) or 'nothing'}")
    print(f"saved {path}")


if __name__ == "__main__":
    main()
