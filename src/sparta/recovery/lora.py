"""Masked low-rank adapters: LoRA and DoRA on a sparse base, whose zeros survive merging.

The weight of a layer becomes ``base + mask · (B · A) · alpha / rank``, with the mask of the spec. What is trained is
therefore what is merged: pruned weights get no update at any time, so merging has nothing to cut off. The base may be
kept in 8 bits meanwhile; a zero is a zero there too.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparta.errors import (
    ArgumentError,
    FileFormatError,
    NameNotFoundError,
    ShapeError,
    ValueRangeError,
    did_you_mean,
    message,
)
from sparta.files import load_tensors, reading, save_tensors
from sparta.sparsify.layers import Layer, find_layers
from sparta.tables import table
from sparta.tesa import names
from sparta.tesa.spec import Spec

__all__ = ["Adapters", "MaskedLoRA", "add_lora", "live_masks"]

_KIND, _VERSION = "adapters", 1
_LARGEST = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}  # how values are kept, the largest of them


class MaskedLoRA(nn.Module):
    """The effective weight of one layer: a parametrization of its base.

    Parameters
    ----------
    base
        The weight, of any shape.
    live
        Bool, of its shape: what may change.
    output_axis
        The axis of the outputs; all others together are the inputs of the low-rank update.
    dora
        Whether the length of each output's weights is learnt apart from their direction.
    kept
        ``"int8"`` or ``"fp8"``: the base is kept here, in 8 bits with a scale for each output, and what the module
        hands over is only looked at for its dtype.
    """

    live: Tensor
    values: Tensor
    scales: Tensor

    def __init__(
        self, base: Tensor, live: Tensor, rank: int, alpha: float, output_axis: int, generator: torch.Generator,
        *, dora: bool = False, kept: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        outputs = base.shape[output_axis]
        inputs = base.numel() // outputs
        dtype = base.dtype if base.dtype == torch.float64 else torch.float32
        bound = 1 / math.sqrt(inputs)
        start = (torch.rand(rank, inputs, generator=generator, dtype=dtype) * 2 - 1) * bound
        self.lora_A = nn.Parameter(start.to(base.device))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank, dtype=dtype, device=base.device))
        self.register_buffer("live", live, persistent=False)
        self.scale, self.output_axis, self.kept = alpha / rank, output_axis, kept
        if kept is not None:
            self._keep(base.detach().to(dtype), *_LARGEST[kept])
            base = self.base(base)
        self.magnitude = nn.Parameter(self._lengths(base.detach().to(dtype)).clone()) if dora else None

    def _keep(self, base: Tensor, dtype: torch.dtype, largest: float) -> None:
        others = [axis for axis in range(base.dim()) if axis != self.output_axis]
        scales = (base.abs().amax(others, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
        values = base / scales
        values = values.round() if dtype == torch.int8 else values
        self.register_buffer("values", values.to(dtype))
        self.register_buffer("scales", scales)

    def base(self, given: Tensor) -> Tensor:
        """Return the base, in the dtype of what the module has: that itself, unless the base is kept here."""
        if self.kept is None:
            return given
        return (self.values.to(self.scales.dtype) * self.scales).to(given.dtype)

    def forward(self, base: Tensor) -> Tensor:
        """Return the effective weight; where it is not live, the base as it is."""
        base = self.base(base)
        shape = base.movedim(self.output_axis, 0).shape
        update = (self.lora_B @ self.lora_A).view(shape).movedim(0, self.output_axis) * self.scale
        weight = base.to(update.dtype) + self.live * update
        if self.magnitude is not None:
            lengths = self._lengths(weight).detach()  # a constant of the gradient, as in the paper
            weight = weight * (self.magnitude / lengths.clamp(min=torch.finfo(lengths.dtype).tiny))
        return torch.where(self.live, weight.to(base.dtype), base)

    def _lengths(self, weight: Tensor) -> Tensor:
        others = [axis for axis in range(weight.dim()) if axis != self.output_axis]
        lengths: Tensor = torch.linalg.vector_norm(weight, dim=others, keepdim=True)
        return lengths


class Adapters:
    """The adapters of a model, made by :func:`add_lora`: train :meth:`parameters`, then :meth:`merge`."""

    def __init__(self, model: nn.Module, spec: Spec, made: dict[str, tuple[Layer, MaskedLoRA]]) -> None:
        self._model, self._spec, self._made = model, spec, made
        self._frozen = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        for parameter, _ in self._frozen:
            parameter.requires_grad_(False)  # noqa: FBT003 - torch's own signature
        for layer, adapter in made.values():
            parametrize.register_parametrization(layer.module, layer.attribute, adapter)
            if adapter.kept is not None:  # a single zero, seen everywhere: the memory of the base is free
                layer.parameter.data = layer.parameter.data.new_zeros(()).expand(layer.shape)

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained, by the name of the layer's weight and of the part."""
        return {
            f"{name}::{part}": parameter
            for name, (_, adapter) in self._made.items()
            for part, parameter in adapter.named_parameters()
        }

    def parameters(self) -> list[nn.Parameter]:
        """Return what is trained, for an optimizer."""
        return list(self.named_parameters().values())

    def merge(self) -> None:
        """Put the effective weights into the model and take the adapters away; the spec's zeros are zero."""
        self._check_present()
        with torch.no_grad():
            weights = {name: getattr(layer.module, layer.attribute).clone() for name, (layer, _) in self._made.items()}
        broken = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
        if broken:
            given = f"NaN or infinity in the adapters of {', '.join(broken[:5])}"
            raise ValueRangeError(message(given, "finite values", "train with a smaller learning rate, or `remove()`"))
        layers = {name: layer for name, (layer, _) in self._made.items()}
        self.remove()
        with torch.no_grad():
            for name, weight in weights.items():
                getattr(layers[name].module, layers[name].attribute).copy_(weight)
        self._spec.check(self._model)

    def remove(self) -> None:
        """Take the adapters away; the model is as it was before them, but for the rounding of a base in 8 bits."""
        self._check_present()
        for layer, adapter in self._made.values():
            if adapter.kept is not None:
                layer.parameter.data = adapter.base(layer.parameter.data)
            parametrize.remove_parametrizations(layer.module, layer.attribute, leave_parametrized=False)
        for parameter, needed in self._frozen:
            parameter.requires_grad_(needed)
        self._made = {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the adapters alone, as one checked safetensors file."""
        save_tensors(path, _KIND, _VERSION, self.named_parameters(), {})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load adapters that were saved for the same layers and rank."""
        tensors, _ = load_tensors(path, _KIND, _VERSION)
        mine = self.named_parameters()
        with reading(path), torch.no_grad():
            other = mine.keys() ^ tensors.keys()
            other |= {name for name in mine.keys() & tensors.keys() if mine[name].shape != tensors[name].shape}
            if other:
                given = f"{path} holds adapters for other layers, rank or kind: {', '.join(sorted(other)[:5])}"
                raise FileFormatError(message(given, fix="call add_lora as when it was saved"))
            for name, parameter in mine.items():
                parameter.copy_(tensors[name])

    def to_dict(self) -> dict[str, Any]:
        """Return for each layer its shape, rank, density, how its base is kept, and the number of trained values."""
        return {
            name: {
                "shape": list(adapter.live.shape),
                "rank": adapter.lora_A.shape[0],
                "density": float(adapter.live.float().mean()),
                "base": adapter.kept or str(layer.parameter.dtype).removeprefix("torch."),
                "trained": sum(parameter.numel() for parameter in adapter.parameters()),
            }
            for name, (layer, adapter) in self._made.items()
        }

    def __str__(self) -> str:
        rows = [
            [name, "×".join(map(str, row["shape"])), row["base"], row["rank"], f"{row['density']:.4f}", row["trained"]]
            for name, row in self.to_dict().items()
        ]
        return table(["layer", "shape", "base", "rank", "density", "trained"], rows)

    def _check_present(self) -> None:
        if not self._made:
            raise ValueRangeError(message("the adapters were merged or removed before", fix="call add_lora again"))


def add_lora(  # noqa: PLR0913 - one verb, and all but two of its arguments by name
    model: nn.Module,
    spec: Spec | None = None,
    *,
    rank: int = 8,
    alpha: float | None = None,
    dora: bool = False,
    base: str | None = None,
    include: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str | None = None,
    seed: int = 0,
) -> Adapters:
    """Put masked low-rank adapters on the sparse layers of a model, and freeze everything else.

    Parameters
    ----------
    model
        A pruned model; it computes what it did until the adapters are trained.
    spec
        Where its zeros are; by default those that it has.
    rank, alpha
        Of the update, which is multiplied by ``alpha / rank``; alpha is twice the rank by default.
    dora
        Whether the length of each output's weights is learnt too (DoRA).
    base
        ``"int8"`` or ``"fp8"``: the frozen weights that get an adapter are kept in 8 bits, with a scale for each
        output, until the adapters are merged or removed; their rounding is part of what the adapters learn to mend.
        None leaves them as they are.
    include, ignore
        Names of parameters, globs or ``re:`` patterns. By default the weights of linear, convolution and attention
        layers that the spec has; a dense layer that is named gets a plain adapter.
    seed
        Of the adapters' first values.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> spec = Spec.from_pattern(model, "2:4")
    >>> spec.apply(model)
    >>> adapters = add_lora(model, spec, rank=2)
    >>> optimizer = torch.optim.Adam(adapters.parameters(), lr=0.01)
    >>> model(torch.randn(8, 16)).square().mean().backward()
    >>> optimizer.step()
    >>> adapters.merge()
    >>> spec.check(model)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(message(f"the model is a {type(model).__name__}", "a torch.nn.Module"))
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank < 2**31:
        raise ValueRangeError(message(f"rank is {rank!r}", "a number from 1 on"))
    alpha = 2.0 * rank if alpha is None else alpha
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha <= 0:
        raise ValueRangeError(message(f"alpha is {alpha!r}", "a positive number"))
    if base is not None and base not in _LARGEST:
        raise NameNotFoundError(did_you_mean(str(base), _LARGEST, "form of the base"))
    if any(isinstance(module, MaskedLoRA) for module in model.modules()):
        raise ValueRangeError(message("the model has adapters", "one set at a time", "merge or remove them first"))
    spec = Spec.from_zeros(model) if spec is None else spec
    live = live_masks(model, spec)
    layers = _chosen(model, live, include, ignore)
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, tuple[Layer, MaskedLoRA]] = {}
    for layer in layers:
        weight = layer.parameter.detach()
        mask = live.get(layer.name)
        mask = torch.ones_like(weight, dtype=torch.bool) if mask is None else mask
        axis = 1 if layer.input_axis == 0 and weight.dim() > 1 else 0
        adapter = MaskedLoRA(weight, mask, rank, alpha, axis, generator, dora=dora, kept=base)
        made[layer.name] = (layer, adapter)
    return Adapters(model, spec, made)


def live_masks(model: nn.Module, spec: Spec) -> dict[str, Tensor]:
    """Return what is live of each tensor that a spec has, by its name without wrappers; the model must obey the spec.

    >>> model = nn.Linear(4, 2, bias=False)
    >>> {name: mask.sum().item() for name, mask in live_masks(model, Spec.from_pattern(model, "2:4")).items()}
    Traceback (most recent call last):
    sparta.errors.CheckError: weights that the spec prunes are not zero: weight (4 elements); call `spec.apply(model)`, or hold the masks while training.
    """  # noqa: E501
    if not isinstance(spec, Spec):
        raise ArgumentError(message(f"the spec is a {type(spec).__name__}", "a sparta.Spec, or None"))
    spec.check(model)
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found = spec.resolve(model)
    return {names.canonical(name): t.mask(tensors[name].device) for name, t in found.items() if name in tensors}


def _chosen(
    model: nn.Module,
    live: Mapping[str, Tensor],
    include: Sequence[str] | str | None,
    ignore: Sequence[str] | str | None,
) -> list[Layer]:
    """Return the layers that get an adapter; one whose weight other modules share cannot have one."""
    layers = find_layers(model, include, ignore)
    if include is None:
        layers = [layer for layer in layers if layer.name in live]
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    shared = [layer.name for layer in layers if uses[id(layer.parameter)] > 1]
    if shared:
        given = f"{', '.join(shared[:5])}: shared with other modules, and left without adapters"
        warnings.warn(message(given, fix="untie them to adapt them"), stacklevel=4)
    layers = [layer for layer in layers if layer.name not in shared]
    if not layers:
        given = "the model has no sparse layer to adapt"
        raise ValueRangeError(message(given, "weights of linear, convolution or attention layers that the spec has"))
    for layer in layers:
        if hasattr(layer.parameter, "placements") or layer.parameter.is_meta:
            raise ShapeError(message(f"{layer.name} is sharded or has no values", "whole weights", "adapt, then shard"))
        if layer.parameter.dim() < 2 or not layer.parameter.is_floating_point():
            given = f"{layer.name} is {tuple(layer.parameter.shape)} of {layer.parameter.dtype}"
            raise ShapeError(message(given, "floating-point weights of two dims or more", "leave it out of `include`"))
    return layers
