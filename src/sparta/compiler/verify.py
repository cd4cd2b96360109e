"""Verify: the compiled model computes what the masked dense model computes, on inputs that no one chose.

Outputs are compared on the example and on fresh seeded inputs, with a tolerance for the dtype; the outcome is a
:class:`Certificate` that goes with the artifact. A model that does not agree is not handed over: kernels are checked
one by one, wrong ones are replaced by dense, and the check starts again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

__all__ = ["TOLERANCES", "Certificate", "agree", "relative_error", "verify", "wrong_kernels"]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest relative error (norm of the difference over norm of the output) that passes, by dtype."""

_ELEMENT = 30.0
_QUANTUM = 1 / 255  # of a grid of 8 bits, over its range
_QUANTA = 5.0  # an input on the edge between two quanta may be rounded either way, and so may what follows from it
_SEEDS = (0, 1)


def verify(
    reference: Callable[..., Any],
    compiled: Callable[..., Any],
    sizes: Sequence[Sequence[Any]],
    *,
    rounding: bool = False,
    brief: bool = False,
) -> Certificate:
    """Compare two callables of flat inputs; raises :class:`CheckError` where they do not agree.

    Parameters
    ----------
    reference
        The masked dense model.
    sizes
        Flat example inputs, for each size that was measured.
    rounding
        Whether both round activations to 8 bits; they may then differ by a few quanta.
    brief
        Whether calls take long: one fresh input beside the example is then enough.

    Examples
    --------
    >>> verify(torch.relu, lambda x: x.clamp_min(0), [[torch.randn(3)]]).error
    0.0
    """
    error = worst = 0.0
    coarsest, outputs = torch.float64, 0
    seeds = _SEEDS[:1] if brief else _SEEDS
    for example in sizes:
        for inputs in (list(example), *(fresh_inputs(example, seed) for seed in seeds)):
            with torch.no_grad():
                pairs = list(
                    zip(pytree.tree_leaves(reference(*inputs)), pytree.tree_leaves(compiled(*inputs)), strict=True)
                )
            outputs = len(pairs)
            for expected, actual in pairs:
                if not isinstance(expected, Tensor):
                    _same_value(expected, actual)
                    continue
                relative, single = _difference(expected, actual, rounding=rounding)
                error, worst = max(error, relative), max(worst, single)
                coarsest = max(coarsest, expected.dtype, key=lambda dtype: TOLERANCES.get(dtype, 0.0))
    allowed = _allowed(coarsest, rounding=rounding)
    name = str(coarsest).removeprefix("torch.") + " with int8 layers" * rounding
    return Certificate(seeds, name, allowed, error, worst, outputs, passed=True)


def agree(expected: Sequence[Any], actual: Sequence[Any], *, rounding: bool = False) -> None:
    """Raise :class:`CheckError` unless flat results agree as well as :func:`verify` asks.

    >>> agree([torch.ones(2), 3], [torch.ones(2), 3])
    """
    if len(expected) != len(actual):
        raise CheckError(message(f"{len(actual)} results", f"{len(expected)}"))
    for one, two in zip(expected, actual, strict=True):
        _difference(one, two, rounding=rounding) if isinstance(one, Tensor) else _same_value(one, two)


def relative_error(reference: Callable[..., Any], compiled: Callable[..., Any], inputs: Sequence[Any]) -> float:
    """Return the largest norm of a difference over the norm of the output, of two callables of flat inputs.

    >>> relative_error(torch.relu, lambda x: 1.5 * x, [torch.ones(3)])
    0.5
    """
    with torch.no_grad():
        pairs = zip(pytree.tree_leaves(reference(*inputs)), pytree.tree_leaves(compiled(*inputs)), strict=True)
        errors = [
            float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
            for expected, actual in pairs
            if isinstance(expected, Tensor) and expected.is_floating_point() and expected.numel()
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


def _difference(expected: Tensor, actual: object, *, rounding: bool = False) -> tuple[float, float]:
    """Return the relative error, and the largest single one over the largest element; raises beyond the tolerance."""
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        got = f"{tuple(actual.shape)} in {actual.dtype}" if isinstance(actual, Tensor) else type(actual).__name__
        raise CheckError(message(f"the compiled model returns {got}", f"{tuple(expected.shape)} in {expected.dtype}"))
    if expected.numel() == 0:
        return 0.0, 0.0
    if not expected.is_floating_point():
        wrong = int((expected != actual).sum())
        if wrong:
            raise CheckError(message(f"{wrong} elements of a {expected.dtype} output differ", "equal outputs"))
        return 0.0, 0.0
    left, right = actual.to(torch.float64), expected.to(torch.float64)
    finite = torch.isfinite(left) & torch.isfinite(right)
    alike = finite | (left == right) | (left.isnan() & right.isnan())
    if not bool(alike.all()):
        raise CheckError(message(f"{int((~alike).sum())} outputs are infinite or NaN on one side only"))
    gap, truth = torch.where(finite, left - right, 0.0), torch.where(finite, right, 0.0)
    norm, peak = float(truth.norm()), float(truth.abs().max())
    allowed = _allowed(expected.dtype, rounding=rounding)
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
    return relative, single
