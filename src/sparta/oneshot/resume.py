"""Resume: what is finished of a run stands in a folder, one file per stage, so that a killed run goes on exactly.

Each file holds the new weights and masks of a stage and its log. A fingerprint of the question (dense weights, data,
pattern, method) stands in every file: another question in the same folder is an error, not a wrong answer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparta.errors import FileFormatError, message
from sparta.files import load_tensors, reading, save_tensors
from sparta.oneshot.log import LayerLog
from sparta.oneshot.targets import Target

__all__ = ["Checkpoint", "fingerprint"]

_KIND, _VERSION = "oneshot stage", 1


class Checkpoint:
    """The finished stages of one run in one folder."""

    def __init__(self, folder: str | os.PathLike[str], question: str) -> None:
        self.folder = Path(folder)
        self.question = question
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            given = f"cannot make the folder {self.folder} of a checkpoint: {error.strerror}"
            raise FileFormatError(message(given, fix="name a folder that is yours to write")) from error

    def save(self, stage: int, targets: Sequence[Target], masks: Mapping[str, Tensor], logs: list[LayerLog]) -> None:
        """Store a finished stage, atomically."""
        tensors: dict[str, Tensor] = {
            f"{target.name}::weight": target.parameter for target in targets if target.name in masks
        }
        tensors |= {f"{name}::mask": mask for name, mask in masks.items()}
        payload = {"question": self.question, "logs": [asdict(log) for log in logs]}
        save_tensors(self._file(stage), _KIND, _VERSION, tensors, payload)

    def load(self, stage: int, targets: Sequence[Target]) -> tuple[dict[str, Tensor], list[LayerLog]] | None:
        """Put the weights of a finished stage into the model; return its masks and log, None if it is not finished."""
        path = self._file(stage)
        if not path.exists():
            return None
        tensors, payload = load_tensors(path, _KIND, _VERSION)
        if payload.get("question") != self.question:
            raise FileFormatError(
                message(
                    f"{path} is of another run: its model, data, pattern or method differ",
                    "the same call as before",
                    "use an empty folder for a new run",
                )
            )
        masks: dict[str, Tensor] = {}
        with reading(path):
            logs = [LayerLog(**log) for log in payload["logs"]]
            for target in targets:
                if f"{target.name}::mask" not in tensors:
                    continue
                weight, mask = tensors[f"{target.name}::weight"], tensors[f"{target.name}::mask"]
                if weight.shape != target.parameter.shape or mask.shape != weight.shape or mask.dtype != torch.bool:
                    raise FileFormatError(message(f"{path} does not fit {target.name}", fix="use an empty folder"))
                target.parameter.data.copy_(weight)
                masks[target.name] = mask.to(target.parameter.device)
        return masks, logs

    def _file(self, stage: int) -> Path:
        return self.folder / f"stage-{stage:05d}.safetensors"


def fingerprint(targets: Sequence[Target], batches: Sequence[Any], settings: str) -> str:
    """Return a digest of the dense weights, the data and the settings of a run."""
    sha = hashlib.sha256(settings.encode())
    for target in targets:
        sha.update(f"{target.name} {tuple(target.parameter.shape)} {target.parameter.dtype}".encode())
        sha.update(_bytes(target.parameter))
    for batch in batches:
        _feed(sha, batch)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        sha.update(f"{tuple(value.shape)} {value.dtype}".encode())
        sha.update(_bytes(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            sha.update(str(key).encode())
            _feed(sha, item)
    elif isinstance(value, tuple | list):
        for item in value:
            _feed(sha, item)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
