"""Results of benchmarks: one JSON file a question and machine, with what was measured, where and when."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparta.files import write_atomic
from sparta.testing import environment

RESULTS = Path(__file__).parent / "results"


def save(question: str, device: str, results: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Write the results of one script run on one device, replacing an older run on the same kind of device."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(question, device, folder)
    record = {
        "question": question,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "environment": environment().to_dict(),
        "results": results,
    }
    _write(path, record)
    return path


def path_of(question: str, device: str, folder: Path) -> Path:
    """Return the file of a question's results on a device."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / f"{question}.{name}.json"


def amend(path: Path, results: Mapping[str, Any]) -> None:
    """Replace the results of a stored run to which another machine adds; where and when it was made stays."""
    _write(path, {**json.loads(path.read_text(encoding="utf-8")), "results": results})


def _write(path: Path, record: Mapping[str, Any]) -> None:
    write_atomic(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
