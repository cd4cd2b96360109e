"""Read an exchange file with nothing but JSON and safetensors: no torch, no part of this package.

This file may be copied into another project; it is how a compiler that knows nothing of sparta gets at a sparse model's
graph, kernels and packed weights. An exchange file *is* a safetensors file, whose metadata holds the JSON and a SHA-256
over everything else. Whatever is wrong with a file is a ValueError that names it.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

__all__ = ["read_exchange"]

_NEWEST = 1
_DEEPEST = 100


def read_exchange(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON of an exchange file, and its tensors as numpy arrays by name.

    The JSON has ``graph`` (ATen calls, and calls of kernels by name), ``subgraphs`` (a request and a response each),
    ``sources`` (the kernels' files by name), ``signature`` and ``provenance``.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    with open(path, "rb") as file:  # noqa: PTH123 - plain Python for other projects
        data = file.read()
    try:
        metadata = _checked(data, str(path))
        payload = _json(metadata["payload"], str(path))
        if not isinstance(payload, dict):
            raise ValueError(f"{path} holds {type(payload).__name__}, not an object")  # noqa: TRY004 - as all others
        return payload, load(data)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        SafetensorError,
        TypeError,
    ) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _checked(data: bytes, path: str) -> dict[str, Any]:
    """Return the metadata of a file whose kind, version and checksum are right."""
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= len(data) - 8:
        raise ValueError(f"{path} is truncated or not a safetensors file")
    header = _json(data[8 : 8 + size], path)
    metadata: dict[str, Any] = header.get("__metadata__", {})
    if metadata.get("sparta") != "exchange":
        raise ValueError(f"{path} is not a sparta exchange file")
    version = str(metadata.get("version"))
    if not re.fullmatch("[0-9]{1,9}", version) or int(version) > _NEWEST:
        raise ValueError(f"{path} has version {version!r}; this reader knows up to {_NEWEST}")
    written = metadata.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    digest.update(memoryview(data)[8 + size :])
    if written != digest.hexdigest():
        raise ValueError(f"{path} is damaged or was edited: its checksum does not match")
    return metadata


def _json(text: str | bytes, path: str) -> Any:
    """Return what a JSON text holds, unless it is nested very deeply."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} has damaged JSON ({error})") from error
    level = [found]
    for _ in range(_DEEPEST):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [item for items in inner for item in items]
        if not level:
            return found
    raise ValueError(f"{path} has JSON that is nested too deeply")
