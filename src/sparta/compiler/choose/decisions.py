"""Decisions: what end-to-end measurement decided once is not searched for again.

One small JSON file per model and machine, next to the tuning store. It is only a memory: a file that cannot be read or
written costs time, never a result, and a remembered choice is believed only after a fresh look at the model as given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparta.compiler.numbers import a_number
from sparta.compiler.plan import LayerPlan
from sparta.compiler.run.host import Host
from sparta.compiler.variant import Base
from sparta.files import private_folder, write_atomic
from sparta.specialize.tuning.store import device_name

__all__ = ["Decision", "forget", "model_key", "recall", "remember"]

_VERSION = 13  # one more whenever hosts or the kernels between them change: what is remembered was measured with them


@dataclass(frozen=True)
class Decision:
    """What was decided for a whole model.

    Parameters
    ----------
    base, host
        The graph and its host.
    dense
        The layers that run dense.
    seconds
        How long the compilation took.
    given_milliseconds
        What the model as given took then, to see whether the machine is still as it was.
    """

    base: Base
    host: Host
    dense: tuple[str, ...]
    seconds: float
    given_milliseconds: float


def model_key(graph: str, plans: Sequence[LayerPlan], device: str, effort: str) -> str:
    """Return the key of a model: its graph in text, its layers' choices, the machine, the versions."""
    layers = [[p.name, p.op, p.pattern, round(p.density, 2), list(p.shape), sorted(p.choices)] for p in plans]
    parts: list[Any] = [_VERSION, graph, layers, device_name(device), torch.__version__, effort]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def recall(key: str) -> Decision | None:
    """Return what was decided for a model on this machine, or None."""
    try:
        fields = json.loads(_file(key).read_text(encoding="utf-8"))
        return Decision(
            Base.from_text(fields["base"]),
            Host.from_text(fields["host"]),
            tuple(str(name) for name in fields["dense"]),
            a_number(fields["seconds"], "the seconds"),
            a_number(fields["given_milliseconds"], "the milliseconds"),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def remember(key: str, decision: Decision) -> None:
    """Keep a decision; raises OSError where the folder cannot be written."""
    write_atomic(_file(key), (json.dumps(asdict(decision)) + "\n").encode())


def forget() -> int:
    """Forget all decisions; returns how many there were."""
    files = list(private_folder("compiler").glob("*.json"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def _file(key: str) -> Path:
    return private_folder("compiler") / f"{key}.json"
