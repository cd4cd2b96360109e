"""A manager's state as a file: checked, written whole, never pickled.

`torch.save` of ``manager.state_dict()`` inside a script's own checkpoint does as well; this is for those who keep it
apart. Tensors go to safetensors, everything else to JSON, with the tensors' places marked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparta.errors import FileFormatError, message
from sparta.files import load_tensors, reading, save_tensors

__all__ = ["load_state", "save_state"]

_KIND, _VERSION, _MARK = "create-state", 1, "__tensor__"


def save_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a state: nested dictionaries and lists of tensors and plain values.

    Examples
    --------
    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state(f"{folder}/state", {"step": 3, "masks": {"fc": torch.ones(2)}})
    ...     load_state(f"{folder}/state")
    {'masks': {'fc': tensor([1., 1.])}, 'step': 3}
    """
    tensors: dict[str, Tensor] = {}
    save_tensors(path, _KIND, _VERSION, tensors, _without_tensors(state, "", tensors))


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what :func:`save_state` wrote."""
    tensors, plain = load_tensors(path, _KIND, _VERSION)
    with reading(path):
        state: dict[str, Any] = _with_tensors(plain, tensors)
        if not isinstance(state, dict):
            raise FileFormatError(message("one tensor for a state", "an object", "save it again"))
        return state


def _without_tensors(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[place] = value.clone()  # safetensors refuses tensors that share memory
        return {_MARK: place}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise FileFormatError(message(f"a state has the key {key!r} at {place or 'its top'}", "texts as keys"))
        return {key: _without_tensors(inner, f"{place}/{key}", tensors) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(inner, f"{place}/{index}", tensors) for index, inner in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_MARK}:
            return tensors[value[_MARK]]
        return {key: _with_tensors(inner, tensors) for key, inner in value.items()}
    return [_with_tensors(inner, tensors) for inner in value] if isinstance(value, list) else value
