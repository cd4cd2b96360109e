"""What does sparsity cost an encoder of sentences? MiniLM on STS-B: the default recipe, taught by the dense model.

Run with ``python benchmarks/training/sts.py --minilm FOLDER --sts FOLDER --text BOOK.txt ...``. The first folder holds
a sentence encoder that transformers can load (all-MiniLM-L6-v2 is what the stored results are of), the second STS-B's
``sts-train.csv``, ``sts-dev.csv`` and ``sts-test.csv``; the books, which are optional, give sentences without a score
for the teacher to speak of; any text will do, and more of it is better. The dense model is trained first, on the
scores; it is then the teacher of every row and what every row starts from. Each row is one call of
`sparta.create.initialize`, and differs from the defaults in what its name says. Nothing is chosen by the test pairs.
Every model is compiled at the end, and its metric taken again. ``--device cuda`` trains on a GPU; ``--only`` names
rows, ``--continue`` goes on after the rows that are stored; ``--quick`` tries the script.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
import sparta
from oneshot.tasks import spearman
from record import RESULTS, save
from sparta.create.quantize import is_quantized
from sparta.sparsify import find_layers
from sparta.tables import table

QUESTION = "training_sts"
EPOCHS = 20  # the default recipe's; how many steps one of them has is what --steps decides
LONGEST = 64  # tokens of a sentence
Batch = tuple[dict[str, Tensor], Tensor]
"""What the model takes, and the scores of its first sentences: the two of pair i are 2i and 2i + 1."""


@dataclass(frozen=True)
class Row:
    """One row: arguments for `initialize`, and variables for its recipe."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)


FLOAT = {"quantization": False}
ROWS = (
    Row("80 % 4x1", FLOAT, {"sparsity": 0.8, "mask_type": "block:4x1"}),
    Row("90 % 4x1", FLOAT, {"sparsity": 0.9, "mask_type": "block:4x1"}),
    Row("2:4", FLOAT, {"mask_type": "2:4"}),
    Row("int8", {"pruning": False}),
    Row("80 % 4x1, int8", {}, {"sparsity": 0.8, "mask_type": "block:4x1"}),
    Row("80 %", FLOAT, {"sparsity": 0.8}),
)
ALLOCATIONS = tuple(
    Row(f"80 % {name}, {allocation}", FLOAT, {"sparsity": 0.8, "mask_type": mask, "allocation": allocation})
    for name, mask in (("unstructured", "unstructured"), ("blocks", "block:4x1"))
    for allocation in ("global", "uniform", "erk", "lamp")
)


class Encoder(nn.Module):
    """A model of words as one of sentences: the mean of its last states, of length one."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words = words

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return embeddings (N, width) of sentences (N, tokens)."""
        states = self.words(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


# ---------------------------------------------------------------------- sentences


@dataclass(frozen=True)
class Tokens:
    """Tokenized sentences (N, LONGEST) with padding, and how long each is."""

    ids: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)


class Sentences:
    """The tokenized pairs of STS-B, and sentences without a score."""

    def __init__(self, folder: Path, books: Sequence[Path], tokenizer: Any, pairs: int | None) -> None:
        def tokens(texts: Sequence[str]) -> Tokens:
            if not texts:
                return Tokens(torch.empty(0, LONGEST, dtype=torch.long), torch.empty(0, dtype=torch.long))
            found = tokenizer(
                list(texts), truncation=True, max_length=LONGEST, padding="max_length", return_tensors="pt"
            )
            return Tokens(found["input_ids"], found["attention_mask"].sum(1))

        self.scores: dict[str, Tensor] = {}
        self.ids: dict[str, Tokens] = {}
        for part in ("train", "dev", "test"):
            lines = (folder / f"sts-{part}.csv").read_text(encoding="utf-8").splitlines()
            cells = [cell for cell in (line.split("\t") for line in lines) if len(cell) > 6][:pairs]
            self.scores[part] = torch.tensor([float(cell[4]) / 5 for cell in cells])
            self.ids[part] = tokens([text for cell in cells for text in cell[5:7]])
        more = [sentence for book in books for sentence in _sentences(book)]
        self.unscored = tokens(more)

    def batch(self, parts: Sequence[Tokens], scores: Tensor, device: str) -> Batch:
        """Return sentences side by side; lengths are multiples of eight, so that few sizes are seen."""
        lengths = torch.cat([part.lengths for part in parts])
        length = min(LONGEST, -(-int(lengths.max()) // 8) * 8)
        ids = torch.cat([part.ids[:, :length] for part in parts])
        mask = (torch.arange(length) < lengths.unsqueeze(1)).long()
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}, scores.to(device)

    def batches(self, steps: int, size: int, others: int, device: str) -> Iterator[Batch]:
        """Yield batches of `size` pairs with scores, and sentences without, in orders that never change."""
        generator = torch.Generator().manual_seed(0)
        train = self.ids["train"]
        pairs, more = (_endless(count, generator) for count in (len(self.scores["train"]), len(self.unscored)))
        for _ in range(steps):
            chosen = torch.tensor([next(pairs) for _ in range(size)])
            rows = torch.stack([2 * chosen, 2 * chosen + 1], 1).flatten()
            parts = [Tokens(train.ids[rows], train.lengths[rows])]
            if len(self.unscored) and others:
                rows = torch.tensor([next(more) for _ in range(others)])
                parts.append(Tokens(self.unscored.ids[rows], self.unscored.lengths[rows]))
            yield self.batch(parts, self.scores["train"][chosen], device)


def _sentences(book: Path) -> list[str]:
    text = " ".join(book.read_text(encoding="utf-8", errors="replace").split())
    return [part.strip() for part in re.split(r"(?<=[.!?])\s", text) if 20 < len(part) < 300]


def _endless(count: int, generator: torch.Generator) -> Iterator[int]:
    while count:
        yield from torch.randperm(count, generator=generator).tolist()


@torch.no_grad()
def metric(model: Any, sentences: Sentences, part: str, device: str) -> float:
    """Return how well angles between embeddings rank the pairs as their scores do, in percent."""
    tokens, angles = sentences.ids[part], []
    for first in range(0, len(tokens), 128):
        rows = slice(first, first + 128)
        inputs, _ = sentences.batch([Tokens(tokens.ids[rows], tokens.lengths[rows])], torch.empty(0), device)
        found = model(**inputs).float().cpu()
        angles.append((found[0::2] * found[1::2]).sum(-1))
    return 100 * spearman(torch.cat(angles), sentences.scores[part])


# ---------------------------------------------------------------------- training


def train(model: nn.Module, batches: Iterator[Batch], manager: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train on the scores; what else the loss has is the manager's."""
    model.train()
    for inputs, scores in batches:
        optimizer.zero_grad()
        found = model(**inputs)[: 2 * len(scores)]
        functional.mse_loss((found[0::2] * found[1::2]).sum(-1), scores).backward()
        optimizer.step()
    manager.finalize()
    model.eval()


def teacher_of(dense: Encoder, sentences: Sentences, given: argparse.Namespace) -> Encoder:
    """Return the dense model, trained on the scores for a fifth of the steps at a gentle rate."""
    model, steps = copy.deepcopy(dense), max(1, given.steps // 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    variables = {"num_epochs": 1, "init_lr": 2e-5}
    manager, _ = sparta.create.initialize(
        model, optimizer, steps, pruning=False, quantization=False, recipe_variables=variables
    )
    train(model, sentences.batches(steps, given.batch, 0, given.device), manager, optimizer)
    return model


def trained(teacher: Encoder, row: Row, sentences: Sentences, given: argparse.Namespace) -> Encoder:
    """Return a copy of the teacher, trained as the row says."""
    torch.manual_seed(0)
    model = copy.deepcopy(teacher).requires_grad_(requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    per_epoch = -(-given.steps // EPOCHS)
    manager, _ = sparta.create.initialize(
        model, optimizer, per_epoch, distillation=True, distillation_teacher=teacher,
        recipe_variables={"num_epochs": EPOCHS, "init_lr": given.lr, "hardness": given.hardness, **row.variables},
        **row.arguments,
    )  # fmt: skip
    train(model, sentences.batches(per_epoch * EPOCHS, given.batch, given.others, given.device), manager, optimizer)
    return model


def measured(model: Encoder, sentences: Sentences, given: argparse.Namespace) -> dict[str, Any]:
    """Return the metric of a model as it is and compiled, and its zeros, counted layer by layer."""
    weights = [layer.parameter.detach() for layer in find_layers(model)]
    shares = [float((weight != 0).float().mean()) for weight in weights]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    found: dict[str, Any] = {
        "sparsity": zeros / sum(weight.numel() for weight in weights),
        "lowest_density": min(shares),
        "dev": metric(model, sentences, "dev", given.device),
        "test": metric(model, sentences, "test", given.device),
        "compiled": None,
    }
    if given.compile_on != "none":
        first = sentences.ids["train"]
        some = Tokens(first.ids[:128], first.lengths[:128])
        inputs, _ = sentences.batch([some], torch.empty(0), given.compile_on)
        precision = "int8" if is_quantized(model) else None
        fast = sparta.compile(model.to(given.compile_on), inputs, budget_s=given.budget, precision=precision)
        found["compiled"] = metric(fast, sentences, "test", given.compile_on)
    return found


# ---------------------------------------------------------------------- the whole


def options_given() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, required=True)
    parser.add_argument("--sts", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2000, help="of each row; the teacher has a fifth")
    parser.add_argument("--batch", type=int, default=32, help="pairs with scores in a step")
    parser.add_argument("--others", type=int, default=192, help="other sentences in a step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--hardness", type=float, default=0.9, help="the teacher's share of the loss")
    parser.add_argument("--allocations", action="store_true", help="80 %% spread over the layers in four ways instead")
    parser.add_argument("--only", nargs="+", default=[], help="rows with these names")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="leave out rows that are stored")
    parser.add_argument("--compile-on", default="cpu", help="where the metric is taken again: cpu, cuda or none")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for each compilation")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--quick", action="store_true", help="20 steps, few pairs: not for the table")
    return parser.parse_args()


def stored(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier run with the same settings."""
    if not path.exists():
        return []
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    same = all(results.get(key) == value for key, value in settings.items())
    rows: list[dict[str, Any]] = results["rows"] if same else []
    return rows


def loaded(given: argparse.Namespace) -> tuple[Encoder, Sentences]:
    """Return the dense encoder and the data."""
    from transformers import AutoModel, AutoTokenizer

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    words = AutoModel.from_pretrained(given.minilm, dtype=torch.float32, add_pooling_layer=False)
    tokenizer = AutoTokenizer.from_pretrained(given.minilm)
    sentences = Sentences(given.sts, given.text, tokenizer, 24 if given.quick else None)
    return Encoder(words).to(given.device).eval(), sentences


def main() -> None:
    """Train every row that was asked for, and store each when it is done."""
    given = options_given()
    if given.quick:
        given.steps, given.batch, given.others = 20, 2, 4
    dense, sentences = loaded(given)
    cuda = given.device.startswith("cuda")
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU"
    question = f"{QUESTION}_allocations" if given.allocations else QUESTION
    settings = {"steps": given.steps, "pairs": given.batch, "others": given.others, "lr": given.lr,
                "hardness": given.hardness, "unscored": len(sentences.unscored)}  # fmt: skip
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    rows = stored(given.out / f"{question}.{name}.json", settings) if given.goes_on else []

    def add(name: str, model: Encoder, began: float) -> None:
        rows.append({"row": name, **measured(model, sentences, given), "seconds": time.perf_counter() - began})
        print({key: round(v, 4) if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True)
        save(question, device, {**settings, "rows": rows}, given.out)

    began = time.perf_counter()
    teacher = teacher_of(dense, sentences, given)
    done = {row["row"] for row in rows}
    if "dense" not in done:
        add("dense", copy.deepcopy(dense), time.perf_counter())
        add("dense, trained", copy.deepcopy(teacher), began)
    for row in ALLOCATIONS if given.allocations else ROWS:
        if row.name in done or (given.only and row.name not in given.only):
            continue
        began = time.perf_counter()
        add(row.name, trained(teacher, row, sentences, given), began)
    show(rows)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""
    lines = [
        [row["row"], f"{100 * row['sparsity']:.1f} %", f"{row['lowest_density']:.3f}", f"{row['dev']:.2f}",
         f"{row['test']:.2f}", "" if row["compiled"] is None else f"{row['compiled']:.2f}", f"{row['seconds']:.0f}"]
        for row in rows
    ]  # fmt: skip
    print(table(["row", "zeros", "lowest density", "dev", "test", "compiled", "s"], lines))


if __name__ == "__main__":
    main()
