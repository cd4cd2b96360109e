"""What does int8 cost and bring? A sentence encoder with its real weights: accuracy on STS-B beside time and size.

Run with ``python benchmarks/compiler/precision.py --model FOLDER --sentences FOLDER``, where the first is a folder of
transformers (a MiniLM of sentence-transformers) and the second has ``sts-train.csv`` and ``sts-dev.csv`` of STS-B.
``--sparse FILE`` takes the weights of a model that was pruned and trained (safetensors by parameter name); without it
the model is pruned in one shot. ``--quick`` is a small form to try the script. All variants, ONNX Runtime's dynamic
int8 among them, encode the same sentences in interleaved rounds, and each is scored by Spearman's correlation.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparta
from sparta.tables import table

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import save

QUESTION, DEVICE = "compiler_precision", f"{platform.machine()} cpu"
Batch = dict[str, Tensor]
Encode = Callable[[Batch], Tensor]


class Embedder(nn.Module):
    """The encoder with mean pooling: what sentence-transformers computes, of unit length."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (B, width)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)


@dataclass(frozen=True)
class Row:
    """One variant: accuracy, milliseconds of a sentence alone, sentences a second in batches, MiB of its file."""

    name: str
    spearman: float
    one_ms: float
    per_second: float
    mib: float
    change: float | None = None


def main() -> int:
    """Measure all variants."""
    options = _options()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    data = _Data(options)
    with tempfile.TemporaryDirectory() as folder:
        variants, sizes, changes = _variants(options, data, Path(folder))
        scores = {name: data.spearman(run) for name, run in variants.items()}
        ones = _interleaved(variants, [data.batch([text]) for text in data.timed], options.rounds)
        batches = [data.batch(data.timed[at : at + 32]) for at in range(0, len(data.timed), 32)]
        several = _interleaved(variants, batches, options.rounds)
    rows = [
        Row(
            name,
            scores[name],
            1e3 * ones[name] / len(data.timed),
            len(data.timed) / several[name],
            sizes[name] / 2**20,
            changes.get(name),
        )
        for name in variants
    ]
    columns = ["variant", "Spearman", "ms alone", "sentences/s", "MiB", "change"]
    print(table(columns, [list(asdict(row).values()) for row in rows]))
    if not options.quick:
        sparse = {"pattern": options.pattern, "sparsity": options.sparsity, "trained": options.sparse is not None}
        results = {"pairs": len(data.pairs), "sparse": sparse, "rows": [asdict(row) for row in rows]}
        print(save(QUESTION, DEVICE, results))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--sparse", type=Path)
    parser.add_argument("--pattern", default="4x4")
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--pairs", type=int, default=750)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.rounds, options.budget, options.method = 60, 1, 20.0, "magnitude"
    return options


class _Data:
    """Pairs of sentences with scores, sentences to calibrate with, and sentences to time."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.pairs = _read(options.sentences / "sts-dev.csv")[: options.pairs]
        training = [pair[1] for pair in _read(options.sentences / "sts-train.csv")[: 256 if not options.quick else 32]]
        self.calibration = [self.batch(training[at : at + 16]) for at in range(0, len(training), 16)]
        self.timed = [pair[2] for pair in self.pairs[: 96 if not options.quick else 32]]

    def batch(self, sentences: Sequence[str]) -> Batch:
        """Return sentences as the model takes them."""
        found = self._tokenizer(list(sentences), return_tensors="pt", padding=True, truncation=True, max_length=128)
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    def spearman(self, encode: Encode) -> float:
        """Return the correlation of ranks between cosine similarities and the scores."""
        from scipy.stats import spearmanr

        found: list[float] = []
        for at in range(0, len(self.pairs), 32):
            part = self.pairs[at : at + 32]
            one, two = (encode(self.batch([pair[side] for pair in part])) for side in (1, 2))
            found += (one * two).sum(-1).tolist()
        return float(spearmanr(found, [pair[0] for pair in self.pairs]).statistic)


def _read(path: Path) -> list[tuple[float, str, str]]:
    lines = (line.rstrip("\n").split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [(float(parts[4]), parts[5], parts[6]) for parts in lines if len(parts) > 6]


def _variants(
    options: argparse.Namespace, data: _Data, folder: Path
) -> tuple[dict[str, Encode], dict[str, int], dict[str, float]]:
    """Return the variants by name, the sizes of their files, and how much precision changes their outputs."""
    from transformers import AutoModel

    dense = Embedder(AutoModel.from_pretrained(options.model)).eval()
    sparse, spec = _pruned(dense, options, data)
    examples = [data.batch(data.timed[:1]), data.batch(data.timed[:32])]
    variants: dict[str, Encode] = {"dense fp32, PyTorch": _eager(dense)}
    sizes = {"dense fp32, PyTorch": sum(p.numel() * p.element_size() for p in dense.parameters())}
    changes: dict[str, float] = {}
    for name, path in _rivals(dense, examples[1], folder).items():
        variants[name], sizes[name] = _onnx(path, options.threads), path.stat().st_size
    label = f"{options.pattern} {options.sparsity:.0%}"
    jobs: list[tuple[str, nn.Module, Any, Mapping[str, Any]]] = [
        ("dense int8, sparta", dense, None, {"precision": "int8", "calibration": data.calibration}),
        (f"{label} fp32, sparta", sparse, spec, {}),
        (f"{label} int8, sparta", sparse, spec, {"precision": "int8", "calibration": data.calibration}),
    ]
    for name, model, known, precision in jobs:
        fast = sparta.compile(model, examples, known, budget_s=options.budget, **precision)
        print(f"{name}\n{fast.report}\n")
        path = folder / "model.sparta"
        fast.save(path)
        variants[name], sizes[name] = _eager(fast), path.stat().st_size
        if fast.report.precision is not None:
            changes[name] = fast.report.precision.change
    return variants, sizes, changes


def _pruned(dense: nn.Module, options: argparse.Namespace, data: _Data) -> tuple[nn.Module, sparta.Spec]:
    model = copy.deepcopy(dense)
    if options.sparse is not None:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(options.sparse))
        return model, sparta.Spec.from_zeros(model)
    spec, _ = sparta.prune(
        model, data.calibration, options.pattern, options.sparsity, method=options.method, include="*encoder.layer*"
    )
    return model, spec


def _eager(model: nn.Module) -> Encode:
    def encode(batch: Batch) -> Tensor:
        with torch.no_grad():
            result: Tensor = model(**batch)
        return result

    return encode


def _rivals(model: nn.Module, example: Batch, folder: Path) -> dict[str, Path]:
    """Return the dense model as ONNX files: fp32, and quantised by ONNX Runtime's dynamic int8."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain, small = folder / "dense.onnx", folder / "dense-int8.onnx"
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)}
    torch.onnx.export(
        model, (), str(plain), kwargs=example, dynamo=True, dynamic_shapes=dict.fromkeys(example, sizes), verbose=False,
        external_data=False,
    )  # fmt: skip
    quantize_dynamic(plain, small, weight_type=QuantType.QInt8)
    return {"dense fp32, ONNX Runtime": plain, "dense dynamic int8, ONNX Runtime": small}


def _onnx(path: Path, threads: int) -> Encode:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def encode(batch: Batch) -> Tensor:
        given = dict(zip(names, (value.numpy() for value in batch.values()), strict=True))
        return torch.from_numpy(session.run(None, given)[0])

    return encode


def _interleaved(variants: Mapping[str, Encode], batches: Sequence[Batch], rounds: int) -> dict[str, float]:
    """Return the median seconds of each variant for all batches, in rounds of which each has a turn."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for encode in variants.values():
        encode(batches[0])
    for _ in range(rounds):
        for name, encode in variants.items():
            begin = time.perf_counter()
            for batch in batches:
                encode(batch)
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


if __name__ == "__main__":
    raise SystemExit(main())
