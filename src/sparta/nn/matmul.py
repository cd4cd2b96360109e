"""SparseBatchMatMul: a batched matrix product with one sparse matrix, an operand or the result.

The mask is fixed, the values are not: both operands are inputs. The sparse matrix may be kept *compressed*, as the
values of its kept blocks alone, from the product that makes it to the one that uses it.
"""

# ruff: noqa: N803, N806 -- A, B and C are the operands' names

from __future__ import annotations

from typing import cast

from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.measure.references import matmul_reference
from sparta.nn.inputs import ExampleInputs, as_inputs, checked_mask, need_tensors
from sparta.nn.kernel_operator import KernelOperator
from sparta.specialize.blocks.tiled_matrix import any_group, own_block
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.matmul.spec import DenseMatmulKernel, Product
from sparta.specialize.tuning.select import Problem
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.functions import TeSAIndexes, get_bcs_function

__all__ = ["SparseBatchMatMul"]

_MASKS = {"A_mask": "sdd", "B_mask": "dsd", "C_mask": "dds"}


class SparseBatchMatMul(KernelOperator):
    """``C = op(A) op(B)`` where exactly one of A, B, C is sparse.

    Parameters
    ----------
    A_mask, B_mask, C_mask
        Exactly one: a bool or 0/1 mask, or a TeSA, of the matrix as it is stored: (..., rows, cols). Leading dims
        broadcast to the batch dims of the product, so that each head or batch may have a mask of its own.
    transpose_A, transpose_B
        Whether A is passed as (..., K, M), and B as (..., N, K).
    compressed
        Whether the sparse matrix is passed (A, B) or returned (C) as ``(..., kept * h * w)``, the values of its kept
        blocks, instead of as a whole. :attr:`indexes` converts. Masks that differ by head share one index: the blocks
        that any of them keeps.

    Attributes
    ----------
    block
        (h, w): the blocks of the mask itself, of which compressed values are made.

    Notes
    -----
    The mask holds to the element: pruned elements inside kept blocks are exactly 0, whatever was passed there, and get
    exactly 0 gradient.

    Examples
    --------
    >>> import torch
    >>> mask = torch.tensor([[1, 0], [0, 1]]).repeat_interleave(4, 0).repeat_interleave(4, 1)
    >>> scores = SparseBatchMatMul(C_mask=mask, transpose_B=True)
    >>> values = scores(torch.ones(3, 8, 5), torch.ones(3, 8, 5))
    >>> values.shape, scores.block
    (torch.Size([3, 32]), (4, 4))
    >>> SparseBatchMatMul(A_mask=mask)(values, torch.ones(3, 8, 2)).shape
    torch.Size([3, 8, 2])
    >>> scores.indexes.inverse(values).shape
    torch.Size([3, 8, 8])
    """

    A_mask: Tensor | None
    B_mask: Tensor | None
    C_mask: Tensor | None
    block: tuple[int, int]

    def __init__(
        self,
        A_mask: Tensor | TeSA | None = None,
        B_mask: Tensor | TeSA | None = None,
        C_mask: Tensor | TeSA | None = None,
        transpose_A: bool = False,  # noqa: FBT001, FBT002 - the original's order
        transpose_B: bool = False,  # noqa: FBT001, FBT002
        compressed: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__()
        self.transpose_A, self.transpose_B, self.compressed = bool(transpose_A), bool(transpose_B), bool(compressed)
        for name in _MASKS:
            self.register_buffer(name, None)
        self._hold_mask(A_mask, B_mask, C_mask)

    def update_mask(
        self,
        A_mask: Tensor | TeSA | None = None,
        B_mask: Tensor | TeSA | None = None,
        C_mask: Tensor | TeSA | None = None,
    ) -> None:
        """Take another mask, possibly of another matrix; dense runs until it is tuned or built for it."""
        self._hold_mask(A_mask, B_mask, C_mask)

    def _hold_mask(self, *masks: Tensor | TeSA | None) -> None:
        given = {name: mask for name, mask in zip(_MASKS, masks, strict=True) if mask is not None}
        if len(given) != 1:
            names = ", ".join(given) or "none"
            raise ValueRangeError(message(f"{len(given)} masks ({names})", "exactly one of " + ", ".join(_MASKS)))
        ((present, mask),) = given.items()
        kept = checked_mask(mask, present)
        before = [old for name in _MASKS if (old := getattr(self, name)) is not None]
        for name in _MASKS:
            setattr(self, name, kept.to(before[0].device if before else kept.device) if name == present else None)
        self._reset()

    @property
    def mode(self) -> str:
        """``sdd``, ``dsd`` or ``dds``: which of A, B, C is sparse, in this order."""
        return next(mode for name, mode in _MASKS.items() if getattr(self, name) is not None)

    @property
    def indexes(self) -> TeSAIndexes:
        """The index of compressed values; ``convert`` and ``inverse`` go between them and whole matrices."""
        return get_bcs_function(*self.block).build_indexes(any_group(self._mask()))

    def forward(self, A: Tensor, B: Tensor) -> Tensor:
        """Return C (..., M, N), or its values (..., kept * h * w), for A (..., M, K) and B (..., K, N).

        With `transpose_A`, `transpose_B` or `compressed` the operands have the shapes said there. Leading dims
        broadcast.
        """
        need_tensors(A=A, B=B)
        self._product().batch(tuple(self._mask().shape), A, B, self._kept_blocks)
        return self._run(A, B)

    # ------------------------------------------------------------------ for KernelOperator

    def _mask(self) -> Tensor:
        # `torch.compile` cannot follow an assignment inside a generator on every Python.
        masks = [getattr(self, name) for name in _MASKS]
        return cast("Tensor", next(mask for mask in masks if mask is not None))

    def _product(self) -> Product:
        return Product(self.mode, self.transpose_A, self.transpose_B, self.compressed, self.block)

    def _reset(self) -> None:
        self.block = own_block(self._mask())
        self._kept_blocks = self.indexes.nnz
        super()._reset()

    def _dense(self) -> DenseMatmulKernel:
        return DenseMatmulKernel(self._product())

    def _spec(self, inputs: ExampleInputs, *, backward: bool = False) -> KernelSpec:
        A, B = as_inputs(inputs, 2)
        self._product().batch(tuple(self._mask().shape), A, B, self._kept_blocks)
        return self._product().spec(self._mask(), A, B, backward=backward)

    def _problem(self, inputs: ExampleInputs, *, backward: bool) -> Problem:
        spec = self._spec(inputs, backward=backward)
        A, B = (x.detach() for x in as_inputs(inputs, 2))
        indexes, name = self.indexes, self._product().sparse
        whole = {"A": A, "B": B}
        if self.compressed and name != "C":
            whole[name] = indexes.inverse(whole[name])
        options = {f"{name}_mask": self._mask(), "transpose_A": self.transpose_A, "transpose_B": self.transpose_B}
        expected = matmul_reference(whole["A"], whole["B"], **options)  # type: ignore[arg-type]
        if self.compressed and name == "C":
            expected = indexes.convert(expected)
        reduction = whole["A"].shape[-2 if self.transpose_A else -1]
        return Problem(spec, self._mask(), (A, B), expected, max(1, reduction), backward)

    def extra_repr(self) -> str:
        """Say the mask and what runs."""
        mask = self._mask()
        density = mask.float().mean().item() if mask.numel() else 1.0
        return f"{self.mode}, mask {tuple(mask.shape)} density {density:.3g}, {super().extra_repr()}"
