"""Does a result agree with its reference? :func:`check` answers with a number, or raises with a report.

Kernels are compared with float64 references (:mod:`sparta.measure.references`), so all disagreement is the kernel's.
The tolerance is derived, not guessed: from the unit roundoff of the dtype and the length of the longest sum
(:func:`tolerance`), so the same call is strict in float64 and fair in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch

from sparta.errors import CheckError, ValueRangeError, message

__all__ = ["Agreement", "check", "tolerance"]

# Rounding errors of one element, and of a norm of them, stay well within four standard deviations of the
# model.
_SAFETY = 4.0
# One element may be off by four times what the norm may be: 16 standard deviations, which no rounding
# reaches.
_ELEMENT = 4.0
# How far below its terms a single sum may plausibly cancel; n sums together, to the n-th root of that.
_CANCELLATION = 1000.0


@dataclass(frozen=True)
class Agreement:
    """How well a result agrees with its reference; what :func:`check` measured.

    Attributes
    ----------
    what
        The name of the result, with the path to the tensor when the result was nested.
    relative_error
        ``||actual - expected|| / ||expected||`` in the Frobenius norm, over the finite elements; the part of
        each difference that ``atol`` covers is left out.
    tolerance
        The largest relative error that passes.
    reason
        Where the tolerance comes from.
    elements
        How many elements were compared.
    outliers
        How many elements are off by more than rounding explains.
    nonfinite_mismatches
        At how many elements NaN, inf or -inf stand in one tensor only.
    worst_index, worst_actual, worst_expected
        The element furthest outside (or nearest to) what is allowed for it; ``None`` in an empty tensor.
    worst_ratio
        Its error over what is allowed for it; more than 1 fails.

    Examples
    --------
    >>> agreement = check(torch.ones(4), torch.ones(4, dtype=torch.float64))
    >>> agreement.passed, agreement.to_dict()["relative_error"]
    (True, 0.0)
    >>> print(agreement)
    result agrees: relative error 0 <= 4.77e-07 (float32, sums of 1 term), 4 elements
    """

    what: str
    relative_error: float
    tolerance: float
    reason: str
    elements: int
    outliers: int
    nonfinite_mismatches: int
    worst_index: tuple[int, ...] | None
    worst_actual: float | None
    worst_expected: float | None
    worst_ratio: float

    @property
    def passed(self) -> bool:
        """Whether norm, single elements and non-finite values all agree."""
        norm_agrees = self.relative_error <= self.tolerance
        return norm_agrees and self.outliers == 0 and self.nonfinite_mismatches == 0

    def to_dict(self) -> dict[str, object]:
        """Return the fields, and ``passed``, as plain values that JSON can hold (NaN and inf as text)."""
        fields = {**asdict(self), "passed": self.passed}
        return {key: _jsonable(value) for key, value in fields.items()}

    def __str__(self) -> str:
        """Return one line if the result agrees, a report otherwise."""
        sign = "<=" if self.relative_error <= self.tolerance else ">"
        verdict = "agrees" if self.passed else "differs"
        summary = (
            f"{self.what} {verdict}: relative error {self.relative_error:.3g} {sign} {self.tolerance:.3g} "
            f"({self.reason}), {self.elements} elements"
        )
        if self.passed:
            return summary
        lines = [summary]
        if self.worst_index is not None:
            lines.append(
                f"  worst element {self.worst_index}: {self.worst_actual!r} instead of "
                f"{self.worst_expected!r}, {self.worst_ratio:.3g} times what is allowed for it"
            )
        lines.append(f"  elements off by more than rounding explains: {self.outliers} of {self.elements}")
        lines.append(f"  elements where only one side is NaN or inf: {self.nonfinite_mismatches} of {self.elements}")
        return "\n".join(lines)


def tolerance(dtype: torch.dtype, reduction: int = 1, *, tf32: bool = False) -> float:
    """Return the relative error that correct rounding may cause.

    Four times ``u + sqrt(reduction) * v``: ``u`` is the unit roundoff of the dtype, paid once when the result
    is stored; ``v`` is that of the accumulator, paid at every step of the sum, where independent errors grow
    as a random walk does. Types of 16 bits or fewer accumulate in float32, so their tolerance hardly grows
    with the length, which is what lets a dropped block show in a long sum.

    Parameters
    ----------
    dtype
        Of the result. Integers and bool are exact: 0.
    reduction
        How many terms the longest sum of one element has: K of a matrix product.
    tf32
        Whether float32 operands are rounded to TF32 (10 bits of mantissa) before they are multiplied.

    Examples
    --------
    >>> tolerance(torch.bfloat16) == 4 * (2**-8 + 2**-24)
    True
    >>> tolerance(torch.float32, 4096) == 4 * (2**-24 + 64 * 2**-24)
    True
    >>> tolerance(torch.int8)
    0.0
    """
    if reduction < 0:
        raise ValueRangeError(message(f"reduction is {reduction}", "the number of terms, 0 or more"))
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    stored = torch.finfo(dtype).eps / 2
    accumulated = min(stored, torch.finfo(torch.float32).eps / 2)
    if tf32 and dtype in (torch.float32, torch.complex64):
        stored = 2.0**-11
    return _SAFETY * (stored + math.sqrt(reduction) * accumulated)


def check(
    actual: object,
    expected: object,
    *,
    reduction: int = 1,
    rtol: float | None = None,
    atol: float = 0.0,
    dtype: torch.dtype | None = None,
    tf32: bool = False,
    what: str = "result",
) -> Agreement:
    """Raise unless ``actual`` agrees with ``expected``; return how well it does.

    Three things must hold, all computed in float64.

    1. *The norm*: ``||actual - expected|| <= tol * ||expected||`` (Frobenius). Relative to the norm and not
       to each element, because an element that cancels to nearly 0 keeps the rounding errors of its large
       terms.
    2. *Each element*: ``|actual - expected| <= 4 * tol * scale``. A norm over a million elements forgives one
       that is plainly wrong; this does not. ``scale`` is the size that the terms of the element must have
       had, as its neighbourhood shows it: the largest of the element itself, the root mean square of each
       line of the tensor through it (its row, its column ...), and the product of its slices' sizes (a loud
       row times a loud column). So neither a zero among large neighbours nor a tensor with rows of very
       different size is misjudged, and where all of them are 0, as in a pruned block, the result must be 0
       exactly.
    3. *NaN and inf* stand at the same elements, with the same signs.

    The model of ``tol`` has one standard deviation at a quarter of it, so (2) is at 16 of them: rounding
    never gets there, while a dropped block, a swapped row or one element computed from the wrong address
    does. Where few elements tell the scale (a scalar, or a row with one giant), they may all have cancelled;
    the part of ``tol`` that comes from sums is then widened by ``1000 ** (1 / n)`` for ``n`` effective
    elements, which is 1.07 at a hundred.

    Parameters
    ----------
    actual, expected
        Tensors, arrays or numbers of one shape, on any devices; or tuples, lists and dicts of them, of one
        structure.
    reduction
        How many terms the longest sum of one element has: K of a matrix product.
    rtol
        Use this for ``tol`` instead of :func:`tolerance`.
    atol
        Allowed for each element beside the relative part; for results that cancel to zero altogether.
    dtype
        The coarsest dtype the computation goes through; by default the coarser of the two tensors'.
    tf32
        Whether float32 products run in TF32.
    what
        Names the result in the report.

    Returns
    -------
    Agreement
        What was measured; for a nested result, of the tensor nearest to its limit.

    Raises
    ------
    sparta.errors.CheckError
        With a report of every tensor that does not agree.

    Examples
    --------
    >>> x, w = torch.rand(64, 256), torch.rand(256, 32)
    >>> check(x @ w, x.double() @ w.double(), reduction=256).passed
    True
    >>> check(torch.tensor([1.0, 2.0, 3.5]), torch.tensor([1.0, 2.0, 3.0]), what="y")
    Traceback (most recent call last):
    sparta.errors.CheckError: y differs: relative error 0.134 > 4.77e-07 (float32, sums of 1 term), 3 elements
      worst element (2,): 3.5 instead of 3.0, ... times what is allowed for it
      elements off by more than rounding explains: 1 of 3
      elements where only one side is NaN or inf: 0 of 3
      ...
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0.0 <= value < math.inf:
            raise ValueRangeError(message(f"{name} is {value}", "a number of 0 or more"))
    agreements = []
    for path, left, right in _pairs(actual, expected, what):
        if left.shape != right.shape:
            given = f"{path} has shape {tuple(left.shape)} instead of {tuple(right.shape)}"
            raise CheckError(message(given, "the shape of the reference", "see which dimension was lost or swapped"))
        limit = _limit(left, right, dtype, reduction, rtol=rtol, tf32=tf32)
        agreements.append(_measure(left, right, limit, atol, path))
    failures = [agreement for agreement in agreements if not agreement.passed]
    if failures:
        advice = "  (longer sums, or a coarser dtype on the way? say so with reduction=, dtype= or tf32=)"
        raise CheckError("\n".join([*map(str, failures), advice]))
    if not agreements:
        raise CheckError(message(f"{what} holds no tensor", "one or more", "return the tensors to compare"))
    return max(agreements, key=lambda agreement: agreement.relative_error / max(agreement.tolerance, 1e-300))


def _pairs(actual: object, expected: object, path: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Walk two nested structures together and yield the tensors that face each other, with their path."""
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or actual.keys() != expected.keys():
            keys = sorted(map(str, actual)) if isinstance(actual, Mapping) else type(actual).__name__
            given = f"{path} is {keys}"
            raise CheckError(message(given, f"a mapping with the keys {sorted(map(str, expected))}"))
        for key in expected:
            yield from _pairs(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (tuple, list)):
        if not isinstance(actual, (tuple, list)) or len(actual) != len(expected):
            found = f"{len(actual)} entries" if isinstance(actual, (tuple, list)) else type(actual).__name__
            raise CheckError(message(f"{path} is {found}", f"a sequence of {len(expected)} entries"))
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            yield from _pairs(left, right, f"{path}[{index}]")
    elif expected is None:
        if actual is not None:
            raise CheckError(message(f"{path} is {type(actual).__name__}", "None, as in the reference"))
    else:
        yield path, _tensor(actual, path), _tensor(expected, path)


def _tensor(value: object, path: str) -> torch.Tensor:
    """Return a leaf as a dense real tensor."""
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, (bool, int, float, complex, np.ndarray, np.generic)):
            given = f"{path} is {type(value).__name__}"
            raise CheckError(message(given, "tensors, arrays, numbers, and tuples, lists and dicts of them"))
        # Through numpy, because Python's own numbers are doubles and torch would read them as float32.
        value = torch.from_numpy(np.array(value, order="C"))
    tensor = value.detach()
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class _Limit:
    """The tolerance of one tensor: what rounding the result costs, what its sums cost, and why."""

    stored: float
    summed: float
    reason: str

    def at(self, effective: torch.Tensor) -> torch.Tensor:
        """Return the tolerance where so many effective elements tell the scale."""
        return self.stored + self.summed * _CANCELLATION ** (1.0 / effective)


def _limit(
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype | None,
    reduction: int,
    *,
    rtol: float | None,
    tf32: bool,
) -> _Limit:
    """Return the tolerance for one tensor and the reason for it."""
    if rtol is not None:
        return _Limit(rtol, 0.0, "rtol as given")
    candidates = [actual.dtype, expected.dtype] if dtype is None else [dtype]
    coarsest = max(candidates, key=lambda candidate: tolerance(candidate, reduction, tf32=tf32))
    whole = tolerance(coarsest, reduction, tf32=tf32)
    # A single term has nothing to cancel with.
    stored = whole if reduction <= 1 else tolerance(coarsest, 0, tf32=tf32)
    name = str(coarsest).removeprefix("torch.") + (" in TF32" if tf32 and coarsest == torch.float32 else "")
    terms = f"sums of {reduction} term" + ("" if reduction == 1 else "s")
    return _Limit(stored, whole - stored, f"{name}, {terms}" if whole else f"{name}, exact")


def _measure(actual: torch.Tensor, expected: torch.Tensor, limit: _Limit, atol: float, what: str) -> Agreement:
    """Compare two tensors of one shape."""
    expected = expected.to(actual.device)
    left, right = actual.to(torch.float64), expected.to(torch.float64)
    both_finite = torch.isfinite(left) & torch.isfinite(right)
    same_nonfinite = (left == right) | (torch.isnan(left) & torch.isnan(right))

    truth = torch.where(both_finite, right, 0.0)
    error = torch.where(both_finite, (left - right).abs(), 0.0)
    if not (actual.is_floating_point() or expected.is_floating_point()):
        # Integers beyond 2**53 differ where their float64 images do not.
        error = torch.where(actual == expected, 0.0, error.clamp_min(1.0))
    slack = atol + max(_smallest_step(actual.dtype), _smallest_step(expected.dtype))
    # Squares are taken of numbers up to 1, so that neither 1e200 nor 1e-200 leaves the range of float64.
    peak = (float(truth.abs().max()) if truth.numel() else 0.0) or 1.0
    unit = truth / peak
    norm, error_norm = float(unit.norm()), float(((error - slack).clamp_min(0.0) / peak).norm())
    relative = error_norm / norm if norm else (math.inf if error_norm else 0.0)

    scales, effective = _scales(unit)
    allowed = _ELEMENT * limit.at(effective) * peak * scales + slack
    # An error of exactly 0 is fine even where nothing is allowed.
    ratio = torch.where(error > 0.0, error / allowed, 0.0)
    ratio = torch.where(both_finite | same_nonfinite, ratio, math.inf)
    worst = int(ratio.argmax()) if ratio.numel() else None
    return Agreement(
        what=what,
        relative_error=relative,
        tolerance=float(limit.at(_effective(unit.square().flatten(), 0).squeeze())),
        reason=limit.reason,
        elements=actual.numel(),
        outliers=int(((ratio > 1.0) & both_finite).sum()),
        nonfinite_mismatches=int((~both_finite & ~same_nonfinite).sum()),
        worst_index=None if worst is None else tuple(int(i) for i in np.unravel_index(worst, actual.shape)),
        worst_actual=None if worst is None else left.flatten()[worst].item(),
        worst_expected=None if worst is None else right.flatten()[worst].item(),
        worst_ratio=0.0 if worst is None else ratio.flatten()[worst].item(),
    )


def _scales(truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each element the size that its terms must have had, as its neighbourhood shows it.

    Also return how many effective elements the best line through it has, which says how far to trust that
    size.
    """
    squares = truth.square()
    scales, effective = truth.abs(), torch.ones_like(truth)
    overall = squares.mean().sqrt() if truth.numel() else squares.sum()
    separable = overall.expand(truth.shape)
    for dim in range(truth.ndim):
        scales = torch.maximum(scales, squares.mean(dim, keepdim=True).sqrt())
        effective = torch.maximum(effective, _effective(squares, dim))
        others = [other for other in range(truth.ndim) if other != dim]
        slices = squares.mean(others, keepdim=True) if others else squares
        separable = separable * (slices.sqrt() / overall)
    # 0 / 0 in a tensor of zeros, which has no scale at all.
    return torch.maximum(scales, separable.nan_to_num(0.0)), effective


def _effective(squares: torch.Tensor, dim: int) -> torch.Tensor:
    """Return how many equal elements would share the energy of a line as its own do: 1 to its length."""
    share = squares / squares.sum(dim, keepdim=True)
    return 1.0 / share.square().sum(dim, keepdim=True).nan_to_num(1.0).clamp(1e-300, 1.0)


def _smallest_step(dtype: torch.dtype) -> float:
    """Return the spacing of a dtype's smallest numbers, below which rounding is absolute, not relative."""
    if not dtype.is_floating_point:
        return 0.0
    information = torch.finfo(dtype)
    return float(information.smallest_normal * information.eps)


def _jsonable(value: object) -> object:
    """Return a field as JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
