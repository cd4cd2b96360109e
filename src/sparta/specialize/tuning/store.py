"""The tuning store: what was measured once is not measured again, by this program or the next.

One small JSON file per entry, keyed by device, kernel-spec bucket and the versions of all implements of the operation,
in a folder of the user's own. Entries are written atomically and never edited in place, so any number of processes may
read and write the store at once; a damaged entry is dropped with a warning and measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparta.errors import FileFormatError, message
from sparta.files import private_folder, read_json_file, write_atomic
from sparta.specialize.implement import implements_of
from sparta.specialize.kernel_spec import KernelSpec

__all__ = ["Entry", "TuningStore", "device_name"]

_VERSION = 1
_LONGEST = 1e12  # milliseconds


@dataclass(frozen=True)
class Entry:
    """The outcome of tuning one kernel spec.

    Attributes
    ----------
    implement, params
        What won.
    milliseconds, dense_milliseconds
        Medians of the winner and of dense, measured interleaved.
    size
        The product of the dynamic sizes that were measured; 0 where that is not known.
    """

    implement: str
    params: Mapping[str, Any]
    milliseconds: float
    dense_milliseconds: float
    size: int = 0

    @property
    def speedup(self) -> float:
        """How many times faster than dense the winner was."""
        return self.dense_milliseconds / self.milliseconds

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return {**asdict(self), "params": dict(self.params)}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Entry:
        """Return the entry that :meth:`to_dict` wrote; raises TypeError, KeyError or ValueError for anything else."""
        implement, params = fields["implement"], fields["params"]
        if not isinstance(implement, str) or not isinstance(params, Mapping):
            raise TypeError("an implement is a text and its parameters are an object")
        times = fields["milliseconds"], fields["dense_milliseconds"]
        for time in times:
            if isinstance(time, bool) or not isinstance(time, int | float) or not 0 < time < _LONGEST:
                raise ValueError("times must be positive and finite")
        size = fields.get("size", 0)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError("a size is a count")
        return Entry(implement, dict(params), float(times[0]), float(times[1]), size)


class TuningStore:
    """Tuning results on disk.

    Parameters
    ----------
    folder
        Where the entries are; by default ``tuning`` in the user's cache: ``$SPARTA_CACHE``, else ``~/.cache/sparta`` or
        where the system keeps caches.

    Examples
    --------
    >>> import tempfile
    >>> store = TuningStore(tempfile.mkdtemp())
    >>> len(store)
    0
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._given = None if folder is None else Path(folder)

    @property
    def folder(self) -> Path:
        """The folder of the store; made on first use."""
        return private_folder("tuning") if self._given is None else self._given

    def get(self, spec: KernelSpec) -> Entry | None:
        """Return the stored result for `spec` on this device, or None."""
        path = self._path(spec)
        try:
            record = read_json_file(path)
            if record["key"] == key_of(spec) and record["version"] == _VERSION:
                return Entry.from_dict(record["entry"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"the tuning entry {path} is damaged and is dropped ({error})", stacklevel=2)
            path.unlink(missing_ok=True)
        return None

    def put(self, spec: KernelSpec, entry: Entry) -> None:
        """Store the result for `spec` on this device."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path(spec), _record(key_of(spec), entry.to_dict()))

    def __len__(self) -> int:
        return len(list(self.folder.glob("*.json"))) if self.folder.is_dir() else 0

    def records(self) -> list[dict[str, Any]]:
        """Return all entries with their keys, as JSON values; damaged ones are left out with a warning."""
        records = []
        for file in sorted(self.folder.glob("*.json")):
            try:
                record = read_json_file(file)
                Entry.from_dict(record["entry"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                warnings.warn(f"the tuning entry {file} is damaged and is left out ({error})", stacklevel=2)
                continue
            records.append(record)
        return records

    def clear(self) -> int:
        """Forget all entries; returns how many there were."""
        files = list(self.folder.glob("*.json"))
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write all entries to one JSON file, to share; returns how many."""
        records = self.records()
        write_atomic(path, (json.dumps({"version": _VERSION, "entries": records}, indent=1) + "\n").encode())
        return len(records)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Take the entries of an exported file into this store, replacing those it has; returns how many.

        What they name is checked when a kernel spec asks for them: an implement that does not exist, cannot run the
        spec, or has no such parameters is passed over.
        """
        try:
            content = read_json_file(path)
            if content["version"] != _VERSION:
                raise FileFormatError(
                    message(f"{os.fspath(path)} has version {content['version']!r}", f"{_VERSION}", "export it again")
                )
            checked = [(_key(record["key"]), Entry.from_dict(record["entry"])) for record in content["entries"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FileFormatError):
                raise
            raise FileFormatError(
                message(f"{os.fspath(path)} is not an exported tuning store ({error})", fix="export it again")
            ) from error
        self.folder.mkdir(parents=True, exist_ok=True)
        for key, entry in checked:
            write_atomic(self.folder / _file_name(key), _record(key, entry.to_dict()))
        return len(checked)

    def _path(self, spec: KernelSpec) -> Path:
        return self.folder / _file_name(key_of(spec))


def device_name(device: str) -> str:
    """Return what identifies a kind of device: the GPU's name, or the CPU's name, generation and number of threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    from sparta.measure.machine import probe_cpu

    cpu = probe_cpu()
    return ", ".join(
        part for part in (cpu.model or platform.machine(), cpu.family, f"{torch.get_num_threads()} threads") if part
    )


def key_of(spec: KernelSpec) -> str:
    """Return the readable key under which results for `spec` are stored."""
    versions = ",".join(sorted(f"{i.name}.{i.version}" for i in implements_of(spec.op)))
    return f"{device_name(spec.device)} | {spec.bucket} | {versions}"


def _key(given: object) -> str:
    if not isinstance(given, str) or not given.isprintable():
        raise TypeError("a key is a text")
    return given


def _file_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32] + ".json"


def _record(key: str, entry: Mapping[str, Any]) -> bytes:
    return (json.dumps({"version": _VERSION, "key": key, "entry": entry}, indent=1) + "\n").encode()
