"""Time decoding of a pruned language model on this CPU, beside what a user would take instead.

Run with ``python benchmarks/generation/decode.py --weights FOLDER --llama PATH --gguf FILE --quantize Q8_0 Q4_0``. The
folder holds a llama-like model that transformers can load (SmolLM2-135M is what the stored results are of), or it is a
GGUF itself, whose weights are then taken in float32; ``--gguf`` names a file of the same model for llama.cpp, from
which ``--quantize`` makes those that are compared; ``--llama`` is a folder with the package llama_cpp. Without
``--weights`` a model of Llama-1B's shape with random weights is taken and written as a GGUF too (which needs the
package gguf). Weights are pruned by magnitude, the head like the rest unless ``--keep-head``: what matters here is the
time, and that greedy tokens equal those of the masked dense model. All are timed interleaved, end to end through
``generate``; llama.cpp runs in a process of its own in the same rounds.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import sparta
from generation.llama_cpp_rival import LlamaCpp, quantized, write_gguf
from record import RESULTS, save
from sparta.generation import compile_generator
from sparta.tables import table

QUESTION = "generation_decode"
PATTERNS: dict[str, tuple[sparta.Pattern, float]] = {
    "unstructured 50 %": (sparta.Unstructured(), 0.5),
    "4x1 50 %": (sparta.Block(4, 1), 0.5),
    "unstructured 80 %": (sparta.Unstructured(), 0.8),
    "4x1 80 %": (sparta.Block(4, 1), 0.8),
}
PROMPT = "The history of the steam engine begins with a kettle, a piece of leather and a great deal of patience:"


def model_of(folder: Path | None, layers: int = 22) -> tuple[nn.Module, Tensor]:
    """Return the model and the prompt's tokens; without a folder, one of random weights with so many layers."""
    import transformers

    if folder is None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=4,
        )
        return transformers.LlamaForCausalLM(config).eval(), torch.randint(3, 32000, (1, 24))
    where, more = (folder.parent, {"gguf_file": folder.name}) if folder.suffix == ".gguf" else (folder, {})
    model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **more).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, **more)
    return model, tokenizer(PROMPT, return_tensors="pt")["input_ids"]


def decoded(model: Any, ids: Tensor, tokens: int, **more: Any) -> tuple[Tensor, float]:
    """Return greedy tokens, and how many came per second after the first one."""
    ways = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=1, **ways, **more)
    first = time.perf_counter()
    found = model.generate(ids, max_new_tokens=tokens + 1, **ways, **more)
    seconds = (time.perf_counter() - first) - (first - begin)
    return found[0, ids.shape[1] :], tokens / max(seconds, 1e-9)


def explained(model: Any, ids: Tensor, expected: Tensor, found: Tensor) -> str:
    """Return whether tokens are equal, or the margin of the first that is not: two logits as near as rounding."""
    different = (expected != found).nonzero()
    if not len(different):
        return "equal"
    at = int(different[0])
    with torch.no_grad():
        logits = model(torch.cat([ids, expected[None, :at]], 1)).logits[0, -1]
    best = logits.topk(2).values
    return f"token {at} differs, by a margin of {float(best[0] - best[1]):.1e}"


def same_tokens(model: nn.Module, ids: Tensor, expected: Tensor, fast: Any, kind: str) -> str:
    """Return how the tokens of a compiled model compare with the masked one's and, in int8, with the rounded one's."""
    found, _ = decoded(fast, ids, len(expected) - 1)
    said = explained(model, ids, expected, found)
    if kind != "int8":
        return said
    like = rounded(model)
    simulated = explained(like, ids, decoded(like, ids, len(expected) - 1)[0], found)
    return f"{simulated} (rounded in PyTorch); {said} (before rounding)"


def rounded(model: nn.Module) -> nn.Module:
    """Return a copy whose linear layers have weights of 8 bits with a scale per row, in PyTorch's own float32."""
    like: Any = copy.deepcopy(model)
    like.lm_head.weight = nn.Parameter(like.lm_head.weight.detach().clone())  # the embedding stays as it is
    with torch.no_grad():
        for layer in like.modules():
            if isinstance(layer, nn.Linear):
                step = layer.weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
                layer.weight.copy_((layer.weight / step).round() * step)
    return like  # type: ignore[no-any-return]


def compared(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of tokens per second of each, interleaved."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    return {name: statistics.median(rates) for name, rates in found.items()}


def pruned(dense: nn.Module, name: str, *, keep_head: bool) -> nn.Module:
    """Return a pruned copy; a head that shares its weight with the embedding gets one of its own before."""
    pattern, sparsity = PATTERNS[name]
    model: Any = copy.deepcopy(dense)
    if model.lm_head.weight is model.get_input_embeddings().weight and not keep_head:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    spec = sparta.Spec.from_pattern(model, pattern, sparsity)
    if not keep_head and "lm_head.weight" not in spec:
        raise SystemExit("the head was to be pruned and is not in the spec")
    if keep_head:
        spec = sparta.Spec({key: tesa for key, tesa in spec.items() if not key.startswith("lm_head")})
    spec.apply(model)
    return model  # type: ignore[no-any-return]


def measured(
    dense: nn.Module, ids: Tensor, name: str, files: list[Path], options: argparse.Namespace
) -> dict[str, Any]:
    """Prune, compile and time one pattern."""
    model = pruned(dense, name, keep_head=options.keep_head)
    fast = {kind: compile_generator(model, ids, tune="off", precision=kind) for kind in options.kinds}
    expected, _ = decoded(model, ids, options.tokens)
    runs: dict[str, Callable[[], float]] = {"dense": lambda: decoded(model, ids, options.tokens)[1]}
    if options.compiled:
        ways = {"cache_implementation": "static", "compile_config": _compile_config()}
        runs["torch.compile"] = lambda: decoded(model, ids, options.tokens, **ways)[1]
    for kind, each in fast.items():
        runs[f"ours {kind}"] = lambda each=each: decoded(each, ids, options.tokens)[1]
    threads = torch.get_num_threads()
    rivals = {_quantisation(f): LlamaCpp(f, options.llama, ids[0].tolist(), options.tokens, threads) for f in files}
    rates = compared({**runs, **rivals}, options.rounds)
    for rival in rivals.values():
        rival.close()
    return {
        "pattern": name,
        "head": "as it is" if options.keep_head else "pruned",
        "rates": rates,
        "tokens": {kind: same_tokens(model, ids, expected, f, kind) for kind, f in fast.items()},
        "mebibytes": {kind: f.program.nbytes / 2**20 for kind, f in fast.items() if f.program is not None},
    }


def gguf_files(dense: nn.Module, options: argparse.Namespace, folder: Path) -> list[Path]:
    """Return the files that llama.cpp runs: those given, or what is made of one of them, or of random weights."""
    if not options.quantize:
        return list(options.gguf)
    if not options.gguf and options.weights is not None:
        raise SystemExit("--quantize of a model with --weights needs its --gguf")
    source = options.gguf[0] if options.gguf else write_gguf(dense, folder / "random-F16.gguf")
    return [quantized(source, kind, folder, options.llama) for kind in options.quantize]


def _compile_config() -> Any:
    from transformers import CompileConfig

    return CompileConfig(fullgraph=False, mode="default")


def _quantisation(file: Path) -> str:
    """Return what llama.cpp's rival is called: the last part of the file's name."""
    return f"llama.cpp {file.stem.replace('.', '-').split('-')[-1]}"


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--gguf", type=Path, nargs="*", default=[])
    parser.add_argument("--llama", default="", help="a folder with the package llama_cpp")
    parser.add_argument("--quantize", nargs="*", default=[], help="what to make of the file first: Q8_0 Q4_0")
    parser.add_argument("--kinds", nargs="*", default=["fp32", "int8"], choices=["fp32", "int8"])
    parser.add_argument("--keep-head", action="store_true", help="do not prune the layer that makes logits")
    parser.add_argument("--patterns", nargs="*", default=list(PATTERNS), choices=list(PATTERNS))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile with a static cache")
    parser.add_argument("--layers", type=int, default=22, help="of the model with random weights")
    parser.add_argument("--name", help="what the table calls the model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--quick", action="store_true", help="one pattern, few tokens, nothing saved")
    options = parser.parse_args()
    if options.quick:
        options.patterns, options.tokens, options.rounds = options.patterns[:1], 8, 1
    dense, ids = model_of(options.weights, options.layers)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = gguf_files(dense, options, Path(folder))
        for name in options.patterns:
            rows.append(measured(dense, ids, name, files, options))
            _told(rows, options)


def _told(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the last row and save all there are."""
    lines = [[name, f"{rate:.1f}"] for name, rate in rows[-1]["rates"].items()]
    print(f"{rows[-1]['pattern']}: {rows[-1]['tokens']}\n{table(['', 'tokens/s'], lines)}\n", flush=True)
    if options.quick:
        return
    given = options.weights
    model = options.name or (f"Llama-1B's shape, {options.layers} layers" if given is None else given.resolve().name)
    results = {"model": model, "threads": torch.get_num_threads(), "tokens": options.tokens, "rows": rows}
    question = QUESTION if given is not None else f"{QUESTION}_1b"
    print(save(question, f"{platform.machine()} CPU", results, folder=options.out), flush=True)


if __name__ == "__main__":
    main()
