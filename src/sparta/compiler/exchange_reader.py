"""Read an exchange file with nothing but JSON and safetensors: no torch, no part of this package.

This file may be copied into another project; it is how a compiler that knows nothing of sparta gets at a sparse model's
graph, kernels and packed weights. The one idea to know: an exchange file *is* a safetensors file, whose metadata holds
the JSON.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["read_exchange"]

_NEWEST = 1


def read_exchange(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON of an exchange file, and its tensors as numpy arrays by name.

    The JSON has ``graph`` (ATen calls, and calls of kernels by name), ``subgraphs`` (a request and a response each),
    ``sources`` (the kernels' files by name), ``signature`` and ``provenance``.
    """
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        if metadata.get("sparta") != "exchange":
            raise ValueError(f"{path} is not a sparta exchange file")
        if int(metadata["version"]) > _NEWEST:
            raise ValueError(f"{path} has version {metadata['version']}; this reader knows up to {_NEWEST}")
        return json.loads(metadata["payload"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
