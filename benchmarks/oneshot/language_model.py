"""What does one-shot pruning cost a language model? Perplexity on held-out text, by pattern and method.

Run with ``python benchmarks/oneshot/language_model.py --weights FOLDER --text CALIBRATION.txt HELD_OUT.txt``. The
folder holds a causal language model that transformers can load: a saved one, or one ``.gguf`` file (SmolLM2-135M is
what the stored results are of). Calibration and held-out text must be different books. Every run starts from the same
dense weights, and the zeros of the pruned model are checked against the spec. Runs that stand in the stored results, of
the same texts and numbers of tokens, are not repeated, so the script can be stopped at any time.

On the CPU every run also records what it costs there: processor time, summed over threads, which other programs on the
machine can only lengthen, and by how much the process grew, from a model and a copy of it in memory. ``--blocks``
takes so many of the first blocks, to learn what pruning costs in a fraction of the time; such a model is not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import sparta
from record import RESULTS, save
from sparta.tables import table

PATTERNS: dict[str, tuple[str, float | None]] = {
    "unstructured 50 %": ("unstructured", 0.5),
    "2:4": ("2:4", None),
    "4x1 50 %": ("4x1", 0.5),
    "unstructured 70 %": ("unstructured", 0.7),
}
QUESTION = "oneshot_language_model"
METHODS = ("magnitude", "wanda", "sparsegpt", "alps", "alps+block")


def load(folder: Path) -> tuple[nn.Module, Any]:
    """Return the model in float32 and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packed = sorted(folder.glob("*.gguf"))
    extra = {"gguf_file": packed[0].name} if packed else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
    return model.eval(), tokenizer


def batches(tokenizer: Any, path: Path, tokens: int, context: int, device: str = "cpu") -> list[dict[str, Tensor]]:
    """Return the middle of a book as batches of one sequence each."""
    text = path.read_text(encoding="utf-8", errors="replace")
    middle = text[len(text) // 4 :][: tokens * 8]
    ids = torch.tensor(tokenizer(middle)["input_ids"], device=device)
    count = min(tokens, len(ids)) // context
    return [{"input_ids": part.unsqueeze(0), "use_cache": False} for part in ids[: count * context].split(context)]


@torch.no_grad()
def perplexity(model: nn.Module, held_out: list[dict[str, Tensor]]) -> float:
    """Return the perplexity of the model on sequences, each read from its start."""
    total, count = 0.0, 0
    for batch in held_out:
        logits = model(**batch).logits[0, :-1].float()
        aim = batch["input_ids"][0, 1:]
        total += float(nn.functional.cross_entropy(logits, aim, reduction="sum"))
        count += len(aim)
    return math.exp(total / count)


def pruned(
    dense: nn.Module, calibration: list[dict[str, Tensor]], held_out: list[dict[str, Tensor]], name: str, method: str
) -> dict[str, Any]:
    """Prune a copy of the model and return what it cost."""
    model = copy.deepcopy(dense)
    pattern, sparsity = PATTERNS[name]
    cost = Cost()
    spec, log = sparta.prune(
        model,
        calibration,
        pattern,
        sparsity,
        method=method.removesuffix("+block"),
        refine="block" if method.endswith("+block") else None,
    )
    paid = cost.paid(next(model.parameters()).device.type)
    spec.check(model)
    errors = [layer.error for layer in log if layer.error is not None]
    return {
        "pattern": name,
        "method": method,
        "perplexity": perplexity(model, held_out) if held_out else None,
        "density": spec.density,
        "layer_error": sum(errors) / len(errors),
        **paid,
    }


class Cost:
    """What is paid from here on: seconds, and on the CPU processor time and memory."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the most memory in use is that in use now
        self.wall, self.processor, self.mib = time.perf_counter(), time.process_time(), _status_mib("VmRSS")

    def paid(self, device: str) -> dict[str, float]:
        """Return it, as entries of a run."""
        seconds = {"seconds": time.perf_counter() - self.wall}
        if device != "cpu":
            return seconds
        processor = time.process_time() - self.processor
        return {**seconds, "processor_seconds": processor, "grown_mib": _status_mib("VmHWM") - self.mib}


def _status_mib(key: str) -> int:
    """Return an entry of what Linux tells of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) // 1024


def shortened(model: Any, count: int) -> str:
    """Leave the first blocks of a model, and return how many of how many they are."""
    whole = len(model.model.layers)
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    return f"{count} of {whole}"


def peak_mib(device: str) -> int:
    """Return the most memory that was in use, on the device that computes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() // 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def resumed(fresh: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the stored results where they answer the same question, so that their runs are not repeated."""
    if not path.exists():
        return fresh
    stored: dict[str, Any] = json.loads(path.read_text())["results"]
    same = all(stored.get(key) == fresh.get(key) for key in ("calibration_tokens", "held_out_tokens", "blocks"))
    old, new = stored["perplexity_dense"], fresh["perplexity_dense"]
    return stored if same and (old == new or abs(old / new - 1) < 1e-3) else fresh


def main() -> None:
    """Prune by every method in every pattern that was asked for, and store what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs=2, required=True, metavar=("CALIBRATION", "HELD_OUT"))
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--held-out-tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, help="that are pruned, the first ones; all by default")
    parser.add_argument("--threads", type=int, help="of torch; all cores that the process may use by default")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    model, tokenizer = load(given.weights)
    model.to(given.device)
    calibration = batches(tokenizer, given.text[0], given.calibration_tokens, given.context, given.device)
    blocks = shortened(model, given.blocks) if given.blocks else None
    held_out = [] if blocks else batches(tokenizer, given.text[1], given.held_out_tokens, given.context, given.device)
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"{platform.machine()} CPU"
    results: dict[str, Any] = {
        "perplexity_dense": perplexity(model, held_out) if held_out else None,
        "calibration_tokens": len(calibration) * given.context,
        "held_out_tokens": len(held_out) * given.context,
        "peak_mib": 0,
        "runs": [],
    }
    if blocks:
        results["blocks"] = blocks
    results = resumed(results, given.results / f"{QUESTION}.{where.lower().replace('_', '-').replace(' ', '-')}.json")
    print(f"dense {results['perplexity_dense']}", flush=True)
    done = {(run["pattern"], run["method"]) for run in results["runs"]}
    for method in given.methods:
        for name in given.patterns:
            if (name, method) in done:
                continue
            results["runs"].append(pruned(model, calibration, held_out, name, method))
            print(results["runs"][-1], flush=True)
            results["peak_mib"] = max(results["peak_mib"], peak_mib(given.device))
            save(QUESTION, where, results, given.results)
    results["runs"].sort(key=lambda run: (list(PATTERNS).index(run["pattern"]), METHODS.index(run["method"])))
    save(QUESTION, where, results, given.results)
    rows = [
        [r["pattern"], r["method"], r["perplexity"], f"{r['layer_error']:.3f}", f"{r['density']:.3f}",
         f"{r['seconds']:.0f}"] for r in results["runs"]
    ]  # fmt: skip
    read = f"{results['calibration_tokens']} tokens read, {results['held_out_tokens']} held out"
    title = f"dense {results['perplexity_dense']}; {read}; {results['peak_mib']} MiB"
    print(table(["pattern", "method", "perplexity", "layer error", "density", "s"], rows, title))


if __name__ == "__main__":
    main()
