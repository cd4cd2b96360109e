"""The model card of a sparse model: what was pruned, how much, and how to run it."""

from __future__ import annotations

from sparta.tables import table
from sparta.tesa.spec import Spec
from sparta.version import __version__

__all__ = ["card"]


def card(name: str, spec: Spec, notes: str = "") -> str:
    """Return the text of a ``README.md`` for a folder with a sparse model.

    >>> import torch
    >>> from sparta.tesa.attribute import TeSA
    >>> text = card("small", Spec({"fc.weight": TeSA.from_mask(torch.eye(4, dtype=torch.bool))}))
    >>> "75.0% of the weights in 1 tensors are zero" in text
    True
    """
    elements = sum(tesa.numel for tesa in spec.values())
    live = sum(tesa.count("live") for tesa in spec.values())
    groups: dict[str, list[int]] = {}
    for tesa in spec.values():
        counts = groups.setdefault(tesa.describe_pattern(), [0, 0, 0])
        for at, amount in enumerate((1, tesa.numel, tesa.count("live"))):
            counts[at] += amount
    rows = [[pattern, count, f"{1 - alive / size:.1%}"] for pattern, (count, size, alive) in sorted(groups.items())]
    zeros = 1 - live / elements if elements else 0.0
    parts = [
        f"---\nlibrary_name: transformers\ntags:\n- sparse\n- sparta\n---\n\n# {name}, sparse",
        f"{zeros:.1%} of the weights in {len(spec)} tensors are zero.",
        f"```text\n{table(['pattern', 'tensors', 'zeros'], rows)}\n```",
        "It is a dense checkpoint with zeros in it, and loads as any other. With SparTA the zeros are skipped:",
        '```python\nimport sparta.hf\n\nmodel = sparta.hf.from_pretrained("path/to/this/folder")\n```',
        notes,
        f"Written by SparTA {__version__}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
