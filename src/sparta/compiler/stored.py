"""Tensors in a file: what lies on an int8 grid is stored as integers with their scales, all else as it is.

Embeddings, and layers that run dense, are plain tensors of a graph; the spec tells which of them were rounded. They are
stored so only where integers and scales give back every bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparta.errors import FileFormatError, message
from sparta.tesa.attribute import TeSA

__all__ = ["put_tensor", "read_tensors"]

_PLAIN, _INTEGERS, _SCALES = "tensor/", "integers/", "scales/"


def put_tensor(tensors: dict[str, Tensor], name: str, value: Tensor, known: TeSA | None) -> None:
    """Put a tensor of a graph among those of a file.

    Parameters
    ----------
    known
        What the spec says of it, if anything.

    Examples
    --------
    >>> scale = torch.tensor([0.5, 0.25])
    >>> file = {}
    >>> put_tensor(file, "e", torch.tensor([[1.0], [0.5]]), TeSA.dense((2, 1)).with_format("int8", scale=scale))
    >>> {key: value.tolist() for key, value in file.items()}
    {'integers/e': [[2], [2]], 'scales/e': [[0.5], [0.25]]}
    """
    scales = None if known is None else _scales(value, known)
    if scales is not None:
        integers = (value / scales).round().clamp(-128, 127).to(torch.int8)
        if torch.equal(integers.float() * scales, value):
            tensors[f"{_INTEGERS}{name}"], tensors[f"{_SCALES}{name}"] = integers, scales
            return
    tensors[f"{_PLAIN}{name}"] = value


def read_tensors(tensors: Mapping[str, Tensor], where: torch.device) -> dict[str, Tensor]:
    """Return the tensors of a graph by name, on a device, from those of a file."""
    found = {name.removeprefix(_PLAIN): t.to(where) for name, t in tensors.items() if name.startswith(_PLAIN)}
    for name, integers in tensors.items():
        if not name.startswith(_INTEGERS):
            continue
        plain = name.removeprefix(_INTEGERS)
        scales = tensors.get(f"{_SCALES}{plain}")
        if scales is None or not _fit(integers, scales) or plain in found:
            raise FileFormatError(
                message(f"the integers of {plain[:100]!r}", "8-bit integers with their scales", "save it again")
            )
        found[plain] = integers.to(where).float() * scales.to(where)
    return found


def _fit(integers: Tensor, scales: Tensor) -> bool:
    sizes = zip(scales.shape, integers.shape, strict=False)
    alike = scales.dim() == integers.dim() and all(size in (1, other) for size, other in sizes)
    return alike and integers.dtype == torch.int8 and scales.dtype == torch.float32


def _scales(value: Tensor, known: TeSA) -> Tensor | None:
    """Return the scales of a tensor that the spec has on an int8 grid, one per channel along one of its dims."""
    usable = value.dtype == torch.float32 and value.dim() >= 2 and tuple(value.shape) == known.shape
    if not usable or str(known.format) != "int8" or bool((known.zero_point.cells != 0).any()):
        return None
    scales = known.scale.dense().to(value.device, torch.float32)
    if not bool(scales.isfinite().all()):
        return None
    for axis in range(value.dim()):
        others = [dim for dim in range(value.dim()) if dim != axis]
        first = scales.amax(others, keepdim=True)
        if torch.equal(first.expand_as(scales), scales):
            return first.contiguous()
    return None
