"""Weights on disk: a folder of safetensors files, of which single tensors are read, and a folder that is written.

Files are read piece by piece and never mapped into memory, so that what is not in use takes none. What was written
replaces what was read: after a layer is pruned, every later pass sees it so.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparta.errors import FileFormatError, NameNotFoundError, did_you_mean, message
from sparta.files import read_json, reading, write_atomic

__all__ = ["Shards"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_LONGEST_HEADER = 100 * 1024 * 1024


@dataclass(frozen=True)
class _Place:
    """Where a tensor stands."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


class Shards:
    """The tensors of a model in files.

    Parameters
    ----------
    folder
        Has one or more ``*.safetensors`` files.
    output
        Where changed tensors go: a folder that is made, complete after :meth:`finish`.
    """

    def __init__(self, folder: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
        self.folder, self.output = Path(folder), Path(output)
        files = sorted(self.folder.glob("*.safetensors")) if self.folder.is_dir() else []
        if not files:
            raise FileFormatError(message(f"{self.folder} has no *.safetensors file", fix="name a folder of a model"))
        if self.output.resolve() == self.folder.resolve():
            raise FileFormatError(message(f"{self.output} is where the weights are read from", "another folder"))
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileFormatError(message(f"{self.output} cannot be used as a folder: {error}")) from error
        self.places = {name: place for path in files for name, place in _places(path).items()}
        self._written: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        if name not in self.places:
            raise NameNotFoundError(did_you_mean(name, self.places, f"tensor of {self.folder}"))
        place = self.places[name]
        with reading(place.path), place.path.open("rb") as file:
            file.seek(place.start)
            data = bytearray(place.size)
            if file.readinto(data) != place.size:
                raise FileFormatError(message(f"{place.path} is cut short", fix="copy it again"))
        if not place.size:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)

    def write(self, shard: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of one part of the model to a file of its own; they are read from there from now on."""
        from safetensors.torch import save

        path = self.output / f"{shard}.safetensors"
        write_atomic(path, save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, {"format": "pt"}))
        self.places |= _places(path)
        self._written |= dict.fromkeys(tensors, path.name)

    def finish(self) -> None:
        """Copy what was not written, tensor files and others, and write the index that readers look for."""
        left: dict[Path, list[str]] = {}
        for name in self.places.keys() - self._written.keys():
            left.setdefault(self.places[name].path, []).append(name)
        for number, (_, names) in enumerate(sorted(left.items())):
            for part, name in enumerate(sorted(names)):
                self.write(f"rest-{number:05d}-{part:05d}", {name: self.read(name)})
        total = sum(place.size for place in self.places.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self._written.items()))}
        write_atomic(self.output / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
        for path in self.folder.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, self.output / path.name)

    def fingerprint(self) -> str:
        """Return what the files that are read look like from outside: names, sizes and times."""
        files = sorted(self.folder.glob("*.safetensors"))
        return " ".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)


def _places(path: Path) -> dict[str, _Place]:
    """Return where the tensors of one file stand, after checking every number of its header."""
    with reading(path):
        whole = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, whole - 8):
                raise FileFormatError(message(f"{path} is not a safetensors file", fix="copy it again"))
            header = read_json(file.read(length), str(path))
        found: dict[str, _Place] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = _DTYPES.get(entry["dtype"]), tuple(int(size) for size in entry["shape"])
            start, end = (int(offset) for offset in entry["data_offsets"])
            if dtype is None:
                raise FileFormatError(message(f"{path}: {name!r} is {entry['dtype']}", ", ".join(_DTYPES)))
            size = math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or not 0 <= start <= end <= whole - 8 - length or end - start != size:
                raise FileFormatError(message(f"{path}: {name!r} has offsets that do not fit", fix="copy it again"))
            found[name] = _Place(path, dtype, shape, 8 + length + start, size)
    return found
