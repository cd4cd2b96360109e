"""Decisions: what end-to-end measurement decided once is not searched for again.

One small JSON file a model and machine, next to the tuning store. It is only a memory; a file that cannot be read or
written costs time, never a result, and a remembered choice is timed once more before it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparta.compiler.plan import LayerPlan
from sparta.files import private_folder, write_atomic
from sparta.specialize.tuning.store import device_name

__all__ = ["Decision", "model_key", "recall", "remember"]

_VERSION = 7


@dataclass(frozen=True)
class Decision:
    """What was decided for a whole model: the graph, the host, the layers made dense, and how long it took."""

    base: str
    host: str
    dense: tuple[str, ...]
    seconds: float


def model_key(graph: str, plans: Sequence[LayerPlan], device: str, effort: str) -> str:
    """Return the key of a model: its graph in text, its layers' choices, the machine, the versions."""
    layers = [[p.name, p.op, p.pattern, round(p.density, 2), list(p.shape), sorted(p.choices)] for p in plans]
    parts: list[Any] = [_VERSION, graph, layers, device_name(device), torch.__version__, effort]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def recall(key: str) -> Decision | None:
    """Return what was decided for a model on this machine, or None."""
    try:
        fields = json.loads(_file(key).read_text(encoding="utf-8"))
        dense = tuple(str(name) for name in fields["dense"])
        return Decision(str(fields["base"]), str(fields["host"]), dense, float(fields["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(key: str, decision: Decision) -> None:
    """Keep a decision; raises OSError where the folder cannot be written."""
    write_atomic(_file(key), (json.dumps(asdict(decision)) + "\n").encode())


def _file(key: str) -> Path:
    return private_folder("compiler") / f"{key}.json"
