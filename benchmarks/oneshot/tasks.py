"""Two real tasks for one-shot pruning, sentences that mean the same and digits, each with data and a metric.

MiniLM is read from a folder that transformers can load, STS-B from its tab-separated files, MNIST from its original
files. The network for digits is trained here, for a minute, from a fixed seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from data import load

from sparta import Block

LENGTH, TOKENS = 64, 128  # of sentences that are calibrated on, and of the measured input


@dataclass(frozen=True)
class Task:
    """A model with what it takes to prune and judge it.

    Parameters
    ----------
    metric
        Larger is better.
    channels
        The patterns that remove whole channels and heads, by the layer that reads them.
    """

    name: str
    model: nn.Module
    data: list[Any]
    example: Any
    metric: Callable[[nn.Module], float]
    metric_name: str
    channels: dict[str, Any]


def minilm(folder: Path, sentences: Path, pairs: int, device: str = "cpu") -> Task:
    """Return MiniLM with STS-B's test pairs, calibrated on sentences of its training pairs."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)

    def encoded(texts: list[str], length: int, *, full: bool = False) -> dict[str, Tensor]:
        padding = "max_length" if full else "longest"
        found = tokenizer(texts, padding=padding, truncation=True, max_length=length, return_tensors="pt")
        return {name: found[name].to(device) for name in ("input_ids", "attention_mask")}

    train, test = _pairs(sentences / "sts-train.csv"), _pairs(sentences / "sts-test.csv")[:pairs]
    texts = [text for _, one, two in train[:256] for text in (one, two)]
    data = [encoded(texts[first : first + 32], LENGTH) for first in range(0, len(texts), 32)]

    @torch.no_grad()
    def metric(pruned: nn.Module) -> float:
        angles: list[float] = []
        for first in range(0, len(test), 64):
            part = test[first : first + 64]
            one, two = (_embedded(pruned, encoded([pair[side] for pair in part], 128)) for side in (1, 2))
            angles += functional.cosine_similarity(one, two).tolist()
        return spearman(torch.tensor(angles), torch.tensor([score for score, _, _ in test]))

    example = encoded([" ".join(text for _, text, _ in train[:20])], TOKENS, full=True)
    layers = "encoder.layer.*"
    channels = {f"{layers}.attention.output.dense.weight": Block(384, 32), f"{layers}.output.dense.weight": "channel:1"}
    return Task("MiniLM", model, data, example, metric, "Spearman, STS-B test", channels)


def digits(folder: Path | None, device: str = "cpu") -> Task:
    """Return a convolutional network trained on MNIST, with its test images."""
    images = load(folder, device)
    torch.manual_seed(0)
    size = (images.train_images.shape[-1] // 4) ** 2
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * size, 256), nn.ReLU(), nn.Linear(256, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for rows in _batches(len(images.train_images), epochs=1 if folder else 20):
        loss = functional.cross_entropy(model(images.train_images[rows]), images.train_labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()

    @torch.no_grad()
    def metric(pruned: nn.Module) -> float:
        right = sum(
            int((pruned(x).argmax(1) == y).sum())
            for x, y in zip(images.test_images.split(500), images.test_labels.split(500), strict=True)
        )
        return 100 * right / len(images.test_labels)

    data = list(images.train_images[:512].split(64))
    channels = {"3.weight": "channel:1", "7.weight": Block(256, size), "9.weight": "channel:1"}
    return Task("MNIST CNN", model, data, images.test_images[:1], metric, "accuracy in percent", channels)


def spearman(one: Tensor, two: Tensor) -> float:
    """Return the correlation of ranks; equal values share their mean rank.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 20.0]))
    0.866...
    """
    ranks = torch.stack([_ranks(one), _ranks(two)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, place, count = torch.unique(values, return_inverse=True, return_counts=True)
    ends = count.cumsum(0).double()
    return (ends - (count.double() - 1) / 2)[place]


def _embedded(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def _pairs(path: Path) -> list[tuple[float, str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = [line.split("\t") for line in lines]
    return [(float(cell[4]), cell[5], cell[6]) for cell in cells if len(cell) > 6]


def _batches(count: int, epochs: int, size: int = 128) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(size)
