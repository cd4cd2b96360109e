"""Layers of a plan that are rounded: what that changes in each, and the model in which those that were chosen are.

Rounding to 8 bits is that of :mod:`sparta.precision`, for some layers only: all others, embeddings among them, stay as
they are. A layer in bfloat16 casts what it takes and gives, so that its neighbours see the numbers that they did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from sparta.errors import NameNotFoundError, SpartaError, did_you_mean
from sparta.modules import unwrapped
from sparta.oneshot.calibrate import call
from sparta.planning.options import BF16
from sparta.precision.api import FORMATS, FoundGrids, Quantized, quantize
from sparta.precision.data import checked_batches
from sparta.precision.layers import chosen_layer, unusable
from sparta.precision.losses import Judge
from sparta.precision.observe import observe
from sparta.precision.report import LayerPrecision, PrecisionReport
from sparta.precision.watch import Weights
from sparta.tesa.names import canonical
from sparta.tesa.spec import Spec

__all__ = ["rounded", "rounding_errors"]


@torch.no_grad()
def rounding_errors(
    model: nn.Module, names: Collection[str], batches: Sequence[Any], precision: str
) -> dict[str, float]:
    """Return the relative error that rounding weights and inputs makes in the output of each layer that can be."""
    model = unwrapped(model)
    if precision == BF16:
        return _errors_in_bf16(model, names, batches)
    weights = Weights(model)
    try:
        seen = observe(model, batches, weights)
    except SpartaError:
        return {}  # inputs that are not finite: no layer is rounded
    dynamic = None if precision == "int8" else True
    return {
        name: chosen_layer(one, weights.tensors[name], FORMATS[precision], "auto", dynamic).error
        for name, one in seen.items()
        if name in names and not unusable(one, weights.tensors[name])
    }


def rounded(
    model: nn.Module, batches: Sequence[Any], spec: Spec, precisions: Mapping[str, str], *, quick: bool = False
) -> Quantized:
    """Return a copy of a model in which some layers are rounded, with its spec and the grids of their inputs.

    Parameters
    ----------
    precisions
        Of each layer that is rounded: bfloat16, and one other at most.
    quick
        Take the first grids that will do: times do not depend on them.

    Raises
    ------
    sparta.errors.NameNotFoundError
        If the model has no layer of a name that is to be in bfloat16.
    """
    model = unwrapped(model)
    on_grids = {name: precision for name, precision in precisions.items() if precision != BF16}
    short = [name for name in precisions if name not in on_grids]
    _check_known(model, short)
    found = _on_grids(model, batches, spec, on_grids, quick=quick) if on_grids else _as_given(model, batches, spec)
    for layer in {layer: None for _, layer in _layers(found.model, short)}:  # each once, by however many paths
        _shorten(layer)
    if not short or quick:
        return found
    known = {row.layer: row for row in found.report.layers}
    known |= {layer: LayerPrecision(layer, BF16, BF16) for layer in (name.removesuffix(".weight") for name in short)}
    told = replace(found.report, layers=tuple(known.values()), change=found.judge.change(found.simulated))
    return replace(found, report=told)


def _on_grids(
    model: nn.Module, batches: Sequence[Any], spec: Spec, precisions: Mapping[str, str], *, quick: bool
) -> Quantized:
    (precision,) = set(precisions.values())
    others = [name for name in Weights(model).tensors if name not in precisions]
    return quantize(
        model,
        batches,
        cast("Literal['int8', 'fp8']", precision),
        spec=spec,
        observer="minmax" if quick else "auto",
        migrate=not quick,
        dynamic=None if precision == "int8" else True,
        ignore=others,
    )


def _as_given(model: nn.Module, batches: Sequence[Any], spec: Spec) -> Quantized:
    """Return a copy with its zeros, of which nothing is on a grid."""
    copy = deepcopy(model).eval()
    for parameter in copy.parameters():
        parameter.requires_grad = False
    spec.apply(copy)
    judge = Judge.of(copy, checked_batches(batches), None)
    return Quantized(copy, spec, FoundGrids(), copy, PrecisionReport(BF16, (), len(batches), 0.0), judge)


# ---------------------------------------------------------------------- bfloat16


def _layers(model: nn.Module, names: Collection[str] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Give the layers of these weights, or all, each with the name of its weight; by every path that leads to one."""
    for path, module in model.named_modules(remove_duplicate=False):
        name = canonical(f"{path}.weight" if path else "weight")
        if (names is None or name in names) and module._parameters.get("weight") is not None:
            yield name, module


def _check_known(model: nn.Module, names: Sequence[str]) -> None:
    known = [name for name, _ in _layers(model)]
    for name in names:
        if name not in known:
            raise NameNotFoundError(did_you_mean(name, known, "weight of a layer"))


def _shorten(layer: nn.Module) -> None:
    """Let a layer compute in bfloat16, in place; a weight that others share stays as it is for them."""
    for key, parameter in layer._parameters.items():
        if parameter is not None:
            layer._parameters[key] = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
    layer.register_forward_pre_hook(_narrowed, with_kwargs=True)
    layer.register_forward_hook(_widened)


def _short_copy(layer: nn.Module) -> nn.Module:
    copy = deepcopy(layer)
    _shorten(copy)
    return copy


def _narrowed(
    _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_short, args)), {key: _short(each) for key, each in kwargs.items()}


def _short(x: Any) -> Any:
    return x.to(torch.bfloat16) if isinstance(x, Tensor) else x


def _widened(_layer: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.to(torch.float32)


def _errors_in_bf16(model: nn.Module, names: Collection[str], batches: Sequence[Any]) -> dict[str, float]:
    changes, wholes = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)

    def listener(name: str, short: nn.Module) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            changes[name] += float((short(*args, **kwargs) - output).double().square().sum())
            wholes[name] += float((output - _bias(layer)).double().square().sum())

        return hook

    found = [(name, layer, _short_copy(layer)) for name, layer in _layers(model, names)]
    handles = [layer.register_forward_hook(listener(name, short), with_kwargs=True) for name, layer, short in found]
    try:
        for index, batch in enumerate(batches):
            call(model, batch, index)
    finally:
        for handle in handles:
            handle.remove()
    return {name: (changes[name] / whole) ** 0.5 for name, whole in wholes.items() if whole > 0}


def _bias(layer: nn.Module) -> Tensor | float:
    """Return what a layer adds to its product, as it lies on its output."""
    bias = getattr(layer, "bias", None)
    if not isinstance(bias, Tensor):
        return 0.0
    spatial = len(layer.kernel_size) if isinstance(layer, nn.Conv1d | nn.Conv2d) else 0
    return bias.view(-1, *[1] * spatial)
