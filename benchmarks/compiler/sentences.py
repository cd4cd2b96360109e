"""Real sentences of all lengths, in batches of 1 to 64, through one compiled encoder: sentences per second.

Run with ``python benchmarks/compiler/sentences.py --model FOLDER --sentences FILE``: a folder of transformers (MiniLM)
and a text file, a sentence per line or the columns 5 and 6 of STS-B. The weights of linear layers are pruned in blocks
4x1; eager PyTorch, ``torch.compile(dynamic=True)`` and ONNX Runtime run the same weights on the same stream of batches,
interleaved, and every output is compared with eager's. ``--quick`` takes a short stream.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import sparta
from record import RESULTS, save

Batch = Mapping[str, Tensor]
Run = Callable[[Batch], Tensor]


class Embeddings(nn.Module):
    """An encoder with the mean of its tokens and length 1 after it, as sentence embeddings are made."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (B, E) for ids and mask (B, T)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask[..., None].to(hidden.dtype)
        return nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def sentences_of(path: Path) -> list[str]:
    """Return the sentences of a file."""
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [text for line in lines for text in (line[5:7] if len(line) >= 7 else line[:1])]


def stream_of(texts: list[str], tokenizer: Any, batches: int) -> list[Batch]:
    """Return batches of 1 to 64 sentences as they come, padded to the longest of each."""
    draw = random.Random(0)  # noqa: S311 - a stream that is the same in every run
    found = []
    for _ in range(batches):
        size = draw.choice([1, 1, 2, 4, 8, 16, 32, 64])
        chosen = [draw.choice(texts) for _ in range(size)]
        given = tokenizer(chosen, padding=True, truncation=True, return_tensors="pt")
        found.append({name: given[name] for name in ("input_ids", "attention_mask")})
    return found


def onnx_of(model: nn.Module, example: Batch) -> Run | None:
    """Return the model as ONNX Runtime runs it with one thread; None where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    folder = tempfile.mkdtemp()
    path = str(Path(folder) / "model.onnx")
    names = list(example)
    axes = {name: {0: "batch", 1: "length"} for name in names}
    torch.onnx.export(
        model, tuple(example.values()), path, input_names=names, output_names=["y"], dynamic_axes=axes, dynamo=False
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(None, {n: t.numpy() for n, t in batch.items()})[0])


def runners(model: nn.Module, stream: list[Batch], budget: float) -> dict[str, Run]:
    """Return all that runs the stream."""
    by_size = sorted(stream, key=lambda batch: batch["input_ids"].numel())
    calls = [dict(by_size[int(share * (len(by_size) - 1))]) for share in (0.05, 0.5, 0.95)]
    start = time.perf_counter()
    fast = sparta.compile(model, calls, budget_s=budget)
    print(f"compiled in {time.perf_counter() - start:.0f} s\n{fast.report}")
    found: dict[str, Run] = {"eager": lambda b: model(**b), "sparta": lambda b: fast(**b)}
    compiled = torch.compile(model, dynamic=True)
    found["torch.compile"] = lambda b: compiled(**b)
    try:
        onnx = onnx_of(model, calls[1])
    except Exception as failed:  # noqa: BLE001 - a rival that does not run is left out, and said so
        print(f"ONNX Runtime is left out: {type(failed).__name__}: {str(failed)[:200]}")
        onnx = None
    return found | ({} if onnx is None else {"onnxruntime": onnx})


def measure(found: Mapping[str, Run], stream: list[Batch], rounds: int) -> dict[str, Any]:
    """Return sentences per second of each, by batch size, and the largest difference from eager."""
    worst = dict.fromkeys(found, 0.0)
    with torch.no_grad():
        for batch in stream:  # which also warms them up
            expected = found["eager"](batch)
            for name, run in found.items():
                worst[name] = max(worst[name], float((run(batch) - expected).abs().max()))
        seconds: dict[str, list[list[float]]] = {name: [[] for _ in stream] for name in found}
        for _ in range(rounds):
            for place, batch in enumerate(stream):
                for name, run in found.items():
                    start = time.perf_counter()
                    run(batch)
                    seconds[name][place].append(time.perf_counter() - start)
    sizes = sorted({batch["input_ids"].shape[0] for batch in stream})
    rates = {}
    for name in found:
        rates[name] = {"all": _rate(stream, seconds[name], None)}
        rates[name] |= {str(size): _rate(stream, seconds[name], size) for size in sizes}
    return {"sentences_per_second": rates, "difference": worst}


def _rate(stream: list[Batch], seconds: list[list[float]], size: int | None) -> float:
    chosen = [(b, t) for b, t in zip(stream, seconds, strict=True) if size in (None, b["input_ids"].shape[0])]
    return sum(b["input_ids"].shape[0] for b, _ in chosen) / sum(median(t) for _, t in chosen)


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder of transformers")
    parser.add_argument("--sentences", required=True, type=Path, help="a text file")
    parser.add_argument("--name", default="MiniLM", help="of the model, for the table")
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds to compile")
    parser.add_argument("--quick", action="store_true", help="a short stream, little tuning")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    from transformers import AutoModel, AutoTokenizer

    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = Embeddings(AutoModel.from_pretrained(options.model)).eval()
    inner = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "pooler" not in name]
    spec = sparta.Spec.from_pattern(
        model, sparta.Block(4, 1), options.sparsity, include=[f"{name}.weight" for name in inner]
    )
    spec.apply(model)
    stream = stream_of(sentences_of(options.sentences), tokenizer, 12 if options.quick else 120)
    found = runners(model, stream, 20.0 if options.quick else options.budget)
    result = measure(found, stream, 1 if options.quick else 5)
    case = {
        "model": options.name,
        "sparsity": options.sparsity,
        "threads": options.threads,
        "batches": len(stream),
        "shapes": len({tuple(batch["input_ids"].shape) for batch in stream}),
        **result,
    }
    for name, rates in result["sentences_per_second"].items():
        print(name, {size: round(rate, 1) for size, rate in rates.items()}, f"{result['difference'][name]:.1e}")
    print(save("compiler_sentences", f"{platform.machine()} cpu", {"cases": [case]}, folder=options.out))


if __name__ == "__main__":
    main()
