"""How much faster is a whole compiled model on the CPU? Sparse models against eager and `torch.compile` dense.

Run with ``python benchmarks/compiler/models.py``; ``--quick`` takes small versions of the models, ``--only`` some.
In each case the dense model, eager and under Inductor, and the compiled sparse one take turns, call by call. The bound
that Amdahl's law sets is printed beside: what the speed-up would be if the pruned layers took no time.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
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
from sparta.tables import table
from sparta.testing import compare

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save


class EncoderLayer(nn.Module):
    """A transformer encoder layer, normalised after each half."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, C) for (B, T, C)."""
        b, t, c = x.shape
        q, k, v = (f(x).reshape(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        x = self.first(x + self.out(y))
        z: Tensor = self.second(x + self.down(functional.gelu(self.up(x))))
        return z


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *normed(nn.Conv2d(inputs, width, 1, bias=False), nn.ReLU()),
            *normed(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.ReLU()),
            *normed(nn.Conv2d(width, outputs, 1, bias=False)),
        )
        self.side = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(*normed(nn.Conv2d(inputs, outputs, 1, stride, bias=False)))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways, rectified."""
        return functional.relu(self.body(x) + self.side(x))


class Inverted(nn.Module):
    """An inverted residual of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        first = normed(nn.Conv2d(inputs, hidden, 1, bias=False), nn.ReLU6()) if expand > 1 else []
        self.body = nn.Sequential(
            *first,
            *normed(nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.ReLU6()),
            *normed(nn.Conv2d(hidden, outputs, 1, bias=False)),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of x, plus x where the shapes allow."""
        y: Tensor = self.body(x)
        return x + y if self.adds else y


def normed(conv: nn.Conv2d, *after: nn.Module) -> list[nn.Module]:
    """Return a convolution with its BatchNorm and what follows."""
    return [conv, nn.BatchNorm2d(conv.out_channels), *after]


def encoder(layers: int, width: int, heads: int) -> nn.Module:
    """Return a stack of encoder layers."""
    return nn.Sequential(*[EncoderLayer(width, heads, 4 * width) for _ in range(layers)])


def resnet(blocks: tuple[int, ...], width: int) -> nn.Module:
    """Return a ResNet of bottlenecks."""
    parts: list[nn.Module] = [*normed(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            parts.append(Bottleneck(inputs, width << stage, 2 if stage and block == 0 else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def mobilenet(scale: float) -> nn.Module:
    """Return a MobileNetV2."""
    settings = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    inputs = int(32 * scale)
    parts = normed(nn.Conv2d(3, inputs, 3, 2, 1, bias=False), nn.ReLU6())
    for expand, channels, count, stride in settings:
        for block in range(count):
            outputs = int(channels * scale)
            parts.append(Inverted(inputs, outputs, stride if block == 0 else 1, expand))
            inputs = outputs
    last = int(1280 * scale)
    parts += normed(nn.Conv2d(inputs, last, 1, bias=False), nn.ReLU6())
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 1000))


def mlp(width: int, layers: int) -> nn.Module:
    """Return a chain of linear layers with ReLU."""
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])


@dataclass(frozen=True)
class Case:
    """One measurement: a model, a batch, a pattern and a sparsity; sparsity 0 is the dense model."""

    model: str
    batch: int
    pattern: str
    sparsity: float


# Each model in full and in small, and its inputs for a batch.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "bert-base": (lambda: encoder(12, 768, 12), lambda: encoder(2, 256, 4), lambda b: torch.randn(b, 128, 768)),
    "minilm": (lambda: encoder(6, 384, 12), lambda: encoder(2, 128, 4), lambda b: torch.randn(b, 128, 384)),
    "resnet50": (
        lambda: resnet((3, 4, 6, 3), 64),
        lambda: resnet((1, 1), 16),
        lambda b: torch.randn(b, 3, 224, 224),
    ),
    "mobilenetv2": (lambda: mobilenet(1.0), lambda: mobilenet(0.5), lambda b: torch.randn(b, 3, 224, 224)),
    "mlp": (lambda: mlp(3072, 6), lambda: mlp(256, 3), lambda b: torch.randn(b, 3072)),
}
SMALL_INPUTS: dict[str, Callable[[int], Tensor]] = {
    "bert-base": lambda b: torch.randn(b, 16, 256),
    "minilm": lambda b: torch.randn(b, 16, 128),
    "resnet50": lambda b: torch.randn(b, 3, 32, 32),
    "mobilenetv2": lambda b: torch.randn(b, 3, 32, 32),
    "mlp": lambda b: torch.randn(b, 256),
}
PATTERNS = {"u": sparta.Unstructured(), "4x1": sparta.Block(4, 1), "8x1": sparta.Block(8, 1)}


def pruned(model: nn.Module, case: Case) -> nn.Module:
    """Prune linear layers and convolutions, but the first, the last, and those with few weights a channel."""
    layers = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1))
        and module.weight.shape[0] % 8 == 0
    ]
    middle = layers if case.model in ("bert-base", "minilm", "mlp") else layers[1:-1]
    if case.sparsity:
        names = [f"{name}.weight" for name in middle]
        sparta.Spec.from_pattern(model, PATTERNS[case.pattern], case.sparsity, include=names).apply(model)
    return model


def measure(case: Case, *, quick: bool, tune: str, seconds: float, inductor: bool) -> dict[str, Any]:
    """Compile one case and time it against the dense model."""
    torch.manual_seed(0)
    full, small, inputs = MODELS[case.model]
    model = pruned((small if quick else full)().eval(), case)
    x = (SMALL_INPUTS[case.model] if quick else inputs)(case.batch)
    begin = time.perf_counter()
    fast = compile_model(model, x, tune=tune, inductor=inductor)  # type: ignore[arg-type]
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    compile_model(model, x, tune=tune, inductor=inductor)  # type: ignore[arg-type]
    second = time.perf_counter() - begin
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        rivals: dict[str, Callable[[Tensor], Any]] = {"eager": model}
        if inductor:
            rivals["inductor"] = torch.compile(model, dynamic=False)
        rivals["sparta"] = fast
        with torch.no_grad():
            timings = compare(rivals, (x,), warmup=3, iters=50, max_seconds=seconds)
    medians = {name: timing.median for name, timing in timings.timings.items()}
    dense = min(median for name, median in medians.items() if name != "sparta")
    return {
        **asdict(case),
        "median_ms": medians,
        "speedup": dense / medians["sparta"],
        "amdahl_bound": fast.report.amdahl_bound,
        "compile_seconds": [first, second],
        "error": fast.report.certificate.error,
        "sparse_layers": len(fast.report.plan.sparse),
        "runs": fast.report.plan.whole.reason,
        "report": fast.report.to_dict(),
    }


def cases(names: list[str], batches: list[int], *, quick: bool) -> list[Case]:
    """Return what to measure: the dense model, and each pattern at each sparsity."""
    found = []
    for name in names:
        for batch in batches:
            found.append(Case(name, batch, "u", 0.0))
            for pattern in ("4x1",) if quick else ("u", "4x1"):
                found += [Case(name, batch, pattern, sparsity) for sparsity in ((0.9,) if quick else (0.8, 0.9, 0.95))]
    return found


def show(results: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    rows = [
        [
            r["model"],
            r["batch"],
            r["pattern"] if r["sparsity"] else "dense",
            r["sparsity"],
            *(r["median_ms"].get(name) for name in ("eager", "inductor", "sparta")),
            f"{r['speedup']:.2f}x",
            "" if r["amdahl_bound"] is None else f"{r['amdahl_bound']:.2f}x",
            f"{r['compile_seconds'][0]:.0f} / {r['compile_seconds'][1]:.0f}",
        ]
        for r in results
    ]
    columns = [
        "model",
        "batch",
        "pattern",
        "sparsity",
        "eager ms",
        "inductor ms",
        "sparta ms",
        "speed-up",
        "bound",
        "compile s",
    ]
    return table(columns, rows, title="times faster than the best dense")


def main() -> None:
    """Measure every case and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, one sparsity")
    parser.add_argument("--only", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tune", choices=("quick", "full"), default="quick")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the last timing of each case")
    parser.add_argument(
        "--no-inductor", action="store_true", help="leave torch.compile out, which takes most of the time"
    )
    parser.add_argument("--threads", type=int, help="as many as torch takes by default")
    parser.add_argument("--out", type=Path, help="folder for the JSON instead of benchmarks/results")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    load_before = os.getloadavg()[0]
    results = []
    for case in cases(options.only, options.batch, quick=options.quick):
        found = measure(
            case, quick=options.quick, tune=options.tune, seconds=options.seconds, inductor=not options.no_inductor
        )
        results.append(found)
        print(f"{case}: {results[-1]['speedup']:.2f}x; {results[-1]['runs']}", flush=True)
    record = {"cases": results, "threads": torch.get_num_threads(), "load": [load_before, os.getloadavg()[0]]}
    path = save("compiler_models", f"{platform.machine()} cpu", record, folder=options.out)
    print(show(results))
    print(f"saved {path}")


if __name__ == "__main__":
    main()
