"""Verify: the compiled model computes what the masked dense model computes, on inputs that no one chose.

Outputs are compared on the example and on fresh seeded inputs, with a tolerance for the dtype; the outcome is a
:class:`Certificate` that goes with the artifact. A model that does not agree is not handed over: kernels are checked
one by one, wrong ones are replaced by dense, and the check starts again. Models that round are compared layer by layer
(:mod:`sparta.compiler.layerwise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sparta.compiler.certificate import Certificate
from sparta.compiler.lower.samples import SizeSample
from sparta.compiler.lower.subgraph import SubGraph
from sparta.compiler.run.kernel_module import KernelModule
from sparta.errors import CheckError, SpartaError, message
from sparta.measure.checks import check
from sparta.propagation.inputs import fresh_inputs
from sparta.specialize.linear.spec import apply_epilogue

__all__ = [
    "TOLERANCES",
    "Certificate",
    "Difference",
    "agree",
    "compared",
    "difference",
    "relative_error",
    "tolerance_of",
    "verify",
    "wrong_kernels",
]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest relative error (norm of the difference over norm of the output) that passes, by dtype."""

_ELEMENT = 30.0
_QUANTUM = 1 / 255  # of a grid of 8 bits, over its range
_QUANTA = 5.0  # an input on the edge between two quanta may be rounded either way, and so may what follows from it
_SEEDS = (0, 1)


class Difference(NamedTuple):
    """How far results are apart, within bounds.

    Attributes
    ----------
    relative
        The largest norm of a difference over the norm of its tensor.
    single
        The largest difference of one element over the largest element of its tensor.
    allowed
        The largest relative difference that passes anywhere.
    dtype
        The coarsest, which says why.
    outputs
        How many results the model has.
    """

    relative: float = 0.0
    single: float = 0.0
    allowed: float = 0.0
    dtype: torch.dtype = torch.float64
    outputs: int = 0

    def joined(self, other: Difference) -> Difference:
        """Return the larger of both in everything."""
        return Difference(
            max(self.relative, other.relative),
            max(self.single, other.single),
            max(self.allowed, other.allowed),
            max(self.dtype, other.dtype, key=lambda dtype: TOLERANCES.get(dtype, 0.0)),
            max(self.outputs, other.outputs),
        )


Compare = Callable[[Callable[..., Any], Sequence[Any]], Difference]
"""Compares a compiled model with what it should compute on flat inputs; raises where they do not agree."""


def verify(
    reference: Callable[..., Any] | None,
    compiled: Callable[..., Any],
    sizes: Sequence[Sequence[Any]],
    *,
    layers: Compare | None = None,
    brief: bool = False,
    least: float = 0.0,
) -> Certificate:
    """Compare two callables of flat inputs; raises :class:`CheckError` where they do not agree.

    Parameters
    ----------
    reference
        The masked dense model; None with `layers`.
    sizes
        Flat example inputs, for each size that was measured.
    layers
        What compares the compiled model in its place, where it rounds activations.
    brief
        Whether calls take long: one fresh input beside the example is then enough, and with `layers`, which look at
        every place where something is rounded and take several times as long, the example alone.
    least
        What is allowed in any case: :func:`tolerance_of` the model's parameters.

    Examples
    --------
    >>> verify(torch.relu, lambda x: x.clamp_min(0), [[torch.randn(3)]]).error
    0.0
    """
    found = Difference()
    few: tuple[int, ...] = () if layers is not None else _SEEDS[:1]
    seeds = few if brief else _SEEDS
    for example in sizes:
        for inputs in (list(example), *(fresh_inputs(example, seed) for seed in seeds)):
            if layers is not None:
                found = found.joined(layers(compiled, inputs))
            elif reference is not None:
                with torch.no_grad():
                    expected, actual = reference(*inputs), compiled(*inputs)
                found = found.joined(compared(pytree.tree_leaves(expected), pytree.tree_leaves(actual), least=least))
    name = str(found.dtype).removeprefix("torch.") + " with int8 layers" * (layers is not None)
    return Certificate(seeds, name, found.allowed, found.relative, found.single, found.outputs, passed=True)


def compared(
    expected: Sequence[Any], actual: Sequence[Any], *, rounding: bool = False, least: float = 0.0
) -> Difference:
    """Return how far flat results are apart; raises :class:`CheckError` beyond what :func:`difference` allows.

    >>> compared([torch.ones(2), 3], [torch.ones(2), 3]).outputs
    2
    """
    if len(expected) != len(actual):
        raise CheckError(message(f"{len(actual)} results", f"{len(expected)}"))
    found = Difference(allowed=TOLERANCES[torch.float64], outputs=len(expected))
    for one, two in zip(expected, actual, strict=True):
        if isinstance(one, Tensor):
            found = found.joined(difference(one, two, rounding=rounding, least=least))
        else:
            _same_value(one, two)
    return found


def agree(expected: Sequence[Any], actual: Sequence[Any], *, least: float = 0.0) -> None:
    """Raise :class:`CheckError` unless flat results agree as well as :func:`verify` asks.

    >>> agree([torch.ones(2), 3], [torch.ones(2), 3])
    """
    compared(expected, actual, least=least)


def tolerance_of(parameters: Iterable[Tensor]) -> float:
    """Return what results may differ by for the coarsest dtype that a model computes in, whatever they come back in.

    >>> tolerance_of([torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]) == TOLERANCES[torch.bfloat16]
    True
    """
    return max((TOLERANCES.get(parameter.dtype, 0.0) for parameter in parameters), default=0.0)


def relative_error(expected: Sequence[Any], actual: Sequence[Any]) -> float:
    """Return the largest norm of a difference over the norm of the output, of flat results.

    >>> relative_error([torch.ones(3)], [1.5 * torch.ones(3)])
    0.5
    """
    errors = [
        float((two.double() - one.double()).norm() / one.double().norm().clamp_min(1e-30))
        for one, two in zip(expected, actual, strict=True)
        if isinstance(one, Tensor) and one.is_floating_point() and one.numel()
    ]
    return max(errors, default=0.0)


def wrong_kernels(kernels: Mapping[SubGraph, KernelModule], samples: Sequence[SizeSample]) -> dict[str, str]:
    """Return the names of sub-graphs whose kernel computes something else than dense, with what was found."""
    wrong: dict[str, str] = {}
    for subgraph, module in kernels.items():
        for sample in samples:
            x, residual = sample.values[subgraph]
            for seed in (None, *_SEEDS):
                given = x if seed is None else torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
                found = _kernel_error(subgraph, module, given, residual)
                if found:
                    wrong.setdefault(subgraph.name, found)
    return wrong


def _kernel_error(subgraph: SubGraph, module: KernelModule, x: Tensor, residual: Tensor | None) -> str:
    x = subgraph.lowering.on_grid(x, subgraph.anchor.attributes)
    residual = subgraph.lowering.residual_on_grid(residual, subgraph.anchor.attributes)
    wide = [None if t is None else t.to(torch.float64) for t in (subgraph.bias, residual)]
    with torch.no_grad():
        exact = subgraph.lowering.dense(
            subgraph.weight.to(torch.float64), x.to(torch.float64), wide[0], subgraph.anchor.attributes
        )
        expected = apply_epilogue(exact, subgraph.epilogue, wide[1])
        try:
            check(module(x, residual), expected, reduction=max(1, subgraph.weight[:1].numel()), what=subgraph.name)
        except (SpartaError, RuntimeError) as error:
            return str(error).splitlines()[0]
    return ""


def _same_value(expected: object, actual: object) -> None:
    if expected is not actual and expected != actual:
        raise CheckError(message(f"the compiled model returns {actual!r} where the original returns {expected!r}"))


def _allowed(dtype: torch.dtype, *, rounding: bool) -> float:
    allowed = TOLERANCES.get(dtype, 0.0)
    return max(allowed, _QUANTA * _QUANTUM) if rounding and dtype.is_floating_point else allowed


def difference(expected: Tensor, actual: object, *, rounding: bool = False, least: float = 0.0) -> Difference:
    """Return how far a tensor is from what it should be; raises :class:`CheckError` beyond the tolerance of its dtype.

    Parameters
    ----------
    rounding
        Whether both round to 8 bits on the way; they may then differ by a few quanta.
    least
        What is allowed in any case.

    Examples
    --------
    >>> difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])).relative
    0.0
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        got = f"{tuple(actual.shape)} in {actual.dtype}" if isinstance(actual, Tensor) else type(actual).__name__
        raise CheckError(message(f"the compiled model returns {got}", f"{tuple(expected.shape)} in {expected.dtype}"))
    if expected.numel() == 0:
        return Difference(dtype=expected.dtype)
    if not expected.is_floating_point():
        wrong = int((expected != actual).sum())
        if wrong:
            raise CheckError(message(f"{wrong} elements of a {expected.dtype} output differ", "equal outputs"))
        return Difference(dtype=expected.dtype)
    left, right = actual.to(torch.float64), expected.to(torch.float64)
    finite = torch.isfinite(left) & torch.isfinite(right)
    alike = finite | (left == right) | (left.isnan() & right.isnan())
    if not bool(alike.all()):
        raise CheckError(message(f"{int((~alike).sum())} outputs are infinite or NaN on one side only"))
    gap, truth = torch.where(finite, left - right, 0.0), torch.where(finite, right, 0.0)
    norm, peak = float(truth.norm()), float(truth.abs().max())
    allowed = max(least, _allowed(expected.dtype, rounding=rounding))
    most = (_QUANTA if rounding else _ELEMENT) * allowed
    tiny = float(torch.finfo(expected.dtype).eps)
    relative = float(gap.norm()) / max(norm, tiny)
    single = float(gap.abs().max()) / max(peak, tiny)
    if relative > allowed or single > most or not math.isfinite(relative):
        raise CheckError(
            message(
                f"the compiled model differs from the original by {relative:.3g} (relative), {single:.3g} at most",
                f"{allowed:.3g} in {expected.dtype}",
            )
        )
    return Difference(relative, single, allowed, expected.dtype)
