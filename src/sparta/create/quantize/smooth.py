"""Smoothing: large input channels become smaller in the norm before a layer, and its columns larger by as much.

This is SmoothQuant for models that are about to be quantized. Factors are powers of two, so the model in real numbers
stays what it was; a norm that something else reads as well (a residual, say) would change the outputs, which are
compared, and is put back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparta.create.distill.losses import heads_of
from sparta.create.quantize.prepare import named_modules
from sparta.errors import ValueRangeError, message
from sparta.oneshot.calibrate import call, quiet
from sparta.tesa import names

__all__ = ["ReadBy", "smooth"]

_LARGEST = 8  # powers of two that a channel may move by
_TOLERANCE = 1e-3  # of the size of the outputs

ReadBy = tuple[list[str], str]
"""Names or patterns of layers, and of the norm that they read."""


@dataclass
class _Norm:
    module: nn.Module
    readers: dict[str, nn.Linear] = field(default_factory=dict)
    peak: Tensor | None = None


@torch.no_grad()
def smooth(
    model: nn.Module,
    data: Iterable[Any],
    strength: float = 0.5,
    *,
    mappings: Sequence[ReadBy] | None = None,
    steps: int | None = None,
) -> dict[str, list[str]]:
    """Move what makes the grids of activations coarse from norms into the linear layers that read them.

    Parameters
    ----------
    data
        Batches as the model takes them.
    strength
        How much of the difference goes into the weights: 0 nothing, 1 all.
    mappings
        Which layers read which norm; None: as the data shows.
    steps
        How many batches; None: all.

    Returns
    -------
    dict of str to list of str
        The layers that took over from each norm.

    Examples
    --------
    >>> model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    >>> smooth(model, [torch.randn(8, 4) * torch.tensor([1.0, 1.0, 1.0, 50.0])])
    {'0': ['1']}
    """
    batches = list(itertools.islice(data, steps))
    if not batches:
        raise ValueRangeError(message("no batch to smooth with", "at least one"))
    plain = named_modules(model)[""]
    with quiet(plain):
        norms = _seen(plain, batches)
        if mappings is not None:
            norms = _mapped(norms, mappings)
        before = heads_of(call(plain, batches[0], 0))
        factors = {name: _factors(norm, strength) for name, norm in norms.items()}
        for name, norm in norms.items():
            _scale(norm, factors[name])
        if not _same(before, heads_of(call(plain, batches[0], 0))):
            for name, norm in norms.items():
                _scale(norm, 1 / factors[name])
            norms = {name: norm for name, norm in norms.items() if _stays(plain, norm, factors[name], batches, before)}
    return {name: list(norm.readers) for name, norm in norms.items()}


def _stays(model: nn.Module, norm: _Norm, factors: Tensor, batches: Sequence[Any], before: dict[str, Tensor]) -> bool:
    """Smooth one norm, and put it back if the outputs change."""
    _scale(norm, factors)
    if _same(before, heads_of(call(model, batches[0], 0))):
        return True
    _scale(norm, 1 / factors)
    return False


def _seen(model: nn.Module, batches: Sequence[Any]) -> dict[str, _Norm]:
    """Return the norms whose output linear layers read as it is, with the largest value of each channel."""
    modules = named_modules(model)
    found = {name: _Norm(module) for name, module in modules.items() if _is_norm(module)}
    outputs: dict[tuple[int, tuple[int, ...]], tuple[str, Tensor]] = {}

    def gave(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[output.data_ptr(), tuple(output.shape)] = (name, output)  # held: its memory stays its own
                peak = output.abs().flatten(0, -2).amax(0).float()
                known = found[name].peak
                found[name].peak = peak if known is None else torch.maximum(known, peak)

        return hook

    def read(name: str, layer: nn.Linear) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0] if args else None
            if isinstance(x, Tensor) and (x.data_ptr(), tuple(x.shape)) in outputs:
                found[outputs[x.data_ptr(), tuple(x.shape)][0]].readers[name] = layer

        return hook

    handles = [norm.module.register_forward_hook(gave(name)) for name, norm in found.items()]
    linear = [(name, module) for name, module in modules.items() if isinstance(module, nn.Linear)]
    handles += [module.register_forward_pre_hook(read(name, module)) for name, module in linear]
    try:
        for index, batch in enumerate(batches):
            outputs.clear()
            call(model, batch, index)
    finally:
        for handle in handles:
            handle.remove()
    return {name: norm for name, norm in found.items() if norm.readers and norm.peak is not None}


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    named = "norm" in type(module).__name__.lower() and "batch" not in type(module).__name__.lower()
    return named and weight is not None and weight.dim() == 1


def _mapped(norms: dict[str, _Norm], mappings: Sequence[ReadBy]) -> dict[str, _Norm]:
    chosen: dict[str, _Norm] = {}
    for layers, norm_name in mappings:
        for name in names.resolve(norm_name, list(norms)):
            norm = norms[name]
            wanted = {reader for layer in layers for reader in names.resolve(layer, list(norm.readers))}
            if wanted != set(norm.readers):
                missing = ", ".join(sorted(set(norm.readers) - wanted))
                given = f"the mapping of {norm_name} leaves out {missing}, which read it too"
                raise ValueRangeError(message(given, "all layers that read the norm"))
            chosen[name] = norm
    return chosen


def _factors(norm: _Norm, strength: float) -> Tensor:
    assert norm.peak is not None  # noqa: S101 - only norms that were seen
    tiny = torch.finfo(torch.float32).tiny
    weights = torch.stack([layer.weight.abs().amax(0).float() for layer in norm.readers.values()]).amax(0)
    wanted = norm.peak.clamp(min=tiny).log2() * strength - weights.clamp(min=tiny).log2() * (1 - strength)
    silent = (norm.peak == 0) | (weights == 0)
    wanted = (wanted - wanted[~silent].mean()) if bool((~silent).any()) else torch.zeros_like(wanted)
    return torch.exp2(torch.where(silent, 0.0, wanted).round().clamp(-_LARGEST, _LARGEST))


def _scale(norm: _Norm, factors: Tensor) -> None:
    for name in ("weight", "bias"):
        parameter = norm.module._parameters.get(name)
        if parameter is not None:
            parameter.div_(factors.to(parameter.dtype))
    for layer in norm.readers.values():
        layer.weight.mul_(factors.to(layer.weight.dtype))


def _same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return all(
        bool((after[key] - one).abs().max() <= _TOLERANCE * one.abs().max())
        for key, one in before.items()
        if one.numel()
    )
