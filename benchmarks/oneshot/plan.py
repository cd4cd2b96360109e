"""Plans: how near they come to the speed-up that was asked for, beside one sparsity for all layers.

Run with ``python benchmarks/oneshot/plan.py`` on a quiet machine; ``--only`` takes some models, ``--minilm`` and
``--sts`` name folders with real weights and sentences, ``--smollm2`` and ``--text`` a language model and two books, and
then the planned model is compared with uniform pruning to the same measured latency, both by ``--method``; ``--tokens``
are those that a language model is calibrated on, and judged by. ``--device cuda --only llama`` measures four layers of
a Llama on CUDA. Results are saved after every model and goal, also where several processes
write the same file, each on cores of its own; with ``--continue``, what stands in the file is not measured again.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "compiler"))
from language_model import batches, load, perplexity
from networks import encoder, resnet
from rows import keep, stored
from tasks import minilm

import sparta
from record import RESULTS, path_of
from sparta.compiler.session import Session
from sparta.oneshot.calibrate import moved, quiet
from sparta.oneshot.targets import find_targets
from sparta.planning import Option, SparsityPlan
from sparta.planning.bench import CompilerBench
from sparta.tables import table

QUESTION = "oneshot_plan"
ASKED = (1.5, 2.0, 3.0)
UNIFORM = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
MODELS = ("minilm", "smollm2", "bert", "resnet50", "llama")


@dataclass(frozen=True)
class Made:
    """A model with what it takes to plan for it.

    Parameters
    ----------
    metric
        Larger is better; None where there are no real weights.
    sign
        What makes the metric the number that is shown: -1 for a perplexity.
    """

    model: nn.Module
    example: Any
    data: list[Any]
    metric: Callable[[Any], float] | None = None
    metric_name: str = ""
    sign: int = 1


def bert(*, quick: bool) -> Made:
    """Return BERT-base's encoder with random weights and inputs."""
    model = encoder(2, 256, 4) if quick else encoder(12, 768, 12)
    width = 256 if quick else 768
    return Made(model.eval(), torch.randn(1, 128, width), [torch.randn(4, 128, width) for _ in range(4)])


def resnet50(*, quick: bool) -> Made:
    """Return ResNet-50 with random weights and images."""
    model = resnet((1, 1, 1, 1), 16) if quick else resnet((3, 4, 6, 3), 64)
    size = 64 if quick else 224
    return Made(model.eval(), torch.randn(1, 3, size, size), [torch.randn(2, 3, size, size) for _ in range(4)])


def llama(*, quick: bool) -> Made:
    """Return four layers of a Llama, with random weights and embeddings."""
    from transformers import LlamaConfig, LlamaModel

    width = 256 if quick else 4096
    config = LlamaConfig(
        vocab_size=1000, hidden_size=width, intermediate_size=int(2.6875 * width), num_hidden_layers=4,
        num_attention_heads=width // 64, num_key_value_heads=width // 256, use_cache=False,
    )  # fmt: skip
    model = LlamaModel(config).to(torch.float32 if quick else torch.bfloat16).eval()
    data = [torch.randint(0, 1000, (2, 256)) for _ in range(4)]
    return Made(model, {"input_ids": torch.randint(0, 1000, (1, 16))}, data)


def real_minilm(folder: Path, sentences: Path, pairs: int) -> Made:
    """Return MiniLM as it is."""
    task = minilm(folder, sentences, pairs)
    return Made(task.model, task.example, task.data, task.metric, task.metric_name)


def language_model(folder: Path, calibration: Path, held_out: Path, tokens: int, *, quick: bool) -> Made:
    """Return SmolLM2 with a prompt of 128 tokens, judged by the perplexity of a book that it is not calibrated on."""
    model, tokenizer = load(folder)
    if quick:
        model.model.layers = model.model.layers[:2]  # type: ignore[union-attr,index]
        model.config.num_hidden_layers = 2  # type: ignore[union-attr]
    context = min(512, tokens)
    data, judged = batches(tokenizer, calibration, tokens, context), batches(tokenizer, held_out, tokens, context)
    example = {"input_ids": data[0]["input_ids"][:, :128].contiguous(), "use_cache": False}
    return Made(model, example, data, lambda pruned: -perplexity(pruned, judged), "perplexity", -1)


@dataclass
class Uniform:
    """One sparsity of 4x1 for all layers, in the model's own numbers and rounded: compiled and measured once each."""

    made: Made
    device: str
    precisions: list[str | None]
    seconds: float
    known: dict[Option, float] = field(default_factory=dict)
    metrics: dict[Option, float] = field(default_factory=dict)

    def beside(self, plan: SparsityPlan) -> dict[str, Any] | None:
        """Return the best by the metric of those that are just as fast as the plan; None where none is."""
        fast = [option for precision in self.precisions if (option := self._as_fast(plan, precision)) is not None]
        if not fast:
            return None
        best = max(fast, key=lambda option: self._metric(option, plan))
        return {"option": str(best), "speedup": self.known[best], "metric": self.made.sign * self._metric(best, plan)}

    def _as_fast(self, plan: SparsityPlan, precision: str | None) -> Option | None:
        levels = [Option("4x1", sparsity, precision) for sparsity in UNIFORM]
        if precision is not None:
            levels = [Option("dense", precision=precision), *levels]
        for option in levels:
            if option not in self.known:
                self.known[option] = self._measured(option, plan)
            if self.known[option] >= plan.speedup:
                return option
        return None

    def _measured(self, option: Option, plan: SparsityPlan) -> float:
        model = copy.deepcopy(self.made.model).eval().to(self.device)
        targets = {target.name: target for target in find_targets(model)}
        bench = CompilerBench(model, moved(self.made.example, self.device), targets, Session(budget_s=self.seconds))
        pattern = option.made if option.prunes else None
        with quiet(model):
            ratio = bench.whole(dict.fromkeys(plan.table.times, (option, pattern))).ratio
        print(f"uniform {option}: {ratio:.2f}x", flush=True)
        return ratio

    def _metric(self, option: Option, plan: SparsityPlan) -> float:
        if option not in self.metrics and self.made.metric is not None:
            names = dict.fromkeys(plan.table.times, option)
            same = replace(plan, assignment=names, whole=None, met=True, _spec=None, _pruned=None)
            model = copy.deepcopy(self.made.model)
            same.apply(model)
            self.metrics[option] = same.judged(model, self.made.metric)
        return self.metrics[option]


def measured(
    name: str, made: Made, uniform: Uniform, asked: float, folder: Path, given: argparse.Namespace
) -> dict[str, Any]:
    """Plan for one speed-up, and return what came of it."""
    plan = sparta.plan(
        made.model, made.example, made.data, speedup=asked, device=uniform.device, budget_s=given.budget, progress=True,
        checkpoint=folder, method=given.method,
    )  # fmt: skip
    print(plan.report(), flush=True)
    row: dict[str, Any] = {
        "model": name,
        "asked": asked,
        "met": plan.met,
        "speedup": plan.speedup,
        "given_ms": plan.table.given_ms,
        "ms": plan.latency_ms,
        "rounds": len(plan.points),
        "loss": plan.loss,
        "seconds": plan.seconds,
        "method": given.method,
        "options": sorted({str(option) for option in plan.assignment.values()}),
        "metric_name": made.metric_name,
        "dense_metric": None,
        "metric": None,
        "uniform": None,
    }
    if made.metric is not None and plan.met:
        pruned = copy.deepcopy(made.model)
        plan.apply(pruned)
        row["dense_metric"] = made.sign * made.metric(made.model)
        row["metric"] = made.sign * plan.judged(pruned, made.metric)
        row["uniform"] = uniform.beside(plan)
    return row


def in_order(row: dict[str, Any]) -> Any:
    """Return what rows are sorted by."""
    return MODELS.index(row["model"]), row["asked"]


def makers_of(given: argparse.Namespace) -> dict[str, Callable[[], Made]]:
    """Return what makes each model that can be had."""
    found: dict[str, Callable[[], Made]] = {}
    if given.minilm is not None and given.sts is not None:
        found["minilm"] = lambda: real_minilm(given.minilm, given.sts, given.pairs)
    if given.smollm2 is not None and given.text is not None:
        found["smollm2"] = lambda: language_model(given.smollm2, *given.text, given.tokens, quick=given.quick)
    found["bert"] = lambda: bert(quick=given.quick)
    found["resnet50"] = lambda: resnet50(quick=given.quick)
    if given.only and "llama" in given.only:
        found["llama"] = lambda: llama(quick=given.quick)
    missing = set(given.only or ()) - set(found)
    if missing:
        raise SystemExit(f"{', '.join(sorted(missing))}: name the folders of its weights and its data")
    return {name: make for name, make in found.items() if not given.only or name in given.only}


def arguments() -> argparse.Namespace:
    """Return what was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS)
    parser.add_argument("--asked", nargs="+", type=float, default=ASKED)
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--sts", type=Path)
    parser.add_argument("--pairs", type=int, default=1379)
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--text", type=Path, nargs=2, metavar=("CALIBRATION", "HELD_OUT"))
    parser.add_argument(
        "--tokens", type=int, default=8192, help="that a language model is calibrated on, and judged by"
    )
    parser.add_argument("--method", default="alps", help="by which all models are pruned")
    parser.add_argument("--uniform-budget", type=float, default=20.0, help="seconds to compile each uniform model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch; all cores that the process may use by default")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for measuring, for each plan")
    parser.add_argument("--quick", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--continue", action="store_true", dest="again", help="skip what stands in the results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Plan every model for every speed-up."""
    given = arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
    given.results.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"{platform.machine()} CPU"
    path = path_of(QUESTION, where, given.results)
    for name, make in makers_of(given).items():
        done = {row["asked"] for row in stored(path) if row["model"] == name} if given.again else set()
        if done >= set(given.asked):
            continue
        torch.manual_seed(0)
        made = make()
        precisions: list[str | None] = [None, "int8"] if given.device == "cpu" else [None]
        uniform = Uniform(made, given.device, precisions, given.uniform_budget)
        with tempfile.TemporaryDirectory() as folder:  # what was measured for one goal serves the next
            for asked in given.asked:
                if asked not in done:
                    row = measured(name, made, uniform, asked, Path(folder), given)
                    keep(row, ("model", "asked"), in_order, path, where, {})
    shown = [
        [r["model"], r["asked"], r["speedup"], r["met"], r["loss"], r["metric"], r["seconds"]] for r in stored(path)
    ]
    print(table(["model", "asked", "measured", "met", "loss", "metric", "s"], shown))


if __name__ == "__main__":
    main()
