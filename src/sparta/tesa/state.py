"""A TeSA as tensors and JSON, for files: small, and checked when it comes back.

Grids of one cell go into the JSON; states are stored as bits (one plane for live, one for dead where there are any).
The one idea to know: :func:`from_state` trusts nothing, so a damaged file becomes an error that says what is wrong
and never a TeSA that is subtly another.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparta.errors import FileFormatError, SpartaError, ValueRangeError, message
from sparta.tesa.algebra import CONSTANT, DEAD, LIVE
from sparta.tesa.attribute import TeSA
from sparta.tesa.bits import FORMATS, bit_format
from sparta.tesa.grid import Grid, cells_shape

__all__ = ["decode_state", "encode_state", "from_state", "to_state"]

_FLOATS = ("value", "scale", "zero_point")


def to_state(tesa: TeSA) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the JSON-able rest that :func:`from_state` needs to make an equal TeSA."""
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {"shape": list(tesa.shape), "dynamic": sorted(tesa.dynamic)}
    state, code = tesa.state.canonical(), tesa.code.canonical()
    meta["state"] = {"block": list(state.block)}
    tensors["live"] = _packed(state.cells == LIVE)
    if bool((state.cells == DEAD).any()):
        tensors["dead"] = _packed(state.cells == DEAD)

    # Formats by name, so that a file outlives any change of their order.
    used = [f.code for f in FORMATS if bool((code.cells == f.code).any())]
    meta["code"] = {"block": list(code.block), "formats": [FORMATS[c].name for c in used]}
    if len(used) > 1:
        position = torch.zeros(len(FORMATS), dtype=torch.uint8)
        position[used] = torch.arange(len(used), dtype=torch.uint8)
        tensors["code"] = position[code.cells.long()]
    for name in _FLOATS:
        grid: Grid = getattr(tesa, name).canonical()
        meta[name] = {"block": list(grid.block)}
        if grid.is_uniform:
            meta[name]["uniform"] = float(grid.value()).hex() if grid.cells.numel() else "0x0p+0"
        else:
            tensors[name] = grid.cells.contiguous()
    return tensors, meta


def from_state(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> TeSA:
    """Return the TeSA that :func:`to_state` was given; a :class:`FileFormatError` says what does not fit."""
    try:
        shape = tuple(int(s) for s in meta["shape"])
        blocks = {name: tuple(int(b) for b in meta[name]["block"]) for name in ("state", "code", *_FLOATS)}
        live = _unpacked(tensors["live"], cells_shape(shape, blocks["state"]))
        cells = torch.where(live, LIVE, CONSTANT).to(torch.uint8)
        if "dead" in tensors:
            cells[_unpacked(tensors["dead"], tuple(cells.shape)) & ~live] = DEAD
        return TeSA(
            state=Grid(shape, blocks["state"], cells),
            code=_codes(tensors, meta, shape, blocks["code"]),
            dynamic=frozenset(int(d) for d in meta["dynamic"]),
            **{name: _floats(tensors, meta, shape, name, blocks[name]) for name in _FLOATS},
        )
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        if isinstance(error, FileFormatError):
            raise
        reason = str(error) if isinstance(error, SpartaError) else f"{type(error).__name__}: {error}"
        raise FileFormatError(
            message(f"a stored TeSA does not fit together ({reason})", fix="save it again")
        ) from error


def encode_state(tesa: TeSA) -> dict[str, Any]:
    """Return a TeSA as JSON values alone: its tensors as text in base 64."""
    tensors, meta = to_state(tesa)
    arrays = {name: [str(t.numpy().dtype), list(t.shape), _text(t)] for name, t in tensors.items()}
    return {**meta, "tensors": arrays}


def decode_state(state: Mapping[str, Any]) -> TeSA:
    """Return the TeSA that :func:`encode_state` was given.

    >>> decode_state(encode_state(TeSA.dense((2, 3)))) == TeSA.dense((2, 3))
    True
    """
    try:
        tensors = {
            name: torch.from_numpy(np.frombuffer(b64decode(text, validate=True), dtype=dtype).reshape(shape).copy())
            for name, (dtype, shape, text) in state["tensors"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(message(f"a stored TeSA cannot be read ({error})", fix="write it again")) from error
    return from_state(tensors, state)


def _text(tensor: Tensor) -> str:
    return b64encode(tensor.contiguous().numpy().tobytes()).decode()


def _codes(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], shape: tuple[int, ...], block: tuple[int, ...]
) -> Grid:
    formats = [bit_format(name).code for name in meta["code"]["formats"]]
    if len(formats) > 1:
        return Grid(shape, block, torch.tensor(formats, dtype=torch.uint8)[tensors["code"].long()])
    # A tensor without elements has no format; any other has at least one, or this raises.
    counts = cells_shape(shape, block)
    return Grid(shape, block, torch.full(counts, formats[0] if math.prod(counts) else 0, dtype=torch.uint8))


def _floats(
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    shape: tuple[int, ...],
    name: str,
    block: tuple[int, ...],
) -> Grid:
    if "uniform" in meta[name]:
        value = float.fromhex(meta[name]["uniform"])
        return Grid(shape, block, torch.full(cells_shape(shape, block), value, dtype=torch.float64))
    return Grid(shape, block, tensors[name].to(torch.float64))


def _packed(flags: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(flags.contiguous().numpy().reshape(-1), bitorder="little"))


def _unpacked(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if bits.dtype != torch.uint8 or bits.numel() != -(-count // 8):
        raise ValueRangeError(message(f"{bits.numel()} bytes of flags for {count} cells", f"{-(-count // 8)} bytes"))
    flags = np.unpackbits(bits.numpy().reshape(-1), count=count, bitorder="little").astype(bool)
    return torch.from_numpy(flags).reshape(shape)
