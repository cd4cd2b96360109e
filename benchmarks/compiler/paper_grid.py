"""The SparTA paper's own grid on the CPU: three models under four patterns, against today's runtimes.

Run with ``python benchmarks/compiler/paper_grid.py --threads 2``. Models: BERT-base (32 x 128 tokens), MobileNet-v1 (32
images), HuBERT-base (32 x 16,000 samples). Patterns: pruned channels, 95 % unstructured, channels in int8, and int8
blocks with a fine-grained remainder. Rivals run the dense model: eager, `torch.compile`, ONNX Runtime and OpenVINO
where they are installed, in fp32, and in int8 where ours is. The ablation is what the compiler measured itself: the
model as given, the graph after propagation, sparse kernels in it, and those as a chain or in panels; then all with
``tune="full"``. Results are saved after every row, also where several processes write the same file, each on cores of
its own; ``--only`` takes some models, patterns, or rows such as ``"BERT-base, channels"``, ``--continue`` goes on.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparta
from sparta.tables import table
from sparta.testing import compare

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "oneshot"))
from networks import encoder
from paper_networks import Hubert, mobilenet_v1, samples
from rows import keep, stored
from runtimes import rival_calls

from record import RESULTS, path_of

QUESTION, DEVICE = "compiler_paper_grid", f"{platform.machine()} cpu"
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], Callable[[int, bool], Tensor]]] = {
    "BERT-base": (
        lambda: encoder(12, 768, 12),
        lambda: encoder(1, 64, 4),
        lambda b, quick: torch.randn(b, 16 if quick else 128, 64 if quick else 768),
    ),
    "MobileNet-v1": (
        mobilenet_v1,
        lambda: mobilenet_v1(0.25),
        lambda b, quick: torch.randn(b, 3, 64 if quick else 224, 64 if quick else 224),
    ),
    "HuBERT-base": (
        Hubert,
        lambda: Hubert(1, 64, 4, 32),
        lambda b, quick: samples(b, 2000 if quick else 16000),
    ),
}
PATTERNS = ("channels", "unstructured 95 %", "channels, int8", "int8 blocks and a remainder")
BLOCK, KEPT_BLOCKS, KEPT_BESIDE = 16, 0.1, 0.02


def main() -> int:
    """Measure every row that is asked for."""
    options = _options()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    path = path_of(QUESTION, DEVICE, options.out or RESULTS)
    done = {(row["model"], row["pattern"]) for row in stored(path)} if options.go_on else set()
    for name in MODELS:
        for pattern in PATTERNS:
            asked = not options.only or not {name, pattern, f"{name}, {pattern}"}.isdisjoint(options.only)
            if not asked or (name, pattern) in done:
                continue
            row = _measured(name, pattern, options)
            print(_shown([row]), flush=True)
            if not options.quick or options.out:
                keep(row, ("model", "pattern"), _in_order, path, DEVICE, {"threads": options.threads})
    return 0


def _in_order(row: dict[str, Any]) -> tuple[int, int]:
    """Return what rows are sorted by."""
    return list(MODELS).index(row["model"]), PATTERNS.index(row["pattern"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="models, patterns, or 'model, pattern'")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30.0, help="for the last timing of a row")
    parser.add_argument("--budget", type=float, default=150.0, help="for compiling a row")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--no-full", action="store_true", help="leave the last step of the ablation out")
    parser.add_argument("--continue", dest="go_on", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small models and batches")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.budget, options.batch, options.no_inductor, options.no_full = 1.0, 10.0, 2, True, True
    return options


def _measured(name: str, pattern: str, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    full, small, inputs = MODELS[name]
    dense, x = (small if options.quick else full)().eval(), inputs(options.batch, options.quick)
    integers = "int8" in pattern
    batches = [inputs(options.batch, options.quick)]
    calls: dict[str, Callable[[Tensor], Any]] = {"eager": dense}
    if not options.no_inductor:
        torch._dynamo.reset()
        calls["torch.compile"] = torch.compile(copy.deepcopy(dense), dynamic=False)
    sparse, spec = _pruned(dense, x, pattern)
    given: dict[str, Any] = {"budget_s": options.budget, "dynamic_shapes": None}
    if integers:
        given |= {"precision": "int8", "calibration": batches, "max_loss": 10.0}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        precisions = ("fp32", "int8") if integers else ("fp32",)
        calls |= rival_calls(dense, x, Path(folder), options.threads, calibration=batches, precisions=precisions)
        fast = sparta.compile(sparse, x, spec, **given)
        path = Path(folder) / "model.sparta"
        fast.save(path)
        stored = path.stat().st_size
        ablation = _steps(fast)
        if not options.no_full:
            calls["sparta, full search"] = sparta.compile(sparse, x, spec, tune="full", **given)
        calls["sparta"] = fast
        found = compare(calls, (x,), warmup=1, iters=30, max_seconds=options.seconds)
    medians = {label: timing.median for label, timing in found.timings.items()}
    weights = sum(p.numel() * p.element_size() for p in dense.parameters())
    size = {"dense": weights / 2**20, "sparta": stored / 2**20}
    return {"model": name, "pattern": pattern, "median_ms": medians, "ablation_ms": ablation, "mib": size}


def _pruned(dense: nn.Module, x: Tensor, pattern: str) -> tuple[nn.Module, sparta.Spec | None]:
    model = copy.deepcopy(dense)
    if pattern.startswith("channels"):
        # Cut by propagation alone: rows of zeros in layers that others read, and what follows from them.
        names = [name for name, module in model.named_modules() if _first_of_a_pair(name, module)]
        spec = sparta.Spec.from_pattern(model, sparta.Channel(0), 0.5, include=[f"{name}.weight" for name in names])
        spec.apply(model)
        with torch.no_grad():
            for name in names:
                module = model.get_submodule(name)
                bias = getattr(module, "bias", None)
                if bias is not None:
                    bias.mul_(module.weight.flatten(1).any(1))  # type: ignore[union-attr,operator]
        return model, None
    del x
    layers = [name for name, module in model.named_modules() if _wide(module)]
    if pattern.startswith("unstructured"):
        spec = sparta.Spec.from_pattern(
            model, sparta.Unstructured(), 0.95, include=[f"{name}.weight" for name in layers]
        )
    else:
        spec = sparta.Spec({f"{name}.weight": sparta.TeSA.from_mask(_mixed(model, name)) for name in layers})
    spec.apply(model)
    return model, spec


def _first_of_a_pair(name: str, module: nn.Module) -> bool:
    """Whether a layer's output channels are read by one other layer alone, so that pruned ones can be cut."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.out_channels % 8 == 0
    return name.endswith(".up") or (isinstance(module, nn.Conv1d) and module.groups == 1)


def _wide(module: nn.Module) -> bool:
    layer = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))
    return layer and getattr(module, "groups", 1) == 1 and min(module.weight.shape[:2]) >= BLOCK  # type: ignore[union-attr]


def _mixed(model: nn.Module, name: str) -> Tensor:
    """Return a mask: the largest blocks, and of the rest the largest single weights."""
    weight = model.get_submodule(name).weight.detach().abs()  # type: ignore[union-attr,operator]
    size = weight.flatten(1)
    rows, columns = (-(-n // BLOCK) * BLOCK for n in size.shape)
    whole = torch.zeros(rows, columns)
    whole[: size.shape[0], : size.shape[1]] = size
    blocks = whole.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).sum((1, 3))
    kept = blocks >= blocks.flatten().kthvalue(max(1, int((1 - KEPT_BLOCKS) * blocks.numel()))).values
    inside = kept.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: size.shape[0], : size.shape[1]]
    rest = torch.where(inside, 0.0, size)
    beside = rest > rest.flatten().kthvalue(max(1, int((1 - KEPT_BESIDE) * rest.numel()))).values
    return (inside | beside).view(weight.shape)


def _steps(fast: Any) -> dict[str, float]:
    """Return what the compiler measured of each way to run the model."""
    times: dict[str, float] = dict(fast.report.plan.whole.milliseconds)
    return times


def _shown(results: list[dict[str, Any]]) -> str:
    rows = []
    for row in results:
        ours = row["median_ms"]["sparta"]
        for name, ms in row["median_ms"].items():
            rows.append([row["model"], row["pattern"], name, ms, ms / ours])
    return table(["model", "pattern", "what", "ms", "sparta is faster by"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
