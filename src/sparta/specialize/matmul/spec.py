"""The operation ``batch_matmul``: ``C = op(A) op(B) + bias`` where one of A, B and C is sparse by a fixed mask.

This file holds its conventions, plain dense, and ``blocks``, which multiplies kept tiles only. The sparse matrix may
come and go *compressed*, as the flat values ``(..., kept * h * w)`` of the kept blocks of one block index, the same for
every implement (see :mod:`sparta.specialize.blocks.tiled_matrix`).
"""

# ruff: noqa: N803, N806, N815 -- A, B and C are the operands' names

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.common.tuning import TunableItemCfg
from sparta.errors import ShapeError, message
from sparta.specialize.blocks.batches import Batches, broadcast
from sparta.specialize.blocks.block_rows import tile_candidates, tile_guess
from sparta.specialize.blocks.tiled_matrix import TiledMatrix, block_places, to_values, to_whole
from sparta.specialize.implement import Cause, DenseImplement, Implement, Kernel, Params, Support, present
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["BlocksMatmul", "DenseMatmul", "DenseMatmulKernel", "MatmulKernel", "Product"]

_SPARSE = {"sdd": "A", "dsd": "B", "dds": "C"}


@dataclass(frozen=True)
class Product:
    """Which product it is.

    Attributes
    ----------
    mode
        ``sdd``, ``dsd`` or ``dds``: which of A, B, C is sparse, in this order.
    transpose_A, transpose_B
        Whether the last two dims of an operand are swapped before the product.
    compressed
        Whether the sparse matrix is passed or returned as the values of its kept blocks.
    block
        (h, w) of those blocks.
    """

    mode: str
    transpose_A: bool = False
    transpose_B: bool = False
    compressed: bool = False
    block: tuple[int, int] = (1, 1)

    @property
    def sparse(self) -> str:
        """The name of the sparse matrix: ``"A"``, ``"B"`` or ``"C"``."""
        return _SPARSE[self.mode]

    @staticmethod
    def of(spec: KernelSpec) -> Product:
        """Return the product that a kernel spec describes."""
        fields = {name: spec.attributes[name] for name in ("mode", "transpose_A", "transpose_B", "compressed")}
        return Product(**fields, block=(spec.attributes["block"][0], spec.attributes["block"][1]))

    def spec(self, mask: Tensor, A: Tensor, B: Tensor, *, bias: bool = False, backward: bool = False) -> KernelSpec:
        """Return the kernel spec for these operands; leading dims are dynamic, and so is the free dim of each."""
        operands = {name: TeSA.dense(x.shape, format=x.dtype) for name, x in (("A", A), ("B", B))}
        operands = {name: tesa.with_dynamic(*range(tesa.ndim - 2)) for name, tesa in operands.items()}
        operands[self.sparse] = TeSA.from_mask(mask, format=A.dtype)
        attributes = {**asdict(self), "block": list(self.block), "backward": backward}
        return KernelSpec("batch_matmul", operands, Epilogue(bias=bias), attributes, A.device.type)

    def batch(self, mask_shape: tuple[int, ...], A: Tensor, B: Tensor, kept: int) -> tuple[int, ...]:
        """Return the batch dims of the result; raises when the operands do not fit each other or the mask."""
        shapes, leads = {}, {"mask": mask_shape[:-2]}
        for name, x, transposed in (("A", A, self.transpose_A), ("B", B, self.transpose_B)):
            if name == self.sparse and self.compressed:
                width = kept * self.block[0] * self.block[1]
                if x.dim() < 1 or x.shape[-1] != width:
                    allowed = f"(..., {width}): {kept} kept blocks of {self.block[0]} x {self.block[1]}"
                    raise ShapeError(message(f"{name} has shape {tuple(x.shape)}", allowed, "use indexes.convert"))
                shape, leads[name] = mask_shape[-2:], tuple(x.shape[:-1])
            else:
                if x.dim() < 2 or (name == self.sparse and tuple(x.shape[-2:]) != mask_shape[-2:]):
                    last = mask_shape[-2:] if name == self.sparse else ("rows", "cols")
                    allowed = f"(..., {last[0]}, {last[1]})"
                    raise ShapeError(message(f"{name} has shape {tuple(x.shape)}", allowed))
                shape, leads[name] = tuple(x.shape[-2:]), tuple(x.shape[:-2])
            shapes[name] = shape[::-1] if transposed else shape
        (M, K), (K2, N) = shapes["A"], shapes["B"]
        if K != K2 or (self.sparse == "C" and mask_shape[-2:] != (M, N)):
            given = f"a product of ({M}, {K}) and ({K2}, {N}), after transposition"
            C = f" into ({mask_shape[-2]}, {mask_shape[-1]})" if self.sparse == "C" else ""
            raise ShapeError(message(given, f"(M, K) and (K, N){C}", "check transpose_A and transpose_B"))
        return broadcast(**leads)


class MatmulKernel(Kernel):
    """A built kernel of ``batch_matmul``."""

    @abstractmethod
    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the index of the mask (..., rows, cols), as the sparse matrix is stored."""

    @abstractmethod
    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return C for the inputs A and B, each dense or compressed, and a bias (N,) if one is passed."""


class DenseMatmulKernel(MatmulKernel):
    """PyTorch's own product of the masked matrices."""

    def __init__(self, product: Product) -> None:
        self._product = product

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the mask and, for compressed values, the places of their blocks."""
        return (operand, block_places(operand, self._product.block)) if self._product.compressed else (operand,)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return C for A, B and perhaps a bias."""
        A, B, bias = _operands(inputs)
        product, mask = self._product, packed[0]
        if product.sparse != "C":
            sparse = A if product.sparse == "A" else B
            if product.compressed:
                sparse = to_whole(sparse, packed[1], mask.shape[-2:], product.block)
            sparse = torch.where(mask, sparse, 0.0)
            A, B = (sparse, B) if product.sparse == "A" else (A, sparse)
        left, right = A.mT if product.transpose_A else A, B if product.transpose_B else B.mT
        # A shared matrix on the right is what PyTorch's linear is for: no batches of it, and the bias comes for free.
        C = functional.linear(left, right, bias) if right.dim() == 2 else left @ right.mT
        C = C if bias is None or right.dim() == 2 else C + bias
        if product.sparse != "C":
            return C
        C = torch.where(mask, C, 0.0)
        return to_values(C, packed[1], product.block) if product.compressed else C


class DenseMatmul(DenseImplement):
    """``torch.matmul`` of the masked matrices."""

    op = "batch_matmul"

    def build(self, spec: KernelSpec, params: Params) -> MatmulKernel:
        """Return the dense kernel."""
        del params
        return DenseMatmulKernel(Product.of(spec))


class _BlocksKernel(MatmulKernel):
    """Products of kept tiles with the rows (columns) of the dense operand that face them."""

    def __init__(self, spec: KernelSpec, tile: tuple[int, int]) -> None:
        product = self._product = Product.of(spec)
        # Each row of tiles makes a row of the result, so A is needed as (M, K) and B as (N, K).
        transpose = {"A": product.transpose_A, "B": not product.transpose_B, "C": False}[product.sparse]
        block = product.block if product.compressed else None
        self._matrix = TiledMatrix(spec[product.sparse].mask(), block, tile, transpose=transpose)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        return self._matrix.tensors(operand.device)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        A, B, bias = _operands(inputs)
        product, matrix, rows = self._product, self._matrix, self._matrix.rows
        lead = product.batch((*matrix.mask_lead, *matrix.shape), A, B, matrix.kept)
        batches = Batches(lead, matrix.mask_lead)
        # The dense operands as (M, K) and (N, K); the values of a compressed one may have a single dim.
        left = A.mT if product.transpose_A and product.sparse != "A" else A
        right = B if product.transpose_B or product.sparse == "B" else B.mT
        if product.sparse == "C":
            own = rows.rows_of(packed[1:], _folded(batches, left))
            faced = rows.columns_of(packed[1:], _folded(batches, right))
            tiles = [_times(x, y.mT) for x, y in zip(own, faced, strict=True)]
            if bias is not None:
                shifts = rows.columns_of(packed[1:], _folded(batches, bias[:, None]))
                tiles = [tile + shift.mT for tile, shift in zip(tiles, shifts, strict=True)]
            return matrix.stored(packed, tiles, batches)
        stored, dense = (A, right.mT) if product.sparse == "A" else (B, left.mT)  # the dense one as (K, ...)
        sparse = matrix.bands(packed, stored, batches)
        faced = rows.columns_of(packed[1:], _folded(batches, dense))
        result = batches.unfold(rows.join(packed[1:], [_times(x, y) for x, y in zip(sparse, faced, strict=True)]))
        result = result if product.sparse == "A" else result.mT
        return result if bias is None else result + bias


def _operands(inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return A, B and the bias, which may be left out."""
    A, B = present(*inputs[:2])
    return A, B, inputs[2] if len(inputs) > 2 else None


def _folded(batches: Batches, x: Tensor) -> Tensor:
    """Return x as (shared, groups, rows, cols); one matrix that serves a whole batch stays one, with shared = 1."""
    one_mask = all(size == 1 for size in batches.mask_lead)
    return x[None, None] if x.dim() == 2 and one_mask else batches.fold(x)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """Return the products of x (S or 1, rows, h, q) and y (S or 1, rows, q, F) as (S, rows, h, F)."""
    if x.shape[0] == y.shape[0]:
        return x @ y
    if x.shape[0] == 1:
        return _times(y.mT, x.mT).mT
    # One y for the whole batch: the batch's rows make one taller product each, and y is not copied for every S.
    shared, rows, height, inner = x.shape
    taller = x.transpose(0, 1).reshape(rows, shared * height, inner) @ y[0]
    return taller.reshape(rows, shared, height, y.shape[-1]).transpose(0, 1)


class BlocksMatmul(Implement):
    """Batched products over the kept tiles, in plain PyTorch, on any device."""

    name = "blocks"
    op = "batch_matmul"

    def supports(self, spec: KernelSpec) -> Support:
        """Any mask that prunes something."""
        density = spec[Product.of(spec).sparse].density
        if density == 1.0:
            return Support.no("its mask prunes nothing", Cause.PATTERN)
        return Support.yes("batched products of tiles")

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the tiles to try."""
        product = Product.of(spec)
        return {"tile": TunableItemCfg("choice", _value=tile_candidates(spec[product.sparse], product.block))}

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the tile that computes little with large products."""
        product = Product.of(spec)
        return {"tile": tile_guess(spec[product.sparse], product.block)}

    def build(self, spec: KernelSpec, params: Params) -> MatmulKernel:
        """Lay the tiles out."""
        h, w = params["tile"]
        return _BlocksKernel(spec, (h, w))
