"""Provenance: with what and where a model was compiled."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import Any

import torch

from sparta.specialize.tuning.store import device_name
from sparta.version import __version__

__all__ = ["provenance_of"]


def provenance_of(model: str, device: str, tune: str) -> dict[str, Any]:
    """Return where and with what a model of this class was compiled, as JSON values."""
    return {
        "model": model,
        "sparta": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": device_name(device),
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tune": tune,
    }
