"""A linear layer whose input or output is masked, as a product with one sparse matrix: what SparseLinear runs for it.

``x W^T + bias`` with a masked x is the ``batch_matmul`` of mode ``sdd``, with a masked result of mode ``dds``. The mask
is fixed and the values are not, so what kernels pack is the index of the mask; gradients are autograd's, through the
kernel.
"""

from __future__ import annotations

from torch import Tensor

from sparta.errors import ShapeError, message
from sparta.measure.references import linear_reference
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.matmul.spec import Product
from sparta.specialize.tuning.select import Problem

__all__ = ["check_rows", "masked_problem", "masked_spec"]

_MODES = {"input_mask": "sdd", "output_mask": "dds"}


def check_rows(x: Tensor, mask: Tensor, name: str) -> None:
    """Raise unless the last dims of an input are those that its layer's mask is for.

    >>> import torch
    >>> check_rows(torch.ones(5, 4, 3), torch.ones(4, 3, dtype=torch.bool), "input_mask")
    """
    rows, cols = mask.shape
    if x.dim() < 2 or x.shape[-2] != rows or (name == "input_mask" and x.shape[-1] != cols):
        allowed = f"(..., {rows}, {cols})" if name == "input_mask" else f"(..., {rows}, K)"
        raise ShapeError(message(f"an input of shape {tuple(x.shape)}", allowed, f"the {name} says which"))


def masked_spec(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, name: str, *, backward: bool
) -> KernelSpec:
    """Return the kernel spec for an input (..., M, K) and a mask that is called `name`.

    >>> import torch
    >>> mask = torch.eye(4, dtype=torch.bool)
    >>> masked_spec(torch.ones(4, 4), torch.ones(2, 4), None, mask, "input_mask", backward=False).op
    'batch_matmul'
    """
    check_rows(x, mask, name)
    return Product(_MODES[name], transpose_B=True).spec(mask, x, weight, bias=bias is not None, backward=backward)


def masked_problem(
    spec: KernelSpec, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor, name: str, *, backward: bool
) -> Problem:
    """Return what is to be measured for the spec of an input, weight and mask, all detached."""
    expected = linear_reference(x, weight, bias, **{name: mask})
    return Problem(spec, mask, (x, weight, bias), expected, max(1, x.shape[-1]), backward)
