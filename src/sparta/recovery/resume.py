"""Resume: what a recovery has reached stands in two files of one folder, so that a killed run goes on exactly.

``blocks`` holds the values after the blocks that are finished, ``outputs`` those of the training of the whole model
with its moments. A fingerprint of the question (model, teacher, data, settings) stands in both: another question in
the same folder is an error, not a wrong answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparta.errors import FileFormatError, message
from sparta.files import load_tensors, reading, save_tensors
from sparta.oneshot.resume import fingerprint
from sparta.recovery.log import RecoveryLog, StageLog

__all__ = ["Checkpoint", "question_of"]

_KIND, _VERSION = "recovery", 1


class Checkpoint:
    """The folder of one recovery; without a folder nothing is kept."""

    def __init__(self, folder: str | os.PathLike[str] | None, question: str) -> None:
        self.folder, self.question = None if folder is None else Path(folder), question
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                given = f"cannot make the folder {self.folder} of a checkpoint: {error.strerror}"
                raise FileFormatError(message(given, fix="name a folder that is yours to write")) from error

    def save(self, part: str, done: int, tensors: Mapping[str, Tensor], log: RecoveryLog, before: float = 0.0) -> None:
        """Store how far a part is, atomically."""
        if self.folder is None:
            return
        payload = {"question": self.question, "done": done, "log": log.to_dict(), "before": before}
        save_tensors(self.folder / f"{part}.safetensors", _KIND, _VERSION, tensors, payload)

    def load(self, part: str) -> tuple[int, dict[str, Tensor], RecoveryLog, float] | None:
        """Return how far a part is, its tensors, the log and the loss that it began with; None if there is nothing."""
        path = None if self.folder is None else self.folder / f"{part}.safetensors"
        if path is None or not path.exists():
            return None
        tensors, payload = load_tensors(path, _KIND, _VERSION)
        if payload.get("question") != self.question:
            given = f"{path} is of another run: its model, teacher, data or settings differ"
            raise FileFormatError(message(given, "the same call as before", "use an empty folder for a new run"))
        with reading(path):
            stages = [StageLog(**stage) for stage in payload["log"]["stages"]]
            log = RecoveryLog(stages, str(payload["log"]["note"]))
            return int(payload["done"]), tensors, log, float(payload["before"])


def question_of(model: nn.Module, teacher: nn.Module, batches: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """Return a digest of all that decides what a recovery gives."""
    weights = [dict(model.state_dict()), dict(teacher.state_dict())]
    return fingerprint([], [*weights, *batches], repr(sorted(settings.items())))
