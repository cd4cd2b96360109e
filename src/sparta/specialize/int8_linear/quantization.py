"""Int8 layers: kernels of 8-bit integers behind the interface of a linear layer in real numbers.

The operation ``quantised_linear`` is ``linear`` with a weight on an int8 grid (the scale of its TeSA) and a grid for
its input (attributes of the kernel spec). Kernels in fp32, dense and sparse, compete with int8 ones, which round the
input to its grid, sum exactly in integers and rescale in the same pass. Candidates are compared on inputs that lie on
the grid, where all must agree; what rounding the inputs costs is measured on the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from sparta.common.tuning import TunableItemCfg
from sparta.errors import NameNotFoundError, SpartaError, ValueRangeError, did_you_mean, message
from sparta.specialize.implement import (
    Cause,
    Implement,
    KernelLayout,
    Params,
    Support,
    implement_named,
    present,
)
from sparta.specialize.int8_linear.spec import RANGES, Int8LinearKernel, int8_linear_spec, requantization
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.cpu import CpuLinear
from sparta.specialize.linear.dense import DenseLinear
from sparta.specialize.linear.spec import LinearKernel, apply_epilogue
from sparta.tesa.attribute import TeSA

__all__ = ["INT8_IMPLEMENTS", "OP", "InputGrid", "Int8Kernel", "integers_of", "row_scales"]

OP = "quantised_linear"
INT8_IMPLEMENTS = frozenset({"cpu-int8", "onednn-int8"})
"""The implements of :data:`OP` that round their inputs; the others compute in real numbers."""

_DTYPES = {"int8": torch.int8, "uint8": torch.uint8}


@dataclass(frozen=True)
class InputGrid:
    """The grid of a layer's input, or of its output where that is the next one's: ``(integer - zero_point) * scale``.

    >>> InputGrid.covering(0.0, 510.0)
    InputGrid(scale=2.0, zero_point=0, format='uint8')
    """

    scale: float
    zero_point: int = 0
    format: str = "int8"

    def __post_init__(self) -> None:
        if self.format not in RANGES:
            raise NameNotFoundError(did_you_mean(self.format, RANGES, "format of a grid"))
        low, high = RANGES[self.format]
        if not (self.scale > 0 and math.isfinite(self.scale) and low <= self.zero_point <= high):
            given = f"a grid of scale {self.scale} and zero point {self.zero_point} in {self.format}"
            raise ValueRangeError(message(given, f"a scale above 0, and a zero point of {low} to {high}"))

    @staticmethod
    def covering(low: float, high: float) -> InputGrid:
        """Return the grid of 256 steps from `low` to `high`, widened to hold 0 exactly."""
        low, high = min(0.0, low), max(0.0, high)
        scale = (high - low) / 255 or 1.0
        return InputGrid(scale, round(-low / scale), "uint8")

    @staticmethod
    def of(given: Any) -> InputGrid:
        """Return a grid from a pair (scale, zero point), or from anything with these attributes.

        What has ``args.quant_min`` too, as an exported quantiser's grid does, says by it whether integers have a sign.
        """
        if isinstance(given, InputGrid):
            return given
        if isinstance(given, Sequence) and not isinstance(given, str):
            return InputGrid(*given)
        if not hasattr(given, "scale") or not hasattr(given, "zero_point"):
            raise ValueRangeError(message(f"the grid {given!r}", "(scale, zero_point) or an object with these"))
        args = getattr(given, "args", None)
        low, high = getattr(args, "quant_min", -128), getattr(args, "quant_max", 127)
        if high - low > 255 or high - low < 254:
            raise ValueRangeError(message(f"a grid of integers from {low} to {high}", "8 bits"))
        return InputGrid(float(given.scale), int(given.zero_point), "uint8" if low >= 0 else "int8")

    def to_dict(self, of: str = "input") -> dict[str, Any]:
        """Return the grid as the attributes of a kernel spec."""
        return {f"{of}_{name}": value for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(attributes: Mapping[str, Any], of: str = "input") -> InputGrid:
        """Return the grid that attributes of a kernel spec hold."""
        return InputGrid(**{name: attributes[f"{of}_{name}"] for name in ("scale", "zero_point", "format")})

    @staticmethod
    def of_output(attributes: Mapping[str, Any]) -> InputGrid | None:
        """Return the grid of a layer's output, or None where it returns real numbers."""
        return InputGrid.from_dict(attributes, "output") if "output_format" in attributes else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the integers."""
        return _DTYPES[self.format]

    def integers(self, x: Tensor) -> Tensor:
        """Return x rounded to the grid, as 8-bit integers."""
        low, high = RANGES[self.format]
        shifted = (x * (1.0 / self.scale)).round_().add_(self.zero_point)
        return shifted.clamp_(low, high).to(self.dtype)

    def real(self, integers: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers that integers of the grid stand for."""
        return ((integers.to(torch.float64) - self.zero_point) * self.scale).to(dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """Return x rounded to the grid, in its own dtype."""
        return self.real(self.integers(x), x.dtype)


def row_scales(weight: TeSA) -> Tensor:
    """Return the scale of each row (N,) of an int8 weight, float64; raises where a row has several."""
    scales = weight.scale.dense()
    if bool((scales != scales[:, :1]).any()):
        raise ValueRangeError(message("a weight with several scales in a row", "one scale an output channel, or one"))
    return scales[:, 0]


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


class Int8Kernel(LinearKernel):
    """Rounds its input unless it is integers already, multiplies integers, and rescales in the same pass."""

    def __init__(self, spec: KernelSpec, kernel: Int8LinearKernel) -> None:
        self._grid, self._epilogue = InputGrid.from_dict(spec.attributes), spec.epilogue
        self._scales = row_scales(spec["weight"])
        output = InputGrid.of_output(spec.attributes)
        self._output_scale = 1.0 if output is None else output.scale
        self._kernel = kernel
        self._multiplier, _ = requantization(self._scales, self._grid.scale, output_scale=self._output_scale)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        """Return the integers of a weight (N, K) that lies on its grid, in the layout of the integer kernel."""
        return self._kernel.pack(integers_of(operand.detach(), self._scales))

    def layout(self) -> KernelLayout | None:
        """Return the layout of the integer kernel."""
        return self._kernel.layout()

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        """Return (M, N), in real numbers or as integers of the output's grid, for x (M, K) in either."""
        (x,), bias, residual = present(inputs[0]), inputs[1], inputs[2]
        offset = bias if bias is None or self._output_scale == 1.0 else bias / self._output_scale
        real, scaling = x.is_floating_point(), (self._multiplier, offset)
        # Some kernels round in the same pass, to the same integers.
        y = self._kernel.run_real(packed, self._grid.scale, x, *scaling) if real else None
        if y is None:
            y = self._kernel.run(packed, self._grid.integers(x) if real else x, *scaling)
        if _relu_inside(self._epilogue):  # the kernel did it
            return y if residual is None else y + residual
        return apply_epilogue(y, self._epilogue, residual)


class _Int8Linear(Implement):
    """An implement of ``int8_linear`` behind real numbers."""

    op = OP
    every_epilogue = True
    inner: ClassVar[str]

    def supports(self, spec: KernelSpec) -> Support:
        """Take int8 weights with one scale a row, on the CPU in fp32."""
        if spec.device != "cpu":
            return Support.no(f"it runs on the CPU, not on {spec.device}", Cause.DEVICE)
        if str(spec["input"].format) != "fp32":
            return Support.no(f"int8 kernels run for fp32 models, not {spec['input'].format}", Cause.DTYPE)
        if str(spec["weight"].format) != "int8":
            return Support.no(f"the weight is {spec['weight'].format}, not int8", Cause.DTYPE)
        try:
            return self._inner.supports(_integer_spec(spec))
        except SpartaError as error:
            return Support.no(str(error), Cause.SHAPE)

    def space(self, spec: KernelSpec) -> Mapping[str, TunableItemCfg]:
        """Return the parameters of the integer kernel."""
        return self._inner.space(_integer_spec(spec))

    def default(self, spec: KernelSpec) -> dict[str, Any]:
        """Return the defaults of the integer kernel."""
        return self._inner.default(_integer_spec(spec))

    def build(self, spec: KernelSpec, params: Params) -> LinearKernel:
        """Build the integer kernel."""
        return Int8Kernel(spec, cast("Int8LinearKernel", self._inner.build(_integer_spec(spec), params)))

    @property
    def _inner(self) -> Implement:
        return implement_named(self.inner, "int8_linear")


def _relu_inside(epilogue: Epilogue) -> bool:
    """Whether the integer kernel does the activation: a ReLU in front of the residual."""
    return epilogue.activation == "relu" and not epilogue.residual_first


def _integer_spec(spec: KernelSpec) -> KernelSpec:
    """Return the kernel spec of the product in integers."""
    grid = InputGrid.from_dict(spec.attributes)
    output = InputGrid.of_output(spec.attributes)
    relu = "relu" if _relu_inside(spec.epilogue) else None
    return int8_linear_spec(
        spec["weight"],
        spec["input"].shape[0],
        input_format=grid.format,
        input_zero_point=grid.zero_point,
        epilogue=Epilogue(bias=spec.epilogue.bias, activation=relu),
        output_format="fp32" if output is None else output.format,
        output_zero_point=0 if output is None else output.zero_point,
    )


class DenseQuantized(DenseLinear):
    """PyTorch's linear layer in real numbers."""

    op = OP


class CpuQuantized(CpuLinear):
    """The C++ kernels in real numbers."""

    op = OP


class CpuInt8(_Int8Linear):
    """The C++ kernels of 8-bit integers."""

    name = "cpu-int8"
    inner = "cpu-int8"


class OneDnnInt8(_Int8Linear):
    """oneDNN's dense product of 8-bit integers."""

    name = "onednn-int8"
    inner = "onednn"
