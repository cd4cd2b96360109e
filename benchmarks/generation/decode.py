"""Time decoding of a pruned language model on this CPU, beside what a user would take instead.

Run with ``python benchmarks/generation/decode.py --weights FOLDER [--gguf FILE ...] [--llama PATH]``. The folder holds
a llama-like model that transformers can load (SmolLM2-135M is what the stored results are of); ``--gguf`` names files
of the same model for llama.cpp, each with its quantisation in its name, and ``--llama`` a folder with llama-cpp-python.
Without ``--weights`` a model of Llama-1B's shape with random weights is taken. Weights are pruned by magnitude: what
matters here is the time, and that greedy tokens equal those of the masked dense model. All rivals of one process are
timed interleaved, end to end through ``generate``; llama.cpp runs in a process of its own in the same rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import sparta
from record import save
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
_LLAMA = """
import json, sys, time
from llama_cpp import Llama
file, threads, tokens, prompt = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = Llama(file, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
def run():
    model.reset()
    ids = model.tokenize(prompt.encode())
    model.eval(ids)
    start = time.perf_counter()
    for _ in range(tokens):
        model.eval([model.sample(temp=0.0)])
    return tokens / (time.perf_counter() - start)
run()
for line in sys.stdin:
    print(json.dumps(run()), flush=True)
"""


class LlamaCpp:
    """llama.cpp in a process of its own, which decodes once for each line it is sent."""

    def __init__(self, file: Path, packages: str, tokens: int) -> None:
        command = [sys.executable, "-c", _LLAMA, str(file), str(torch.get_num_threads()), str(tokens), PROMPT]
        environment = {"PYTHONPATH": packages, "PATH": "/usr/bin:/bin"}
        self._process = subprocess.Popen(  # noqa: S603 - an argument list
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self) -> float:
        """Return tokens per second of one run."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        assert self._process.stdout is not None  # noqa: S101
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        self._process.stdin.close()
        self._process.wait()


def model_of(folder: Path | None) -> tuple[nn.Module, Tensor]:
    """Return the model and the prompt's tokens."""
    import transformers

    if folder is None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
        )
        return transformers.LlamaForCausalLM(config).eval(), torch.randint(3, 32000, (1, 24))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
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


def compared(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of tokens per second of each, interleaved."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    return {name: statistics.median(rates) for name, rates in found.items()}


def measured(dense: nn.Module, ids: Tensor, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Prune, compile and time one pattern."""
    pattern, sparsity = PATTERNS[name]
    model = copy.deepcopy(dense)
    sparta.Spec.from_pattern(model, pattern, sparsity).apply(model)
    fast = {kind: compile_generator(model, ids, tune="off", precision=kind) for kind in ("fp32", "int8")}
    expected, _ = decoded(model, ids, options.tokens)
    runs: dict[str, Callable[[], float]] = {"dense": lambda: decoded(model, ids, options.tokens)[1]}
    if options.compiled:
        ways = {"cache_implementation": "static", "compile_config": _compile_config()}
        runs["torch.compile"] = lambda: decoded(model, ids, options.tokens, **ways)[1]
    for kind, each in fast.items():
        runs[f"ours {kind}"] = lambda each=each: decoded(each, ids, options.tokens)[1]
    rivals = {_quantisation(file): LlamaCpp(file, options.llama, options.tokens) for file in options.gguf}
    rates = compared({**runs, **rivals}, options.rounds)
    for rival in rivals.values():
        rival.close()
    return {
        "pattern": name,
        "rates": rates,
        "tokens": {
            kind: explained(model, ids, expected, decoded(f, ids, options.tokens)[0]) for kind, f in fast.items()
        },
        "mebibytes": {kind: f.program.nbytes / 2**20 for kind, f in fast.items() if f.program is not None},
    }


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
    parser.add_argument("--llama", default="", help="a folder with llama-cpp-python")
    parser.add_argument("--patterns", nargs="*", default=list(PATTERNS), choices=list(PATTERNS))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile with a static cache")
    parser.add_argument("--quick", action="store_true", help="one pattern, few tokens, nothing saved")
    options = parser.parse_args()
    if options.quick:
        options.patterns, options.tokens, options.rounds = options.patterns[:1], 8, 1
    dense, ids = model_of(options.weights)
    rows = [measured(dense, ids, name, options) for name in options.patterns]
    for row in rows:
        lines = [[name, f"{rate:.1f}"] for name, rate in row["rates"].items()]
        print(f"{row['pattern']}: {row['tokens']}\n{table(['', 'tokens/s'], lines)}\n")
    if not options.quick:
        model = "Llama-1B's shape" if options.weights is None else options.weights.resolve().name
        results = {"model": model, "threads": torch.get_num_threads(), "tokens": options.tokens, "rows": rows}
        question = QUESTION if options.weights is not None else f"{QUESTION}_1b"
        print(save(question, f"{platform.machine()} CPU", results))


if __name__ == "__main__":
    main()
