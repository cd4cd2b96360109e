"""The notebook: what was measured and computed for a plan, on disk, so that a killed run goes on where it was.

One JSON file in a folder of the user's, rewritten whole after each entry. It holds a fingerprint of the question;
another question in the same folder is an error, not a wrong answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparta.errors import FileFormatError, message
from sparta.files import read_json_file, reading, write_atomic
from sparta.planning.bench import Bench, Whole
from sparta.planning.options import Option
from sparta.tesa.patterns import Pattern

__all__ = ["GIVEN", "Notebook", "Remembering", "narrow_key", "option_key"]

GIVEN = "given"
"""The entry of the model as given."""
_VERSION = 2


@dataclass(eq=False)
class Notebook:
    """Numbers by name.

    Parameters
    ----------
    path
        The file; None keeps nothing beyond the run.
    question
        What the numbers are of.
    """

    path: Path | None = None
    question: str = ""
    entries: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def opened(cls, folder: str | os.PathLike[str] | None, question: str) -> Notebook:
        """Return the notebook of a folder, which is made if there is none."""
        if folder is None:
            return cls()
        path = Path(folder) / "plan.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileFormatError(
                message(f"{folder} cannot be used as a folder: {error}", fix="name another")
            ) from error
        if not path.exists():
            return cls(path, question)
        with reading(path, "remove it"):
            record = read_json_file(path)
            stored, entries = record["question"], record["entries"]
            if record["version"] != _VERSION or not isinstance(entries, dict):
                raise FileFormatError(message(f"{path} is of another version", fix="use an empty folder"))
        if stored != question:
            raise FileFormatError(
                message(
                    f"{path} is of another plan: its model, inputs, data, patterns or method differ",
                    "the same call as before",
                    "use an empty folder for a new plan",
                )
            )
        return cls(path, question, entries)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the entry of a key, made and kept where there is none."""
        if key not in self.entries:
            self.keep(key, make())
        return self.entries[key]

    def keep(self, key: str, value: Any) -> None:
        """Write an entry down."""
        self.entries[key] = value
        if self.path is not None:
            record = {"version": _VERSION, "question": self.question, "entries": self.entries}
            write_atomic(self.path, json.dumps(record).encode())


@dataclass(eq=False)
class Remembering:
    """A bench that asks another one only for what is not in a notebook."""

    bench: Bench
    notebook: Notebook

    @property
    def device(self) -> str:
        """The kind of device that is measured."""
        return self.bench.device

    def given_ms(self) -> float:
        """Return the milliseconds of the model as given."""
        return float(self.notebook.once(GIVEN, self.bench.given_ms))

    def dense_ms(self, name: str) -> float | None:
        """Return the milliseconds of a layer that is dense."""
        found = self.notebook.once(f"dense {name}", lambda: self.bench.dense_ms(name))
        return None if found is None else float(found)

    def kind(self, name: str) -> str:
        """Return what layers have in common that take the same time."""
        return str(self.notebook.once(f"kind {name}", lambda: self.bench.kind(name)))

    def option_ms(self, name: str, option: Option) -> float:
        """Return the milliseconds of a layer that became an option."""
        return float(self.notebook.once(option_key(name, option), lambda: self.bench.option_ms(name, option)))

    def narrow_ms(self, name: str, *, rows: float, columns: float) -> float:
        """Return the milliseconds of a narrower layer."""
        key = narrow_key(name, rows, columns)
        return float(self.notebook.once(key, lambda: self.bench.narrow_ms(name, rows=rows, columns=columns)))

    def whole(self, masks: Mapping[str, tuple[Option, Pattern | None]]) -> Whole:
        """Return the measured whole, its milliseconds beside those of the model as given that are remembered."""
        key = "whole " + " ".join(f"{name}={option}" for name, (option, _) in sorted(masks.items()))
        found = self.notebook.entries.get(key)
        if found is None:
            whole = self.bench.whole(masks)
            found = _plain(whole)
            if not whole.hurried:  # more time may find it faster
                self.notebook.keep(key, found)
        given_ms = self.given_ms()
        found = {**found, "given_ms": given_ms, "ms": given_ms / found["ratio"], "dense": frozenset(found["dense"])}
        return Whole(**found)


def option_key(name: str, option: Option) -> str:
    """Return the entry of a layer that became an option."""
    return f"option {name} {option}"


def narrow_key(name: str, rows: float, columns: float) -> str:
    """Return the entry of a layer that became narrower."""
    return f"narrow {name} {rows} {columns}"


def _plain(whole: Whole) -> dict[str, Any]:
    return {**asdict(whole), "dense": sorted(whole.dense)}
