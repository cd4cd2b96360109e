"""The shipped table: what won on machines of a kind, for common cases, so that untuned use is already good.

One JSON file for each kind of device lies in ``tables/``; `benchmarks/cpu/shipped_table.py` makes it from measurements.
It is a guess from other machines, so it holds clear wins only, every lookup is checked against the present search
space, and whatever is measured here (the tuning store) comes first.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparta.common.tuning import includes
from sparta.errors import FileFormatError, message
from sparta.files import read_json_file, write_atomic
from sparta.specialize.cpu.toolchain import chosen_isa
from sparta.specialize.implement import implements_of
from sparta.specialize.kernel_spec import KernelSpec, operand_bucket
from sparta.specialize.tuning.store import Entry

__all__ = ["CLEAR_WIN", "ShippedEntry", "device_kind", "misfit", "shipped", "table_key", "table_path", "write_table"]

TABLES = Path(__file__).parent / "tables"
CLEAR_WIN = 1.25
"""How many times faster than dense an entry must have been: another machine of the kind may be worse by as much."""
_VERSION = 1


@dataclass(frozen=True)
class ShippedEntry:
    """What won for the kernel specs of one bucket.

    Attributes
    ----------
    key
        The bucket, as :func:`table_key` gives it.
    implement, implement_version, params
        What won; of another version than the installed one it is not used.
    speedup
        How many times faster than dense it was where it was measured.
    """

    key: str
    implement: str
    implement_version: int
    params: Mapping[str, Any]
    speedup: float

    @property
    def config(self) -> dict[str, Any]:
        """The entry as a sample of the nested search space."""
        return {"_name": self.implement, **self.params}


def device_kind(device: str) -> str:
    """Return the kind of a device: the GPU's name, or the best instruction set the CPU kernels have for this one.

    >>> device_kind("cpu").startswith("cpu ")
    True
    """
    return torch.cuda.get_device_name() if device == "cuda" else f"cpu {chosen_isa()}"


def table_key(spec: KernelSpec) -> str:
    """Return the bucket of a spec: as `KernelSpec.bucket`, but all sizes are rounded up to powers of two.

    The epilogue does not count: it costs every candidate the same.

    >>> from sparta.tesa.attribute import TeSA
    >>> table_key(KernelSpec("linear", {"weight": TeSA.dense((700, 700), format="fp32")}))
    'linear weight=1024x1024:fp32'
    """
    operands = [f"{name}={operand_bucket(tesa, coarse=True)}" for name, tesa in sorted(spec.operands.items())]
    attributes = [f"{key}={value}" for key, value in sorted(spec.attributes.items())]
    return " ".join([spec.op, *operands, *attributes])


def table_path(kind: str) -> Path:
    """Return where the table of a kind of device lies, there or not.

    >>> table_path("cpu avx512").name
    'cpu-avx512.json'
    """
    return TABLES / (re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json")


def shipped(spec: KernelSpec) -> ShippedEntry | None:
    """Return what the shipped table has for a spec on this kind of device, or None.

    An entry of an implement that has another version, cannot run the spec, or has no such parameters any more is passed
    over; a damaged table is ignored with a warning.
    """
    entry = _table(table_path(device_kind(spec.device))).get(table_key(spec))
    if entry is None:
        return None
    return entry if entry.implement_version == _version(spec, entry.implement) and not misfit(spec, entry) else None


def misfit(spec: KernelSpec, entry: ShippedEntry | Entry) -> str:
    """Return why what an entry names cannot run a spec here; nothing if it can.

    Entries come from files, so the implement must exist and support the spec, and the parameters must lie in its
    search space.
    """
    implement = next((i for i in implements_of(spec.op) if i.name == entry.implement), None)
    if implement is None:
        return f"there is no implement {entry.implement!r} of {spec.op}"
    answer = implement.answer(spec)
    if not answer:
        return f"{implement.name} cannot run it: {answer.reason}"
    inside = includes(dict(implement.space(spec)), dict(entry.params))
    return "" if inside else f"{implement.name} has no parameters {dict(entry.params)}"[:300]


def _version(spec: KernelSpec, name: str) -> int | None:
    return next((i.version for i in implements_of(spec.op) if i.name == name), None)


def write_table(path: Path, kind: str, source: Mapping[str, Any], entries: Iterable[ShippedEntry]) -> int:
    """Write the table of a kind of device; of several entries in one bucket the slowest stands for it.

    Parameters
    ----------
    source
        Where the entries come from: machine, versions, date.

    Returns
    -------
    int
        How many buckets the table has.
    """
    kept: dict[str, ShippedEntry] = {}
    lost = set()
    for entry in entries:
        if entry.speedup < CLEAR_WIN:
            lost.add(entry.key)  # a bucket in which dense won once is left to dense
        elif entry.key not in kept or entry.speedup < kept[entry.key].speedup:
            kept[entry.key] = entry
    rows = [{**asdict(kept[key]), "params": dict(kept[key].params)} for key in sorted(set(kept) - lost)]
    record = {"version": _VERSION, "kind": kind, "source": dict(source), "entries": rows}
    write_atomic(path, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    _table.cache_clear()
    return len(rows)


@functools.cache
def _table(path: Path) -> dict[str, ShippedEntry]:
    try:
        record = read_json_file(path)
        if record["version"] != _VERSION:
            raise FileFormatError(message(f"version {record['version']!r}", f"{_VERSION}"))
        return {row["key"]: _entry(row) for row in record["entries"]}
    except FileNotFoundError:
        return {}  # nothing was measured on this kind of device
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        warnings.warn(f"the shipped tuning table {path} is damaged and is ignored ({error})", stacklevel=3)
        return {}


def _entry(row: Mapping[str, Any]) -> ShippedEntry:
    entry = ShippedEntry(
        key=str(row["key"]),
        implement=str(row["implement"]),
        implement_version=int(row["implement_version"]),
        params=dict(row["params"]),
        speedup=float(row["speedup"]),
    )
    if not entry.speedup >= CLEAR_WIN:
        raise ValueError(f"{entry.key} is no clear win")
    return entry
