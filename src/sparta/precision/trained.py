"""Models that were trained for fewer bits: what training learned is taken as it is, integers and grids.

A model after quantization-aware training has its own ranges, so nothing is calibrated; the data only measures. What it
computed in training, with rounding simulated, is what the result is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sparta.create.quantize.export import ActivationGrid, Exported, export
from sparta.create.quantize.prepare import quantizers
from sparta.errors import ValueRangeError, message
from sparta.precision.api import Quantized
from sparta.precision.data import checked_batches
from sparta.precision.formats import Float8
from sparta.precision.losses import Judge, Metric
from sparta.precision.report import LayerPrecision, PrecisionReport
from sparta.specialize.int8_linear.quantization import Quantization
from sparta.tesa.spec import Spec

__all__ = ["from_training"]


def from_training(
    model: nn.Module,
    calibration: Any,
    *,
    spec: Spec | None = None,
    max_loss: float | None = None,
    metric: Metric | None = None,
) -> Quantized:
    """Return a model after quantization-aware training as :func:`~sparta.precision.quantize` returns others.

    Parameters
    ----------
    spec
        What is pruned; None takes the weights that are not zero before they are rounded as live.

    Examples
    --------
    >>> import torch
    >>> from sparta.create import quantize as training
    >>> model = nn.Linear(4, 2)
    >>> _ = training.prepare(model)
    >>> _ = model(torch.randn(8, 4))
    >>> from_training(model, [torch.randn(8, 4)]).report.rounded[0].format
    'int8'
    """
    blind = [name for name, quantizer in quantizers(model) if quantizer.moving and not quantizer.calibrated]
    if blind:
        raise ValueRangeError(
            message(
                f"an int8 model that is not calibrated: {blind[0]} has seen no data",
                "ranges of all activations",
                "train it, or call sparta.create.quantize.calibrate(model, batches)",
            )
        )
    batches = checked_batches(calibration)
    exported = export(model, spec=spec)
    judge = Judge.of(model, batches, metric)
    both = None if judge.baseline is None else (judge.baseline, judge.baseline)
    kinds = {weight.args.kind for weight in exported.weights.values()}
    report = PrecisionReport(
        "fp8" if kinds == {"float"} else "int8", _rows(exported), len(batches), 0.0, max_loss, both
    )
    grids = {name: _grid(grid) for name, grid in exported.activations.items() if _is_8_bit(grid)}
    simulated: Callable[..., Any] = model
    return Quantized(exported.model, exported.spec, grids, simulated, report, judge)


def _grid(grid: ActivationGrid) -> Quantization | Float8:
    return Float8(grid.scale) if grid.args.kind == "float" else Quantization.of(grid)


def _is_8_bit(grid: ActivationGrid) -> bool:
    return bool(grid.args.quant_max - grid.args.quant_min >= 254)


def _rows(exported: Exported) -> tuple[LayerPrecision, ...]:
    rows = []
    for name, weight in exported.weights.items():
        layer = name.removesuffix(".weight")
        grid = exported.activations.get(f"{name.removesuffix('weight')}input")
        how = "" if grid is None else "static (trained)"
        rows.append(LayerPrecision(layer, str(weight.args.format), how, 0.0, "trained"))
    return tuple(rows)
