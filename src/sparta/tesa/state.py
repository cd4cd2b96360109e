"""A TeSA as tensors and JSON, for files: small, and checked when it comes back.

Grids of one cell go into the JSON; states are stored as bits (one plane for live, one for dead where there are any).
:func:`from_state` trusts nothing: a damaged file becomes an error that says what is wrong and never a TeSA that is
subtly another, and no grid has more cells than the file holds.
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
from sparta.files import Budget
from sparta.tesa.algebra import CONSTANT, DEAD, LIVE
from sparta.tesa.attribute import TeSA
from sparta.tesa.bits import FORMATS, bit_format
from sparta.tesa.grid import Grid, cells_shape

__all__ = ["decode_state", "encode_state", "from_state", "to_state"]

_FLOATS = ("value", "scale", "zero_point")
_DTYPES = {"uint8": np.uint8, "float64": np.float64}
_LARGEST = 2**60  # elements: sums of them still fit a 64-bit number


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


def from_state(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], budget: Budget | None = None) -> TeSA:
    """Return the TeSA that :func:`to_state` was given; a :class:`FileFormatError` says what does not fit.

    Parameters
    ----------
    budget
        Of the file that it comes from: what would take more memory than that when it is looked at is refused.
    """
    try:
        shape = _sizes(meta["shape"], 0, [_LARGEST] * len(meta["shape"]))
        if math.prod(shape) > _LARGEST:
            raise ValueRangeError(message(f"the shape {shape}", f"{_LARGEST} elements at most"))
        limits = [max(1, size) for size in shape]
        blocks = {name: _sizes(meta[name]["block"], 1, limits) for name in ("state", "code", *_FLOATS)}
        live = _unpacked(tensors["live"], cells_shape(shape, blocks["state"]))
        cells = torch.where(live, LIVE, CONSTANT).to(torch.uint8)
        if "dead" in tensors:
            cells[_unpacked(tensors["dead"], tuple(cells.shape)) & ~live] = DEAD
        tesa = TeSA(
            state=Grid(shape, blocks["state"], cells),
            code=_codes(tensors, meta, shape, blocks["code"]),
            dynamic=frozenset(_sizes(meta["dynamic"], 0, [len(shape)] * len(meta["dynamic"]))),
            **{name: _floats(tensors, meta, shape, name, blocks[name]) for name in _FLOATS},
        )
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, FileFormatError):
            raise
        reason = str(error) if isinstance(error, SpartaError) else f"{type(error).__name__}: {error}"
        raise FileFormatError(
            message(f"a stored TeSA does not fit together ({reason[:500]})", fix="save it again")
        ) from error
    if budget is not None:
        _check_costs(tesa, budget)
    return tesa


def _sizes(given: Any, least: int, most: list[int]) -> tuple[int, ...]:
    """Return the whole numbers that a file gives, each checked against its limits."""
    if not isinstance(given, list) or len(given) != len(most):
        raise ValueRangeError(message(f"the sizes {given!r}"[:200], f"a list of {len(most)} whole numbers"))
    for size, limit in zip(given, most, strict=True):
        if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= limit:
            raise ValueRangeError(message(f"the size {size!r}"[:200], f"a whole number from {least} to {limit}"))
    return tuple(given)


def _check_costs(tesa: TeSA, budget: Budget) -> None:
    """Raise where telling the pattern or the bits would take more memory than the file may."""
    state, code = tesa.state, tesa.code
    varying = [d for d in range(tesa.ndim) if state.varies_along(d)]
    if len(varying) > 2 or (varying and math.prod(state.block[d] for d in varying) < 4):
        budget.check(tesa.shape, 1, "the mask of a TeSA")
    if not code.is_uniform:
        pairs = zip(tesa.shape, state.cells.shape, code.cells.shape, strict=True)
        budget.check([min(size, mine + other) for size, mine, other in pairs], 2, "the formats of a TeSA")


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
            name: torch.from_numpy(
                np.frombuffer(b64decode(text, validate=True), dtype=_DTYPES[dtype]).reshape(shape).copy()
            )
            for name, (dtype, shape, text) in state["tensors"].items()
        }
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
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
    counts = _one_cell(shape, block)
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
        return Grid(shape, block, torch.full(_one_cell(shape, block), value, dtype=torch.float64))
    return Grid(shape, block, tensors[name].to(torch.float64))


def _one_cell(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the cells where the file gives one value for all: there is one, or none."""
    counts = cells_shape(shape, block)
    if math.prod(counts) > 1:
        raise ValueRangeError(message(f"one value for {math.prod(counts)} cells", "one cell"))
    return counts


def _packed(flags: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(flags.contiguous().numpy().reshape(-1), bitorder="little"))


def _unpacked(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if bits.dtype != torch.uint8 or bits.numel() != -(-count // 8):
        raise ValueRangeError(message(f"{bits.numel()} bytes of flags for {count} cells", f"{-(-count // 8)} bytes"))
    flags = np.unpackbits(bits.numpy().reshape(-1), count=count, bitorder="little").astype(bool)
    return torch.from_numpy(flags).reshape(shape)
