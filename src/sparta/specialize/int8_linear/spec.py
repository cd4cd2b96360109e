"""The operation ``int8_linear``: ``requantize(x W^T)`` of 8-bit integers with a sparse weight W of shape (N, K).

A kernel sums exactly in 32-bit integers and stores ``sum * multiplier + offset``, through ReLU where the epilogue says
so, as fp32 or rounded to 8 bits again. All scales are folded into one multiplier and one offset per channel
(:func:`requantization`), so a kernel knows neither of them apart; zero points are attributes of the spec.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message
from sparta.specialize.implement import Kernel
from sparta.specialize.int8_linear.quantization import DTYPES, RANGES
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.tesa.attribute import TeSA

__all__ = ["Int8LinearKernel", "int8_linear_spec", "requantization", "requantized"]

_MOST_INPUTS = 2**16  # 255 * 127 * K must fit 31 bits


class Int8LinearKernel(Kernel):
    """A built kernel of ``int8_linear``."""

    @abstractmethod
    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the live values of the weight (N, K), int8, in this kernel's layout."""

    @abstractmethod
    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (M, N) for the inputs x (M, K), multiplier (N,), offset (N,) or None."""

    def run_real(self, packed: Sequence[Tensor], scale: float, *inputs: Tensor | None) -> Tensor | None:
        """Return the same for x in real numbers, rounded on the way to the spec's integers with this scale.

        None where a kernel does not do that: x is rounded before it then. Both give the same, bit for bit.
        """
        del packed, scale, inputs
        return None


def int8_linear_spec(
    weight: TeSA,
    rows: int,
    *,
    input_format: str = "int8",
    output_format: str = "fp32",
    input_zero_point: int = 0,
    output_zero_point: int = 0,
    epilogue: Epilogue | None = None,
) -> KernelSpec:
    """Return the kernel spec of a quantised linear operator.

    Parameters
    ----------
    weight
        TeSA of the weight, shape (N, K); its values are int8, symmetric.
    rows
        The M that is measured; any other M runs as well.
    input_format, output_format
        ``'int8'`` or ``'uint8'``; ``'fp32'`` too for the output.
    epilogue
        ``bias`` says whether an offset comes with each call; the activation may be ``'relu'``.

    Examples
    --------
    >>> spec = int8_linear_spec(TeSA.dense((8, 4)), 16, output_format="int8")
    >>> str(spec["weight"].format), spec.attributes["output_format"]
    ('int8', 'int8')
    """
    epilogue = epilogue or Epilogue()
    if input_format not in RANGES:
        raise NameNotFoundError(did_you_mean(input_format, RANGES, "input format"))
    if output_format not in DTYPES:
        raise NameNotFoundError(did_you_mean(output_format, DTYPES, "output format"))
    for name, value, format in (
        ("input", input_zero_point, input_format),
        ("output", output_zero_point, output_format),
    ):
        low, high = RANGES.get(format, (0, 0))
        if not low <= value <= high:
            raise ValueRangeError(message(f"a zero point of {value} for the {name} in {format}", f"{low} to {high}"))
    if epilogue.activation not in (None, "relu") or epilogue.residual:
        raise ValueRangeError(message(f"the epilogue {epilogue}", "bias and relu"))
    if weight.ndim != 2 or weight.shape[1] > _MOST_INPUTS:
        raise ShapeError(message(f"a weight of shape {weight.shape}", f"(N, K) with K up to {_MOST_INPUTS}"))
    return KernelSpec(
        "int8_linear",
        {
            "input": TeSA.dense((rows, weight.shape[1]), format=input_format, dynamic=[0]),
            "weight": weight.with_format("int8"),
        },
        epilogue=epilogue,
        attributes={
            "input_zero_point": input_zero_point,
            "output_format": output_format,
            "output_zero_point": output_zero_point,
        },
    )


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
    >>> import torch
    >>> requantization(torch.tensor([0.5, 0.25]), 2.0, output_scale=4.0)[0].tolist()
    [0.25, 0.125]
    """
    multiplier = (weight_scale.double() * input_scale / output_scale).float()
    return multiplier, None if bias is None else (bias.double() / output_scale).float()


def requantized(sums: Tensor, spec: KernelSpec, multiplier: Tensor, offset: Tensor | None) -> Tensor:
    """Return exact sums (M, N), the input's zero point taken off, as the spec's output: the reference of all kernels.

    >>> import torch
    >>> spec = int8_linear_spec(TeSA.dense((2, 4)), 1, output_format="int8", output_zero_point=1)
    >>> requantized(torch.tensor([[5, -900]]), spec, torch.tensor([0.5, 1.0]), None).tolist()
    [[3, -128]]
    """
    # Products of 24 bits are exact in float64, so that there is one rounding, as in a fused multiplication.
    exact = sums.float().double() * multiplier.double()
    y = (exact if offset is None else exact + offset.double()).float()
    if spec.epilogue.activation == "relu":
        y = y.clamp_min(0.0)
    output = spec.attributes["output_format"]
    if output == "fp32":
        return y
    low, high = RANGES[output]
    zero: int = spec.attributes["output_zero_point"]
    return (y.round() + zero).clamp(low, high).to(DTYPES[output])
