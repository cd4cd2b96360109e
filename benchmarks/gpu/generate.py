"""How fast does a pruned language model generate on a GPU? Prompts and tokens, beside transformers' own ways.

Run with ``python benchmarks/gpu/generate.py`` (two minutes on an H200); ``--quick`` takes a tiny model on any device,
to see that all runs. The model has Llama-8B's layers, four of them, with random weights. Rivals are the same pruned
model in bf16: eager over its dynamic cache, and with a static cache and transformers' own `torch.compile`. Ours are
`sparta.compile(model, prompt)` in bf16 and with ``precision="fp8"``. A prompt is timed by one call of the model, and a
token by what a longer call of `generate` takes more than a shorter one. All take turns, call by call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import sparta
from record import save
from sparta.tables import table

PATTERNS: dict[str, tuple[sparta.Pattern, float]] = {
    "2:4": (sparta.NM(2, 4), 0.5),
    "64x64 90 %": (sparta.Block(64, 64), 0.9),
}
_SHORT = 8  # tokens of the shorter call


def model_of(device: torch.device, *, tiny: bool) -> nn.Module:
    """Return decoder layers of Llama-8B's shape with random weights, in bf16 on a GPU."""
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    if not tiny:
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32}
    heads = sizes["num_attention_heads"] // 4
    config = transformers.LlamaConfig(
        vocab_size=512 if tiny else 32000,
        num_key_value_heads=heads,
        max_position_embeddings=8192,
        eos_token_id=None,  # answers of the length that is asked for
        **sizes,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return (model.bfloat16() if device.type == "cuda" else model).eval().requires_grad_(requires_grad=False)


def prune(model: nn.Module, pattern: sparta.Pattern, sparsity: float) -> None:
    """Prune all linear layers but the one that makes logits, by magnitude."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            kept = pattern.project(module.weight.float().abs(), sparsity)
            module.weight.copy_(module.weight * kept)


def seconds_of(call: Callable[[], Any]) -> float:
    """Return what a call takes until the device is done."""
    begin = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def timed(models: dict[str, tuple[Any, dict[str, Any]]], prompt: Tensor, tokens: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds of a prompt and of a token for each of the models, interleaved."""
    found: dict[str, dict[str, list[float]]] = {name: {"prompt": [], "token": []} for name in models}
    mask = torch.ones_like(prompt)
    for number in range(rounds + 1):  # the first compiles
        for name, (model, options) in models.items():
            given = {"attention_mask": mask, "do_sample": False, **options}

            def generate(count: int, run: Any = model, given: dict[str, Any] = given) -> None:
                run.generate(prompt, max_new_tokens=count, **given)

            with torch.no_grad():
                whole = seconds_of(lambda run=model: run(prompt, logits_to_keep=1))
            short, long = (seconds_of(lambda count=count: generate(count)) for count in (_SHORT, _SHORT + tokens))
            if number:
                found[name]["prompt"].append(1e3 * whole)
                found[name]["token"].append(1e3 * (long - short) / tokens)
    return {name: {what: statistics.median(times) for what, times in each.items()} for name, each in found.items()}


def measure(name: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Compile one pruned model and time it beside its rivals."""
    model: Any = model_of(device, tiny=options.quick)
    with torch.no_grad():
        prune(model, *PATTERNS[name])
    prompt = torch.randint(3, 500, (1, 16 if options.quick else options.prompt), device=device)
    example = {"input_ids": prompt}
    fast = _compiled(f"{name}, sparta", model, example, budget_s=options.seconds)
    models: dict[str, tuple[Any, dict[str, Any]]] = {"eager": (model, {}), "sparta": (fast, {})}
    if device.type == "cuda":
        models["torch.compile"] = (model, {"cache_implementation": "static"})
        if torch.cuda.get_device_capability() >= (8, 9):
            in_fp8 = _compiled(f"{name}, sparta fp8", model, example, precision="fp8", budget_s=options.seconds)
            models["sparta fp8"] = (in_fp8, {})
    times = timed(models, prompt, 4 if options.quick else options.tokens, 1 if options.quick else options.rounds)
    return {"pattern": name, "prompt_tokens": prompt.shape[1], "milliseconds": times}


def _compiled(name: str, model: Any, example: dict[str, Tensor], **how: Any) -> Any:
    """Compile a model, and say how that went and how long it took."""
    begin = time.perf_counter()
    fast = sparta.compile(model, example, **how)
    took = time.perf_counter() - begin
    told = [fast.report.plan.whole.reason, *fast.report.notes]
    print(f"{name}, compiled in {took:.0f} s: {'; '.join(told)}", flush=True)
    return fast


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=list(PATTERNS), default=list(PATTERNS))
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="by how many tokens the longer call is longer")
    parser.add_argument("--rounds", type=int, default=5, help="of calls of each")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each compilation")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all runs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for name in options.only:  # each row is saved when it is there
        rows.append(measure(name, device, options))
        _told(rows, device, options)


def _told(rows: list[dict[str, Any]], device: torch.device, options: argparse.Namespace) -> None:
    """Print the last row and save all there are."""
    times = rows[-1]["milliseconds"]
    lines = [[rows[-1]["pattern"], who, f"{ms['prompt']:.2f}", f"{ms['token']:.3f}"] for who, ms in times.items()]
    print(table(["pattern", "who", "prompt ms", "token ms"], lines), flush=True)
    if not options.quick or options.out:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        save("generate", name, {"rows": rows}, options.out)


if __name__ == "__main__":
    main()
