"""Dense int8 kernels: exact integer products by ``torch._int_mm``, and oneDNN's quantised linear as a library rival.

Both are checked like any other implement. ``dense`` is exact; oneDNN rounds in its own way, so where an 8-bit result is
off by one it is no candidate.
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
from sparta.specialize.implement import Cause, DenseImplement, Implement, Params, Support, present
from sparta.specialize.int8_linear.quantization import DTYPES
from sparta.specialize.int8_linear.spec import Int8LinearKernel, requantized
from sparta.specialize.kernel_spec import KernelSpec

__all__ = ["DenseInt8Linear", "OneDnnInt8Linear"]

# Processors that multiply 8-bit integers take four of them at a time, and `torch._int_mm` gives wrong sums on some of
# those where there is only one: shorter rows are filled up with zeros, which change no sum.
_FEWEST_INPUTS = 4


class _DenseKernel(Int8LinearKernel):
    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        # Integers of 8 bits without a sign are moved to those with one, and so is their zero point.
        self._unsigned = str(spec["input"].format) == "uint8"
        self._zero = spec.attributes["input_zero_point"] - 128 * self._unsigned
        self._missing = max(0, _FEWEST_INPUTS - spec["weight"].shape[1])

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        weight = self._spec["weight"].apply(operand)
        return self._filled(weight).t().contiguous(), weight.sum(1, dtype=torch.int32)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (x, multiplier), offset = present(*inputs[:2]), inputs[2]
        signed = (x ^ 128).view(torch.int8) if self._unsigned else x
        rows = self._filled(signed).contiguous()
        sums = torch._int_mm(rows, packed[0]) if len(x) else x.new_zeros(0, len(multiplier)).int()
        return requantized(sums - self._zero * packed[1], self._spec, multiplier, offset)

    def _filled(self, rows: Tensor) -> Tensor:
        return functional.pad(rows, (0, self._missing)) if self._missing else rows


class DenseInt8Linear(DenseImplement):
    """``torch._int_mm`` on the masked weight."""

    op = "int8_linear"

    def build(self, spec: KernelSpec, params: Params) -> Int8LinearKernel:
        """Return the dense kernel."""
        del params
        return _DenseKernel(spec)


class _OneDnnKernel(Int8LinearKernel):
    def __init__(self, spec: KernelSpec) -> None:
        self._spec = spec
        attributes = spec.attributes
        # With signs oneDNN has no fast kernel and takes ten thousand times as long, so they are moved away.
        self._signed = str(spec["input"].format) == "int8"
        self._zero = attributes["input_zero_point"] + 128 * self._signed
        self._output = DTYPES[attributes["output_format"]], attributes["output_zero_point"]

    def pack(self, operand: Tensor) -> tuple[Tensor, ...]:
        weight = self._spec["weight"].apply(operand).contiguous()
        return torch.ops.onednn.qlinear_prepack(weight, None), torch.zeros(len(weight), dtype=torch.int32)

    def run(self, packed: Sequence[Tensor], *inputs: Tensor | None) -> Tensor:
        (x, multiplier), offset = present(*inputs[:2]), inputs[2]
        dtype, zero = self._output
        unsigned = x.view(torch.uint8) ^ 128 if self._signed else x
        after = self._spec.epilogue.activation or "none"
        arguments: tuple[Any, ...] = (
            unsigned,
            1.0,
            self._zero,
            packed[0],
            multiplier,
            packed[1],
            offset,
            1.0,
            zero,
            dtype,
            after,
            [],
            "",
        )
        result: Tensor = torch.ops.onednn.qlinear_pointwise(*arguments)
        return result


class OneDnnInt8Linear(Implement):
    """oneDNN's quantised linear on the masked weight."""

    name = "onednn"
    op = "int8_linear"

    def supports(self, spec: KernelSpec) -> Support:
        """Where torch was built with oneDNN, and the processor sums products of 8-bit integers in 32 bits."""
        del spec
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return Support.no("this torch was built without oneDNN", Cause.MISSING_TOOL)
        if _sums_in_16_bits(platform.machine().lower()):
            reason = "without VNNI, oneDNN adds two products in 16 bits, where they overflow"
            return Support.no(reason, Cause.CAPABILITY)
        return Support.yes("oneDNN")

    def build(self, spec: KernelSpec, params: Params) -> Int8LinearKernel:
        """Return the library's kernel."""
        del params
        return _OneDnnKernel(spec)


@functools.cache
def _sums_in_16_bits(machine: str) -> bool:
    """Tell whether oneDNN adds pairs of products in 16 bits here: on x86 without VNNI. No sample can rule that out."""
    return machine in ("x86_64", "amd64", "i686") and not {"avx_vnni", "avx512_vnni"} & set(probe_cpu().vector_isa)
