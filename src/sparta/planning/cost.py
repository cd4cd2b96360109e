"""Costs: by how much the model's outputs will change when a layer becomes an option.

The reconstruction error of each row of a weight, on the calibration data, is weighted by how much the outputs of the
model react to that row: the diagonal of the Fisher information of the outputs, from products with random signs through
one backward pass, so no labels are needed. Costs are squared relative changes of the outputs and add up over layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparta.errors import ShapeError, ValueRangeError, message
from sparta.oneshot.calibrate import Grams, call
from sparta.oneshot.methods import find_method, refit
from sparta.oneshot.problem import Problem
from sparta.oneshot.targets import Target
from sparta.planning.options import BF16, Option
from sparta.precision.api import FORMATS
from sparta.precision.formats import round_weight
from sparta.tesa.patterns import Pattern

__all__ = ["Sensitivity", "errors_of", "grams_of", "sensitivity_of"]

_ROWS, _STEPS = 128, 6  # rows of a weight that are fitted, and steps of each fit: enough for an estimate
_MEMORY = 2**30  # bytes of Gram matrices that are held at once
_NO_UPDATE = {"magnitude", "wanda", "ria"}


@dataclass(frozen=True)
class Sensitivity:
    """How the outputs of the model react to each layer.

    Parameters
    ----------
    rows
        By layer: the mean square of the outputs' derivative by each of its rows.
    outputs
        The sum of squares of the model's outputs, over all batches.
    called
        The layers that the data reaches.
    """

    rows: Mapping[str, Tensor]
    outputs: float
    called: frozenset[str]


def sensitivity_of(model: nn.Module, targets: Sequence[Target], batches: Sequence[Any]) -> Sensitivity:
    """Run the model on each batch, and backwards from its outputs times random signs."""
    squares: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    called: set[str] = set()
    whole = 0.0
    for index, batch in enumerate(batches):
        with _recording(model, targets) as seen, torch.enable_grad():
            outputs = [t for t in pytree.tree_leaves(call(model, batch, index)) if _is_real(t)]
            called |= set(seen)
            whole += sum(float(t.detach().double().square().sum()) for t in outputs)
            loss = sum(((t * _signs(t, index)).sum() for t in outputs if t.requires_grad), torch.zeros(()))
            names = list(seen)
            if not names or not isinstance(loss, Tensor) or not loss.requires_grad:
                continue
            gradients = torch.autograd.grad(loss, [seen[name] for name in names], allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                rows = _by_row(gradient, next(t for t in targets if t.name == name)).double()
                squares[name] = squares.get(name, torch.zeros_like(rows[0])) + rows.square().sum(0)
                counts[name] = counts.get(name, 0) + len(rows)
    if not torch.isfinite(torch.tensor(whole)):
        raise ValueRangeError(
            message("the outputs of the model hold NaN or infinity", "finite outputs", "look at data")
        )
    rows_of = {name: square / counts[name] for name, square in squares.items()}
    return Sensitivity(rows_of, max(whole, torch.finfo(torch.float64).tiny), frozenset(called))


def grams_of(model: nn.Module, targets: Sequence[Target], batches: Sequence[Any]) -> Iterator[tuple[Target, Tensor]]:
    """Give each layer that the data reaches with its Gram matrix; so many at once as fit into memory."""
    waiting = list(targets)
    while waiting:
        size = 0
        some: list[Target] = []
        while waiting and (not some or size + _bytes(waiting[0]) <= _MEMORY):
            size += _bytes(waiting[0])
            some.append(waiting.pop(0))
        grams = Grams(some)
        for index, batch in enumerate(batches):
            with torch.no_grad(), grams.watch():
                call(model, batch, index)
        for target in some:
            gram = grams[target.name]
            if gram is not None:
                yield target, gram


def errors_of(
    target: Target,
    gram: Tensor,
    options: Sequence[tuple[Option, Pattern | None]],
    sensitivity: Sensitivity,
    method: str,
    rounding: Mapping[str, float] | None = None,
) -> dict[Option, float]:
    """Return the cost of each option of a layer, by the method where it is quick, else by an upper bound of it.

    Methods that update weights are estimated by one fit on the support of the largest scaled weights, where ALPS
    starts from. What pruning and rounding change is independent, so an option that does both costs their sum.

    Parameters
    ----------
    options
        Each with the pattern on the weight; None for one that prunes nothing.
    rounding
        By precision: the relative error of the layer's output when it is rounded. Options of others are left out.
    """
    weight = target.layout.to_matrix(target.seen(target.parameter.detach()).float())
    fisher = sensitivity.rows.get(target.name)
    own = ((weight.double() @ gram.double()) * weight).sum(2)
    whole = float(own.sum()) if fisher is None else sensitivity.outputs
    # Without a derivative the outputs do not tell: the layer's own relative error has to do.
    reacts = torch.ones_like(own.flatten()) if fisher is None else fisher.to(own.device)

    def cost(errors: Tensor) -> float:
        return float((errors.flatten() * reacts).sum()) / whole if whole else 0.0

    wanted = [(option, pattern) for option, pattern in options if pattern is not None]
    pruning = _pruning_errors(target, weight, gram, wanted, method)
    found = {option: cost(pruning[option]) for option, _ in wanted if option in pruning}
    rounded = {
        each: cost(_rounding(weight, gram, error**2 * own.sum(), each)) for each, error in (rounding or {}).items()
    }
    for option, _ in options:
        if option.precision in rounded and (not option.prunes or option.unrounded in found):
            found[option] = found.get(option.unrounded, 0.0) + rounded[option.precision]
    return found


def _rounding(weight: Tensor, gram: Tensor, whole: Tensor, precision: str) -> Tensor:
    """Return the squared error of each row when weights and inputs are rounded, of which the sum is known.

    Rounding the weights changes a row by what the Gram matrix says. What is left of the sum is due to the inputs, whose
    noise reaches each row by the squares of its weights, however large the output of the row is.
    """
    if precision == BF16:
        values = weight.to(torch.bfloat16).to(weight.dtype)
    else:
        values = round_weight(weight.flatten(0, 1), 0, FORMATS[precision]).values.view_as(weight)
    change = (values - weight).double()
    by_weights = ((change @ gram.double()) * change).sum(2).clamp(min=0)
    squares = weight.double().square().sum(2)
    left = (whole - by_weights.sum()).clamp(min=0)
    return by_weights + left * squares / squares.sum().clamp(min=torch.finfo(torch.float64).tiny)


def _pruning_errors(
    target: Target, weight: Tensor, gram: Tensor, options: Sequence[tuple[Option, Pattern]], method: str
) -> dict[Option, Tensor]:
    """Return the squared error of each row, by option; patterns that the layer cannot have are left out."""
    shared: dict[str, Any] = {}
    found: dict[Option, Tensor] = {}
    for option, pattern in options:
        units = pattern.unit_count(target.layout.shape)
        count = None if option.sparsity is None else round(option.sparsity * units)
        try:
            pattern.check_shape(target.layout.shape)
        except ShapeError:
            continue  # the layer cannot have this pattern
        problem = Problem(weight, gram, pattern, count, target.layout, shared)
        found[option] = _quick(problem, method) if method in _NO_UPDATE else _fitted(problem)
    return found


def _quick(problem: Problem, method: str) -> Tensor:
    return _by_rows(problem, find_method(method).solve(problem).weight)


def _fitted(problem: Problem) -> Tensor:
    """Return the error of each row, ``(groups, rows)``; a row that is not fitted has that of the one before."""
    scale = problem.hessian.diagonal(dim1=1, dim2=2).sqrt().unsqueeze(1).to(problem.weight.dtype)
    mask = problem.select((problem.weight * scale).square())
    step = -(-problem.weight.shape[1] // _ROWS)
    part = replace(problem, weight=problem.weight[:, ::step])
    errors = _by_rows(part, refit(part, mask[:, ::step], part.weight, _STEPS))
    return errors.repeat_interleave(step, 1)[:, : problem.weight.shape[1]]


def _by_rows(problem: Problem, weight: Tensor) -> Tensor:
    change = weight - problem.weight
    if problem.gram is None:
        return change.double().square().sum(2)
    return ((change @ problem.gram.to(change.dtype)) * change).sum(2, dtype=torch.float64).clamp(min=0)


def _bytes(target: Target) -> int:
    return 4 * target.layout.groups * target.layout.columns**2


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _signs(tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return signs.to(tensor.device, tensor.dtype)


def _by_row(gradient: Tensor, target: Target) -> Tensor:
    """Return the gradient of a layer's output as ``(positions, rows of the weight)``."""
    if isinstance(target.module, nn.Conv1d | nn.Conv2d):
        spatial = 1 if isinstance(target.module, nn.Conv1d) else 2
        return gradient.movedim(-1 - spatial, -1).reshape(-1, target.layout.shape[0])
    return gradient.reshape(-1, gradient.shape[-1])


@contextlib.contextmanager
def _recording(model: nn.Module, targets: Sequence[Target]) -> Iterator[dict[str, Tensor]]:
    """Record the outputs of layers, differentiable, while no parameter is."""
    seen: dict[str, Tensor] = {}

    def recorder(target: Target) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            kept = output if output.requires_grad else output.detach().requires_grad_()
            seen[target.name] = kept
            return kept.clone()  # what follows may work in place

        return hook

    needed = [(p, p.requires_grad) for p in model.parameters()]
    handles = [target.module.register_forward_hook(recorder(target)) for target in targets]
    try:
        for parameter, _ in needed:
            parameter.requires_grad_(False)  # noqa: FBT003 - torch's own
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        for parameter, flag in needed:
            parameter.requires_grad_(flag)
