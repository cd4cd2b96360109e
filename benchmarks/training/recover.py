"""How much of what pruning cost does a language model learn back? Masked LoRA and `sparta.recover`, zeros intact.

Run with ``python benchmarks/training/recover.py --weights FOLDER --text BOOK.txt ... --held-out BOOK.txt``. The folder
holds a causal language model that transformers can load, as files or as one ``.gguf`` (SmolLM2-135M is what the stored
results are of); the held-out book must be none of the others. For each pattern the model is pruned once, by ALPS; from
there each way of learning back starts with the same weights, the same batches and as many steps. Perplexity is taken on
the held-out book, once, at the end; the zeros are checked against the spec. ``--device cuda`` trains on a GPU;
``--only`` names patterns, ``--continue`` goes on after the rows that are stored. ``--speed`` adds to the stored rows
how many tokens per second the pattern decodes compiled, interleaved with the dense model, on a quiet CPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import sparta
from generation.decode import PROMPT, decoded
from oneshot.language_model import load, perplexity
from record import RESULTS, amend, save
from sparta.recovery import add_lora
from sparta.tables import table

QUESTION = "training_recover"
PATTERNS: dict[str, tuple[str, float | None]] = {"2:4": ("2:4", None), "4x1 50 %": ("4x1", 0.5)}
RANK = 16
Batch = dict[str, Any]
Way = Callable[[nn.Module, nn.Module, Any, list[Batch], argparse.Namespace], None]
"""Trains a pruned model: the model, its dense self, the spec, the batches, and the options."""


def batches(tokenizer: Any, books: Sequence[Path], count: int, given: argparse.Namespace) -> list[Batch]:
    """Return batches of sequences from several books in a fixed mix, each sequence from the middle of a book."""
    parts: list[Tensor] = []
    for book in books:
        text = book.read_text(encoding="utf-8", errors="replace")
        text = text[len(text) // 10 : -len(text) // 10]
        need = count * given.batch * given.context * 6 // len(books) + 1000  # characters: a token has fewer than six
        ids = torch.tensor(tokenizer(text[:need])["input_ids"], dtype=torch.long)
        whole = len(ids) // given.context * given.context
        parts += ids[:whole].split(given.context) if whole else ()
    if not parts:
        raise SystemExit(f"the texts have fewer than {given.context} tokens")
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [parts[order[place % len(order)]] for place in range(count * given.batch)]
    rows = torch.stack(chosen).split(given.batch)
    return [{"input_ids": row.to(given.device), "use_cache": False} for row in rows]


def lora(model: nn.Module, dense: nn.Module, spec: Any, data: list[Batch], given: argparse.Namespace) -> None:
    """Train masked adapters on the next token, as any script would, and merge them."""
    del dense
    _adapt(model, spec, data, given, dora=False)


def dora(model: nn.Module, dense: nn.Module, spec: Any, data: list[Batch], given: argparse.Namespace) -> None:
    """Train masked adapters with lengths of their own."""
    del dense
    _adapt(model, spec, data, given, dora=True)


def lora_on_int8(model: nn.Module, dense: nn.Module, spec: Any, data: list[Batch], given: argparse.Namespace) -> None:
    """Train masked adapters on a base that is kept in int8 meanwhile."""
    del dense
    _adapt(model, spec, data, given, dora=False, base="int8")


def _adapt(
    model: nn.Module, spec: Any, data: list[Batch], given: argparse.Namespace, *, dora: bool, base: str | None = None
) -> None:
    adapters = add_lora(model, spec, rank=RANK, dora=dora, base=base)
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=given.lora_lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.lora_lr, total_steps=len(data) + 1)
    for batch in data:
        optimizer.zero_grad()
        logits = model(**batch).logits[:, :-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
    adapters.merge()


def recovered(model: nn.Module, dense: nn.Module, spec: Any, data: list[Batch], given: argparse.Namespace) -> None:
    """Reconstruct blocks and distil the dense model's outputs: one call."""
    sparta.recover(model, dense, data, spec, steps=len(data), block_steps=given.block_steps)


def recovered_by_adapters(
    model: nn.Module, dense: nn.Module, spec: Any, data: list[Batch], given: argparse.Namespace
) -> None:
    """Distil into masked adapters."""
    sparta.recover(model, dense, data, spec, steps=len(data), block_steps=given.block_steps, rank=RANK)


WAYS: dict[str, Way | None] = {
    "one-shot": None,
    "masked LoRA": lora,
    "masked DoRA": dora,
    "masked LoRA, int8 base": lora_on_int8,
    "recover, adapters": recovered_by_adapters,
    "recover": recovered,
}


def rows_of(
    dense: nn.Module, name: str, data: list[Batch], held_out: list[Batch], given: argparse.Namespace, done: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way of learning back, from one pruned model."""
    ways = [way for way in WAYS if way not in done and (not given.ways or way in given.ways)]
    if not ways:
        return
    pattern, sparsity = PATTERNS[name]
    pruned, start = copy.deepcopy(dense), time.perf_counter()
    singly = [{**batch, "input_ids": row[None]} for batch in data[:8] for row in batch["input_ids"]][:64]
    spec, _ = sparta.prune(pruned, singly, pattern, sparsity, method=given.method)
    took = time.perf_counter() - start
    for way in ways:
        start, train = time.perf_counter(), WAYS[way]
        model = copy.deepcopy(pruned)
        if train is not None:
            train(model, dense, spec, data, given)
            took = time.perf_counter() - start
        spec.check(model)
        yield {
            "pattern": name,
            "way": way,
            "perplexity": perplexity(model, held_out),
            "zeros": _zeros(model, spec),
            "seconds": took,
            "tokens_per_s": None,
            "dense_tokens_per_s": None,
        }


def _zeros(model: nn.Module, spec: Any) -> float:
    weights = [dict(model.named_parameters())[name] for name in spec.resolve(model)]
    return float(sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights))


def speed(dense: nn.Module, ids: Tensor, name: str, rounds: int, tokens: int) -> tuple[float, float]:
    """Return tokens per second of the dense model and of the compiled one; the values do not change the time."""
    model = copy.deepcopy(dense)
    pattern, sparsity = PATTERNS[name]
    sparta.Spec.from_pattern(model, pattern, sparsity).apply(model)
    fast = sparta.compile(model, {"input_ids": ids})
    rates: dict[str, list[float]] = {"dense": [], "ours": []}
    for _ in range(rounds):
        for key, each in (("dense", dense), ("ours", fast)):
            rates[key].append(decoded(each, ids, tokens)[1])
    return statistics.median(rates["dense"]), statistics.median(rates["ours"])


def options_given() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=300, help="one batch each")
    parser.add_argument("--block-steps", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a batch")
    parser.add_argument("--context", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--held-out-tokens", type=int, default=32768)
    parser.add_argument("--lora-lr", type=float, default=5e-4)
    parser.add_argument("--method", default="alps", help="of the one-shot pruning")
    parser.add_argument("--only", nargs="+", choices=PATTERNS, default=list(PATTERNS), help="patterns")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[], help="of learning back; by default all")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="leave out rows that are stored")
    parser.add_argument("--speed", action="store_true", help="add tokens per second to the stored rows; no training")
    parser.add_argument("--tokens", type=int, default=128, help="to decode, with --speed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny model of the same kind: not for the table")
    return parser.parse_args()


def stored(folder: Path, settings: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """Return the file and the record of an earlier run with the same settings, on any machine."""
    for path in sorted(folder.glob(f"{QUESTION}.*.json")):
        record = json.loads(path.read_text())
        if all(record["results"][key] == value for key, value in settings.items()):
            return path, record
    return None


def loaded(given: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return the dense model and its tokenizer; a tiny one of the same kind if the script is only tried."""
    torch.set_float32_matmul_precision("high")
    if not given.quick:
        model, tokenizer = load(given.weights)
        return model.to(given.device), tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(given.weights)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 2, 64, 128
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    given.steps, given.block_steps, given.batch, given.context, given.held_out_tokens = 8, 4, 2, 64, 512
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    return model.to(given.device), AutoTokenizer.from_pretrained(given.weights)


def main() -> None:
    """Prune and recover in every pattern and way that was asked for, and store each row when it is done."""
    given = options_given()
    dense, tokenizer = loaded(given)
    cuda = given.device.startswith("cuda")
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU"
    settings = {"steps": given.steps, "batch": given.batch, "context": given.context, "method": given.method}
    earlier = stored(given.out, settings) if given.goes_on or given.speed else None
    results: dict[str, Any] = {**settings, "rank": RANK, "perplexity_dense": math.nan, "rows": []}
    if earlier is not None:
        device, results = earlier[1]["device"], earlier[1]["results"]
    if given.speed:
        if earlier is None:
            raise SystemExit(f"no rows of {settings} are stored in {given.out}")
        add_speed(dense, tokenizer, results, given)
        amend(earlier[0], results)
    else:
        data = batches(tokenizer, given.text, given.steps, given)
        one = argparse.Namespace(**{**vars(given), "batch": 1})
        held_out = batches(tokenizer, [given.held_out], max(1, given.held_out_tokens // given.context), one)
        results["perplexity_dense"] = perplexity(dense, held_out)
        print(f"dense {results['perplexity_dense']:.2f}", flush=True)
        for name in given.only:
            done = {row["way"] for row in results["rows"] if row["pattern"] == name}
            for row in rows_of(dense, name, data, held_out, given, done):
                results["rows"].append(row)
                print(row, flush=True)
                save(QUESTION, device, results, given.out)
    show(results)


def add_speed(dense: nn.Module, tokenizer: Any, results: dict[str, Any], given: argparse.Namespace) -> None:
    """Fill in tokens per second, one measurement for all rows of a pattern."""
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    for name in given.only:
        theirs, ours = speed(dense, ids, name, 5, given.tokens)
        for row in results["rows"]:
            if row["pattern"] == name:
                row["tokens_per_s"], row["dense_tokens_per_s"] = ours, theirs
    cpu = (
        re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if Path("/proc/cpuinfo").exists()
        else None
    )
    results["speed_on"] = f"{cpu[1] if cpu else platform.machine()}, {torch.get_num_threads()} threads"


def show(results: Mapping[str, Any]) -> None:
    """Print the table."""
    lines = [
        [row["pattern"], row["way"], f"{row['perplexity']:.2f}", f"{100 * row['zeros']:.1f} %", f"{row['seconds']:.0f}",
         "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}",
         "" if row["dense_tokens_per_s"] is None else f"{row['dense_tokens_per_s']:.1f}"]
        for row in results["rows"]
    ]  # fmt: skip
    title = f"dense {results['perplexity_dense']:.2f}"
    print(table(["pattern", "way", "perplexity", "zeros", "s", "tokens/s", "dense"], lines, title))


if __name__ == "__main__":
    main()
