"""Plans: how near they come to the speed-up that was asked for, beside one sparsity for all layers.

Run with ``python benchmarks/oneshot/plan.py`` on a quiet machine; ``--only`` takes some models, ``--minilm`` and
``--sts`` name folders with real weights and sentences, and then the planned model is compared with uniform pruning to
the same measured latency. ``--device cuda --only llama`` measures four layers of a Llama on CUDA. Results are saved
after every model and goal, and what stands in the file is not measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "compiler"))
from networks import encoder, resnet
from tasks import minilm

import sparta
from record import RESULTS, save
from sparta.compiler.session import Session
from sparta.oneshot.targets import find_targets
from sparta.planning import Option, SparsityPlan
from sparta.planning.bench import CompilerBench
from sparta.tables import table

QUESTION = "oneshot_plan"
ASKED = (1.5, 2.0, 3.0)
UNIFORM = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
Made = tuple[nn.Module, Any, list[Any], Callable[[nn.Module], float] | None]


def bert(*, quick: bool) -> Made:
    """Return BERT-base's encoder with random weights and inputs."""
    model = encoder(2, 256, 4) if quick else encoder(12, 768, 12)
    width = 256 if quick else 768
    return model.eval(), torch.randn(1, 128, width), [torch.randn(4, 128, width) for _ in range(4)], None


def resnet50(*, quick: bool) -> Made:
    """Return ResNet-50 with random weights and images."""
    model = resnet((1, 1, 1, 1), 16) if quick else resnet((3, 4, 6, 3), 64)
    size = 64 if quick else 224
    return model.eval(), torch.randn(1, 3, size, size), [torch.randn(2, 3, size, size) for _ in range(4)], None


def llama(*, quick: bool) -> Made:
    """Return four layers of a Llama, with random weights and embeddings."""
    from transformers import LlamaConfig, LlamaModel

    width = 256 if quick else 4096
    config = LlamaConfig(
        vocab_size=1000, hidden_size=width, intermediate_size=int(2.6875 * width), num_hidden_layers=4,
        num_attention_heads=width // 64, num_key_value_heads=width // 256, use_cache=False,
    )  # fmt: skip
    model = LlamaModel(config).to(torch.float32 if quick else torch.bfloat16).eval()
    return (
        model,
        {"input_ids": torch.randint(0, 1000, (1, 16))},
        [torch.randint(0, 1000, (2, 256)) for _ in range(4)],
        None,
    )


def real_minilm(folder: Path, sentences: Path, pairs: int) -> Made:
    """Return MiniLM as it is."""
    task = minilm(folder, sentences, pairs)
    return task.model, task.example, task.data, task.metric


def uniform(plan: SparsityPlan, made: Made, pattern: str) -> dict[str, Any]:
    """Return the first sparsity for all layers that is as fast as the plan, and the metric it leaves."""
    model, example, data, metric = made
    targets = {target.name: target for target in find_targets(copy.deepcopy(model))}
    bench = CompilerBench(copy.deepcopy(model).eval(), example, targets, Session())
    names = [name for name in plan.table.times if name in targets]
    for sparsity in UNIFORM:
        option = Option(pattern, sparsity)
        ratio = bench.whole(dict.fromkeys(names, (option, option.made))).ratio
        if ratio >= plan.speedup or sparsity == UNIFORM[-1]:
            break
    pruned = copy.deepcopy(model)
    sparta.prune(pruned, data, dict.fromkeys(names, pattern), sparsity)
    return {"sparsity": sparsity, "speedup": ratio, "metric": None if metric is None else metric(pruned)}


def measured(name: str, made: Made, asked: float, given: argparse.Namespace) -> dict[str, Any]:
    """Plan for one speed-up, and return what came of it."""
    model, example, data, metric = made
    folder = Path(tempfile.gettempdir()) / f"sparta-plan-{name}-{given.device}"
    plan = sparta.plan(
        model, example, data, speedup=asked, device=given.device, budget_s=given.budget, progress=True,
        checkpoint=folder if given.keep else None,
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
        "options": sorted({str(option) for option in plan.assignment.values()}),
        "dense_metric": None,
        "metric": None,
        "uniform": None,
    }
    if metric is not None and plan.met:
        pruned = copy.deepcopy(model)
        plan.apply(pruned)
        row |= {"dense_metric": metric(model), "metric": metric(pruned), "uniform": uniform(plan, made, "4x1")}
    return row


def main() -> None:
    """Plan every model for every speed-up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=("minilm", "bert", "resnet50", "llama"))
    parser.add_argument("--asked", nargs="+", type=float, default=ASKED)
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--sts", type=Path)
    parser.add_argument("--pairs", type=int, default=1379)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for measuring, for each plan")
    parser.add_argument("--quick", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--keep", action="store_true", help="keep what was measured of each model for the next goal")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.manual_seed(0)
    makers: dict[str, Callable[[], Made]] = {
        "bert": lambda: bert(quick=given.quick),
        "resnet50": lambda: resnet50(quick=given.quick),
    }
    if given.minilm is not None and given.sts is not None:
        makers = {"minilm": lambda: real_minilm(given.minilm, given.sts, given.pairs), **makers}
    if given.only and "llama" in given.only:
        makers["llama"] = lambda: llama(quick=given.quick)
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"{platform.machine()} CPU"
    path = given.results / f"{QUESTION}.{where.lower().replace('_', '-').replace(' ', '-')}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]["rows"] if path.exists() else []
    for name, make in makers.items():
        if given.only and name not in given.only:
            continue
        made = make()
        for asked in given.asked:
            if not any((row["model"], row["asked"]) == (name, asked) for row in rows):
                rows.append(measured(name, made, asked, given))
                save(QUESTION, where, {"rows": rows}, given.results)
    shown = [[r["model"], r["asked"], r["speedup"], r["met"], r["loss"], r["metric"], r["seconds"]] for r in rows]
    print(table(["model", "asked", "measured", "met", "loss", "metric", "s"], shown))


if __name__ == "__main__":
    main()
