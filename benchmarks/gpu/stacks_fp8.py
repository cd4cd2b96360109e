"""How much faster than dense fp8 are whole stacks on a GPU, pruned and in fp8? Prefill, decode and encoders.

Run with ``python benchmarks/gpu/stacks_fp8.py`` on a Hopper GPU; ``--only`` takes some of the stacks by their numbers,
``--limit`` starts none after so many seconds, and results of earlier runs are kept beside those of this one.
``--quick`` takes tiny stacks on any device without fp8, to see that all runs. Stacks are decoder layers of Llama-8B's
shape (grouped keys, RMSNorm, rotary positions, SwiGLU) and encoder layers of BERT-large's and ViT-L's, these also in
bf16. Rivals are the same stack in bf16, the best of eager, `torch.compile`, and both replayed from CUDA graphs; and
with every linear layer as ``torch._scaled_mm`` with fast sums and scales of tokens and outputs, compiled and replayed.
Ours is `sparta.compile`, one call. All take turns, call by call until the device is done.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparta
from sparta.compiler.run.cuda_graph import Graphed
from sparta.specialize.scaled_linear.spec import codes_of, scaled_weight
from sparta.tables import table
from sparta.testing import compare

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "compiler"))

from ceilings import ceilings
from networks import EncoderLayer
from stack_bounds import kernel_times, linear_microseconds
from stacks import rotated

from record import RESULTS, save

_STORED = ("layers", "batch", "tokens", "pattern", "sparsity", "over_fp8", "over_bf16")
_CACHE = 1024  # tokens that a decode step attends to


@dataclass(frozen=True)
class Case:
    """One stack, with its pattern, its sizes, and the aims in times dense fp8 and dense bf16."""

    name: str
    layers: int
    width: int
    heads: int
    key_heads: int  # 0 for an encoder
    hidden: int
    batch: int
    tokens: int  # 1 for a decode step
    pattern: str
    sparsity: float
    over_fp8: float | None
    over_bf16: float | None
    precision: str = "fp8"  # ours

    def __str__(self) -> str:
        kind = f"{self.batch}×{self.tokens}" if not self.key_heads else ("decode" if self.tokens == 1 else "prefill")
        size = "" if not self.key_heads else f" {self.batch * self.tokens}"
        ours = "" if self.precision == "fp8" else f", {self.precision}"
        return f"{self.name} {kind}{size}, {self.pattern}, {self.sparsity:.0%}{ours}"


_LLAMA = ("llama-8b", 4, 4096, 32, 8, 14336)
_BERT, _VIT = ("bert-large", 24, 1024, 16, 0, 4096), ("vit-large", 24, 1024, 16, 0, 4096)
CASES = (
    Case(*_LLAMA, 1, 1, "2:4", 0.5, 1.3, 2.2),
    Case(*_LLAMA, 1, 2048, "64x64", 0.9, 2.0, 1.8),
    Case(*_LLAMA, 1, 2048, "2:4", 0.5, None, None),
    Case(*_LLAMA, 16, 1, "2:4", 0.5, 1.3, 2.2),
    Case(*_LLAMA, 1, 1, "64x64", 0.9, None, None),
    Case(*_BERT, 8, 512, "64x64", 0.8, None, 2.2),
    Case(*_VIT, 32, 197, "64x64", 0.8, None, 2.2),
    Case(*_BERT, 8, 512, "64x64", 0.8, None, 2.2, "bf16"),
    Case(*_VIT, 32, 197, "64x64", 0.8, None, 2.2, "bf16"),
)
PATTERNS: dict[str, sparta.Pattern] = {"2:4": sparta.NM(2, 4), "64x64": sparta.Block(64, 64)}


class DecoderLayer(nn.Module):
    """A layer of Llama; a decode step attends to a cache that is there already, and returns its keys and values."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width, self.heads, self.key_heads = case.width, case.heads, case.key_heads
        narrow = width // case.heads * case.key_heads
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, case.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(case.hidden, width, bias=False)
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.decodes = case.tokens == 1
        if self.decodes:
            cache = torch.randn(2, case.batch, case.key_heads, _CACHE, width // case.heads)
            self.register_buffer("cached_keys", cache[0].clone())
            self.register_buffer("cached_values", cache[1].clone())

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (B, T, C) for (B, T, C), and the keys and values (B, H, T, E)."""
        b, t, c = x.shape
        h = self.first(x)
        q = self.query(h).reshape(b, t, self.heads, -1).transpose(1, 2)
        k, v = (f(h).reshape(b, t, self.key_heads, -1).transpose(1, 2) for f in (self.key, self.value))
        q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
        seen = (self.cached_keys, self.cached_values) if self.decodes else (k, v)
        y = functional.scaled_dot_product_attention(q, *seen, is_causal=not self.decodes, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        h = self.second(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h)), k, v


class Decoder(nn.Module):
    """Decoder layers with their rotary positions."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(case) for _ in range(case.layers))
        positions = torch.tensor([float(_CACHE)]) if case.tokens == 1 else torch.arange(float(case.tokens))
        half = case.width // case.heads // 2
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


class DenseFp8(nn.Module):
    """A linear layer as a user of fp8 has it: scales of tokens and outputs, rounded where `torch.compile` fuses it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        codes, scales = codes_of(weight, scaled_weight(weight))
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales[:, :1].t().contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., N) for (..., K)."""
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / 448.0
        codes = (rows.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(
            codes, self.codes.t(), scale, self.scales, bias=self.bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return y.reshape(*x.shape[:-1], -1)


def stack_of(case: Case, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Return a pruned stack in bf16 and its input."""
    torch.manual_seed(0)
    with torch.device(device):
        layers = [
            EncoderLayer(case.width, case.heads, case.hidden) for _ in range(0 if case.key_heads else case.layers)
        ]
        model = Decoder(case) if case.key_heads else nn.Sequential(*layers)
        x = torch.randn(case.batch, case.tokens, case.width).bfloat16()
    model = model.bfloat16().eval().requires_grad_(requires_grad=False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            kept = PATTERNS[case.pattern].project(parameter.float().abs(), case.sparsity)
            parameter.copy_(parameter * kept)
    return model, x


def compiled(model: nn.Module) -> nn.Module:
    """Return the model with each layer compiled by itself, so that equal layers are compiled once."""
    layers = model.layers if isinstance(model, Decoder) else model
    for layer in layers:
        layer.compile(dynamic=False)
    return model


def in_fp8(model: nn.Module) -> nn.Module:
    """Return a copy whose linear layers are dense products in fp8."""
    copy = deepcopy(model)
    for parent in list(copy.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, DenseFp8(child))
    return copy


def measure(case: Case, device: torch.device, seconds: float) -> dict[str, Any]:
    """Compile one stack within some seconds and time it against its rivals."""
    model, x = stack_of(case, device)
    fp8 = device.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    begin = time.perf_counter()
    given = {"precision": "fp8", "calibration": [x]} if fp8 and case.precision == "fp8" else {}
    fast = sparta.compile(model, x, budget_s=seconds, dynamic_shapes=None, **given)
    took = time.perf_counter() - begin
    rivals: dict[str, Callable[[Tensor], Any]] = {"eager": model, "sparta": fast}
    if fp8:
        once = compiled(deepcopy(model))
        rivals |= {"eager, graph": Graphed(model), "compiled": once, "compiled, graph": Graphed(once)}
        rivals |= {"fp8": Graphed(compiled(in_fp8(model)))}
    calls = {name: _waiting(run, x) for name, run in rivals.items()}
    times = compare(calls, warmup=5, iters=200, max_seconds=1.5, device="cpu").timings
    medians = {name: found.median for name, found in times.items()}
    best = min((name for name in medians if name not in ("sparta", "fp8")), key=lambda name: medians[name])
    medians = {"bf16": medians.pop(best), **{name: medians[name] for name in ("sparta", "fp8") if name in medians}}
    layers = fast.report.plan.layers
    implements = dict(Counter(layer.first.implement for layer in layers))
    joined = sum(1 for layer in layers if layer.joined[:1] == (layer.name,))
    for text, count in Counter(f"{_last(layer.name)}: {layer.first}" for layer in layers).items():
        print(f"{count} x {text}")
    print(", ".join(f"{name} {ms:.3f} ms" for name, ms in fast.report.plan.whole.milliseconds.items()))
    change = None if fast.report.precision is None else fast.report.precision.change
    print(f"{fast.report.plan.whole.reason}; best in bf16: {best}")
    sizes = {name: value for name, value in asdict(case).items() if name in _STORED}
    known = [layer.first.entry for layer in layers]
    products = None if None in known else sum(entry.milliseconds for entry in known if entry is not None)
    least = _least(case, layers, calls["sparta"]) if fp8 else {}
    return {
        **sizes, **least, "case": str(case), "ms": medians, "implements": implements, "joined": joined,
        "compile_seconds": took,
        "products": products, "change": change, "notes": list(fast.report.notes),
        "ratio_fp8": medians["fp8"] / medians["sparta"] if fp8 else None,
        "ratio_bf16": medians["bf16"] / medians["sparta"],
    }  # fmt: skip


def _least(case: Case, layers: Sequence[Any], run: Callable[[], object]) -> dict[str, float]:
    """Print where the time of a call goes; return the milliseconds that linear layers take at least."""
    for name, (count, took) in sorted(kernel_times(run).items(), key=lambda each: -each[1][1])[:12]:
        print(f"{took:9.1f} us {count:4} x {name[:90]}")
    size = 1 if case.precision == "fp8" else 2
    found = linear_microseconds(layers, case.batch * case.tokens, case.pattern, size, ceilings())
    return {"least": found / 1e3}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _waiting(run: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            result = run(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        return result

    return call


def tiny(case: Case) -> Case:
    """Return a case of the same kind that takes no time."""
    fields = asdict(case) | {"layers": 1, "width": 256, "heads": 4, "hidden": 512, "tokens": min(case.tokens, 16)}
    return Case(**fields | {"key_heads": 2 if case.key_heads else 0, "batch": 1})


def main() -> None:
    """Measure, print and save; cases of an earlier run that are not measured now are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--only", nargs="+", type=int, default=list(range(len(CASES))), help="numbers of cases")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers of the encoders")
    parser.add_argument("--seconds", type=float, default=45.0, help="for each compilation")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no stack is started")
    parser.add_argument("--quick", action="store_true", help="tiny stacks, to see that all runs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    found: dict[str, dict[str, Any]] = {}
    earlier = RESULTS / "stacks_fp8.nvidia-h200.json"
    if earlier.exists() and not options.quick:
        found = {each["case"]: each for each in json.loads(earlier.read_text(encoding="utf-8"))["results"]["cases"]}
    begin = time.perf_counter()
    for number in options.only:
        if time.perf_counter() - begin > options.limit:
            print(f"no time for stack {number}: {CASES[number]}")
            continue
        case = tiny(CASES[number]) if options.quick else CASES[number]
        if options.layers and not case.key_heads:
            case = Case(**asdict(case) | {"layers": options.layers})
        result = measure(case, device, options.seconds)
        found[result["case"]] = result
        print(json.dumps(result), flush=True)
        save("stacks_fp8", name, {"cases": list(found.values())}, options.out)  # what follows may be cut short
    rows = [
        [r["case"], r["layers"], *[f"{r['ms'][n]:.3f}" if n in r["ms"] else None for n in ("bf16", "fp8", "sparta")],
         r["ratio_fp8"] and f"{r['ratio_fp8']:.2f}", r["over_fp8"], f"{r['ratio_bf16']:.2f}", r["over_bf16"]]
        for r in found.values()
    ]  # fmt: skip
    heads = ["stack", "layers", "bf16 ms", "fp8 ms", "sparta ms", "over fp8", "aim", "over bf16", "aim"]
    print(table(heads, rows))


if __name__ == "__main__":
    main()
