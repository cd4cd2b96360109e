"""Dense kernels of 8-bit integers: exact products by ``torch._int_mm``, and oneDNN's quantised linear as a rival.

Both are checked like any other implement. ``torch-int8`` is exact; oneDNN rounds in its own way, so where an 8-bit
result is off by one it is no candidate.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparta.measure.machine import probe_cpu
from sparta.specialize.implement import Cause, Implement, Params, Support, present
from sparta.specialize.int8_linear.cpu import integers_here
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.specialize.int8_linear.spec import OP, Int8Kernel, integers_of, requantization, requantized, row_scales
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.linear.spec import apply_epilogue

__all__ = ["OneDnnInt8Linear", "TorchInt8Linear"]

# Processors that multiply 8-bit integers take four of them at a time, and `torch._int_mm` gives wrong sums on some of
# those where there is only one: shorter rows are filled up with zeros, which change no sum.
_FEWEST_INPUTS = 4


class _DenseInt8Kernel(Int8Kernel):
    """What both share: the weight as integers, the input rounded."""

    def __init__(self, spec: KernelSpec) -> None:
        self._spec, self._scales = spec, row_scales(spec["weight"])
        self._grid = Quantization.from_dict(spec.attributes)
        self._output = Quantization.of_output(spec.attributes)

    def _live(self, operand: Tensor) -> Tensor:
        weight = operand.detach()
        integers = integers_of(weight, self._scales) if weight.is_floating_point() else weight
        return self._spec["weight"].apply(integers)

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return x as integers, and the scales of its tokens where the grid is dynamic."""
        if not x.is_floating_point():
            return x, None
        return self._grid.token_integers(x) if self._grid.dynamic else (self._grid.integers(x.float()), None)


class _TorchKernel(_DenseInt8Kernel):
    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        # Integers of 8 bits without a sign are moved to those with one, and so is their zero point.
        self._unsigned = self._grid.format == "uint8"
        self._zero = self._grid.zero_point - 128 * self._unsigned
        self._missing = max(0, _FEWEST_INPUTS - spec["weight"].shape[1])

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        weight = self._live(operand)
        return self._filled(weight).t().contiguous(), weight.sum(1, dtype=torch.int32)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        x, token_scales = self._rounded(*present(inputs[0]))
        signed = (x ^ 128).view(torch.int8) if self._unsigned else x
        rows = self._filled(signed).contiguous()
        sums = torch._int_mm(rows, packed[0]) if len(x) else x.new_zeros(0, len(self._scales)).int()
        return requantized(sums - self._zero * packed[1], self._spec, token_scales, inputs[1], inputs[2])

    def _filled(self, rows: Tensor) -> Tensor:
        return functional.pad(rows, (0, self._missing)) if self._missing else rows


class TorchInt8Linear(Implement):
    """``torch._int_mm`` on the masked weight."""

    name = "torch-int8"
    op = OP
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Whatever kernels of integers take."""
        return integers_here(spec)

    def build(self, spec: KernelSpec, params: Params) -> Int8Kernel:
        """Return the dense kernel."""
        del params
        return _TorchKernel(spec)


class _OneDnnKernel(_DenseInt8Kernel):
    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        # With signs oneDNN has no fast kernel and takes ten thousand times as long, so they are moved away.
        self._signed = self._grid.format == "int8"
        self._zero = self._grid.zero_point + 128 * self._signed
        epilogue, output = spec.epilogue, self._output
        self._inside = epilogue.activation == "relu" and not epilogue.residual
        # The library rounds its result only where nothing is left to do after it: tokens have no scale of their own.
        done = (self._inside or epilogue.activation is None) and not epilogue.residual and not self._grid.dynamic
        self._plain = output is not None and done
        divisor = output.scale if output is not None and self._plain else 1.0
        self._divisor = divisor
        self._multiplier, _ = requantization(self._scales, self._grid.scale, output_scale=divisor)

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        weight = self._live(operand).contiguous()
        return torch.ops.onednn.qlinear_prepack(weight, None), torch.zeros(len(weight), dtype=torch.int32)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (given,), bias, residual = present(inputs[0]), inputs[1], inputs[2]
        x, token_scales = self._rounded(given)
        output = self._output if self._plain else None
        dtype, zero = (torch.float32, 0) if output is None else (output.dtype, output.zero_point)
        unsigned = x.view(torch.uint8) ^ 128 if self._signed else x
        offset = None if bias is None else bias.float() / self._divisor
        after = "relu" if self._inside and token_scales is None else "none"
        arguments: tuple[Any, ...] = (
            unsigned,
            1.0,
            self._zero,
            packed[0],
            self._multiplier,
            packed[1],
            None if token_scales is not None else offset,
            1.0,
            zero,
            dtype,
            after,
            [],
            "",
        )
        y: Tensor = torch.ops.onednn.qlinear_pointwise(*arguments)
        if output is not None:
            return y
        if token_scales is not None:
            y = y * token_scales if offset is None else torch.addcmul(offset, y, token_scales)
        if after == "none":
            y = apply_epilogue(y, self._spec.epilogue, residual)
        return y if self._output is None else self._output.integers(y)


class OneDnnInt8Linear(Implement):
    """oneDNN's quantised linear on the masked weight."""

    name = "onednn-int8"
    op = OP
    every_epilogue = True

    def supports(self, spec: KernelSpec) -> Support:
        """Where torch was built with oneDNN, and the processor sums products of 8-bit integers in 32 bits."""
        answer = integers_here(spec)
        if not answer:
            return answer
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return Support.no("this torch was built without oneDNN", Cause.MISSING_TOOL)
        if _sums_in_16_bits(platform.machine().lower()):
            reason = "without VNNI, oneDNN adds two products in 16 bits, where they overflow"
            return Support.no(reason, Cause.CAPABILITY)
        return Support.yes("oneDNN")

    def build(self, spec: KernelSpec, params: Params) -> Int8Kernel:
        """Return the library's kernel."""
        del params
        return _OneDnnKernel(spec)


@functools.cache
def _sums_in_16_bits(machine: str) -> bool:
    """Tell whether oneDNN adds pairs of products in 16 bits here: on x86 without VNNI. No sample can rule that out."""
    return machine in ("x86_64", "amd64", "i686") and not {"avx_vnni", "avx512_vnni"} & set(probe_cpu().vector_isa)
