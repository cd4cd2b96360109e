"""Migration: large input channels are made smaller by the norm before a layer, and its weight larger by as much.

A few input channels of large magnitude make the grid of all of them coarse. Where a norm's output goes to layers alone,
its scale can be divided per channel and the layers' columns multiplied (SmoothQuant). Factors are powers of two, so the
model in real numbers stays the same to the last bit. It is done only where it lowers the error of the layers' outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sparta.precision.data import call
from sparta.precision.observe import Seen
from sparta.precision.watch import Weights, quietly

__all__ = ["Migration", "find_norms", "migrations"]

_aten = torch.ops.aten
_SHARES = (0.5, 0.65, 0.8)
_WORTH = 0.9  # of the error before
_LARGEST = 6  # powers of two that a channel may move by
_SHARED = (_aten._unsafe_view.default, _aten.detach.default, _aten.alias.default)
_PRODUCTS = {_aten.addmm.default: 1, _aten.mm.default: 0}


@dataclass
class _Norm:
    """A norm's output while the model runs: its parameters, the weights that it meets, and whether anything else."""

    parameters: tuple[str, ...]
    held: list[Tensor] = field(default_factory=list)
    readers: set[str] = field(default_factory=set)
    spoiled: bool = False


@dataclass(frozen=True)
class Migration:
    """Factors (K,) of input channels, powers of two: norms are divided by them, columns of weights multiplied."""

    norms: tuple[str, ...]
    weights: tuple[str, ...]
    factors: Tensor


def find_norms(model: nn.Module, batch: Any, weights: Weights) -> dict[tuple[str, ...], frozenset[str]]:
    """Return the weights that read each norm, by the norm's parameters, for norms that nothing else reads.

    Examples
    --------
    >>> model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    >>> find_norms(model, torch.randn(3, 4), Weights(model))
    {('0.weight', '0.bias'): frozenset({'1.weight'})}
    """
    watch = _NormWatch(model, weights)
    with quietly(model):
        with watch:
            outputs = call(model, batch)
        for leaf in pytree.tree_leaves(outputs):
            watch.spoil(leaf)
    seen: dict[tuple[str, ...], list[_Norm]] = {}
    for norm in watch.norms:
        seen.setdefault(norm.parameters, []).append(norm)
    shared = [name for parameters in seen for name in parameters]
    return {
        parameters: frozenset(uses[0].readers)
        for parameters, uses in seen.items()
        if len(uses) == 1
        and uses[0].readers
        and not uses[0].spoiled
        and all(shared.count(name) == 1 and watch.uses[name] == 1 for name in parameters)
    }


class _NormWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module, weights: Weights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norms: list[_Norm] = []
        self.uses: dict[str, int] = {}
        self._weights = weights
        vectors = {name: p for name, p in model.named_parameters() if p.dim() == 1 and p.is_floating_point()}
        self._vectors = {p.untyped_storage().data_ptr(): name for name, p in vectors.items()}
        self._by_memory: dict[int, _Norm] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Follow what norms give."""
        del types
        result = func(*args, **(kwargs or {}))
        names = [self._vector(leaf) for leaf in args]
        for name in filter(None, names):
            self.uses[name] = self.uses.get(name, 0) + 1
        self._read(func, args, result)
        if func is _aten.native_layer_norm.default and names[2]:
            self._begin(tuple(name for name in names[2:4] if name), result[0])
        elif func is _aten.mul.Tensor and isinstance(result, Tensor) and sum(map(bool, names)) == 1:
            vector = next(leaf for leaf, name in zip(args, names, strict=True) if name)
            if result.dim() >= 2 and vector.shape == result.shape[-1:]:
                self._begin(tuple(filter(None, names)), result)
        return result

    def spoil(self, leaf: Any) -> None:
        """Note that a tensor is used otherwise."""
        norm = self._norm(leaf)
        if norm is not None:
            norm.spoiled = True

    def _begin(self, parameters: tuple[str, ...], output: Tensor) -> None:
        norm = _Norm(parameters, [output])  # held, so that no other tensor gets its memory
        self.norms.append(norm)
        self._by_memory[output.untyped_storage().data_ptr()] = norm

    def _read(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        view = func in _SHARED or getattr(func, "is_view", False)
        for place, leaf in enumerate(args):
            norm = self._norm(leaf)
            if norm is None or (view and isinstance(result, Tensor)):
                continue
            reader = None
            if _PRODUCTS.get(func) == place:
                reader = self._weights.name_of(args[place + 1])
            if reader is None:
                norm.spoiled = True
            else:
                norm.readers.add(reader)
        for leaf in pytree.tree_leaves([arg for arg in args if isinstance(arg, tuple | list)]):
            self.spoil(leaf)

    def _norm(self, leaf: Any) -> _Norm | None:
        return self._by_memory.get(leaf.untyped_storage().data_ptr()) if isinstance(leaf, Tensor) else None

    def _vector(self, leaf: Any) -> str | None:
        return self._vectors.get(leaf.untyped_storage().data_ptr()) if isinstance(leaf, Tensor) else None


def migrations(
    norms: Mapping[tuple[str, ...], frozenset[str]],
    seen: Mapping[str, Seen],
    tensors: Mapping[str, Tensor],
    error: Callable[[Seen, Tensor], float],
) -> list[Migration]:
    """Return the migrations that lower the error of the layers behind a norm.

    Parameters
    ----------
    norms
        As :func:`find_norms` returns.
    seen, tensors
        What calibration showed, and the weights.
    error
        The error of a layer with a weight, on what was seen.
    """
    found = []
    for parameters, readers in norms.items():
        layers = [seen[name] for name in sorted(readers) if name in seen]
        usable = all(one.axis is not None and one.kinds == {"linear"} and one.peaks is not None for one in layers)
        if len(layers) != len(readers) or not usable:
            continue
        before = _total(layers, tensors, None, error)
        options = [_factors(layers, tensors, share) for share in _SHARES]
        errors = [_total(layers, tensors, factors, error) for factors in options]
        best = min(range(len(options)), key=errors.__getitem__)
        if errors[best] < _WORTH * before and bool((options[best] != 1).any()):
            found.append(Migration(parameters, tuple(one.name for one in layers), options[best]))
    return found


def _factors(layers: list[Seen], tensors: Mapping[str, Tensor], share: float) -> Tensor:
    """Return powers of two close to ``max|x|^share / max|w|^(1 - share)``, over the middle one."""
    peaks = torch.stack([one.peaks for one in layers if one.peaks is not None]).amax(0).double().clamp_min(1e-8)
    heights = torch.stack([tensors[one.name].abs().amax(1 - one.input_axis) for one in layers]).amax(0).double()
    wanted = peaks.log2() * share - heights.clamp_min(1e-8).log2() * (1 - share)
    powers = (wanted - wanted.median()).round().clamp(-_LARGEST, _LARGEST)
    return torch.exp2(powers).float()


def _total(
    layers: list[Seen], tensors: Mapping[str, Tensor], factors: Tensor | None, error: Callable[[Seen, Tensor], float]
) -> float:
    """Return the squared errors of some layers together, with their inputs divided by the factors."""
    total = 0.0
    for one in layers:
        weight = tensors[one.name]
        if factors is None:
            total += error(one, weight) ** 2
        else:
            total += error(moved(one, factors), scaled(weight, factors, one.input_axis)) ** 2
    return total


def moved(seen: Seen, factors: Tensor) -> Seen:
    """Return what would have been seen of a layer whose inputs are divided by the factors."""
    samples = [sample / factors.to(sample) for sample in seen.samples]
    values = torch.cat(samples)
    peaks = None if seen.peaks is None else seen.peaks / factors.to(seen.peaks)
    # The extremes of all batches are known for each channel only by their magnitude; those of the sample are exact.
    low, high = (float(extreme) for extreme in torch.aminmax(values))
    most = float(peaks.max()) if peaks is not None else max(-low, high)
    low, high = (min(low, -most) if seen.low < 0 else low), max(high, most)
    return Seen(seen.name, seen.kinds, seen.axes, low, high, peaks, samples, seen.replay, seen.positions)


def scaled(weight: Tensor, factors: Tensor, axis: int) -> Tensor:
    """Return a weight with its input channels multiplied, in its own strides."""
    shape = [-1 if dim == axis else 1 for dim in range(weight.dim())]
    result = torch.empty_like(weight)
    result.copy_(weight * factors.to(weight).reshape(shape))
    return result
