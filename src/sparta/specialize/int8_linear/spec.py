"""The operation ``int8_linear``: a linear layer whose weight W (N, K) lies on an int8 grid and may be sparse.

The scale of each row of W is part of its TeSA; how the input stands for integers is a
:class:`~sparta.specialize.int8_linear.quantization.Quantization` in the attributes of the kernel spec, and so is the
output's where the next layer takes integers. Kernels take and return real numbers, so kernels in fp32 compete with
those of integers, which round the input, sum exactly in 32-bit integers and rescale in the same pass. Candidates are
compared on inputs that lie on the grid, where all agree; what rounding costs is measured on the whole model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import LinearKernel, apply_epilogue
from sparta.tesa.attribute import TeSA

__all__ = ["OP", "Int8Kernel", "int8_linear_spec", "integers_of", "reference", "requantized", "row_scales"]

OP = "int8_linear"
MOST_INPUTS = 2**16  # 255 * 128 * K must fit 31 bits


class Int8Kernel(LinearKernel):
    """A built kernel of integers: it takes integers of the input's grid as well, and gives those of the output's."""

    @abstractmethod
    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the live values of the weight (N, K) in this kernel's layout.

        The weight is real and lies on its grid, or is given as its integers, int8.
        """

    @abstractmethod
    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (M, N) for the inputs x (M, K), bias (N,) or None, residual (M, N) or None.

        x is in real numbers or, with a static grid, as its integers. The result is in real numbers, or as integers of
        the output's grid where the spec has one.
        """


def int8_linear_spec(
    weight: TeSA,
    rows: int,
    grid: Quantization,
    *,
    output: Quantization | None = None,
    epilogue: Epilogue | None = None,
) -> KernelSpec:
    """Return the kernel spec of a quantised linear operator.

    Parameters
    ----------
    weight
        TeSA of the weight, shape (N, K), int8 and symmetric, with one scale per row or one for all.
    rows
        The M that is measured; any other M runs as well.
    grid
        The integers of the input.
    output
        The integers of the result; None for a result in real numbers.

    Examples
    --------
    >>> weight = TeSA.dense((8, 4)).with_format("int8", scale=0.1)
    >>> spec = int8_linear_spec(weight, 16, Quantization(0.5))
    >>> str(spec["weight"].format), spec.attributes["input_scale"]
    ('int8', 0.5)
    """
    if weight.ndim != 2 or weight.shape[1] > MOST_INPUTS:
        raise ShapeError(message(f"a weight of shape {weight.shape}", f"(N, K) with K up to {MOST_INPUTS}"))
    if weight.count("live") and str(weight.format) != "int8":
        raise ValueRangeError(message(f"a weight in {weight.format}", "int8", "weight.with_format('int8', scale=...)"))
    row_scales(weight)
    if output is not None and output.dynamic:
        raise ValueRangeError(message("a dynamic grid of the output", "a static one, or None"))
    return KernelSpec(
        OP,
        {"input": TeSA.dense((rows, weight.shape[1]), format="fp32", dynamic=[0]), "weight": weight},
        epilogue=epilogue or Epilogue(),
        attributes={**grid.to_dict(), **({} if output is None else output.to_dict("output"))},
    )


def row_scales(weight: TeSA) -> Tensor:
    """Return the scale of each row (N,) of an int8 weight (N, ...), float64; raises where a row has several, or none.

    >>> row_scales(TeSA.dense((2, 4)).with_format("int8", scale=torch.tensor([0.5, 0.25]))).tolist()
    [0.5, 0.25]
    """
    if not weight.count("live"):
        return torch.ones(weight.shape[0], dtype=torch.float64)
    scales = weight.scale.dense().flatten(1)
    if bool((scales != scales[:, :1]).any()):
        raise ValueRangeError(message("a weight with several scales in a row", "one scale per output channel, or one"))
    if not bool(scales.isfinite().all()) or bool((weight.zero_point.cells != 0).any()):
        raise ValueRangeError(message("an int8 weight without a scale, or with a zero point", "a symmetric grid"))
    return scales[:, 0].clone()  # a view would keep a number for every element


def integers_of(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the integers (N, K), int8, of a weight that lies on its grid; raises where it does not.

    >>> integers_of(torch.tensor([[0.5, -1.0]]), torch.tensor([0.5])).tolist()
    [[1, -2]]
    """
    exact = weight.to(torch.float64) / scales.to(weight.device, torch.float64).unsqueeze(1)
    whole = exact.round()
    if bool(((exact - whole).abs() > 1e-3).any()) or bool((whole.abs() > 128).any()):
        raise ValueRangeError(message("a weight that is not on its int8 grid", fix="export the quantised model again"))
    return whole.clamp(-128, 127).to(torch.int8)


def reference(spec: KernelSpec, integers: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return what a kernel of integers computes, every step rounded as kernels round it: what they are tested against.

    Parameters
    ----------
    integers
        Of the weight, (N, K), int8.
    x
        (M, K), in real numbers or as integers of a static grid.

    Examples
    --------
    >>> weight = TeSA.dense((2, 4)).with_format("int8", scale=0.5)
    >>> spec = int8_linear_spec(weight, 1, Quantization(1.0), output=Quantization(1.0, 1))
    >>> reference(spec, torch.ones(2, 4, dtype=torch.int8), torch.ones(1, 4), None, None).tolist()
    [[3, 3]]
    """
    grid, token_scales = Quantization.from_dict(spec.attributes), None
    if grid.dynamic:
        x, token_scales = grid.token_integers(x)
    elif x.is_floating_point():
        x = grid.integers(x.float())
    live = torch.where(spec["weight"].mask("cpu"), integers.long(), 0)
    sums = (x.long() - grid.zero_point) @ live.t()
    return requantized(sums, spec, token_scales, bias, residual)


def requantized(
    sums: Tensor, spec: KernelSpec, token_scales: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Return exact sums (M, N), the input's zero point taken off, as the spec's output."""
    grid, output = Quantization.from_dict(spec.attributes), Quantization.of_output(spec.attributes)
    folded = output is not None and folds(spec.epilogue)
    divisor = output.scale if output is not None and folded else 1.0
    multiplier, offset = requantization(row_scales(spec["weight"]), grid.scale, bias=bias, output_scale=divisor)
    real = sums.float() if token_scales is None else sums.float() * token_scales
    # Products of 24 bits are exact in float64, so that there is one rounding, as in a fused multiplication.
    exact = real.double() * multiplier.double()
    y = (exact if offset is None else exact + offset.double()).float()
    if output is None:
        return apply_epilogue(y, spec.epilogue, residual)
    if folded:
        unit = Quantization(1.0, output.zero_point, output.format)
        return unit.integers(functional.relu(y) if spec.epilogue.activation == "relu" else y)
    return output.integers(apply_epilogue(y, spec.epilogue, residual))


def folds(epilogue: Epilogue) -> bool:
    """Whether the scale of an 8-bit output can be part of the multiplier: ReLU or nothing comes after the product.

    >>> folds(Epilogue(bias=True, activation="relu")), folds(Epilogue(activation="gelu"))
    (True, False)
    """
    return epilogue.activation in (None, "relu") and not epilogue.residual


def requantization(
    weight_scale: Tensor, input_scale: float, *, bias: Tensor | None = None, output_scale: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Return the multiplier (N,) and the offset (N,) or None of a quantised linear layer.

    Parameters
    ----------
    weight_scale
        (N,), one per channel, or (1,) for all.
    bias
        (N,), in real numbers.
    output_scale
        Of an 8-bit output; 1 for fp32.

    Examples
    --------
    >>> requantization(torch.tensor([0.5, 0.25]), 2.0, output_scale=4.0)[0].tolist()
    [0.25, 0.125]
    """
    multiplier = (weight_scale.double() * input_scale / output_scale).float()
    return multiplier, None if bias is None else (bias.double() / output_scale).float()
