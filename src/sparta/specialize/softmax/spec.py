"""The operation ``softmax``: ``softmax(x / temperature)`` over the kept elements of each row, 0 elsewhere.

This file holds its conventions, plain dense, and ``blocks``, which looks at kept tiles only. Pruned elements take no
part at all, not even in the maximum that guards against overflow, and a row with nothing kept is 0.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparta.common.tuning import TunableItemCfg
from sparta.errors import ShapeError, message
from sparta.specialize.blocks.batches import Batches, broadcast
from sparta.specialize.blocks.block_rows import tile_candidates, tile_guess
from sparta.specialize.blocks.tiled_matrix import TiledMatrix, block_places, to_values, to_whole
from sparta.specialize.implement import Cause, DenseImplement, Implement, Kernel, Params, Support, present
from sparta.specialize.kernel_spec import KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = [
    "BlocksSoftmax",
    "DenseSoftmax",
    "DenseSoftmaxKernel",
    "SoftmaxKernel",
    "check_softmax",
    "kept_softmax",
    "softmax_spec",
]


class SoftmaxKernel(Kernel):
    """A built kernel of ``softmax``."""

    @abstractmethod
    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the index of the mask (..., rows, cols)."""

    @abstractmethod
    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return the softmax for the inputs x (whole or compressed) and the temperature, a number as a tensor."""


def softmax_spec(
    mask: Tensor, x: Tensor, *, block: tuple[int, int], compressed: bool, backward: bool = False
) -> KernelSpec:
    """Return the kernel spec of a masked softmax of x (..., rows, cols), or of its compressed values.

    >>> spec = softmax_spec(torch.eye(4) > 0, torch.zeros(2, 4, 4), block=(1, 1), compressed=False)
    >>> str(spec["x"])
    'TeSA 2*×4×4, dense, density 1, fp32'
    """
    dynamic = range(x.dim() - (1 if compressed else 2))
    return KernelSpec(
        "softmax",
        {"x": TeSA.dense(x.shape, format=x.dtype, dynamic=dynamic), "mask": TeSA.from_mask(mask)},
        attributes={"block": list(block), "compressed": compressed, "backward": backward},
        device=x.device.type,
    )


def check_softmax(mask_shape: Sequence[int], x: Tensor, values: int | None) -> tuple[int, ...]:
    """Return the batch dims of the result; `values` is the width of compressed values, None for whole matrices.

    >>> check_softmax((3, 8, 8), torch.zeros(2, 3, 8, 8), None)
    (2, 3)
    """
    last = tuple(mask_shape[-2:]) if values is None else (values,)
    if x.dim() < len(last) or tuple(x.shape[-len(last) :]) != last:
        allowed = "(..., " + ", ".join(map(str, last)) + ")" + ("" if values is None else ", compressed values")
        raise ShapeError(message(f"x has shape {tuple(x.shape)}", allowed))
    return broadcast(x=tuple(x.shape[: -len(last)]), mask=tuple(mask_shape[:-2]))


def kept_softmax(x: Tensor, kept: Tensor | None, *, covered: bool = False) -> Tensor:
    """Return the softmax along the last dim over the kept elements; 0 elsewhere and in rows with nothing kept.

    `covered` promises that every row keeps something; None keeps all.

    >>> kept_softmax(torch.tensor([[1.0, 1.0, math.nan]]), torch.tensor([[True, True, False]])).tolist()
    [[0.5, 0.5, 0.0]]
    """
    if kept is None:
        return x.softmax(-1)
    y = torch.where(kept, x, -math.inf).softmax(-1)
    return y if covered else torch.where(kept, y, 0.0)


class DenseSoftmaxKernel(SoftmaxKernel):
    """PyTorch's own softmax with -inf where pruned."""

    def __init__(self, block: tuple[int, int], *, compressed: bool) -> None:
        self._block, self._compressed = block, compressed

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the mask and, for compressed values, the places of their blocks."""
        return (operand, block_places(operand, self._block)) if self._compressed else (operand,)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return the softmax of x."""
        x, temperature = present(*inputs)
        if self._compressed:
            x = to_whole(x, packed[1], packed[0].shape[-2:], self._block)
        y = kept_softmax(x / temperature, packed[0])
        return to_values(y, packed[1], self._block) if self._compressed else y


class DenseSoftmax(DenseImplement):
    """``torch.softmax`` with -inf where pruned."""

    op = "softmax"

    def build(self, spec: KernelSpec, params: Params) -> SoftmaxKernel:
        """Return the dense kernel."""
        del params
        return DenseSoftmaxKernel(_block(spec), compressed=spec.attributes["compressed"])


class _BlocksKernel(SoftmaxKernel):
    """Softmax over rows of kept tiles: a row of tiles lies side by side, so it is the softmax of its last dim."""

    def __init__(self, spec: KernelSpec, tile: tuple[int, int]) -> None:
        self._compressed = spec.attributes["compressed"]
        self._block = _block(spec)
        self._matrix = TiledMatrix(spec["mask"].mask(), self._block if self._compressed else None, tile)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return self._matrix.tensors(operand.device)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, temperature = present(*inputs)
        matrix = self._matrix
        values = matrix.kept * math.prod(self._block) if self._compressed else None
        lead = check_softmax((*matrix.mask_lead, *matrix.shape), x, values)
        batches = Batches(lead, matrix.mask_lead)
        insides = matrix.rows.insides(packed[1:])
        bands = matrix.bands(packed, x, batches)
        return matrix.stored(
            packed,
            [kept_softmax(band / temperature, inside) for band, inside in zip(bands, insides, strict=True)],
            batches,
        )


class BlocksSoftmax(Implement):
    """Softmax over the kept tiles, in plain PyTorch, on any device."""

    name = "blocks"
    op = "softmax"

    def supports(self, spec: KernelSpec) -> Support:
        """Any mask that prunes something."""
        if spec["mask"].density == 1.0:
            return Support.no("its mask prunes nothing", Cause.PATTERN)
        return Support.yes("softmax over kept tiles")

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the tiles to try."""
        return {"tile": TunableItemCfg("choice", _value=tile_candidates(spec["mask"], _block(spec)))}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the tile that computes little in large pieces."""
        return {"tile": tile_guess(spec["mask"], _block(spec))}

    def build(self, spec: KernelSpec, params: Params) -> SoftmaxKernel:
        """Lay the tiles out."""
        h, w = params["tile"]
        return _BlocksKernel(spec, (h, w))


def _block(spec: KernelSpec) -> tuple[int, int]:
    h, w = spec.attributes["block"]
    return h, w
