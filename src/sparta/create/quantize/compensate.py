"""Rounding with compensation (GPTQ): weights are rounded column by column, and those to come make up for the error.

What the columns to come can do follows from the Gram matrix of a layer's inputs. Weights that are zero stay zero: they
are neither rounded away from it nor used to compensate, so a pruned model keeps its pattern.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparta.create.quantize.fake_quantize import Quantizer, fake_quantize
from sparta.create.quantize.layers import QuantizedLayer
from sparta.create.quantize.prepare import named_modules
from sparta.errors import ValueRangeError, message
from sparta.oneshot.calibrate import Grams, call, quiet
from sparta.oneshot.problem import DAMPING
from sparta.oneshot.targets import Target, find_targets

__all__ = ["as_inputs", "compensate"]

_COLUMNS = 128  # that are rounded before the rest of the matrix is corrected
_GRAM_BYTES = 1 << 30  # of Gram matrices that are held at a time


def as_inputs(data: Iterable[Any], steps: int | None = None) -> list[Any]:
    """Return the first batches without targets: mappings and tensors as they are, the first item of a pair.

    >>> as_inputs([(1, "target"), {"x": 2}])
    [1, {'x': 2}]
    """
    return [
        batch[0] if isinstance(batch, Sequence) and not isinstance(batch, str) else batch
        for batch in itertools.islice(data, steps)
    ]


@torch.no_grad()
def compensate(model: nn.Module, data: Iterable[Any], steps: int | None = None) -> list[str]:
    """Round the weights of a prepared model so that its layers' outputs change less than by rounding each alone.

    Parameters
    ----------
    model
        As :func:`~sparta.create.quantize.prepare.prepare` left it. The grids of the weights that are rounded are
        frozen.
    data
        Batches as the model takes them, read once.
    steps
        How many of them; None: all.

    Returns
    -------
    list of str
        The weights that were rounded; those of layers that were never called are left alone.

    Examples
    --------
    >>> from sparta.create.quantize.prepare import prepare
    >>> model = nn.Sequential(nn.Linear(8, 4))
    >>> _ = prepare(model, {"weights": {"num_bits": 4, "strategy": "channel"}})
    >>> compensate(model, [torch.randn(32, 8)])
    ['0.weight']
    """
    batches = list(itertools.islice(data, steps))
    if not batches:
        raise ValueRangeError(message("no batch to compensate with", "at least one"))
    plain = named_modules(model)[""]
    targets = [target for target in find_targets(plain, include="*") if _quantizer(target) is not None]
    done = []
    for part in _parts(targets):
        grams = Grams(part)
        with quiet(plain), grams.watch():
            for index, batch in enumerate(batches):
                call(plain, batch, index)
        for target in part:
            gram = grams[target.name]
            if gram is not None:
                _round(target, gram)
                done.append(target.name)
    return done


def _quantizer(target: Target) -> Quantizer | None:
    module = target.module
    found = module._modules.get("weight_quantizer")
    is_plain = isinstance(module, QuantizedLayer) and not module.folded_norm
    return found if is_plain and isinstance(found, Quantizer) else None


def _parts(targets: Sequence[Target]) -> Iterator[list[Target]]:
    """Yield layers together whose Gram matrices may be held at a time."""
    part: list[Target] = []
    total = 0
    for target in targets:
        size = 8 * target.layout.groups * target.layout.columns**2
        if part and total + size > _GRAM_BYTES:
            yield part
            part, total = [], 0
        part.append(target)
        total += size
    if part:
        yield part


def _round(target: Target, gram: Tensor) -> None:
    quantizer = _quantizer(target)
    assert quantizer is not None  # noqa: S101 - chosen by it
    parameter = target.parameter
    quantizer.observe(parameter)
    quantizer.observing = False
    scale, zero_point = quantizer.grid()
    weight = target.layout.to_matrix(target.seen(parameter.detach().float()))
    groups, rows, columns = weight.shape
    live = weight != 0
    per_row = quantizer.axis is not None
    grid = [one.reshape(groups * rows) if per_row else one for one in (scale, zero_point)]

    def rounded(column: Tensor) -> Tensor:
        flat = fake_quantize(column.reshape(-1), grid[0], grid[1], quantizer.args, 0 if per_row else None)
        return flat.view(groups, rows)

    factor = _factor(gram).to(weight.dtype)
    for start in range(0, columns, _COLUMNS):
        stop = min(start + _COLUMNS, columns)
        errors = torch.zeros_like(weight[:, :, start:stop])
        for column in range(start, stop):
            before = weight[:, :, column].clone()
            after = rounded(before) * live[:, :, column]
            error = (before - after) / factor[:, column, column].unsqueeze(1)
            update = error.unsqueeze(2) * factor[:, column : column + 1, column:stop]
            weight[:, :, column:stop] -= update * live[:, :, column:stop]
            weight[:, :, column] = after
            errors[:, :, column - start] = error
        weight[:, :, stop:] -= (errors @ factor[:, start:stop, stop:]) * live[:, :, stop:]
    parameter.copy_(target.seen(target.layout.to_weight(weight)))


def _factor(gram: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Gram matrix, ``(groups, columns, columns)``."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    damping = DAMPING * diagonal.mean(1, keepdim=True)
    damped = gram + torch.diag_embed(torch.where(damping > 0, damping, 1.0).expand_as(diagonal))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor
