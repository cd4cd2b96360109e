"""Plans: how near they come to the speed-up that was asked for, beside one sparsity for all layers.

Run with ``python benchmarks/oneshot/plan.py`` on a quiet machine; ``--only`` takes some models, ``--minilm`` and
``--sts`` name folders with real weights and sentences, ``--smollm2`` and ``--text`` a language model and two books, and
then the planned model is compared with uniform ones that are as fast by measurement, all by ``--method``; ``--tokens``
are those that a language model is calibrated on, and judged by. ``--device cuda --only llama prompt`` measures four
layers of a Llama on CUDA, with 16 tokens and with 2,048.

With ``--checkpoint`` every number is kept in a folder, so a run that was ended goes on there; and ``--timing`` ends
where all is measured, so that what does not have to be quiet, pruning and judging, can follow by the same command
without it. Results are saved after every model and goal, also where several processes write the same file, each on
cores of its own; with ``--continue``, what stands in the file is not measured again.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "compiler"))
from language_model import batches, load, perplexity
from made import Made
from networks import encoder, resnet
from rows import keep, stored
from tasks import minilm
from uniform import Uniform, families

import sparta
from record import RESULTS, path_of
from sparta.planning import SparsityPlan
from sparta.tables import table

QUESTION = "oneshot_plan"
ASKED = (1.5, 2.0, 3.0)
MODELS = ("minilm", "smollm2", "bert", "resnet50", "llama", "prompt")


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


def llama(tokens: int, *, quick: bool) -> Made:
    """Return four layers of a Llama with random weights, and so many tokens to read at once."""
    from transformers import LlamaConfig, LlamaModel

    width = 256 if quick else 4096
    config = LlamaConfig(
        vocab_size=1000, hidden_size=width, intermediate_size=int(2.6875 * width), num_hidden_layers=4,
        num_attention_heads=width // 64, num_key_value_heads=width // 256, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # where random numbers take no time
        model = LlamaModel(config).to(torch.float32 if quick else torch.bfloat16).eval()
    data = [torch.randint(0, 1000, (2, 256)) for _ in range(4)]
    return Made(model, {"input_ids": torch.randint(0, 1000, (1, tokens))}, data)


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


def measured(
    name: str, made: Made, asked: float, folder: Path, given: argparse.Namespace
) -> tuple[dict[str, Any], SparsityPlan]:
    """Plan for one speed-up, and return what came of it; how long it took, unless a run that was ended had begun it."""
    resumed = folder.exists() and given.checkpoint is not None
    plan = sparta.plan(
        made.model, made.example, made.data, speedup=asked, device=given.device, budget_s=given.budget, progress=True,
        checkpoint=folder, method=given.method, patterns=given.patterns, precisions=given.precisions,
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
        "seconds": None if resumed else plan.seconds,
        "method": given.method,
        "rounds_layers": given.precisions != [],
        "options": counted(plan),
        "metric_name": made.metric_name,
        "dense_metric": None,
        "metric": None,
        "uniform": None,
    }
    return row, plan


def counted(plan: SparsityPlan) -> list[str]:
    """Return what layers become, each with the number of layers that do."""
    found = Counter(str(option) for option in plan.assignment.values())
    return [f"{option} ({count})" for option, count in sorted(found.items())]


def judge(row: dict[str, Any], plan: SparsityPlan, uniform: Uniform) -> None:
    """Put the metrics of a plan and of the best uniform model that is as fast into a row."""
    made = uniform.made
    if made.metric is None or not plan.met:
        return
    pruned = copy.deepcopy(made.model)
    plan.apply(pruned)
    row["dense_metric"] = made.sign * made.metric(made.model)
    row["metric"] = made.sign * plan.judged(pruned, made.metric)
    print(f"planned: {row['metric']:.4f}, dense {row['dense_metric']:.4f}", flush=True)
    row["uniform"] = uniform.judged(plan)


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
    if given.only:
        found["llama"] = lambda: llama(16, quick=given.quick)
        found["prompt"] = lambda: llama(2048, quick=given.quick)
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
    parser.add_argument("--patterns", nargs="+", default="auto", help="that layers may take")
    parser.add_argument("--precisions", nargs="*", default="auto", help="that layers may be rounded to; none, if empty")
    parser.add_argument("--method", default="alps", help="by which all models are pruned")
    parser.add_argument("--uniform-budget", type=float, default=20.0, help="seconds to compile each uniform model")
    parser.add_argument("--uniform", nargs="*", default=["4x1", "4x1:int8"], help="patterns beside those of the plan")
    parser.add_argument("--timing", action="store_true", help="measure only; prune and judge nothing")
    parser.add_argument("--checkpoint", type=Path, help="a folder for what was measured")
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
        with tempfile.TemporaryDirectory() as temporary:  # what was measured for one goal serves the next
            folder = (given.checkpoint or Path(temporary)) / name
            patterns = families(given.uniform)
            uniform = Uniform(made, given.device, patterns, given.uniform_budget, folder / "uniform")
            for asked in given.asked:
                if asked in done:
                    continue
                row, plan = measured(name, made, asked, folder / "plan", given)
                if given.timing and made.metric is not None and plan.met:
                    uniform.beside(plan)
                elif not given.timing:
                    judge(row, plan, uniform)
                keep(row, ("model", "asked"), in_order, path, where, {})
    shown = [
        [r["model"], r["asked"], r["speedup"], r["met"], r["loss"], r["metric"], r["seconds"]] for r in stored(path)
    ]
    print(table(["model", "asked", "measured", "met", "loss", "metric", "s"], shown))


if __name__ == "__main__":
    main()
