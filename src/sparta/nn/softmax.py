"""SparseSoftmax: softmax over the kept elements of each row, whole or compressed.

It stands between the product that makes masked scores and the one that uses them. Pruned elements take no part, not
even in the maximum, so their values, NaN included, never matter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparta.errors import ValueRangeError, message
from sparta.measure.references import softmax_reference
from sparta.nn.inputs import ExampleInputs, as_inputs, checked_mask, need_operand, need_tensors
from sparta.nn.kernel_operator import KernelOperator
from sparta.specialize.blocks.tiled_matrix import any_group, own_block
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.softmax.spec import DenseSoftmaxKernel, check_softmax, softmax_spec
from sparta.specialize.tuning.select import Problem
from sparta.tesa.attribute import TeSA
from sparta.tesa.formats.functions import TeSAIndexes, get_bcs_function

__all__ = ["SparseSoftmax"]


class SparseSoftmax(KernelOperator):
    """``softmax(x / temperature)`` over the kept elements of each row; 0 where pruned, and in rows with nothing kept.

    Parameters
    ----------
    mask
        Bool or 0/1, or a TeSA: (..., H, W). Leading dims broadcast to the batch dims of x, so that each head or batch
        may have a mask of its own.
    temperature
        A positive number; see :meth:`set_temperature`.
    compressed
        Whether x and the result are ``(..., kept * h * w)``, the values of the kept blocks, instead of (..., H, W).
        Masks that differ by head share one index: the blocks that any of them keeps.

    Attributes
    ----------
    block
        (h, w): the blocks of the mask itself, of which compressed values are made.

    Examples
    --------
    >>> mask = torch.tensor([[True, True, False], [False, False, False]])
    >>> SparseSoftmax(mask)(torch.tensor([[1.0, 1.0, math.nan], [1.0, 2.0, 3.0]])).tolist()
    [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    """

    mask: Tensor
    block: tuple[int, int]

    def __init__(
        self,
        mask: Tensor | TeSA,
        temperature: float = 1.0,
        compressed: bool = False,  # noqa: FBT001, FBT002 - the original's order
    ) -> None:
        super().__init__()
        self.compressed = bool(compressed)
        self.set_temperature(temperature)
        self.register_buffer("mask", checked_mask(mask, "mask"))
        self._reset()

    def set_temperature(self, temperature: float) -> None:
        """Divide x by another number from now on; nothing needs to be tuned again."""
        if not 0.0 < temperature < math.inf:
            raise ValueRangeError(message(f"temperature is {temperature}", "a positive finite number"))
        self.temperature = float(temperature)

    def update_mask(self, mask: Tensor | TeSA) -> None:
        """Take another mask; dense runs until it is tuned or built for it."""
        self.mask = checked_mask(mask, "mask").to(self.mask.device)
        self._reset()

    @property
    def indexes(self) -> TeSAIndexes:
        """The index of compressed values; ``convert`` and ``inverse`` go between them and whole matrices."""
        return get_bcs_function(*self.block).build_indexes(any_group(self.mask))

    def forward(self, x: Tensor) -> Tensor:
        """Return the softmax of x (..., H, W), or of its values (..., kept * h * w), in the same form."""
        need_tensors(x=x)
        need_operand(x, self.mask)
        check_softmax(self.mask.shape, x, self._values)
        return self._run(x, torch.full((), self.temperature, dtype=torch.float64, device=x.device))

    # ------------------------------------------------------------------ for KernelOperator

    def _mask(self) -> Tensor:
        return self.mask

    def _reset(self) -> None:
        self.block = own_block(self.mask)
        self._values = self.indexes.nnz * math.prod(self.block) if self.compressed else None
        super()._reset()

    def _dense(self) -> DenseSoftmaxKernel:
        return DenseSoftmaxKernel(self.block, compressed=self.compressed)

    def _spec(self, inputs: ExampleInputs, *, backward: bool = False) -> KernelSpec:
        (x,) = as_inputs(inputs, 1)
        check_softmax(self.mask.shape, x, self._values)
        return softmax_spec(self.mask, x, block=self.block, compressed=self.compressed, backward=backward)

    def _problem(self, inputs: ExampleInputs, *, backward: bool) -> Problem:
        spec = self._spec(inputs, backward=backward)
        x = as_inputs(inputs, 1)[0].detach()
        temperature = torch.full((), self.temperature, dtype=torch.float64, device=x.device)
        indexes = self.indexes
        lead = check_softmax(self.mask.shape, x, self._values)
        whole = (indexes.inverse(x) if self.compressed else x).expand(*lead, *self.mask.shape[-2:])
        expected = softmax_reference(whole, self.mask, self.temperature)
        if self.compressed:
            expected = indexes.convert(expected)
        return Problem(spec, self.mask, (x, temperature), expected, max(1, self.mask.shape[-1]), backward)

    def extra_repr(self) -> str:
        """Say the mask, the temperature and what runs."""
        density = self.mask.float().mean().item() if self.mask.numel() else 1.0
        mask = f"mask {tuple(self.mask.shape)} density {density:.3g}"
        return f"{mask}, temperature={self.temperature:g}, {super().extra_repr()}"
