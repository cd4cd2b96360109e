"""Lowerings: how calls in a graph become the kernel specs of one operation, and how its kernels are called.

A lowering recognises the call that an operation starts from and knows the operation's kernel spec, reference and
calling convention; everything else in the compiler is the same for all operations. A new operation is one new file with
a :class:`Lowering` in it and one line in :data:`sparta.compiler.lower.LOWERINGS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from sparta.specialize.implement import Kernel, present
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.linear.spec import apply_epilogue
from sparta.specialize.tuning.select import Problem
from sparta.tesa.attribute import TeSA

__all__ = ["Anchor", "Lowering"]

_COMPARED = 1 << 20  # elements of a result: comparing all of a large one in float64 takes longer than to time it


@dataclass(frozen=True)
class Anchor:
    """The call that a sub-graph starts from.

    Parameters
    ----------
    x
        The node of the activation.
    weight, bias
        Names of the tensors; bias may be None.
    transposed
        Whether the weight is stored as (K, N), the other way round than the operation takes it.
    attributes
        The numbers of the operation, such as a stride, as JSON values.
    """

    x: fx.Node
    weight: str
    bias: str | None
    transposed: bool = False
    attributes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


class Lowering(ABC):
    """One operation, between the graph and the specialiser."""

    op: str

    @abstractmethod
    def match(self, node: fx.Node) -> Anchor | None:
        """Return what a call stands for, or None where it is not this operation with fixed weights."""

    @abstractmethod
    def fits(self, weight: Tensor, x: Tensor) -> bool:
        """Whether kernels take operands of these shapes."""

    @abstractmethod
    def spec(
        self, weight: TeSA, x: Tensor, attributes: Mapping[str, Any], epilogue: Epilogue, *, device: str
    ) -> KernelSpec:
        """Return the kernel spec for an activation of this shape and dtype (its values do not count)."""

    @abstractmethod
    def size(self, x: Tensor) -> int:
        """Return the number that decides which kernel is fastest: the rows of a linear layer, for example."""

    @abstractmethod
    def dense(self, weight: Tensor, x: Tensor, bias: Tensor | None, attributes: Mapping[str, Any]) -> Tensor:
        """Return the operation by PyTorch's own ops, without activation and residual."""

    @abstractmethod
    def inputs(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the inputs as the operation's kernels take them."""

    @abstractmethod
    def result(self, y: Tensor, x: Tensor) -> Tensor:
        """Return what a kernel returned in the shape that the graph expects for an activation `x`."""

    @abstractmethod
    def flat(self, y: Tensor) -> Tensor:
        """Return a result of the graph's shape as kernels return it."""

    @abstractmethod
    def flops(self, weight: TeSA, x: Tensor, attributes: Mapping[str, Any], *, live: bool) -> int:
        """Return the multiplications and additions of one call: of live weights only, or of all."""

    @abstractmethod
    def sample(self, spec: KernelSpec) -> Tensor:
        """Return a random activation of the size that a kernel spec names."""

    # ------------------------------------------------------------------ the same for all

    def on_grid(self, x: Tensor, attributes: Mapping[str, Any]) -> Tensor:
        """Return an activation that all kernels of the operation take without rounding it: here, as it is."""
        del attributes
        return x

    def residual_on_grid(self, residual: Tensor | None, attributes: Mapping[str, Any]) -> Tensor | None:
        """Return a residual that all kernels of the operation add without rounding it: here, as it is."""
        del attributes
        return residual

    def result_dtype(self, dtype: torch.dtype, attributes: Mapping[str, Any]) -> torch.dtype:
        """Return the dtype of a result, for weights of a dtype."""
        del attributes
        return dtype

    def run(
        self,
        kernel: Kernel,
        packed: Sequence[Tensor],
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        attributes: Mapping[str, Any],
    ) -> Tensor:
        """Return the fused operation by a built kernel."""
        del attributes
        return self.result(kernel.run(packed, *self.inputs(x, bias, residual)), x)

    def fast_path(
        self, kernel: Kernel, packed: Sequence[Tensor], bias: Tensor | None
    ) -> Callable[..., Tensor | None] | None:
        """Return the kernel's short way for x and a residual, where that is all that :meth:`run` does; here, none."""
        del kernel, packed, bias
        return None

    def problem(
        self, spec: KernelSpec, weight: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Problem:
        """Return what the tuner measures, with the right result in float64: of all rows, or of both ends of many."""
        x = self.on_grid(x, spec.attributes)
        inputs = self.inputs(x, bias, self.residual_on_grid(residual, spec.attributes))
        (flat,), added = present(inputs[0]), inputs[2]
        rows = self._ends(flat, x, spec)
        if rows is not None:
            flat = flat.index_select(0, rows)
            added = None if added is None else added.index_select(0, rows)
        wide = [None if t is None else t.to(torch.float64) for t in (bias, added)]
        exact = self.dense(weight.to(torch.float64), flat.to(torch.float64), wide[0], spec.attributes)
        expected = self.flat(apply_epilogue(exact, spec.epilogue, wide[1]))
        return Problem(spec, weight, inputs, expected, reduction=max(1, weight[:1].numel()), checked=rows)

    def _ends(self, flat: Tensor, x: Tensor, spec: KernelSpec) -> Tensor | None:
        """Return which rows of x, as kernels take it, are compared with float64; None for all."""
        count, weight = flat.shape[0], spec["weight"]
        results = self.flops(weight, x, spec.attributes, live=False) // max(1, 2 * math.prod(weight.shape[1:]))
        end = max(1, _COMPARED * count // max(1, 2 * max(flat.numel(), results)))
        if 2 * end >= count:
            return None
        return torch.cat([torch.arange(end), torch.arange(count - end, count)]).to(flat.device)
