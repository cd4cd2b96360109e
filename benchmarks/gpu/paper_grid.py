"""The grid of SparTA's paper on a GPU: three models, four patterns, against what a user would take, step by step.

Run with ``python benchmarks/gpu/paper_grid.py`` on a Hopper GPU (ten minutes; ``--models`` and ``--patterns`` take
some); ``--quick`` takes tiny models on any device. Models are BERT-base, MobileNet-v1 and HuBERT-base in bf16 with a
batch of 32. Rivals are the dense model, eager and by `torch.compile` (default and max-autotune), and with linear layers
in fp8, all replayed from CUDA graphs. The steps are: what was pruned is cut out, kernels for what is left, fewer bits.
Where the paper has int8, a GPU of today has fp8. max-autotune takes convolutions from cuDNN: with Inductor's templates
among them, the process ended in an illegal memory access on MobileNet after BERT's rows. The cause is not known:
one at a time, in processes without sparta, they gave right results (before PyTorch 2.13 they do not for some other
shapes, see pytorch/pytorch#173068).

Results are saved after every row. Rows that are there already stay, ``--again`` measures them anew; no row is begun
after ``--limit`` seconds, and the status is 3 until all are measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparta
from sparta.compiler.run.cuda_graph import Graphed
from sparta.tables import table
from sparta.testing import compare

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "compiler"))

from networks import EncoderLayer, normed
from stacks_fp8 import DenseFp8

from record import RESULTS, path_of, save

_BATCH, _TOKENS, _SAMPLES, _IMAGE = 32, 128, 16000, 224
UNFINISHED = 3
_STEP = 16  # sides of a dense product in fp8 are multiples of it
_BLOCK, _REST = 32, 0.01  # blocks of the mixed pattern, and the share of single weights beside them


def bert(*, quick: bool) -> tuple[nn.Module, tuple[int, ...]]:
    """Return BERT-base's layers and the shape of their input."""
    layers, width = (1, 64) if quick else (12, 768)
    heads = width // 64
    return nn.Sequential(*(EncoderLayer(width, heads, 4 * width) for _ in range(layers))), (_TOKENS, width)


def mobilenet(*, quick: bool) -> tuple[nn.Module, tuple[int, ...]]:
    """Return MobileNet-v1 and the shape of an image."""
    plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    modules, width = normed(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.ReLU()), 32
    for outputs, stride in plan[:2] if quick else plan:
        depthwise = nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)
        modules += normed(depthwise, nn.ReLU()) + normed(nn.Conv2d(width, outputs, 1, bias=False), nn.ReLU())
        width = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
    return nn.Sequential(*modules, *head), (3, 32 if quick else _IMAGE, 32 if quick else _IMAGE)


class Hubert(nn.Module):
    """HuBERT-base from a second of sound to its hidden states."""

    def __init__(self, *, quick: bool) -> None:
        super().__init__()
        from transformers import HubertConfig, HubertModel

        small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
        self.model = HubertModel(HubertConfig(apply_spec_augment=False, **(small if quick else {})))

    def forward(self, sound: Tensor) -> Tensor:
        """Return (B, frames, width) for (B, samples)."""
        hidden: Tensor = self.model(sound).last_hidden_state
        return hidden


def hubert(*, quick: bool) -> tuple[nn.Module, tuple[int, ...]]:
    """Return HuBERT-base and the shape of its input."""
    return Hubert(quick=quick), (4000 if quick else _SAMPLES,)


MODELS: dict[str, Callable[..., tuple[nn.Module, tuple[int, ...]]]] = {
    "bert-base": bert,
    "mobilenet-v1": mobilenet,
    "hubert-base": hubert,
}
PATTERNS = {  # whether channels are pruned, and whether to fewer bits
    "channels 50 %": (True, False),
    "unstructured 95 %": (False, False),
    "channels 50 % + fp8": (True, True),
    "blocks 90 % and a rest + fp8": (False, True),
}


def masks_of(model: nn.Module, pattern: str) -> sparta.Spec:
    """Return what is pruned in linear layers and convolutions that are not depthwise."""
    found = {}
    for name, module in model.named_modules():
        wide = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups == 1)
        if not wide or min(module.weight.shape[:2]) < _BLOCK:
            continue
        sizes = module.weight.detach().float().abs()
        if pattern.startswith("unstructured"):
            kept = sparta.Unstructured().project(sizes, 0.95)
        else:
            matrix = sizes.flatten(1)
            blocks = sparta.Block(_BLOCK, _BLOCK).project(matrix, 0.9)
            rest = torch.rand_like(matrix) < _REST
            kept = (blocks | rest).view_as(sizes)
        found[f"{name}.weight"] = sparta.TeSA.from_mask(kept)
    return sparta.Spec(found)


def in_fp8(model: nn.Module) -> nn.Module:
    """Return a copy whose linear layers are dense products in fp8, where their sides allow it."""
    copy = deepcopy(model)
    for parent in list(copy.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not any(side % _STEP for side in child.weight.shape):
                setattr(parent, name, DenseFp8(child))
    return copy


def rivals_of(model: nn.Module, x: Tensor, *, fp8: bool, inductor: bool) -> dict[str, Callable[[Tensor], Any]]:
    """Return dense models ready to run; one that does not run is left out, and said so."""
    wanted: dict[str, Callable[[], nn.Module]] = {"eager": lambda: model}
    if inductor:
        wanted["torch.compile"] = lambda: torch.compile(deepcopy(model), dynamic=False)
        options = {"max_autotune": True, "coordinate_descent_tuning": True, "max_autotune_conv_backends": "ATEN"}
        wanted["max-autotune"] = lambda: torch.compile(deepcopy(model), dynamic=False, options=options)
    if fp8:
        wanted["dense fp8"] = lambda: torch.compile(in_fp8(model), dynamic=False)
    found: dict[str, Callable[[Tensor], Any]] = {}
    for name, make in wanted.items():
        try:
            made = make()
            with torch.no_grad():
                made(x)
            found[name] = Graphed(made) if x.is_cuda else made
        except Exception as error:  # noqa: BLE001 - whatever a rival raises
            print(f"  {name} does not run: {str(error).splitlines()[0][:200]}", flush=True)
    return found


def steps_of(model: nn.Module, x: Tensor, pattern: str, seconds: float, *, fp8: bool) -> dict[str, Callable[..., Any]]:
    """Return the pruned model after each step."""
    channels, bits = PATTERNS[pattern]
    if channels:
        pruned, _ = sparta.prune_structured(deepcopy(model), x, sparsity=0.5)
        spec, cut = None, pruned
    else:
        pruned = deepcopy(model)
        spec = masks_of(pruned, pattern)
        spec.apply(pruned)
        cut = sparta.propagate(pruned, x, spec).compact()
    steps: dict[str, Callable[..., Any]] = {"cut": Graphed(cut) if x.is_cuda else cut}
    steps["kernels"] = sparta.compile(pruned, x, spec, budget_s=seconds, dynamic_shapes=None)
    if bits and fp8:
        steps["fewer bits"] = sparta.compile(
            pruned, x, spec, budget_s=seconds, dynamic_shapes=None, precision="fp8", calibration=[x]
        )
    return steps


def waiting(run: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Any]:
    """Return a call that ends when the device is done."""

    def call() -> Any:
        with torch.no_grad():
            result = run(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        return result

    return call


class _Model:
    """A dense model on the device, with its rivals, which are made for the first row that needs them."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._options = name, options
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._fp8 = self._device.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)

    @cached_property
    def _dense(self) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model, shape = MODELS[self._name](quick=self._options.quick)
        model = model.to(self._device, torch.bfloat16).eval().requires_grad_(requires_grad=False)
        batch = 2 if self._options.quick else _BATCH
        return model, torch.randn(batch, *shape, device=self._device, dtype=torch.bfloat16)

    @cached_property
    def _rivals(self) -> dict[str, Callable[[Tensor], Any]]:
        return rivals_of(*self._dense, fp8=self._fp8, inductor=not self._options.quick)

    def row(self, pattern: str) -> dict[str, Any]:
        """Time the model under a pattern against its rivals."""
        model, x = self._dense
        steps = steps_of(model, x, pattern, self._options.seconds, fp8=self._fp8)
        calls = {key: waiting(run, x) for key, run in {**self._rivals, **steps}.items()}
        times = compare(calls, warmup=3, iters=100, max_seconds=1.0, device="cpu").timings
        medians = {key: found.median for key, found in times.items()}
        best = min(medians[key] for key in self._rivals)
        last = min(medians[key] for key in steps)
        return {"model": self._name, "pattern": pattern, "ms": medians, "ratio": best / last}


def main() -> int:
    """Measure, print and save what is not there yet, as far as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--seconds", type=float, default=20.0, help="for each compilation")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no row is begun")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that all runs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = {} if options.quick else _before(device, options.out)
    begin = time.perf_counter()
    for name in options.models:
        model = _Model(name, options)
        for pattern in options.patterns:
            if (name, pattern) in found and not options.again:
                continue
            if time.perf_counter() - begin > options.limit:
                print(f"not begun, the time is up: {name}, {pattern}", flush=True)
                return UNFINISHED
            before = time.perf_counter()
            found[name, pattern] = model.row(pattern)
            seconds = time.perf_counter() - before
            print(f"{json.dumps(found[name, pattern])} in {seconds:.0f} s", flush=True)
            if not options.quick or options.out != RESULTS:
                cases = [found[key] for key in product(MODELS, PATTERNS) if key in found]
                save("paper_grid", device, {"batch": _BATCH, "cases": cases}, options.out)
    rows = [[r["model"], r["pattern"], *(f"{k} {v:.3f}" for k, v in r["ms"].items())] for r in found.values()]
    width = max(map(len, rows))
    print(table(["model", "pattern", *[""] * (width - 2)], [[*row, *[""] * (width - len(row))] for row in rows]))
    return 0


def _before(device: str, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return rows by model and pattern: those of the folder, or of the stored results where it has none."""
    paths = [path_of("paper_grid", device, each) for each in (folder, RESULTS)]
    path = next((each for each in paths if each.exists()), None)
    cases = [] if path is None else json.loads(path.read_text(encoding="utf-8"))["results"]["cases"]
    return {(each["model"], each["pattern"]): each for each in cases}


if __name__ == "__main__":
    raise SystemExit(main())
