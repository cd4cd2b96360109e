"""What the tuner measures for a scaled weight: inputs on which all candidates must agree.

Some kernels round x to fp8 and others do not, so where a spec allows it, x is put on that grid first; then both compute
the same. What rounding x costs is measured on the whole model.
"""

from __future__ import annotations

from torch import Tensor

from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.scaled_linear.spec import reference, rounded_rows, rounds_inputs
from sparta.specialize.tuning.select import Problem

__all__ = ["scaled_problem"]


def scaled_problem(
    spec: KernelSpec, weight: Tensor, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Problem:
    """Return the problem of a scaled linear operator.

    Parameters
    ----------
    weight
        (N, K), real numbers; kernels round it.
    x
        (M, K) of the spec's dtype.
    bias
        (N,), where the spec's epilogue has one.
    residual
        (M, N), likewise.

    Examples
    --------
    >>> import torch
    >>> from sparta.specialize.scaled_linear.spec import scaled_linear_spec, scaled_weight
    >>> weight = torch.randn(8, 16)
    >>> spec = scaled_linear_spec(scaled_weight(weight), 4, torch.float32, device="cpu")
    >>> scaled_problem(spec, weight, torch.randn(4, 16)).expected.shape
    torch.Size([4, 8])
    """
    if rounds_inputs(spec):
        x = rounded_rows(x, spec.attributes["input_scale"])
    expected = reference(spec, weight, x, bias, residual)
    return Problem(spec, weight, (x, bias, residual), expected, spec["weight"].shape[1])
