"""`quantize`: a trained model and some data in, the same model on grids of fewer bits out, with what that costs.

The model is copied, its weights are rounded with one scale per output channel, the grids of its inputs follow from the
data, and layers whose rounding would cost more than is allowed stay as they are. The spec of the result has the bits
and the pattern: which weights are live is read before they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparta.errors import NameNotFoundError, ValueRangeError, did_you_mean, message
from sparta.modules import unwrapped
from sparta.precision.data import checked_batches
from sparta.precision.formats import Float8
from sparta.precision.layers import Layer, Simulated, chosen_layer, unusable
from sparta.precision.losses import Judge, Metric, kept_within
from sparta.precision.norms import find_norms, migrations, scaled
from sparta.precision.observe import OBSERVERS, Seen, observe
from sparta.precision.report import LayerPrecision, PrecisionReport
from sparta.precision.watch import Weights
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.tesa import names as tensor_names
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec

__all__ = ["FORMATS", "FoundGrids", "Quantized", "quantize"]

FORMATS: Mapping[str, str] = {"int8": "int8", "fp8": "fp8_e4m3"}
"""The bit format of each precision that rounds weights."""


class FoundGrids(dict[str, Quantization | Float8]):
    """Grids of inputs, by ``"layer.input"``, that were found in data after training.

    Nothing was trained with them, so the compiler may let layers that read one tensor share the widest of its grids,
    and round what is added to it as well. Grids in any other mapping were learnt, or are the user's: they stay as they
    are.
    """


@dataclass(frozen=True, eq=False)
class Quantized:
    """A model on grids of fewer bits.

    Parameters
    ----------
    model
        A copy of the model whose weights are rounded, in real numbers; it does not round its inputs.
    spec
        The TeSAs of its tensors, with pattern, bits and scales.
    activations
        The grids of inputs, by ``"layer.input"``; :class:`FoundGrids` unless training has learnt them.
    simulated
        The model that rounds its inputs as well: what kernels must agree with.
    report
        Which layers, and what it costs.
    judge
        Measures the loss of any model against the one that was given.
    """

    model: nn.Module
    spec: Spec
    activations: Mapping[str, Quantization | Float8]
    simulated: Callable[..., Any]
    report: PrecisionReport
    judge: Judge


def quantize(  # noqa: PLR0913 - one call says all there is to say about rounding
    model: nn.Module,
    calibration: Any,
    precision: Literal["int8", "fp8"] = "int8",
    *,
    spec: Spec | None = None,
    max_loss: float | None = None,
    metric: Metric | None = None,
    observer: str = "auto",
    dynamic: bool | None = None,
    migrate: bool = True,
    ignore: Sequence[str] | str = (),
) -> Quantized:
    """Round the weights of a trained model, and find the grids of its inputs, by the data it will see.

    Parameters
    ----------
    model
        It is not changed. All linear layers, convolutions and embeddings are rounded, whatever code calls them.
    calibration
        An iterable of batches: tensors, tuples of arguments, or dicts of keyword arguments.
    precision
        ``"int8"``, or ``"fp8"`` (e4m3).
    spec
        What is pruned; None reads the zeros that are in the weights.
    max_loss
        The loss that is allowed: of `metric`, or the norm of the change of the outputs over their norm. Layers that
        would cost more stay as they are. None allows a hundredth of the metric, and any without one.
    metric
        Takes a model and returns a number, higher is better; the loss is what it falls by.
    observer
        How static grids follow from data: ``"minmax"``, ``"percentile"``, ``"mse"``, or ``"auto"`` for the best of
        them, layer by layer.
    dynamic
        Whether every token gets a scale of its own at run time; None: in layers where static ones are clearly worse.
    migrate
        Whether norms take over what makes grids coarse, where that lowers the error.
    ignore
        Names of parameters or layers, or patterns of them, that stay as they are.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> found = quantize(model, [torch.randn(32, 8) for _ in range(4)])
    >>> str(found.spec["0.weight"].format), sorted(found.activations)
    ('int8', ['0.input', '2.input'])
    >>> bool(found.report.change < 0.1)
    True
    """
    format = _checked(model, precision, max_loss, observer)
    batches = checked_batches(calibration)
    given = unwrapped(model)
    copy = deepcopy(given).eval()
    for parameter in copy.parameters():
        parameter.requires_grad = False
    known = (Spec.from_zeros(given) if spec is None else spec).resolve(copy)
    Spec(known).apply(copy)
    judge = Judge.of(copy, batches, metric)
    weights = Weights(copy)
    skipped = _ignored(weights, ignore)
    seen = {name: one for name, one in observe(copy, batches, weights).items() if name not in skipped}
    moved = _migrated(copy, batches[0], weights, seen, known, format) if migrate else set()
    if moved:
        seen = {name: one for name, one in observe(copy, batches, weights).items() if name not in skipped}
    layers, left = _layers(seen, weights, format, observer, dynamic)
    left |= dict.fromkeys(sorted(skipped & set(weights.tensors)), "as asked")
    bound = judge.allowed(max_loss)
    active, hurt, (loss, reached) = kept_within(judge, copy, weights, layers, bound)
    kept = {name: layer for name, layer in layers.items() if name in active}
    simulated = Simulated(copy, weights, kept)
    change = loss if metric is None else judge.change(simulated)
    both = None if judge.baseline is None or reached is None else (judge.baseline, reached)
    rows = tuple(
        _row(name, kept.get(name), {**left, **hurt}.get(name, ""), name in moved)
        for name in weights.tensors
        if name in kept or name in left or name in hurt
    )
    told = None if bound == float("inf") else bound
    report = PrecisionReport(precision, rows, len(batches), change, told, both)
    with torch.no_grad():
        for name, layer in kept.items():
            weights.tensors[name].copy_(layer.weight.values)
    return Quantized(copy, _spec_of(known, kept, weights), _activations(kept), simulated, report, judge)


def _checked(model: Any, precision: str, max_loss: float | None, observer: str) -> str:
    if not isinstance(model, nn.Module):
        raise ValueRangeError(message(f"a {type(model).__name__}", "a torch.nn.Module"))
    if precision not in FORMATS:
        raise NameNotFoundError(did_you_mean(str(precision), FORMATS, "precision"))
    if observer != "auto" and observer not in OBSERVERS:
        raise NameNotFoundError(did_you_mean(str(observer), [*OBSERVERS, "auto"], "observer"))
    if max_loss is not None and not (isinstance(max_loss, int | float) and max_loss >= 0):
        raise ValueRangeError(message(f"max_loss={max_loss!r}", "0 or more, or None"))
    return FORMATS[precision]


def _ignored(weights: Weights, ignore: Sequence[str] | str) -> set[str]:
    """Return the weights that stay as they are; a layer's name stands for its tensors."""
    found: set[str] = set()
    for entry in (ignore,) if isinstance(ignore, str) else ignore:
        below = {name for name in weights.tensors if name == entry or name.startswith(f"{entry}.")}
        found |= below or set(tensor_names.resolve(entry, weights.tensors))
    return found


def _migrated(
    model: nn.Module, batch: Any, weights: Weights, seen: Mapping[str, Seen], known: Mapping[str, TeSA], format: str
) -> set[str]:
    """Migrate from norms to layers where it helps, in place; return the weights that changed."""
    norms = {
        parameters: readers
        for parameters, readers in find_norms(model, batch, weights).items()
        if not any(name in known for name in parameters)
    }

    def error(one: Seen, weight: Tensor) -> float:
        return chosen_layer(one, weight, format, "minmax", dynamic=None).error

    changed: set[str] = set()
    parameters = dict(model.named_parameters())
    for found in migrations(norms, seen, weights.tensors, error):
        with torch.no_grad():
            for name in found.norms:
                parameters[name].div_(found.factors.to(parameters[name]))
            for name in found.weights:
                tensor = weights.tensors[name]
                tensor.copy_(scaled(tensor, found.factors, seen[name].input_axis))
        changed |= set(found.weights)
    return changed


def _layers(
    seen: Mapping[str, Seen],
    weights: Weights,
    format: str,
    observer: str,
    dynamic: bool | None,  # noqa: FBT001 - three answers
) -> tuple[dict[str, Layer], dict[str, str]]:
    """Return how each weight is rounded, and why others are not."""
    layers: dict[str, Layer] = {}
    left: dict[str, str] = {}
    for name, one in seen.items():
        tensor = weights.tensors[name]
        why = unusable(one, tensor)
        if why:
            left[name] = why
        else:
            layers[name] = chosen_layer(one, tensor, format, observer, dynamic)
    if not layers:
        reasons = "; ".join(f"{name}: {why}" for name, why in left.items()) or "no product with a weight was seen"
        raise ValueRangeError(
            message(
                f"nothing to round ({reasons})", "linear layers, convolutions or embeddings with data of some range"
            )
        )
    return layers, left


def _row(name: str, layer: Layer | None, why: str, moved: bool) -> LayerPrecision:  # noqa: FBT001 - a note
    shown = name.removesuffix(".weight")
    if layer is None:
        return LayerPrecision(shown, "fp32", "", None, why)
    grid = layer.input
    how = "" if grid is None else "per token" if grid.dynamic else f"static ({layer.observer})"
    return LayerPrecision(shown, layer.format, how, layer.error, "scaled by its norm" if moved else "")


def _activations(layers: Mapping[str, Layer]) -> FoundGrids:
    return FoundGrids(
        {
            f"{name.removesuffix('weight')}input": layer.input
            for name, layer in layers.items()
            if layer.input is not None
        }
    )


def _spec_of(known: Mapping[str, TeSA], layers: Mapping[str, Layer], weights: Weights) -> Spec:
    """Return the spec: patterns as they were known, bits and scales as they are now."""
    found = dict(known)
    for name, layer in layers.items():
        shape = tuple(weights.tensors[name].shape)
        group = [1 if dim == layer.axis else size for dim, size in enumerate(shape)]
        scale = layer.weight.scales.reshape([-1 if dim == layer.axis else 1 for dim in range(len(shape))])
        pattern = found.get(name, TeSA.dense(shape))
        found[name] = pattern.with_format(layer.format, scale=scale, group=group)
    return Spec(found)
