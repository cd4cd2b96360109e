"""Tensors in a file: what lies on a grid of 8 bits is stored in 8 bits with its scales, all else as it is.

Embeddings, and layers that run dense, are plain tensors of a graph; the spec tells which of them were rounded, to int8
or to fp8. They are stored so only where numbers and scales give back every bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparta.errors import FileFormatError, message
from sparta.tesa.attribute import TeSA

__all__ = ["put_tensor", "read_tensors"]

_PLAIN, _SCALES = "tensor/", "scales/"
_NUMBERS = {  # the prefix of numbers in 8 bits, by their dtype and that of the tensor they stand for
    (torch.int8, torch.float32): "integers/",
    (torch.float8_e4m3fn, torch.float32): "fp8/",
    (torch.float8_e4m3fn, torch.bfloat16): "fp8-bf16/",
    (torch.float8_e4m3fn, torch.float16): "fp8-fp16/",
}
_FORMATS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


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
    if known is not None and scales is not None:
        dtype = _FORMATS[str(known.format)]
        steps = value.float() / scales
        numbers = (steps.round().clamp(-128, 127) if dtype == torch.int8 else steps.clamp(-448, 448)).to(dtype)
        if torch.equal((numbers.float() * scales).to(value.dtype), value):
            tensors[f"{_NUMBERS[dtype, value.dtype]}{name}"], tensors[f"{_SCALES}{name}"] = numbers, scales
            return
    tensors[f"{_PLAIN}{name}"] = value


def read_tensors(tensors: Mapping[str, Tensor], where: torch.device) -> dict[str, Tensor]:
    """Return the tensors of a graph by name, on a device, from those of a file."""
    found = {name.removeprefix(_PLAIN): t.to(where) for name, t in tensors.items() if name.startswith(_PLAIN)}
    for (stored, dtype), prefix in _NUMBERS.items():
        for name, numbers in tensors.items():
            if not name.startswith(prefix):
                continue
            plain = name.removeprefix(prefix)
            scales = tensors.get(f"{_SCALES}{plain}")
            if scales is None or numbers.dtype != stored or not _fit(numbers, scales) or plain in found:
                raise FileFormatError(
                    message(f"the numbers of {plain[:100]!r}", "8-bit integers with their scales", "save it again")
                )
            found[plain] = (numbers.to(where).float() * scales.to(where)).to(dtype)
    return found


def _fit(numbers: Tensor, scales: Tensor) -> bool:
    sizes = zip(scales.shape, numbers.shape, strict=False)
    alike = scales.dim() == numbers.dim() and all(size in (1, other) for size, other in sizes)
    return alike and scales.dtype == torch.float32


def _scales(value: Tensor, known: TeSA) -> Tensor | None:
    """Return the scales of a tensor that the spec has on a grid of 8 bits, one per channel along one of its dims."""
    dtype = _FORMATS.get(str(known.format))
    usable = (dtype, value.dtype) in _NUMBERS and value.dim() >= 2 and tuple(value.shape) == known.shape
    if not usable or bool((known.zero_point.cells != 0).any()):
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
